// Products of rows and a weight: out[n, o] = sum_i x[n, i] w[i, o], the sum a chain of fused multiply-adds in ascending i.
//
// A weight is packed into panels of PANEL columns, [panel][i][column], padded with zeros. Each output is the chain of one
// lane, whatever rows and columns are computed beside it: no row's bits depend on the batch.
#pragma once

#include <vector>

#include "lanes.hpp"

constexpr long PANEL = 16;   // columns: two vectors
constexpr long BLOCK = 6;    // rows per tile: times two vectors, twelve accumulators in sixteen registers
constexpr long CHUNK = 96;   // rows of x that stay in the first caches while all panels are read

static inline long panels(long columns) { return (columns + PANEL - 1) / PANEL; }
static inline long packed_size(long inner, long columns) { return panels(columns) * PANEL * inner; }

// Packs w[i * stride_i + o * stride_o].
static void pack(const float* w, long inner, long columns, long stride_i, long stride_o, float* packed) {
    for (long p = 0; p < panels(columns); p++) {
        long first = p * PANEL, width = columns - first < PANEL ? columns - first : PANEL;
        float* panel = packed + first * inner;
        if (stride_o == 1 && width == PANEL) {
            for (long i = 0; i < inner; i++) std::memcpy(panel + i * PANEL, w + i * stride_i + first, PANEL * sizeof(float));
            continue;
        }
        for (long o = 0; o < PANEL; o++)
            for (long i = 0; i < inner; i++)
                panel[i * PANEL + o] = o < width ? w[i * stride_i + (first + o) * stride_o] : 0.0f;
    }
}

template <long ROWS>
static inline void tile(const float* const* x, const float* panel, long inner, float* const* out, long first, long width) {
    Lanes left[ROWS], right[ROWS];
    for (long r = 0; r < ROWS; r++) left[r] = right[r] = splat(0.0f);
    for (long i = 0; i < inner; i++) {
        Lanes a = load(panel + i * PANEL), b = load(panel + i * PANEL + LANES);
        for (long r = 0; r < ROWS; r++) {
            Lanes value = splat(x[r][i]);
            left[r] = fma(value, a, left[r]);
            right[r] = fma(value, b, right[r]);
        }
    }
    for (long r = 0; r < ROWS; r++) {
        if (width == PANEL) {
            store(out[r] + first, left[r]);
            store(out[r] + first + LANES, right[r]);
        } else {
            // Through a buffer: the row of `out` ends within this panel.
            float both[PANEL];
            store(both, left[r]);
            store(both + LANES, right[r]);
            std::memcpy(out[r] + first, both, width * sizeof(float));
        }
    }
}

// out[n][o] for rows given by pointers x[n].
static void product(const float* const* x, long rows, const float* packed, long inner, long columns, float* const* out) {
    for (long start = 0; start < rows; start += CHUNK) {
        long stop = rows - start < CHUNK ? rows : start + CHUNK;
        for (long p = 0; p < panels(columns); p++) {
            long first = p * PANEL, width = columns - first < PANEL ? columns - first : PANEL;
            const float* panel = packed + first * inner;
            // The fewest tiles, of nearly equal height: one of less than four rows takes as long as one of four.
            for (long r = start, height; r < stop; r += height) {
                long tiles = (stop - r + BLOCK - 1) / BLOCK;
                height = (stop - r + tiles - 1) / tiles;
                switch (height) {
                    case 6: tile<6>(x + r, panel, inner, out + r, first, width); break;
                    case 5: tile<5>(x + r, panel, inner, out + r, first, width); break;
                    case 4: tile<4>(x + r, panel, inner, out + r, first, width); break;
                    case 3: tile<3>(x + r, panel, inner, out + r, first, width); break;
                    case 2: tile<2>(x + r, panel, inner, out + r, first, width); break;
                    case 1: tile<1>(x + r, panel, inner, out + r, first, width); break;
                }
            }
        }
    }
}

// The same for rows that are contiguous in one array.
static void product(const float* x, long rows, const float* packed, long inner, long columns, float* out) {
    const float* from[CHUNK];
    float* to[CHUNK];
    for (long start = 0; start < rows; start += CHUNK) {
        long count = rows - start < CHUNK ? rows - start : CHUNK;
        for (long r = 0; r < count; r++) {
            from[r] = x + (start + r) * inner;
            to[r] = out + (start + r) * columns;
        }
        product(from, count, packed, inner, columns, to);
    }
}
