// Attention over whole sequences, from the qkv product to the heads' outputs, and its gradient: as in pass.hpp, but it
// keeps what the gradient needs. A sequence is one part.
#pragma once

#include "backward.hpp"
#include "pass.hpp"

// A layer up to its MLP, in training: its input, its weights as they are (not packed), and what the forward pass keeps for
// the gradient, outputs included. x, out and hidden (B, S, D); scale_x and scale_out 1 / rms of each row; qkv (B, S,
// (H + 2 h) d); q (B, S, H, d) and k, v (B, h, P, d) after norm and rotation; probs (B, H, S, P); heads (B, S, H d); logits
// (B, S, E), null like `router` without one. Token (b, s) is rotated by entry (b S + s) mod num_tables of the tables, H + h
// equal rows each, and sees keys 0 to s.
struct AttentionLayer {
    const float *x, *norm, *qkv_weight, *q_norm, *k_norm, *o, *mlp_norm, *router, *cos, *sin;
    float *normed, *scale_x, *qkv, *q, *k, *v, *probs, *heads, *scale_out, *out, *hidden, *logits;
    int64_t B, S, P, num_tables;
};

// The part of it between the qkv product and that of the heads.
struct SelfAttention {
    const Sizes& m;
    LayerWeights w;
    long B, S, P, num_tables;
    const float *cos, *sin, *qkv;
    float *q, *k, *v, *probs;

    SelfAttention(const Sizes& sizes, const AttentionLayer& a)
        : m(sizes), w{}, B(a.B), S(a.S), P(a.P), num_tables(a.num_tables), cos(a.cos), sin(a.sin), qkv(a.qkv), q(a.q), k(a.k),
          v(a.v), probs(a.probs) {
        w.q_norm = a.q_norm, w.k_norm = a.k_norm;
    }
    long wide() const { return (m.H + 2 * m.h) * m.d; }
    long table(long n) const { return n % num_tables * (m.H + m.h) * m.d; }
    long num_norms() const { return m.qk_norm == 0 ? 0 : m.qk_norm == 1 ? 2 * m.d : (m.H + m.h) * m.d; }
};

static void attend_sequence(const SelfAttention& a, long b, float* out) {
    static thread_local Scratch scratch;
    long H = a.m.H, h = a.m.h, d = a.m.d, G = H / h;
    float* row = scratch.take(a.wide());
    for (long n = b * a.S; n < (b + 1) * a.S; n++) {
        // A copy: `normalise` writes in place, and the gradient needs qkv as it was.
        std::memcpy(row, a.qkv + n * a.wide(), a.wide() * sizeof(float));
        normalise(a.m, a.w, row);
        const float *cos = a.cos + a.table(n), *sin = a.sin + a.table(n);
        for (long j = 0; j < H; j++) rotate(row + j * d, cos, sin, d, a.q + (n * H + j) * d);
        for (long j = 0; j < h; j++) {
            long place = ((b * h + j) * a.P + n % a.S) * d;
            rotate(row + (H + j) * d, cos, sin, d, a.k + place);
            std::memcpy(a.v + place, row + (H + h + j) * d, d * sizeof(float));
        }
    }
    for (long n = b * a.S; n < (b + 1) * a.S; n++)
        for (long j = 0; j < h; j++) {
            long first = (b * h + j) * a.P * d, at = (n * H + j * G) * d, s = n % a.S;
            float* probs = a.probs + ((b * H + j * G) * a.S + s) * a.P;
            attend(a.q + at, G, a.k + first, a.v + first, s + 1, d, a.m.scale, probs, a.S * a.P, out + at);
        }
}

// The gradient of `rotate`: the rotation by the opposite angle.
static inline void rotate_back(const float* g, const float* cos, const float* sin, long width, float* out) {
    long half = width / 2;
    for (long i = 0; i < half; i++) out[i] = g[i] * cos[i] - g[half + i] * sin[i];
    for (long i = half; i < width; i++) out[i] = g[i] * cos[i] - g[i - half] * sin[i];
}

