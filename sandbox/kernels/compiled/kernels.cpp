// The C interface that ops.py and sandbox/model/compiled_passes.py call through ctypes. Arrays are contiguous float32
// unless stated otherwise; the caller checks sizes. At most `threads` threads compute, fewer if there is little to do;
// the bits are the same. build.py reads the argument types from these declarations.
#include "backward.hpp"
#include "pass.hpp"
#include "self_attention.hpp"

// The number of rows per part of an elementwise loop: waking a thread takes some 20 microseconds.
static long rows_of(long width) { return 65536 / (width + 1) + 1; }

extern "C" {

void fo_pack(int64_t threads, const float* w, int64_t count, int64_t inner, int64_t columns, int64_t stride_i, int64_t stride_o, float* out) {
    in_parts(threads, count, 1, [=](long first, long last) {
        for (long e = first; e < last; e++)
            pack(w + e * inner * columns, inner, columns, stride_i, stride_o, out + e * packed_size(inner, columns));
    });
}

// Rows [ends[e-1], ends[e]) of x times the e-th weight; linear is the case of one weight.
void fo_product(int64_t threads, const float* x, const int32_t* ends, int64_t count, const float* packed, int64_t inner, int64_t columns,
                float* out) {
    // Parts are rows, not experts: one expert may have most of the rows.
    in_parts(threads, count ? ends[count - 1] : 0, CHUNK, [=](long first, long last) {
        for (long e = 0; e < count && first < last; e++) {
            long stop = ends[e] < last ? ends[e] : last;
            if (stop <= first) continue;
            product(x + first * inner, stop - first, packed + e * packed_size(inner, columns), inner, columns,
                    out + first * columns);
            first = stop;
        }
    });
}

// Row n takes weight n mod num_weights.
void fo_rms_norm(int64_t threads, const float* x, const float* weight, int64_t rows, int64_t num_weights, int64_t width, float eps,
                 float* out, float* scale) {
    in_parts(threads, rows, rows_of(width), [=](long first, long last) {
        for (long n = first; n < last; n++)
            scale[n] = rms_norm(x + n * width, weight + n % num_weights * width, width, eps, out + n * width);
    });
}

// Row n takes table row n mod num_tables.
void fo_rotate(int64_t threads, const float* x, const float* cos, const float* sin, int64_t rows, int64_t num_tables, int64_t width,
               float* out) {
    in_parts(threads, rows, rows_of(width), [=](long first, long last) {
        for (long n = first; n < last; n++)
            rotate(x + n * width, cos + n % num_tables * width, sin + n % num_tables * width, width, out + n * width);
    });
}

void fo_swiglu(int64_t threads, const float* gate_up, int64_t rows, int64_t width, float* out) {
    in_parts(threads, rows, rows_of(2 * width), [=](long first, long last) {
        for (long n = first; n < last; n++)
            swiglu(gate_up + 2 * n * width, gate_up + (2 * n + 1) * width, width, out + n * width);
    });
}

void fo_sigmoid(int64_t threads, const float* x, int64_t count, float* out) {
    in_parts(threads, count, rows_of(8), [=](long first, long last) {
        for (long n = first; n < last; n++) out[n] = sigmoid(x[n]);
    });
}

// q, out (B, S, H, d); k, v (B, h, P, d) with strides for b and h; seen (B, S) numbers of keys; probs (B, H, S, P) or null.
void fo_attention(int64_t threads, const float* q, const float* k, const float* v, const int64_t* seen, int64_t B, int64_t S, int64_t H,
                  int64_t h, int64_t P, int64_t d, int64_t stride_b, int64_t stride_h, float scale, float* probs,
                  float* out) {
    long G = H / h;
    in_parts(threads, B * S, 32, [=](long start, long stop) {
        static thread_local Scratch scratch;
        for (long row = start; row < stop; row++)
            for (long j = 0; j < h; j++) {
                long b = row / S, first = b * stride_b + j * stride_h, head = row * H + j * G;
                float* own = probs ? probs + ((b * H + j * G) * S + row % S) * P : scratch.take(G * P);
                attend(q + head * d, G, k + first, v + first, seen[row], d, scale, own, probs ? S * P : P, out + head * d);
            }
    });
}

void fo_experts(int64_t threads, const float* x, int64_t N, int64_t D, int64_t F, int64_t E, int64_t K, const int64_t* ids,
                const float* weights, const float* gate_up, const float* down, int32_t* ends, int64_t* slot,
                float* gate_up_rows, int32_t keeps, float* out) {
    ExpertRows rows = {ends, slot, gate_up_rows};
    // Without `keeps`, gate_up_rows is one chunk that all experts reuse: threads would overwrite it.
    experts(keeps ? threads : 1, x, N, D, F, E, K, ids, weights, gate_up, down, rows, keeps, out);
}

void fo_route(int64_t threads, const Sizes* sizes, const float* bias, int64_t N, const float* logits, int32_t selects, int64_t* ids,
              float* weights) {
    LayerWeights only = {};
    only.bias = bias;
    in_parts(threads, N, 256, [=](long n, long stop) {
        long E = sizes->E, K = sizes->K;
        route(*sizes, only, stop - n, logits + n * E, selects, ids + n * K, weights ? weights + n * K : nullptr);
    });
}

void fo_round(int64_t threads, const Steps* steps, int64_t rows, int64_t width, float* x) {
    in_parts(threads, rows, rows_of(width), [=](long n, long last) { round_rows(*steps, x + n * width, last - n, width); });
}

void fo_attention_half(int64_t threads, const Sizes* sizes, const LayerWeights* layer, const Batch* batch,
                       const Rounding* rounding, float* keys, float* values, float* x, float* hidden, float* logits) {
    in_parts(threads, batch->B, sequences_of(threads, *batch), [=](long b, long stop) {
        long n = b * batch->S, at = b * batch->stride;
        attention_half(*sizes, *layer, of_batch(*batch, b, stop), *rounding, keys + at, values + at, x + n * sizes->D,
                       hidden + n * sizes->D, logits + n * sizes->E);
    });
}

void fo_mlp_half(int64_t threads, const Sizes* sizes, const LayerWeights* layer, const Rounding* rounding, int64_t N,
                 const float* hidden, const int64_t* ids, const float* weights, float* x) {
    in_parts(threads, N, rows_a_part(threads, N), [=](long n, long stop) {
        long at = n * sizes->D, slot = n * sizes->K;
        mlp_half(*sizes, *layer, *rounding, stop - n, hidden + at, ids + slot, weights + slot, x + at);
    });
}

// All layers, naturally routed, and the last norm. Keys and values are (L, ...), `stride` apart per layer; ids (MoE
// layers, N, K); hidden and logits (MoE layers, N, .), or one layer's each if `keeps` is 0. `noise` (MoE layers, N, E),
// or null, is added to the logits. A thread takes its sequences through all layers.
void fo_forward(int64_t threads, const Sizes* sizes, const LayerWeights* layers, int64_t L, const Batch* batch,
                const Rounding* rounding, float* keys, float* values, int64_t stride, const float* norm, float* x,
                int32_t keeps, const float* noise, float* hidden, float* logits, int64_t* ids, float* weights) {
    long N = batch->B * batch->S, D = sizes->D, E = sizes->E, K = sizes->K;
    in_parts(threads, batch->B, sequences_of(threads, *batch), [=](long b, long last) {
        Batch own = of_batch(*batch, b, last);
        long n = b * batch->S, room = 0, at = b * batch->stride, rows = own.B * own.S;
        for (long l = 0; l < L; l++) {
            const LayerWeights& layer = layers[l];
            float *h = hidden + (keeps ? room * N + n : n) * D, *scores = logits + (keeps ? room * N + n : n) * E;
            int64_t* chosen = ids + (room * N + n) * K;
            attention_half(*sizes, layer, own, *rounding, keys + l * stride + at, values + l * stride + at, x + n * D, h, scores);
            if (layer.router && noise)
                for (long i = 0; i < rows * E; i++) scores[i] += noise[(room * N + n) * E + i];
            if (layer.router) route(*sizes, layer, rows, scores, true, chosen, weights + n * K);
            mlp_half(*sizes, layer, *rounding, rows, h, chosen, weights + n * K, x + n * D);
            if (layer.router) room++;  // a dense layer's hidden rows are overwritten by the next layer's
        }
        for (long r = n; r < n + rows; r++) rms_norm(x + r * D, norm, D, sizes->eps, x + r * D);
    });
}

// Gradients of y = x W^T with g (rows, num_out), x (rows, width): g_x = g W (W packed), g_weight += g^T x; null skips one.
void fo_linear_backward(int64_t threads, const float* g, const float* x, int64_t rows, int64_t num_out, int64_t width, const float* packed,
                        float* g_x, float* g_weight) {
    // At most CHUNK rows per part: `Gradients` has room for no more.
    in_parts(threads, g_x ? rows : 0, CHUNK, [=](long first, long last) {
        Gradients kept(g, first, last, num_out);
        float* to[CHUNK];
        for (long r = 0; r < kept.count; r++) to[r] = g_x + kept.row[r] * width;
        // Rows that `kept` leaves out are in no product: their zeros come from here.
        std::memset(g_x + first * width, 0, (last - first) * width * sizeof(float));
        product(kept.at, kept.count, packed, num_out, width, to);
    });
    // Parts are columns, not rows: a column's sum then has one order for every number of threads.
    long share = ((width + PANEL - 1) / PANEL + threads - 1) / threads;
    in_parts(threads, g_weight ? width : 0, share * PANEL, [=](long begin, long end) {
        for (long first = 0; first < rows; first += CHUNK) {
            Gradients kept(g, first, first + CHUNK < rows ? first + CHUNK : rows, num_out);
            const float* at[CHUNK];
            for (long r = 0; r < kept.count; r++) at[r] = x + kept.row[r] * width;
            add_outer(kept.at, at, kept.count, num_out, width, begin, end, g_weight);
        }
    });
}

void fo_rms_norm_backward(int64_t threads, const float* g, const float* x, const float* weight, const float* scale, int64_t rows,
                          int64_t num_weights, int64_t width, float* g_x, float* g_weight) {
    // One sum per block of rows (a multiple of num_weights, so that each starts at weight 0), added in block order.
    long block = (512 + num_weights - 1) / num_weights * num_weights, size = num_weights * width;
    std::vector<float> sums_of((rows + block - 1) / block * size, 0.0f);
    float* all = sums_of.data();
    in_parts(threads, rows, block, [=](long first, long last) {
        float* own = all + first / block * size;
        for (long n = first; n < last; n++) {
            long w = n % num_weights * width;
            rms_norm_backward(g + n * width, x + n * width, weight + w, scale[n], width, g_x + n * width, own + w);
        }
    });
    for (size_t i = 0; i < sums_of.size(); i++) g_weight[i % size] += all[i];
}

void fo_swiglu_backward(int64_t threads, const float* g, const float* gate_up, int64_t rows, int64_t width, float* out) {
    in_parts(threads, rows, rows_of(2 * width), [=](long first, long last) {
        for (long n = first; n < last; n++)
            swiglu_backward(g + n * width, 1.0f, gate_up + 2 * n * width, width, out + 2 * n * width, nullptr);
    });
}

// As fo_attention, with its saved probabilities and contiguous keys and values; g_k and g_v must be zero on entry.
void fo_attention_backward(int64_t threads, const float* g, const float* q, const float* k, const float* v, const int64_t* seen, int64_t B,
                           int64_t S, int64_t H, int64_t h, int64_t P, int64_t d, float scale, const float* probs,
                           float* g_q, float* g_k, float* g_v) {
    long G = H / h;
    // One part per key head of a sequence: its gradient sums over all queries that see it, so no two threads add to it.
    in_parts(threads, B * h, 1, [=](long first, long last) {
        for (long own = first; own < last; own++)
            for (long j = own % h * G; j < (own % h + 1) * G; j++) {
                long b = own / h, at = own * P * d, head = b * S * H + j;
                attend_backward(g + head * d, q + head * d, H * d, k + at, v + at, probs + (b * H + j) * S * P, seen + b * S,
                                S, P, d, scale, g_q + head * d, g_k + at, g_v + at);
            }
    });
}

void fo_experts_backward(int64_t threads, const float* g, const float* x, int64_t N, int64_t D, int64_t F, int64_t E, int64_t K,
                         const float* weights, const float* gate_up_T, const float* down_T, int32_t* ends, int64_t* slot,
                         float* gate_up_rows, float* g_x, float* g_weights, float* g_gate_up, float* g_down) {
    ExpertRows rows = {ends, slot, gate_up_rows};
    experts_backward(threads, g, x, N, D, F, E, K, weights, gate_up_T, down_T, rows, g_x, g_weights, g_gate_up, g_down);
}

// q, k, v and probs keep what the gradient needs: see SelfAttention. qk_norm as in Sizes.
void fo_self_attention(int64_t threads, const float* qkv, const float* q_norm, const float* k_norm, const float* cos,
                       const float* sin, int64_t B, int64_t S, int64_t H, int64_t h, int64_t d, int64_t P, int64_t qk_norm,
                       int64_t num_tables, float eps, float scale, float* q, float* k, float* v, float* probs, float* out) {
    // D, E, K and F stay 0: attention reads none of them.
    SelfAttention all = {{0, H, h, d, 0, 0, 0, qk_norm, eps, scale}, {}, B, S, P, num_tables, cos, sin, qkv, q, k, v, probs};
    all.w.q_norm = q_norm, all.w.k_norm = k_norm;
    in_parts(threads, B, 1, [&](long b, long) { attend_sequence(all, b, out); });
}

// `g_norms` holds q's, then k's, and must be zero on entry.
void fo_self_attention_backward(int64_t threads, const float* g, const float* qkv, const float* q_norm, const float* k_norm,
                                const float* cos, const float* sin, int64_t B, int64_t S, int64_t H, int64_t h, int64_t d,
                                int64_t P, int64_t qk_norm, int64_t num_tables, float eps, float scale, float* q, float* k,
                                float* v, float* probs, float* g_qkv, float* g_norms) {
    SelfAttention all = {{0, H, h, d, 0, 0, 0, qk_norm, eps, scale}, {}, B, S, P, num_tables, cos, sin, qkv, q, k, v, probs};
    all.w.q_norm = q_norm, all.w.k_norm = k_norm;
    long size = all.num_norms();
    // One sum per sequence, added in their order below: no bit depends on the number of threads.
    std::vector<float> by_sequence(B * size, 0.0f);
    float* sums_of = by_sequence.data();
    in_parts(threads, B, 1, [&](long b, long) { attend_sequence_backward(all, g, b, g_qkv, sums_of + b * size); });
    for (long i = 0; i < B * size; i++) g_norms[i % size] += sums_of[i];
}
}
