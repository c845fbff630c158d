// The C interface that ops.py and forward.py call through ctypes. All arrays are contiguous float32 unless said; sizes
// are checked by the caller. One thread.
#include "backward.hpp"
#include "pass.hpp"

extern "C" {

void fo_pack(const float* w, int64_t count, int64_t inner, int64_t columns, int64_t stride_i, int64_t stride_o, float* out) {
    for (long e = 0; e < count; e++)
        pack(w + e * inner * columns, inner, columns, stride_i, stride_o, out + e * packed_size(inner, columns));
}

// Rows [ends[e-1], ends[e]) of x by the e-th weight; linear is the case of one.
void fo_product(const float* x, const int32_t* ends, int64_t count, const float* packed, int64_t inner, int64_t columns,
                float* out) {
    long start = 0;
    for (long e = 0; e < count; e++) {
        product(x + start * inner, ends[e] - start, packed + e * packed_size(inner, columns), inner, columns,
                out + start * columns);
        start = ends[e];
    }
}

// Row n takes weight n mod num_weights.
void fo_rms_norm(const float* x, const float* weight, int64_t rows, int64_t num_weights, int64_t width, float eps,
                 float* out, float* scale) {
    for (long n = 0; n < rows; n++)
        scale[n] = rms_norm(x + n * width, weight + n % num_weights * width, width, eps, out + n * width);
}

// Row n takes table row n mod num_tables.
void fo_rotate(const float* x, const float* cos, const float* sin, int64_t rows, int64_t num_tables, int64_t width,
               float* out) {
    for (long n = 0; n < rows; n++)
        rotate(x + n * width, cos + n % num_tables * width, sin + n % num_tables * width, width, out + n * width);
}

void fo_swiglu(const float* gate_up, int64_t rows, int64_t width, float* out) {
    for (long n = 0; n < rows; n++) swiglu(gate_up + 2 * n * width, gate_up + (2 * n + 1) * width, width, out + n * width);
}

void fo_sigmoid(const float* x, int64_t count, float* out) {
    for (long n = 0; n < count; n++) out[n] = sigmoid(x[n]);
}

// q, out (B, S, H, d); k, v (B, h, P, d) with strides by b and by h; seen (B, S) keys; probs (B, S, H, P), or (G, P) if
// `keeps` is 0.
void fo_attention(const float* q, const float* k, const float* v, const int64_t* seen, int64_t B, int64_t S, int64_t H,
                  int64_t h, int64_t P, int64_t d, int64_t stride_b, int64_t stride_h, float scale, int32_t keeps,
                  float* probs, float* out) {
    long G = H / h;
    for (long row = 0; row < B * S; row++)
        for (long j = 0; j < h; j++) {
            long first = row / S * stride_b + j * stride_h, head = row * H + j * G;
            float* own = keeps ? probs + head * P : probs;
            attend(q + head * d, G, k + first, v + first, seen[row], d, scale, own, P, out + head * d);
        }
}

void fo_experts(const float* x, int64_t N, int64_t D, int64_t F, int64_t E, int64_t K, const int64_t* ids,
                const float* weights, const float* gate_up, const float* down, int32_t* ends, int64_t* slot,
                float* gate_up_rows, float* hidden_rows, float* y_rows, int32_t keeps, float* out) {
    ExpertRows rows = {ends, slot, gate_up_rows, hidden_rows, y_rows};
    experts(x, N, D, F, E, K, ids, weights, gate_up, down, rows, keeps, out);
}

void fo_route(const Sizes* sizes, const float* bias, int64_t N, const float* logits, int32_t selects, int64_t* ids,
              float* weights) {
    LayerWeights only = {};
    only.bias = bias;
    route(*sizes, only, N, logits, selects, ids, weights);
}

void fo_round(const Steps* steps, int64_t rows, int64_t width, float* x) { round_rows(*steps, x, rows, width); }

void fo_attention_half(const Sizes* sizes, const LayerWeights* layer, const Batch* batch, const Rounding* rounding,
                       float* keys, float* values, float* x, float* hidden, float* logits) {
    attention_half(*sizes, *layer, *batch, *rounding, keys, values, x, hidden, logits);
}

void fo_mlp_half(const Sizes* sizes, const LayerWeights* layer, const Rounding* rounding, int64_t N, const float* hidden,
                 const int64_t* ids, const float* weights, float* x) {
    mlp_half(*sizes, *layer, *rounding, N, hidden, ids, weights, x);
}

// All layers, naturally routed. Keys and values are (L, ...) with a stride by layer; ids (MoE layers, N, K); hidden and
// logits (MoE layers, N, .), or one layer's room each if `keeps` is 0.
void fo_forward(const Sizes* sizes, const LayerWeights* layers, int64_t L, const Batch* batch, const Rounding* rounding,
                float* keys, float* values, int64_t stride, float* x, int32_t keeps, float* hidden, float* logits,
                int64_t* ids, float* weights) {
    long N = batch->B * batch->S;
    for (long l = 0; l < L; l++) {
        const LayerWeights& layer = layers[l];
        attention_half(*sizes, layer, *batch, *rounding, keys + l * stride, values + l * stride, x, hidden, logits);
        if (layer.router) route(*sizes, layer, N, logits, true, ids, weights);
        mlp_half(*sizes, layer, *rounding, N, hidden, ids, weights, x);
        if (!layer.router) continue;
        ids += N * sizes->K;
        if (keeps) {
            hidden += N * sizes->D;
            logits += N * sizes->E;
        }
    }
}

void fo_rms_norm_backward(const float* g, const float* x, const float* weight, const float* scale, int64_t rows,
                          int64_t num_weights, int64_t width, float* g_x, float* g_weight) {
    std::vector<float> along(width);
    for (long n = 0; n < rows; n++) {
        long w = n % num_weights * width;
        rms_norm_backward(g + n * width, x + n * width, weight + w, scale[n], width, g_x + n * width, g_weight + w,
                          along.data());
    }
}

void fo_swiglu_backward(const float* g, const float* gate_up, int64_t rows, int64_t width, float* out) {
    for (long n = 0; n < rows; n++)
        swiglu_backward(g + n * width, gate_up + 2 * n * width, width, out + 2 * n * width);
}

// As fo_attention, with the probabilities that it kept and contiguous keys and values; their gradients are zero before.
void fo_attention_backward(const float* g, const float* q, const float* k, const float* v, const int64_t* seen, int64_t B,
                           int64_t S, int64_t H, int64_t h, int64_t P, int64_t d, float scale, const float* probs,
                           float* g_q, float* g_k, float* g_v) {
    std::vector<float> g_p((P + LANES - 1) / LANES * LANES);
    long G = H / h;
    for (long row = 0; row < B * S; row++)
        for (long j = 0; j < H; j++) {
            long at = (row / S * h + j / G) * P * d, head = row * H + j;
            attend_backward(g + head * d, q + head * d, k + at, v + at, probs + head * P, seen[row], d, scale, g_p.data(),
                            g_q + head * d, g_k + at, g_v + at);
        }
}

void fo_experts_backward(const float* g, const float* x, int64_t N, int64_t D, int64_t F, int64_t E, int64_t K,
                         const float* weights, const float* gate_up_T, const float* down_T, int32_t* ends, int64_t* slot,
                         float* gate_up_rows, float* hidden_rows, float* y_rows, float* g_x, float* g_weights,
                         float* g_gate_up, float* g_down) {
    ExpertRows rows = {ends, slot, gate_up_rows, hidden_rows, y_rows};
    experts_backward(g, x, N, D, F, E, K, weights, gate_up_T, down_T, rows, g_x, g_weights, g_gate_up, g_down);
}
}
