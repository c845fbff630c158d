// Gradients. Their sums run over the rows of a batch, so they are deterministic, and depend on it.
#pragma once

#include "experts.hpp"

// out[r][0..PANEL) += sum_n x[n][first + r] panel[n], a chain in the order of the rows.
template <long ROWS>
static inline void outer_tile(const float* const* x, long first, const float* panel, long rows, float* out, long stride) {
    Lanes left[ROWS], right[ROWS];
    for (long r = 0; r < ROWS; r++) {
        left[r] = load(out + r * stride);
        right[r] = load(out + r * stride + LANES);
    }
    for (long n = 0; n < rows; n++) {
        Lanes a = load(panel + n * PANEL), b = load(panel + n * PANEL + LANES);
        const float* at = x[n] + first;
        for (long r = 0; r < ROWS; r++) {
            Lanes value = splat(at[r]);
            left[r] = fma(value, a, left[r]);
            right[r] = fma(value, b, right[r]);
        }
    }
    for (long r = 0; r < ROWS; r++) {
        store(out + r * stride, left[r]);
        store(out + r * stride + LANES, right[r]);
    }
}

// out += x^T g over these rows: (inner, columns). A last panel that is not full is summed beside it.
static void add_outer(const float* const* x, const float* const* g, long rows, long inner, long columns, float* out) {
    static thread_local Scratch scratch;
    float *panel = scratch.take((CHUNK + inner) * PANEL), *beside = panel + CHUNK * PANEL;
    for (long start = 0; start < rows; start += CHUNK) {
        long count = rows - start < CHUNK ? rows - start : CHUNK;
        for (long first = 0; first < columns; first += PANEL) {
            long width = columns - first < PANEL ? columns - first : PANEL, stride = width == PANEL ? columns : PANEL;
            float* to = width == PANEL ? out + first : beside;
            if (width < PANEL) {
                std::memset(panel, 0, CHUNK * PANEL * sizeof(float));
                std::memset(beside, 0, inner * PANEL * sizeof(float));
            }
            for (long n = 0; n < count; n++) {
                if (width == PANEL)
                    std::memcpy(panel + n * PANEL, g[start + n] + first, PANEL * sizeof(float));
                else
                    std::memcpy(panel + n * PANEL, g[start + n] + first, width * sizeof(float));
            }
            long i = 0;
            for (; i + BLOCK <= inner; i += BLOCK) outer_tile<BLOCK>(x + start, i, panel, count, to + i * stride, stride);
            for (; i < inner; i++) outer_tile<1>(x + start, i, panel, count, to + i * stride, stride);
            if (width == PANEL) continue;
            for (i = 0; i < inner; i++)
                for (long o = 0; o < width; o++) out[i * columns + first + o] += beside[i * PANEL + o];
        }
    }
}

static inline float dot(const float* a, const float* b, long width) {
    Lanes total = splat(0.0f);
    long i = 0;
    for (; i + LANES <= width; i += LANES) total = fma(load(a + i), load(b + i), total);
    if (i < width) total = fma(load_some(a + i, width - i), load_some(b + i, width - i), total);
    return sum(total);
}

// y = x s w, s = 1 / rms(x): g_x = s (g w - x s mean(g w x s)), g_w += g x s.
static void rms_norm_backward(const float* g, const float* x, const float* weight, float scale, long width, float* g_x,
                              float* g_weight, float* along) {
    for (long i = 0; i < width; i++) along[i] = g[i] * weight[i];
    float mean = dot(along, x, width) * scale / (float)width;
    for (long i = 0; i < width; i++) {
        float normed = x[i] * scale;
        g_weight[i] += g[i] * normed;
        g_x[i] = (along[i] - normed * mean) * scale;
    }
}

