// Gradients. Their sums run over the rows of a batch: they are deterministic but depend on the batch.
//
// A row whose gradient is all zeros (padding, a response without advantage) is left out of products and sums: adding zero
// would not change their bits. So the values of such a row, NaN included, have no effect.
#pragma once

#include "experts.hpp"

// The rows in [first, last) of g, at most CHUNK, that are not all zeros.
struct Gradients {
    const float* at[CHUNK];
    long row[CHUNK], count = 0;
    Gradients(const float* g, long first, long last, long width) {
        for (long n = first; n < last; n++) {
            if (is_zero(g + n * width, width)) continue;
            at[count] = g + n * width;
            row[count++] = n;
        }
    }
};

// out[r][0..PANEL) += sum_n x[n][first + r] panel[n], the sum a chain in row order.
template <long ROWS>
static inline void outer_tile(const float* const* x, long first, const float* panel, long rows, float* out, long stride) {
    Lanes left[ROWS], right[ROWS];
    for (long r = 0; r < ROWS; r++) left[r] = right[r] = splat(0.0f);
    for (long n = 0; n < rows; n++) {
        Lanes a = load(panel + n * PANEL), b = load(panel + n * PANEL + LANES);
        const float* at = x[n] + first;
        for (long r = 0; r < ROWS; r++) {
            Lanes value = splat(at[r]);
            left[r] = fma(value, a, left[r]);
            right[r] = fma(value, b, right[r]);
        }
    }
    // Added once per chunk: bits depend on the chunks' borders, which are the same for any number of threads.
    for (long r = 0; r < ROWS; r++) {
        store(out + r * stride, load(out + r * stride) + left[r]);
        store(out + r * stride + LANES, load(out + r * stride + LANES) + right[r]);
    }
}

