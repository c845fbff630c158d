// Operations on one row: norms, rotations, activations.
#pragma once

#include "lanes.hpp"

static inline bool is_zero(const float* x, long width) {
    long i = 0;
    while (i < width && x[i] == 0.0f) i++;
    return i == width;
}

// x w / sqrt(mean(x^2) + eps); returns 1 / sqrt(...).
static inline float rms_norm(const float* x, const float* weight, long width, float eps, float* out) {
    Lanes squares = splat(0.0f);
    long i = 0;
    for (; i + LANES <= width; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    if (i < width) {
        Lanes rest = load_some(x + i, width - i);
        squares = fma(rest, rest, squares);
    }
    float scale = 1.0f / std::sqrt(sum(squares) / (float)width + eps);
    // `out` may be x: the scale has read all of it.
    for (i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
    return scale;
}

// Rotary embedding of one head in the half convention; tables as `rotation_tables` makes them. `out` must not be `x`.
static inline void rotate(const float* x, const float* cos, const float* sin, long width, float* out) {
    long half = width / 2;
    for (long i = 0; i < half; i++) out[i] = x[half + i] * sin[i] + x[i] * cos[i];
    for (long i = half; i < width; i++) out[i] = x[i - half] * sin[i] + x[i] * cos[i];
}

static inline Lanes sigmoid(Lanes x) { return splat(1.0f) / (splat(1.0f) + exponential(-x)); }
// One lane of the vector form: std::exp has other bits.
static inline float sigmoid(float x) { return sigmoid(splat(x))[0]; }

// silu(gate) up.
static inline void swiglu(const float* gate, const float* up, long width, float* out) {
    long i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, load(gate + i) * sigmoid(load(gate + i)) * load(up + i));
    if (i < width) {
        Lanes g = load_some(gate + i, width - i), u = load_some(up + i, width - i);
        Lanes last = g * sigmoid(g) * u;
        std::memcpy(out + i, &last, (width - i) * sizeof(float));
    }
}

// exp(x - max) in place; returns their sum. `width` is a multiple of LANES; -inf marks padding.
static inline float exponentials(float* x, long width) {
    Lanes best = load(x);
    for (long i = LANES; i < width; i += LANES) {
        Lanes here = load(x + i);
        best = here > best ? here : best;
    }
    Lanes top = splat(maximum(best)), total = splat(0.0f);
    for (long i = 0; i < width; i += LANES) {
        Lanes e = exponential(load(x + i) - top);
        store(x + i, e);
        total += e;
    }
    return sum(total);
}
