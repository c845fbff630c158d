// A forward pass of the whole decoder without gradients, made of the operators' row functions.
#pragma once

#include "experts.hpp"
#include "routing.hpp"

// Rows per part of a pass: enough to be worth loading the weights into a thread's caches, and few enough that no thread
// waits long for another.
constexpr long FEWEST_ROWS = 16, MOST_ROWS = 384;

struct Sizes {
    int64_t D, H, h, d, E, K, F, qk_norm;  // qk_norm: 0 none, 1 of each head, 2 of the whole projection
    float eps, scale;                      // scale: 1 / sqrt(d)
    Gate gate;
    const float* cos;  // (positions, d), as are the sines
    const float* sin;
};

// One layer's weights, matrices packed; null where it has none. `plain_size`: F of its plain MLP or shared expert.
struct LayerWeights {
    const float *attention_norm, *qkv, *q_norm, *k_norm, *o, *mlp_norm;
    const float *plain_gate_up, *plain_down, *shared_gate;
    const float *router, *bias, *gate_up, *down;
    int64_t plain_size;
};

// Row (b, s) is token `positions[b, s]` of sequence b; keys and values are (B, h, capacity, d), `stride` apart per b.
struct Batch {
    int64_t B, S, capacity, stride;
    const int64_t* positions;
};

// The sequences [first, last) of a batch.
static Batch of_batch(const Batch& batch, long first, long last) {
    return {last - first, batch.S, batch.capacity, batch.stride, batch.positions + first * batch.S};
}

// A thread's share of the rows, within these limits.
static long rows_a_part(long threads, long rows) {
    long share = (rows + threads - 1) / threads;
    return std::min(std::max(share, FEWEST_ROWS), MOST_ROWS);
}

// The same in whole sequences: at least one.
static long sequences_of(long threads, const Batch& batch) {
    return (rows_a_part(threads, batch.B * batch.S) + batch.S - 1) / batch.S;
}

static void normalise(const Sizes& m, const LayerWeights& w, float* qk) {
    if (m.qk_norm == 1) {
        for (long j = 0; j < m.H + m.h; j++)
            rms_norm(qk + j * m.d, j < m.H ? w.q_norm : w.k_norm, m.d, m.eps, qk + j * m.d);
    } else if (m.qk_norm == 2) {
        rms_norm(qk, w.q_norm, m.H * m.d, m.eps, qk);
        rms_norm(qk + m.H * m.d, w.k_norm, m.h * m.d, m.eps, qk + m.H * m.d);
    }
}

// x + attention(norm x) in place, then its norm to `hidden` and, in an MoE layer, the router's logits. Rows come in the
// order of their positions, CHUNK at a time, so that keys are written before they are read.
static void attention_half(const Sizes& m, const LayerWeights& w, const Batch& batch, const Rounding& rounding, float* keys,
                           float* values, float* x, float* hidden, float* logits) {
    static thread_local Scratch scratch;
    long N = batch.B * batch.S, D = m.D, H = m.H, h = m.h, d = m.d, G = H / h, wide = (H + 2 * h) * d;
    float* normed = scratch.take(CHUNK * (D + wide + 2 * H * d) + wide + G * batch.capacity);
    float *qkv = normed + CHUNK * D, *q = qkv + CHUNK * wide, *heads = q + CHUNK * H * d;
    float *turned = heads + CHUNK * H * d, *probs = turned + wide;
    for (long start = 0; start < N; start += CHUNK) {
        long count = N - start < CHUNK ? N - start : CHUNK;
        for (long r = 0; r < count; r++) rms_norm(x + (start + r) * D, w.attention_norm, D, m.eps, normed + r * D);
        round_rows(rounding.inputs, normed, count, D);
        product(normed, count, w.qkv, D, wide, qkv);
        round_rows(rounding.outputs, qkv, count, wide);
        for (long r = 0; r < count; r++) {
            long b = (start + r) / batch.S, position = batch.positions[start + r];
            float* row = qkv + r * wide;
            normalise(m, w, row);
            const float *cos = m.cos + position * d, *sin = m.sin + position * d;
            for (long j = 0; j < H; j++) rotate(row + j * d, cos, sin, d, q + (r * H + j) * d);
            for (long j = 0; j < h; j++) {
                long place = b * batch.stride + (j * batch.capacity + position) * d;
                rotate(row + (H + j) * d, cos, sin, d, keys + place);
                std::memcpy(values + place, row + (H + h + j) * d, d * sizeof(float));
                // After the rotation, as `Numerics.kv` sees them; the queries stay as they are.
                round_rows(rounding.kv, keys + place, 1, d);
                round_rows(rounding.kv, values + place, 1, d);
            }
        }
        for (long r = 0; r < count; r++) {
            long b = (start + r) / batch.S, seen = batch.positions[start + r] + 1;
            for (long j = 0; j < h; j++) {
                long first = b * batch.stride + j * batch.capacity * d, at = (r * H + j * G) * d;
                attend(q + at, G, keys + first, values + first, seen, d, m.scale, probs, batch.capacity, heads + at);
            }
        }
        round_rows(rounding.inputs, heads, count, H * d);
        // `normed` is free again: the qkv product has read it.
        product(heads, count, w.o, H * d, D, normed);
        round_rows(rounding.outputs, normed, count, D);
        for (long i = 0; i < count * D; i++) x[start * D + i] = normed[i] + x[start * D + i];
        for (long r = start; r < start + count; r++) rms_norm(x + r * D, w.mlp_norm, D, m.eps, hidden + r * D);
        if (!w.router) continue;
        // Rounded in a copy: `hidden` is also the MLP's input and a recorder's feature.
        const float* seen = rounded(rounding.other_inputs, hidden + start * D, count, D, normed);
        product(seen, count, w.router, D, m.E, logits + start * m.E);
    }
}