// out (inner, columns) += x^T g over at most CHUNK rows, for its columns from `begin` (a multiple of PANEL) to `end`. A
// partial last panel is summed in a buffer of its own.
static void add_outer(const float* const* x, const float* const* g, long rows, long inner, long columns, long begin, long end,
                      float* out) {
    static thread_local Scratch scratch;
    float *panel = scratch.take((CHUNK + inner) * PANEL), *beside = panel + CHUNK * PANEL;
    for (long first = begin; first < end && rows; first += PANEL) {
        long width = columns - first < PANEL ? columns - first : PANEL, stride = width == PANEL ? columns : PANEL;
        float* to = width == PANEL ? out + first : beside;
        if (width < PANEL) {
            std::memset(panel, 0, CHUNK * PANEL * sizeof(float));
            // outer_tile adds to it, and the memory has an earlier call's numbers.
            std::memset(beside, 0, inner * PANEL * sizeof(float));
        }
        for (long n = 0; n < rows; n++) {
            if (width == PANEL)
                std::memcpy(panel + n * PANEL, g[n] + first, PANEL * sizeof(float));
            else
                std::memcpy(panel + n * PANEL, g[n] + first, width * sizeof(float));
        }
        long i = 0;
        for (; i + BLOCK <= inner; i += BLOCK) outer_tile<BLOCK>(x, i, panel, rows, to + i * stride, stride);
        for (; i + 4 <= inner; i += 4) outer_tile<4>(x, i, panel, rows, to + i * stride, stride);
        for (; i < inner; i++) outer_tile<1>(x, i, panel, rows, to + i * stride, stride);
        if (width == PANEL) continue;
        for (i = 0; i < inner; i++)
            for (long o = 0; o < width; o++) out[i * columns + first + o] += beside[i * PANEL + o];
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
                              float* g_weight) {
    if (is_zero(g, width)) return std::memset(g_x, 0, width * sizeof(float)), void();
    Lanes total = splat(0.0f);
    auto along = [&](long i, long some) __attribute__((always_inline)) {
        return load_some(g + i, some) * load_some(weight + i, some);
    };
    long i = 0;
    for (; i + LANES <= width; i += LANES) total = fma(along(i, LANES), load(x + i), total);
    if (i < width) total = fma(along(i, width - i), load_some(x + i, width - i), total);
    Lanes mean = splat(sum(total) * scale / (float)width), factor = splat(scale);
    auto step = [&](long i, long some) __attribute__((always_inline)) {
        Lanes normed = load_some(x + i, some) * factor;
        Lanes own = load_some(g_weight + i, some) + load_some(g + i, some) * normed, out = (along(i, some) - normed * mean) * factor;
        std::memcpy(g_weight + i, &own, some * sizeof(float));
        std::memcpy(g_x + i, &out, some * sizeof(float));
    };
    for (i = 0; i + LANES <= width; i += LANES) step(i, LANES);
    if (i < width) step(i, width - i);
}

// One row of h = silu(gate) up, whose gradient is `weight` g: writes the gradients of gate and up, and `weight` h to
// `hidden` unless that is null; returns g . h.
static inline float swiglu_backward(const float* g, float weight, const float* gate_up, long width, float* out, float* hidden) {
    Lanes total = splat(0.0f);
    auto step = [&](long i, long some) __attribute__((always_inline)) {
        Lanes gate = load_some(gate_up + i, some), up = load_some(gate_up + width + i, some), grad = load_some(g + i, some);
        Lanes s = sigmoid(gate), h = gate * s * up;
        // Before the weight is multiplied in: the gradient of the weight itself is g . h.
        total = fma(grad, h, total);
        grad *= splat(weight);
        Lanes to_up = grad * gate * s, to_gate = grad * up * s * (splat(1.0f) + gate * (splat(1.0f) - s));
        std::memcpy(out + i, &to_gate, some * sizeof(float));
        std::memcpy(out + width + i, &to_up, some * sizeof(float));
        h *= splat(weight);
        if (hidden) std::memcpy(hidden + i, &h, some * sizeof(float));
    };
    long i = 0;
    for (; i + LANES <= width; i += LANES) step(i, LANES);
    if (i < width) step(i, width - i);
    return sum(total);
}

// out[r] = sum_n w[r, n] rows[n] for r < count, n from first[r] (ascending) to num; w[r, n] is at r stride + n step.
static void weigh_rows(const float* w, long count, long stride, long step, const long* first, const float* rows, long num,
                       long width, float* out) {
    // Two rows at a time, both from first[r]: the second's weights before its own first are zero.
    for (long r = 0; r < count; r += 2) {
        const float *at = w + r * stride + first[r] * step, *from = rows + first[r] * width;
        long c = 0, left = num - first[r];
        for (; c + 4 * LANES <= width; c += 4 * LANES)
            r + 2 <= count ? weigh<2, 4>(at, stride, step, from + c, left, width, out + r * width + c)
                           : weigh<1, 4>(at, stride, step, from + c, left, width, out + r * width + c);
        for (; c + 2 * LANES <= width; c += 2 * LANES)
            r + 2 <= count ? weigh<2, 2>(at, stride, step, from + c, left, width, out + r * width + c)
                           : weigh<1, 2>(at, stride, step, from + c, left, width, out + r * width + c);
        for (; c < width; c += LANES)
            r + 2 <= count ? weigh<2, 1>(at, stride, step, from + c, left, width, out + r * width + c)
                           : weigh<1, 1>(at, stride, step, from + c, left, width, out + r * width + c);
    }
}

// One query head of one sequence. Rows s of g, q and g_q are `apart` floats apart; p (S, P) has its probabilities over
// seen[s] keys. Adds to the gradients of keys and values (P rows each) and writes that of q.
static void attend_backward(const float* g, const float* q, long apart, const float* keys, const float* values,
                            const float* p, const int64_t* seen, long S, long P, long width, float scale, float* g_q,
                            float* g_keys, float* g_values) {
    static thread_local Scratch scratch;
    static thread_local std::vector<long> starts;
    long padded = (P + LANES - 1) / LANES * LANES;
    float* own_g = scratch.take((3 * S + P) * width + 2 * S * padded);
    float *own_q = own_g + S * width, *turned = own_q + S * width, *sum_of = turned + S * width;
    float *g_scores = sum_of + P * width, *probs = g_scores + S * padded;
    starts.assign(S + P, 0);
    long *zero = starts.data(), *first = zero + S, most = 0;
    for (long s = 0; s < S; s++) {
        // Copied next to each other, as weigh_rows takes adjacent rows.
        std::memcpy(own_g + s * width, g + s * apart, width * sizeof(float));
        std::memcpy(own_q + s * width, q + s * apart, width * sizeof(float));
        float *row = g_scores + s * padded, *own = probs + s * padded;
        scores_of(own_g + s * width, values, seen[s], width, row);
        std::memcpy(own, p + s * P, seen[s] * sizeof(float));
        // The gradient of a softmax is p (g - sum p g); the scores' scale comes after it.
        float mean = dot(own, row, seen[s]);
        for (long j = 0; j < seen[s]; j++) row[j] = own[j] * (row[j] - mean) * scale;
        // scores_of wrote whole vectors; weigh_rows takes a weight of 0 for keys that this query does not see.
        std::memset(row + seen[s], 0, (padded - seen[s]) * sizeof(float));
        std::memset(own + seen[s], 0, (padded - seen[s]) * sizeof(float));
        for (; most < seen[s]; most++) first[most] = s;  // the first query that sees key `most`
    }
    weigh_rows(g_scores, S, padded, 1, zero, keys, most, width, turned);
    for (long s = 0; s < S; s++) std::memcpy(g_q + s * apart, turned + s * width, width * sizeof(float));
    weigh_rows(g_scores, most, 1, padded, first, own_q, S, width, sum_of);
    for (long i = 0; i < most * width; i++) g_keys[i] += sum_of[i];
    weigh_rows(probs, most, 1, padded, first, own_g, S, width, sum_of);
    for (long i = 0; i < most * width; i++) g_values[i] += sum_of[i];
}

// All gradients of `experts`, from what its forward kept; weights are packed transposed. An expert is one part: its
// weights' gradients are sums over its rows.
static void experts_backward(long threads, const float* g, const float* x, long N, long D, long F, long E, long K,
                             const float* weights, const float* gate_up_T, const float* down_T, const ExpertRows& rows,
                             float* g_x, float* g_weights, float* g_gate_up, float* g_down) {
    static thread_local Scratch whole;
    static thread_local std::vector<const float*> pointers;
    pointers.resize(N * K);
    // Addresses for the lambdas: a thread_local named inside them would be the helper's own.
    float* g_rows = whole.take(N * K * D);
    const float** of_slot = pointers.data();
    in_parts(threads, E, 1, [=](long e, long) {
        static thread_local Scratch scratch;
        float *g_hidden = scratch.take(CHUNK * 4 * F), *hidden = g_hidden + CHUNK * F, *g_gu = hidden + CHUNK * F;
        for (long start = e ? rows.ends[e - 1] : 0; start < rows.ends[e]; start += CHUNK) {
            long stop = rows.ends[e] - start < CHUNK ? rows.ends[e] : start + CHUNK, count = 0, own[CHUNK];
            const float *from[CHUNK], *g_at[CHUNK], *hidden_at[CHUNK], *gu_at[CHUNK];
            float* g_hidden_at[CHUNK];
            for (long row = start; row < stop; row++) {
                long slot = rows.slot[row], n = slot / K;
                of_slot[slot] = nullptr;
                g_weights[slot] = 0.0f;
                if (is_zero(g + n * D, D)) continue;
                from[count] = x + n * D;
                g_at[count] = g + n * D;
                hidden_at[count] = hidden + count * F;
                g_hidden_at[count] = g_hidden + count * F;
                gu_at[count] = g_gu + count * 2 * F;
                of_slot[slot] = g_rows + (start + count) * D;
                own[count++] = row;
            }
            // A row's output is weight * (hidden down): its gradients follow from g down^T and hidden, computed again.
            product(g_at, count, down_T + e * packed_size(D, F), D, F, g_hidden_at);
            for (long r = 0; r < count; r++) {
                const float* gate_up = rows.gate_up + own[r] * 2 * F;
                long slot = rows.slot[own[r]];
                g_weights[slot] = swiglu_backward(g_hidden + r * F, weights[slot], gate_up, F, g_gu + r * 2 * F, hidden + r * F);
            }
            product(g_gu, count, gate_up_T + e * packed_size(2 * F, D), 2 * F, D, g_rows + start * D);
            add_outer(hidden_at, g_at, count, F, D, 0, D, g_down + e * F * D);
            add_outer(from, gu_at, count, D, 2 * F, 0, 2 * F, g_gate_up + e * D * 2 * F);
        }
    });
    in_parts(threads, N, 256, [=](long n, long last) {
        for (; n < last; n++) {
            // Null marks a row whose gradient is zero: all its slots are null then.
            if (!of_slot[n * K]) std::memset(g_x + n * D, 0, D * sizeof(float));
            for (long k = 0; k < K && of_slot[n * K]; k++) {
                const float* row = of_slot[n * K + k];
                for (long i = 0; i < D; i++) g_x[n * D + i] = k == 0 ? row[i] : g_x[n * D + i] + row[i];
            }
        }
    });
}
