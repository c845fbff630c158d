// The SwiGLU experts of a layer: rows sorted by expert, two products, and the weighted sum of each row's slots.
#pragma once

#include <vector>

#include "attention.hpp"
#include "product.hpp"
#include "rounding.hpp"
#include "threads.hpp"

// down(silu(g) u), (g, u) = x gate_up, of the rows at x, which the caller has rounded; hidden holds CHUNK rows, and so does
// gate_up, or all rows if `keeps`.
static void mlp(const float* const* x, long rows, const float* gate_up_packed, const float* down_packed, long D, long F,
                float* gate_up, float* hidden, bool keeps, float* out, const Rounding& rounding = {}) {
    for (long start = 0; start < rows; start += CHUNK) {
        long count = rows - start < CHUNK ? rows - start : CHUNK;
        float* gu = keeps ? gate_up + start * 2 * F : gate_up;
        float* to[CHUNK];
        for (long r = 0; r < count; r++) to[r] = gu + r * 2 * F;
        product(x + start, count, gate_up_packed, D, 2 * F, to);
        round_rows(rounding.outputs, gu, count, 2 * F);
        for (long r = 0; r < count; r++) swiglu(gu + r * 2 * F, gu + r * 2 * F + F, F, hidden + r * F);
        round_rows(rounding.inputs, hidden, count, F);
        product(hidden, count, down_packed, F, D, out + start * D);
        round_rows(rounding.outputs, out + start * D, count, D);
    }
}

// A stable counting sort of slots by expert: row r is slot slot[r], the rows of expert e end at ends[e].
static void sort_slots(const int64_t* experts, long M, long E, int32_t* ends, int64_t* slot) {
    std::vector<int32_t> next(E + 1, 0);
    for (long m = 0; m < M; m++) next[experts[m] + 1]++;
    for (long e = 0; e < E; e++) next[e + 1] += next[e];
    // Before the last loop, which counts `next` up.
    for (long e = 0; e < E; e++) ends[e] = next[e + 1];
    for (long m = 0; m < M; m++) slot[next[experts[m]]++] = m;
}

// The slots in sorted order, and the part of their rows that a gradient needs.
struct ExpertRows {
    int32_t* ends;
    int64_t* slot;
    float* gate_up;  // all rows, or CHUNK of them without a gradient
};

// out[n] = sum_k weights[n, k] expert_k(x[n]), in slot order (which is ascending expert order). `threads` must be 1 unless
// it `keeps` all rows.
static void experts(long threads, const float* x, long N, long D, long F, long E, long K, const int64_t* ids,
                    const float* weights, const float* gate_up_packed, const float* down_packed, const ExpertRows& rows,
                    bool keeps, float* out, const Rounding& rounding = {}) {
    long M = N * K;
    sort_slots(ids, M, E, rows.ends, rows.slot);
    static thread_local Scratch scratch;
    static thread_local std::vector<const float*> pointers;
    pointers.resize(2 * M);
    // Addresses for the lambdas: a thread_local named inside them would be the helper's own.
    const float **from = pointers.data(), **of_slot = from + M;
    float* y = scratch.take(M * D);
    for (long r = 0; r < M; r++) {
        // Pointers into x, not a gathered copy with K rows per token.
        from[r] = x + rows.slot[r] / K * D;
        of_slot[rows.slot[r]] = y + r * D;
    }
    in_parts(threads, E, 1, [=](long e, long) {
        static thread_local Scratch room;
        long start = e ? rows.ends[e - 1] : 0;
        mlp(from + start, rows.ends[e] - start, gate_up_packed + e * packed_size(D, 2 * F),
            down_packed + e * packed_size(F, D), D, F, keeps ? rows.gate_up + start * 2 * F : rows.gate_up,
            room.take(CHUNK * F), keeps, y + start * D, rounding);
    });
    // A loop of its own: a token's sum waits for all of its experts.
    in_parts(threads, N, 256, [=](long n, long last) {
        for (; n < last; n++) {
            float* to = out + n * D;
            for (long k = 0; k < K; k++) {
                float weight = weights[n * K + k];
                const float* y = of_slot[n * K + k];
                // Product and sum rounded apart, in slot order, as in `_Combine` of sandbox/kernels/experts.py.
                for (long i = 0; i < D; i++) to[i] = k == 0 ? y[i] * weight : to[i] + y[i] * weight;
            }
        }
    });
}