static void route(const Sizes& m, const LayerWeights& w, long N, const float* logits, bool selects, int64_t* ids,
                  float* weights) {
    static thread_local Scratch scratch;
    static thread_local std::vector<Candidate> work;
    static thread_local std::vector<float> chosen;
    long whole = (m.E + LANES - 1) / LANES * LANES;
    float *scores = scratch.take(2 * whole), *choosing = scores + whole;
    for (long n = 0; n < N; n++) {
        score(logits + n * m.E, m.E, m.gate.is_sigmoid, scores);
        if (selects) select(logits + n * m.E, scores, w.bias, m.E, m.K, m.gate, choosing, work, ids + n * m.K);
        if (weights) weigh_experts(logits + n * m.E, scores, ids + n * m.K, m.K, m.gate, chosen, weights + n * m.K);
    }
}

// The plain MLP of a dense layer, or the shared expert, on all rows.
static void plain_mlp(const Sizes& m, const LayerWeights& w, const Rounding& rounding, long N, const float* seen, float* out) {
    static thread_local Scratch scratch;
    static thread_local std::vector<const float*> from;
    float* gate_up = scratch.take(CHUNK * 3 * w.plain_size);
    from.resize(N);
    for (long n = 0; n < N; n++) from[n] = seen + n * m.D;
    mlp(from.data(), N, w.plain_gate_up, w.plain_down, m.D, w.plain_size, gate_up, gate_up + CHUNK * 2 * w.plain_size,
        false, out, rounding);
}

// x + mlp(hidden) in place.
static void mlp_half(const Sizes& m, const LayerWeights& w, const Rounding& rounding, long N, const float* hidden,
                     const int64_t* ids, const float* weights, float* x) {
    static thread_local Scratch scratch;
    static thread_local std::vector<int32_t> ends;
    static thread_local std::vector<int64_t> slots;
    long D = m.D;
    float* out = scratch.take(3 * N * D + N + CHUNK * 2 * m.F);
    float *extra = out + N * D, *room = extra + N * D, *open = room + N * D, *gate_up = open + N;
    const float* seen = rounded(rounding.inputs, hidden, N, D, room);
    if (w.router) {
        ends.resize(m.E);
        slots.resize(N * m.K);
        ExpertRows rows = {ends.data(), slots.data(), gate_up};
        // One thread: a part may start no loop of its own, and without `keeps` all experts share one chunk.
        experts(1, seen, N, D, m.F, m.E, m.K, ids, weights, w.gate_up, w.down, rows, false, out, rounding);
    }
    if (w.plain_gate_up) plain_mlp(m, w, rounding, N, seen, w.router ? extra : out);
    // `room` is free again: both MLPs have read the rounded rows.
    if (w.shared_gate) product(rounded(rounding.other_inputs, hidden, N, D, room), N, w.shared_gate, D, 1, open);
    for (long n = 0; n < N; n++) {
        float* to = out + n * D;
        if (w.router && w.plain_gate_up) {
            // Times 1 is exact: without a gate the sum has the bits of out + extra.
            float gate = w.shared_gate ? sigmoid(open[n]) : 1.0f;
            for (long i = 0; i < D; i++) to[i] = to[i] + gate * extra[n * D + i];
        }
        for (long i = 0; i < D; i++) x[n * D + i] = to[i] + x[n * D + i];
    }
}
