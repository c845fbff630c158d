// The C interface that ops.py and sandbox/model/compiled_passes.py call through ctypes. Arrays are contiguous float32
// unless stated otherwise; the caller checks sizes. At most `threads` threads compute, fewer if there is little to do;
// the bits are the same. build.py reads the argument types from these declarations.
#include "backward.hpp"
#include "pass.hpp"
#include "self_attention.hpp"

// The number of rows per part of an elementwise loop: waking a thread takes some 20 microseconds.
static long rows_of(long width) { return 65536 / (width + 1) + 1; }

// Packs w (count, inner, columns), or (count, columns, inner) if `transposed`.
static void pack_all(long threads, const float* w, long count, long inner, long columns, bool transposed, float* out) {
    in_parts(threads, count, 1, [=](long first, long last) {
        for (long e = first; e < last; e++)
            pack(w + e * inner * columns, inner, columns, transposed ? 1 : columns, transposed ? inner : 1,
                 out + e * packed_size(inner, columns));
    });
}

static void add(long threads, const float* x, long count, float* to) {
    in_parts(threads, count, 65536, [=](long i, long last) {
        for (; i < last; i++) to[i] = to[i] + x[i];
    });
}

extern "C" {

void fo_pack(int64_t threads, const float* w, int64_t count, int64_t inner, int64_t columns, int32_t transposed, float* out) {
    pack_all(threads, w, count, inner, columns, transposed, out);
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

// x W^T. W (num_out, width) is packed in every call: it changes in place between calls, and nothing here would notice.
void fo_linear(int64_t threads, const float* x, const float* weight, int64_t rows, int64_t width, int64_t num_out, float* out) {
    static thread_local Scratch room;
    float* packed = room.take(packed_size(width, num_out));
    int32_t end = rows;
    pack_all(threads, weight, 1, width, num_out, true, packed);
    fo_product(threads, x, &end, 1, packed, width, num_out, out);
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
    static thread_local Scratch room;
    float* packed = room.take(E * (packed_size(D, 2 * F) + packed_size(F, D)));
    float* packed_down = packed + E * packed_size(D, 2 * F);
    pack_all(threads, gate_up, E, D, 2 * F, false, packed);
    pack_all(threads, down, E, F, D, false, packed_down);
    ExpertRows rows = {ends, slot, gate_up_rows};
    // Without `keeps`, gate_up_rows is one chunk that all experts reuse: threads would overwrite it.
    experts(keeps ? threads : 1, x, N, D, F, E, K, ids, weights, packed, packed_down, rows, keeps, out);
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

// Gradients of y = x W^T with g (rows, num_out), x (rows, width): g_x = g W, g_weight += g^T x; null skips one.
void fo_linear_backward(int64_t threads, const float* g, const float* x, int64_t rows, int64_t num_out, int64_t width, const float* weight,
                        float* g_x, float* g_weight) {
    static thread_local Scratch room;
    float* packed = room.take(packed_size(num_out, width));
    if (g_x) pack_all(threads, weight, 1, num_out, width, false, packed);
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
                         const float* weights, const float* gate_up, const float* down, int32_t* ends, int64_t* slot,
                         float* gate_up_rows, float* g_x, float* g_weights, float* g_gate_up, float* g_down) {
    static thread_local Scratch room;
    float* gate_up_T = room.take(E * (packed_size(2 * F, D) + packed_size(D, F)));
    float* down_T = gate_up_T + E * packed_size(2 * F, D);
    pack_all(threads, gate_up, E, 2 * F, D, true, gate_up_T);
    pack_all(threads, down, E, D, F, true, down_T);
    ExpertRows rows = {ends, slot, gate_up_rows};
    experts_backward(threads, g, x, N, D, F, E, K, weights, gate_up_T, down_T, rows, g_x, g_weights, g_gate_up, g_down);
}

// A layer up to its MLP: out = x + o(attention(norm x)), hidden = norm out and, where there is a router, its logits. It is
// the operators above, one after the other.
void fo_attention_layer(int64_t threads, const Sizes* sizes, const AttentionLayer* layer) {
    const Sizes& m = *sizes;
    const AttentionLayer& a = *layer;
    long N = a.B * a.S, heads = m.H * m.d, wide = heads + 2 * m.h * m.d;
    fo_rms_norm(threads, a.x, a.norm, N, 1, m.D, m.eps, a.normed, a.scale_x);
    fo_linear(threads, a.normed, a.qkv_weight, N, m.D, wide, a.qkv);
    in_parts(threads, a.B, 1, [&](long b, long) { attend_sequence(SelfAttention(m, a), b, a.heads); });
    fo_linear(threads, a.heads, a.o, N, heads, m.D, a.out);
    add(threads, a.x, N * m.D, a.out);
    fo_rms_norm(threads, a.out, a.mlp_norm, N, 1, m.D, m.eps, a.hidden, a.scale_out);
    if (a.router) fo_linear(threads, a.hidden, a.router, N, m.D, m.E, a.logits);
}

// From the gradients of out, hidden and logits to those of x, which is written, and of the weights, which are added to; null
// skips a matrix. `g_qk_norms` holds q's, then k's.
void fo_attention_layer_backward(int64_t threads, const Sizes* sizes, const AttentionLayer* layer, const float* g_out,
                                 const float* g_hidden, const float* g_logits, float* g_x, float* g_norm, float* g_qkv_weight,
                                 float* g_qk_norms, float* g_o, float* g_mlp_norm, float* g_router) {
    static thread_local Scratch room;
    const Sizes& m = *sizes;
    const AttentionLayer& a = *layer;
    long N = a.B * a.S, heads = m.H * m.d, wide = heads + 2 * m.h * m.d;
    float* g_rows = room.take(N * (2 * m.D + wide + heads));
    float *g_sum = g_rows + N * m.D, *g_qkv = g_sum + N * m.D, *g_heads = g_qkv + N * wide;
    if (a.router) {
        fo_linear_backward(threads, g_logits, a.hidden, N, m.E, m.D, a.router, g_rows, g_router);
        add(threads, g_hidden, N * m.D, g_rows);
    }
    fo_rms_norm_backward(threads, a.router ? g_rows : g_hidden, a.out, a.mlp_norm, a.scale_out, N, 1, m.D, g_sum, g_mlp_norm);
    add(threads, g_out, N * m.D, g_sum);
    fo_linear_backward(threads, g_sum, a.heads, N, m.D, heads, a.o, g_heads, g_o);
    self_attention_backward(threads, SelfAttention(m, a), g_heads, g_qkv, g_qk_norms);
    fo_linear_backward(threads, g_qkv, a.normed, N, wide, m.D, a.qkv_weight, g_rows, g_qkv_weight);
    fo_rms_norm_backward(threads, g_rows, a.x, a.norm, a.scale_x, N, 1, m.D, g_x, g_norm);
    add(threads, g_sum, N * m.D, g_x);
}
}
