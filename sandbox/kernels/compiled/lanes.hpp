// Vectors of eight floats, and the arithmetic of all kernels here.
//
// The compiler may neither contract a product and a sum (-ffp-contract=off) nor reorder sums (no -ffast-math): a fused
// multiply-add is written `fma`. So a loop gives the same bits however the compiler unrolls or vectorises it: they depend
// only on the order of operations written here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define FIRSTORDER_AVX 1
#endif

constexpr long LANES = 8;

typedef float Lanes __attribute__((vector_size(32)));
typedef int32_t IntLanes __attribute__((vector_size(32)));

static inline Lanes load(const float* from) {
    Lanes out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

static inline void store(float* to, Lanes x) { std::memcpy(to, &x, sizeof x); }

// The first `count` floats, then zeros.
static inline Lanes load_some(const float* from, long count) {
    Lanes out = {};
    std::memcpy(&out, from, count * sizeof(float));
    return out;
}

static inline Lanes splat(float x) { return Lanes{x, x, x, x, x, x, x, x}; }

// a b + c, rounded once.
static inline Lanes fma(Lanes a, Lanes b, Lanes c) {
#if defined(FIRSTORDER_AVX)
    return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    Lanes out;
    for (long i = 0; i < LANES; i++) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return out;
#endif
}

// ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)), the order of two horizontal additions and one across halves (see `sums`).
static inline float sum(Lanes x) {
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

static inline float maximum(Lanes x) {
    float best = x[0];
    for (long i = 1; i < LANES; i++) best = x[i] > best ? x[i] : best;
    return best;
}

// The sums of eight vectors, each in the order of `sum`.
static inline Lanes sums(const Lanes x[LANES]) {
#if defined(FIRSTORDER_AVX)
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps((__m256)x[0], (__m256)x[1]), _mm256_hadd_ps((__m256)x[2], (__m256)x[3]));
    __m256 b = _mm256_hadd_ps(_mm256_hadd_ps((__m256)x[4], (__m256)x[5]), _mm256_hadd_ps((__m256)x[6], (__m256)x[7]));
    return (Lanes)_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
#else
    Lanes out;
    for (long i = 0; i < LANES; i++) out[i] = sum(x[i]);
    return out;
#endif
}

// exp(x) to about one unit in the last place; 0 below -87.3 (no subnormals), infinity above 88.7, NaN for NaN.
// x = n log 2 + r with |r| <= log(2) / 2, and a Taylor-like polynomial in r (Cephes' coefficients).
static inline Lanes exponential(Lanes x) {
    const Lanes magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    // Beyond these bounds the shifts below would leave the bits of the exponent.
    Lanes low = splat(-87.33654f), high = splat(88.72283f);
    // A NaN fails both comparisons, and stays one to the end.
    Lanes clamped = x < low ? low : x;
    clamped = clamped > high ? high : clamped;
    Lanes shifted = fma(clamped, splat(1.44269504f), magic);
    Lanes n = shifted - magic;
    // log 2 in two parts; the first has few bits, so that n times it is exact.
    Lanes r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    Lanes p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
    // 2^n as a product of two powers: 2^128 is not a float.
    IntLanes integer = (IntLanes)shifted - (IntLanes)magic;  // floats here are 1 apart, so their bits count in ones
    IntLanes half = integer >> 1;
    Lanes first = (Lanes)((half + 127) << 23), second = (Lanes)((integer - half + 127) << 23);
    Lanes out = p * first * second;
    out = x < low ? splat(0.0f) : out;
    return x > high ? splat(INFINITY) : out;
}

static inline float exponential(float x) { return exponential(splat(x))[0]; }
