// Gates: from router logits to a set of experts and their weights (theory/routing/gates.py defines them).
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "attention.hpp"

struct Gate {
    int32_t is_sigmoid, is_after, renormalise, num_groups, num_top_groups, is_top2_sum;
    float scaling;
};

typedef std::pair<float, long> Candidate;

// Breaks ties as torch.topk does on a CPU: with the same algorithms of the standard library on the same pairs.
static void keep_largest(std::vector<Candidate>& all, long count) {
    auto larger = [](const Candidate& a, const Candidate& b) {
        return (std::isnan(a.first) && !std::isnan(b.first)) || a.first > b.first;
    };
    // torch's own threshold between the two algorithms.
    if (count * 64 <= (long)all.size())
        std::partial_sort(all.begin(), all.begin() + count, all.end(), larger);
    else
        std::nth_element(all.begin(), all.begin() + count - 1, all.end(), larger);
}

// Writes the places of the `count` largest of `width` numbers, ascending; false if a tie or a NaN leaves a choice.
// `values` has room for `width` rounded up to LANES. Where nothing ties it takes a fifth of keep_largest's time.
static bool take_largest(float* values, long width, long count, int64_t* places) {
    long whole = (width + LANES - 1) / LANES * LANES;
    for (long e = width; e < whole; e++) values[e] = -INFINITY;
    // The largest, then the largest below it, and so on: equal numbers count once here and are detected below.
    Lanes none = splat(-INFINITY), least = splat(INFINITY);
    for (long k = 0; k < count; k++) {
        Lanes best = none;
        for (long e = 0; e < whole; e += LANES) {
            Lanes x = load(values + e);
            Lanes below = x < least ? x : none;
            best = below > best ? below : best;
        }
        least = splat(maximum(best));
    }
    IntLanes reach = {}, nans = {};
    for (long e = 0; e < whole; e += LANES) {
        Lanes x = load(values + e);
        reach -= x >= least;  // a true comparison is -1 in every lane
        nans -= x != x;
    }
    long total = 0, odd = 0;
    for (long i = 0; i < LANES; i++) {
        total += reach[i];
        odd += nans[i];
    }
    // A least of -inf reaches the padding too; then the slower way decides.
    if (total != count || odd) return false;
    for (long e = 0, k = 0; k < count; e++) {
        // Written before it is known to count: the next one overwrites a wrong place.
        places[k] = e;
        k += values[e] >= least[0];
    }
    return true;
}

// The softmax over `width` numbers, or their sigmoids; `padded` holds `width` rounded up to LANES and may be `logits`.
static void score(const float* logits, long width, bool is_sigmoid, float* padded) {
    long whole = (width + LANES - 1) / LANES * LANES;
    for (long e = 0; e < whole; e++) padded[e] = e < width ? logits[e] : -INFINITY;
    if (is_sigmoid) {
        for (long e = 0; e < whole; e += LANES) store(padded + e, sigmoid(load(padded + e)));
        return;
    }
    float total = exponentials(padded, whole);
    for (long e = 0; e < whole; e++) padded[e] /= total;
}

// Sets experts outside the best groups to `left_out`.
static void keep_top_groups(float* choosing, long E, const Gate& gate, float left_out, std::vector<Candidate>& work) {
    long size = E / gate.num_groups;
    work.clear();
    for (long g = 0; g < gate.num_groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        bool has_nan = false;
        for (long e = g * size; e < (g + 1) * size; e++) {
            has_nan |= std::isnan(choosing[e]);
            if (choosing[e] > first) {
                second = first;
                first = choosing[e];
            } else if (choosing[e] > second) {
                second = choosing[e];
            }
        }
        // As torch's, in which NaN is the largest of its group: no comparison above saw it.
        if (has_nan) first = NAN;
        work.emplace_back(gate.is_top2_sum ? first + second : first, g);
    }
    keep_largest(work, gate.num_top_groups);
    std::vector<char> is_in(gate.num_groups, 0);
    for (long k = 0; k < gate.num_top_groups; k++) is_in[work[k].second] = 1;
    for (long e = 0; e < E; e++)
        if (!is_in[e / size]) choosing[e] = left_out;
}

// The K experts of one row, ascending; `scores` come from `score`, `choosing` has room for E rounded up to LANES.
static void select(const float* logits, const float* scores, const float* bias, long E, long K, const Gate& gate,
                   float* choosing, std::vector<Candidate>& work, int64_t* experts) {
    const float* base = gate.is_after ? logits : scores;
    // A copy: the weights come from the scores without bias and groups.
    for (long e = 0; e < E; e++) choosing[e] = bias ? base[e] + bias[e] : base[e];
    // As `_left_out` of theory/routing/gates.py, which says why.
    float left_out = gate.is_sigmoid || gate.is_after || bias ? -INFINITY : 0.0f;
    if (gate.num_top_groups < gate.num_groups) keep_top_groups(choosing, E, gate, left_out, work);
    if (take_largest(choosing, E, K, experts)) return;
    work.clear();
    for (long e = 0; e < E; e++) work.emplace_back(choosing[e], e);
    keep_largest(work, K);
    for (long k = 0; k < K; k++) experts[k] = work[k].second;
    std::sort(experts, experts + K);
}

// The weights of these experts; the sum over slots runs in their order.
static void weigh_experts(const float* logits, const float* scores, const int64_t* experts, long K, const Gate& gate,
                          std::vector<float>& work, float* weights) {
    if (gate.is_after) {
        work.resize((K + LANES - 1) / LANES * LANES);
        for (long k = 0; k < K; k++) work[k] = logits[experts[k]];
        score(work.data(), K, false, work.data());
        for (long k = 0; k < K; k++) weights[k] = work[k];
    } else {
        for (long k = 0; k < K; k++) weights[k] = scores[experts[k]];
        float total = weights[0];
        for (long k = 1; k < K; k++) total += weights[k];
        if (gate.is_sigmoid) total += 1e-20f;  // DeepSeek-V3's own, as in theory/routing/gates.py
        if (gate.renormalise)
            for (long k = 0; k < K; k++) weights[k] /= total;
    }
    if (gate.scaling != 1.0f)
        for (long k = 0; k < K; k++) weights[k] *= gate.scaling;
}