static inline void swiglu_backward(const float* g, const float* gate_up, long width, float* out) {
    for (long i = 0; i < width; i += LANES) {
        long some = width - i < LANES ? width - i : LANES;
        Lanes gate = load_some(gate_up + i, some), up = load_some(gate_up + width + i, some), grad = load_some(g + i, some);
        Lanes s = sigmoid(gate);
        Lanes to_up = grad * gate * s, to_gate = grad * up * s * (splat(1.0f) + gate * (splat(1.0f) - s));
        std::memcpy(out + i, &to_gate, some * sizeof(float));
        std::memcpy(out + width + i, &to_up, some * sizeof(float));
    }
}

// One query head: p its probabilities over `count` keys. Adds to the gradients of keys and values, writes that of q.
static void attend_backward(const float* g, const float* q, const float* keys, const float* values, const float* p,
                            long count, long width, float scale, float* g_p, float* g_q, float* g_keys,
                            float* g_values) {
    scores_of(g, values, count, width, g_p);
    float mean = dot(p, g_p, count);
    for (long j = 0; j < count; j++) g_p[j] = p[j] * (g_p[j] - mean) * scale;
    for (long i = 0; i < width; i += LANES) {
        Lanes total = splat(0.0f), own_q = load(q + i), own_g = load(g + i);
        for (long j = 0; j < count; j++) {
            long at = j * width + i;
            total = fma(splat(g_p[j]), load(keys + at), total);
            store(g_keys + at, fma(splat(g_p[j]), own_q, load(g_keys + at)));
            store(g_values + at, fma(splat(p[j]), own_g, load(g_values + at)));
        }
        store(g_q + i, total);
    }
}

// All gradients of `experts`, from what its forward kept; weights packed for the product by their transposes.
static void experts_backward(const float* g, const float* x, long N, long D, long F, long E, long K, const float* weights,
                             const float* gate_up_T, const float* down_T, const ExpertRows& rows, float* g_x,
                             float* g_weights, float* g_gate_up, float* g_down) {
    static thread_local Scratch scratch;
    static thread_local std::vector<const float*> of_slot;
    of_slot.resize(N * K);
    float *g_y = scratch.take(CHUNK * (D + 3 * F) + N * K * D), *g_hidden = g_y + CHUNK * D, *g_gu = g_hidden + CHUNK * F;
    float* g_rows = g_gu + CHUNK * 2 * F;
    long start = 0;
    for (long e = 0; e < E; e++) {
        for (; start < rows.ends[e];) {
            long count = rows.ends[e] - start < CHUNK ? rows.ends[e] - start : CHUNK;
            const float *from[CHUNK], *y_at[CHUNK], *hidden_at[CHUNK], *gu_at[CHUNK];
            for (long r = 0; r < count; r++) {
                long slot = rows.slot[start + r], n = slot / K;
                g_weights[slot] = dot(g + n * D, rows.y + (start + r) * D, D);
                for (long i = 0; i < D; i++) g_y[r * D + i] = g[n * D + i] * weights[slot];
                from[r] = x + n * D;
                y_at[r] = g_y + r * D;
                hidden_at[r] = rows.hidden + (start + r) * F;
                gu_at[r] = g_gu + r * 2 * F;
                of_slot[slot] = g_rows + (start + r) * D;
            }
            product(g_y, count, down_T + e * packed_size(D, F), D, F, g_hidden);
            for (long r = 0; r < count; r++)
                swiglu_backward(g_hidden + r * F, rows.gate_up + (start + r) * 2 * F, F, g_gu + r * 2 * F);
            product(g_gu, count, gate_up_T + e * packed_size(2 * F, D), 2 * F, D, g_rows + start * D);
            add_outer(hidden_at, y_at, count, F, D, g_down + e * F * D);
            add_outer(from, gu_at, count, D, 2 * F, g_gate_up + e * D * 2 * F);
            start += count;
        }
    }
    for (long n = 0; n < N; n++)
        for (long k = 0; k < K; k++) {
            const float* row = of_slot[n * K + k];
            for (long i = 0; i < D; i++) g_x[n * D + i] = k == 0 ? row[i] : g_x[n * D + i] + row[i];
        }
}
