// Attention of one token's query heads over the keys that it sees.
#pragma once

#include <algorithm>
#include <vector>

#include "rows.hpp"

// Memory that successive calls reuse; it grows and is never freed, so that a steady-state call allocates nothing. A
// function has its own and takes all that it needs at once: another `take` may move the memory.
struct Scratch {
    std::vector<float> floats;
    float* take(size_t count) {
        if (floats.size() < count) floats.resize(count);
        return floats.data();
    }
};

// scores[p] = q . k_p for p < count rounded up to LANES; each lane sums over its share of the width, then `sums`.
static inline void scores_of(const float* q, const float* keys, long count, long width, float* scores) {
    for (long p = 0; p < count; p += LANES) {
        Lanes partial[LANES];
        for (long j = 0; j < LANES; j++) partial[j] = splat(0.0f);
        for (long i = 0; i < width; i += LANES) {
            Lanes part = load(q + i);
            for (long j = 0; j < LANES; j++) partial[j] = fma(part, load(keys + (p + j) * width + i), partial[j]);
        }
        store(scores + p, sums(partial));
    }
}

// out[g] = sum over ascending p of probs[g][p] v_p, for VECTORS vectors of the head width and HEADS heads that share
// values; the probabilities of one head are `step` apart.
template <long HEADS, long VECTORS>
static inline void weigh(const float* probs, long stride, long step, const float* values, long count, long width,
                         float* out) {
    Lanes total[HEADS][VECTORS];
    for (long g = 0; g < HEADS; g++)
        for (long c = 0; c < VECTORS; c++) total[g][c] = splat(0.0f);
    // Not up to the padded count: values beyond `count` may be NaN, and 0 times NaN is NaN.
    for (long p = 0; p < count; p++)
        for (long g = 0; g < HEADS; g++) {
            Lanes weight = splat(probs[g * stride + p * step]);
            for (long c = 0; c < VECTORS; c++) total[g][c] = fma(weight, load(values + p * width + c * LANES), total[g][c]);
        }
    for (long g = 0; g < HEADS; g++)
        for (long c = 0; c < VECTORS; c++) store(out + g * width + c * LANES, total[g][c]);
}

// `weigh` for VECTORS vectors of any number of heads, MOST at a time. The widest tile has eight chains: fewer would wait
// for one another's sums.
template <long MOST, long VECTORS>
static inline void weigh_columns(const float* probs, long heads, long stride, const float* values, long count, long width,
                                 float* out) {
    long g = 0;
    for (; g + MOST <= heads; g += MOST)
        weigh<MOST, VECTORS>(probs + g * stride, stride, 1, values, count, width, out + g * width);
    if constexpr (MOST > 1)
        weigh_columns<MOST - 1, VECTORS>(probs + g * stride, heads - g, stride, values, count, width, out + g * width);
}

// softmax(scale q k^T) v of `heads` query heads, adjacent in q and out, over `count` keys. Keys and values have `width`
// floats each (a multiple of LANES), and memory for `count` rounded up to LANES. probs: (heads, stride), stride at least
// that number.
static void attend(const float* q, long heads, const float* keys, const float* values, long count, long width,
                   float scale, float* probs, long stride, float* out) {
    static thread_local Scratch scratch;
    float* scaled = scratch.take(width);
    long padded = (count + LANES - 1) / LANES * LANES;
    for (long g = 0; g < heads; g++) {
        float* row = probs + g * stride;
        for (long i = 0; i < width; i++) scaled[i] = q[g * width + i] * scale;
        scores_of(scaled, keys, count, width, row);
        // Overwritten, not masked by adding: memory beyond `count` may hold NaN.
        for (long p = count; p < padded; p++) row[p] = -INFINITY;
        float inverse = 1.0f / exponentials(row, padded);
        for (long p = 0; p < padded; p++) row[p] *= inverse;
    }
    // Whatever the tile, an output is one chain over ascending p: the choice of tiles changes no bit.
    long c = 0;
    for (; c + 4 * LANES <= width; c += 4 * LANES)
        weigh_columns<2, 4>(probs, heads, stride, values + c, count, width, out + c);
    for (; c + 2 * LANES <= width; c += 2 * LANES)
        weigh_columns<4, 2>(probs, heads, stride, values + c, count, width, out + c);
    for (; c < width; c += LANES) weigh_columns<4, 1>(probs, heads, stride, values + c, count, width, out + c);
}
