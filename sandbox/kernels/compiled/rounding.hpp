// Rounding of rows to a storage format and back, with the bits of sandbox/engines/formats.py.
#pragma once

#include "lanes.hpp"

enum Format : int64_t { BF16, FP8_E4M3, INT8 };

// block: how many adjacent numbers share a scale, 0 for the whole row; has_scale: 0 for no scale.
struct Step {
    int64_t format, has_scale, block;
};

struct Steps {
    const Step* at;
    int64_t count;
};

// sandbox/kernels/rounding.py: inputs of the large products, of the others, outputs of the large ones, keys and values.
struct Rounding {
    Steps inputs, other_inputs, outputs, kv;
};

typedef uint32_t BitLanes __attribute__((vector_size(32)));

// Rounds to nearest, ties to even: adds half a unit of the last kept place, less one if that place is even.
static inline BitLanes to_nearest(BitLanes bits, int dropped) {
    return (bits + ((1u << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) >> dropped << dropped;
}

static inline Lanes bf16(Lanes x) {
    Lanes rounded = (Lanes)to_nearest((BitLanes)x, 16);
    return x == x ? rounded : x;  // adding to the bits of a NaN could turn it into an infinity
}

// Saturates at 448; steps of 2^-9 below 2^-6; keeps the sign of zeros.
static inline Lanes fp8_e4m3(Lanes x) {
    BitLanes sign = (BitLanes)x & 0x80000000u;
    Lanes magnitude = (Lanes)((BitLanes)x & 0x7fffffffu), most = splat(448.0f), shift = splat(16384.0f);
    magnitude = magnitude > most ? most : magnitude;
    Lanes normal = (Lanes)to_nearest((BitLanes)magnitude, 20);  // e4m3 keeps 3 of the mantissa's 23 bits
    Lanes subnormal = magnitude + shift - shift;  // one unit in the last place of 2^14 is 2^-9
    Lanes rounded = magnitude < splat(0x1p-6f) ? subnormal : normal;
    rounded = magnitude == magnitude ? rounded : magnitude;
    return (Lanes)((BitLanes)rounded | sign);
}

// To the nearest integer, ties to even.
static inline Lanes integer(Lanes x) {
#if defined(FIRSTORDER_AVX)
    return (Lanes)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    Lanes out;
    for (long i = 0; i < LANES; i++) out[i] = std::nearbyint(x[i]);
    return out;
#endif
}

template <typename Function>
static inline void each(float* x, long width, Function function) {
    long i = 0;
    for (; i + LANES <= width; i += LANES) store(x + i, function(load(x + i)));
    if (i < width) {
        Lanes last = function(load_some(x + i, width - i));
        std::memcpy(x + i, &last, (width - i) * sizeof(float));
    }
}

// max |x| / `largest`, or 1 where that is 0 or NaN. The bits of magnitudes are ordered as integers, NaN above all.
static inline float scale_of(const float* x, long width, float largest) {
    IntLanes best = {};
    for (long i = 0; i < width; i += LANES) {
        Lanes next = i + LANES <= width ? load(x + i) : load_some(x + i, width - i);
        IntLanes here = (IntLanes)next & 0x7fffffff;
        best = here > best ? here : best;
    }
    int32_t most = best[0];
    for (long i = 1; i < LANES; i++) most = best[i] > most ? best[i] : most;
    float amax;
    std::memcpy(&amax, &most, sizeof amax);
    float scale = amax / largest;
    return scale > 0.0f ? scale : 1.0f;
}

static inline void round_block(const Step& step, float* x, long width) {
    if (step.format == BF16) {
        each(x, width, bf16);
    } else if (!step.has_scale) {
        each(x, width, fp8_e4m3);
    } else if (step.format == FP8_E4M3) {
        Lanes scale = splat(scale_of(x, width, 448.0f));
        // A division, as in formats.py: times 1 / scale would round otherwise.
        each(x, width, [scale](Lanes part) { return fp8_e4m3(part / scale) * scale; });
    } else {
        Lanes scale = splat(scale_of(x, width, 127.0f));
        each(x, width, [scale](Lanes part) { return integer(part / scale) * scale; });
    }
}

// Applies the steps in order, in place.
static void round_rows(const Steps& steps, float* x, long rows, long width) {
    for (long s = 0; s < steps.count; s++) {
        long block = steps.at[s].block ? steps.at[s].block : width;
        for (long n = 0; n < rows; n++)
            for (long first = 0; first < width; first += block)
                round_block(steps.at[s], x + n * width + first, width - first < block ? width - first : block);
    }
}

// x itself, or, if there are steps, its rounded copy in `room`.
static const float* rounded(const Steps& steps, const float* x, long rows, long width, float* room) {
    if (steps.count == 0) return x;
    std::memcpy(room, x, rows * width * sizeof(float));
    round_rows(steps, room, rows, width);
    return room;
}