// Turns the gradient after `normalise` into that before it; adds to the gradients of the norms' weights (q's, then k's).
static void normalise_backward(const Sizes& m, const LayerWeights& w, const float* g, const float* x, float* room, float* g_x,
                               float* g_norms) {
    long num = m.qk_norm == 1 ? m.H + m.h : 2, at = 0;
    for (long j = 0; j < num; j++) {
        bool is_q = j < (m.qk_norm == 1 ? m.H : 1);
        long width = m.qk_norm == 1 ? m.d : (is_q ? m.H : m.h) * m.d;
        const float* weight = is_q ? w.q_norm : w.k_norm;
        float scale = rms_norm(x + at, weight, width, m.eps, room);  // computed again: only 1 / rms is needed
        float* g_weight = g_norms + (is_q ? 0 : m.qk_norm == 1 ? m.d : m.H * m.d);
        rms_norm_backward(g + at, x + at, weight, scale, width, g_x + at, g_weight);
        at += width;
    }
}

// Writes the gradient of qkv's rows; adds to that of the norms' weights.
static void attend_sequence_backward(const SelfAttention& a, const float* g, long b, float* g_qkv, float* g_norms) {
    static thread_local Scratch scratch;
    long H = a.m.H, h = a.m.h, d = a.m.d, S = a.S, P = a.P, G = H / h, keys = h * P * d, stop = S;
    static thread_local std::vector<int64_t> seen;
    // Kept from call to call: the counts are those of every sequence.
    for (long s = seen.size(); s < S; s++) seen.push_back(s + 1);
    // Stop after the last row with a gradient: attention is causal, so later keys get none.
    while (stop && is_zero(g + (b * S + stop - 1) * H * d, H * d)) stop--;
    std::memset(g_qkv + (b * S + stop) * a.wide(), 0, (S - stop) * a.wide() * sizeof(float));
    float* g_k = scratch.take(2 * keys + S * H * d + 2 * a.wide());
    float *g_v = g_k + keys, *g_q = g_v + keys, *turned = g_q + S * H * d, *room = turned + a.wide();
    std::memset(g_k, 0, 2 * keys * sizeof(float));
    for (long j = 0; j < H; j++) {
        long own = j / G * P * d, first = b * keys + own, at = b * S * H + j;
        attend_backward(g + at * d, a.q + at * d, H * d, a.k + first, a.v + first, a.probs + (b * H + j) * S * P, seen.data(), stop,
                        P, d, a.m.scale, g_q + j * d, g_k + own, g_v + own);
    }
    for (long s = 0; s < stop; s++) {
        long n = b * S + s;
        const float *cos = a.cos + a.table(n), *sin = a.sin + a.table(n);
        float *to = g_qkv + n * a.wide(), *before = a.m.qk_norm ? turned : to;
        for (long j = 0; j < H; j++) rotate_back(g_q + (s * H + j) * d, cos, sin, d, before + j * d);
        for (long j = 0; j < h; j++) {
            rotate_back(g_k + (j * P + s) * d, cos, sin, d, before + (H + j) * d);
            std::memcpy(to + (H + h + j) * d, g_v + (j * P + s) * d, d * sizeof(float));
        }
        if (a.m.qk_norm) normalise_backward(a.m, a.w, turned, a.qkv + n * a.wide(), room, to, g_norms);
    }
}

static void self_attention_backward(long threads, const SelfAttention& all, const float* g, float* g_qkv, float* g_norms) {
    long size = all.num_norms();
    // One sum per sequence, added in their order below: no bit depends on the number of threads.
    std::vector<float> by_sequence(all.B * size, 0.0f);
    float* sums_of = by_sequence.data();
    in_parts(threads, all.B, 1, [&](long b, long) { attend_sequence_backward(all, g, b, g_qkv, sums_of + b * size); });
    for (long i = 0; i < all.B * size; i++) g_norms[i % size] += sums_of[i];
}
