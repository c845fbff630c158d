"""Distances between two routings of the same rows: discrepancies at three levels, agreement, route KL and staleness.

Rows that either record lacks are left out of every mean, never counted as agreement.

Letters beyond theory/contracts.py: R rows, F feature rows, d in {0..K} differing choices of one row at one layer.
Papers: R3 (arXiv 2510.11370) sec. 3.2 and App. H, Pr2 (arXiv 2606.00395) sec. 3.3 and 5.4.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theory.divergences import kl_p_q, tv_p_q
from theory.routing.counts import RouteCounts
from theory.routing.features import RouterFeatures
from theory.routing.record import MISSING, RoutingRecord

BLOCK = 2**15
"""Row-layers per comparison, few enough that their ids stay in a core's cache."""

COUNTED = 2**20
"""Row-layers whose differences are held at once where they are counted: records may be mapped, larger than memory."""


def difference_counts(record_a: RoutingRecord, record_b: RoutingRecord) -> Int[Tensor, "R L"]:
    """d = K - |A and B| in [0, K] per row and layer, and -1 where either record lacks the row (R3 App. H).

    Raises ValueError where the records are over different rows, layers, slots or experts.
    """
    record_a.check_same_rows(record_b)
    R, L, _ = record_a.experts.shape
    where_M, d_M = _differing(record_a.experts, record_b.experts)
    d_N = np.zeros(R * L, dtype=d_M.dtype)
    d_N[where_M] = d_M
    return torch.from_numpy(d_N).view(R, L).to(record_a.experts.device)


def counts_of(a_RLK: Int[Tensor, "R L K"], b_RLK: Int[Tensor, "R L K"]) -> RouteCounts:
    """The differences of two routings by expert ids, ascending in every row-layer, -1 where missing."""
    R, L, _ = a_RLK.shape
    rows = max(1, COUNTED // max(1, L))
    # At least once: a record without rows has counts too, all of them 0.
    parts = (slice(start, start + rows) for start in range(0, max(1, R), rows))
    return RouteCounts.concat([_counts(a_RLK[part], b_RLK[part]) for part in parts])


def _counts(a_RLK: Int[Tensor, "R L K"], b_RLK: Int[Tensor, "R L K"]) -> RouteCounts:
    R, L, K = a_RLK.shape
    where_M, d_M = _differing(a_RLK, b_RLK)
    row_M, is_there_M = where_M // max(1, L), d_M != MISSING
    num_d = np.bincount(d_M[is_there_M], minlength=K + 1)
    num_d[0] = R * L - len(where_M)  # d = 0 is not among them
    sum_R = np.bincount(row_M[is_there_M], weights=d_M[is_there_M], minlength=R).astype(np.int64)
    missing_R = np.bincount(row_M[~is_there_M], minlength=R)
    return RouteCounts(*(torch.from_numpy(one).to(a_RLK.device) for one in (num_d, sum_R, missing_R)))


def route_counts(record_a: RoutingRecord, record_b: RoutingRecord) -> RouteCounts:
    """The differences of two records, counted where the rows of the second are.

    Raises ValueError where the records are over different rows, layers, slots or experts.
    """
    record_a.check_same_rows(record_b)
    # d is symmetric, so that either side may count; only the first record's ids move.
    return record_b.compared(record_a, counts_of)


def _differing(
    a_RLK: Int[Tensor, "R L K"], b_RLK: Int[Tensor, "R L K"]
) -> tuple[Int[np.ndarray, " M"], Int[np.ndarray, " M"]]:
    """The M row-layers whose d is not 0, counted through all rows, and d there, -1 where missing; in no order."""
    # numpy compares narrow integers ten times as fast as torch does on a CPU.
    a_NK, b_NK = (ids_RLK.cpu().flatten(0, 1).contiguous().numpy() for ids_RLK in (a_RLK, b_RLK))
    a_NW, b_NW = _words(a_NK), _words(b_NK)
    where, missing = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for start in range(0, len(a_NK), BLOCK):
        block = slice(start, start + BLOCK)
        # Ids of a row ascend, so equal sets are equal bytes, and most rows are equal.
        differs_B = np.zeros(len(a_NW[block]), dtype=bool)
        for a_B, b_B in zip(a_NW[block].T, b_NW[block].T, strict=True):
            differs_B |= a_B != b_B
        where.append(start + np.flatnonzero(differs_B))
        # A record has -1, whose bits are all ones, in every slot of a row-layer or in none.
        is_missing_B = a_NW[block, 0] == MISSING
        if is_missing_B.any():  # in both: where one has ids, the bytes differ
            missing.append(start + np.flatnonzero(is_missing_B & ~differs_B))
    where_M, both = np.concatenate(where), np.concatenate(missing)
    # Whole words at a time, and of all blocks together: there may be few in each.
    parts = [where_M[start : start + BLOCK] for start in range(0, len(where_M), BLOCK)]
    found = [_d(*(words[part].view(a_NK.dtype) for words in (a_NW, b_NW))) for part in parts]
    d_M = np.concatenate([*found, np.full(len(both), MISSING, dtype=_type_of(a_NK.shape[1]))])
    return np.concatenate([where_M, both]), d_M


def _type_of(num_slots: int) -> type[np.signedinteger]:
    """The narrowest type of a d."""
    return np.int8 if num_slots <= np.iinfo(np.int8).max else np.int16


def _d(a_MK: Int[np.ndarray, "M K"], b_MK: Int[np.ndarray, "M K"]) -> Int[np.ndarray, " M"]:
    """d, and -1 where one of the two is missing."""
    # Slot by slot, each a run of all rows: loops over rows are then the innermost ones.
    a_KM, b_KM = (np.ascontiguousarray(ids_MK.T) for ids_MK in (a_MK, b_MK))
    K, M = a_KM.shape
    d_M, is_equal_M = np.full(M, K, dtype=_type_of(K)), np.empty(M, dtype=bool)
    for a_M in a_KM:
        common_M = np.zeros(M, dtype=np.int8)  # at most 1: the ids of a row are distinct
        for b_M in b_KM:
            np.equal(a_M, b_M, out=is_equal_M)
            common_M += is_equal_M.view(np.int8)
        d_M -= common_M
    # Slot 0 is enough, as a row-layer has -1 in every slot or in none.
    d_M[(a_KM[0] == MISSING) | (b_KM[0] == MISSING)] = MISSING
    return d_M


def _words(ids_NK: Int[np.ndarray, "N K"]) -> Int[np.ndarray, "N W"]:
    """The same bytes as the widest integers that a row divides into."""
    size = math.gcd(ids_NK.shape[1] * ids_NK.itemsize, 8)
    return ids_NK.view(f"i{size}")


def whole_rows(record_a: RoutingRecord, record_b: RoutingRecord) -> tuple[Bool[Tensor, " R"], Int[Tensor, " W"]]:
    """Whether a row is in both records at every layer, and sum_l d of the W rows that are (R3 App. H)."""
    counts = route_counts(record_a, record_b)
    is_whole_R = counts.num_missing_R == 0
    return is_whole_R, counts.sum_R[is_whole_R]


def _num_differing(record_a: RoutingRecord, record_b: RoutingRecord) -> Int[Tensor, " K_plus_1"]:
    """Number of (row, layer) pairs with d = x, for x = 0..K; ValueError where no pair is in both records."""
    num_d = route_counts(record_a, record_b).num_d
    if not bool(num_d.any()):
        num = sum(record_a.num_rows_B) * len(record_a.layer_numbers)
        raise ValueError(f"expected a row and layer present in both records, got none of {num}")
    return num_d


def _token_counts(record_a: RoutingRecord, record_b: RoutingRecord) -> tuple[Tensor, Tensor]:
    is_whole_R, sum_W = whole_rows(record_a, record_b)
    if len(sum_W) == 0:
        raise ValueError(f"expected a row present in both records at every layer, got none of {len(is_whole_R)}")
    return is_whole_R, sum_W


def _means_of_sequences(counts: Tensor, is_whole_R: Tensor, record: RoutingRecord) -> Tensor:
    device = is_whole_R.device
    num_rows_B = record.offsets.diff().to(device)
    response_R = torch.repeat_interleave(torch.arange(len(record), device=device), num_rows_B)[is_whole_R]
    num_whole_B = torch.bincount(response_R, minlength=len(record))
    total_B = torch.bincount(response_R, weights=counts.double(), minlength=len(record))
    return total_B[num_whole_B > 0] / num_whole_B[num_whole_B > 0]


def _histogram(counts: Tensor, largest: int) -> Tensor:
    return torch.bincount(counts, minlength=largest + 1).double() / len(counts)


def router_level_histogram(record_a: RoutingRecord, record_b: RoutingRecord) -> Float[Tensor, " K_plus_1"]:
    """The share of (row, layer) pairs with d = x, for x = 0..K (R3 App. H, Fig. 3a); sums to 1."""
    num_d = _num_differing(record_a, record_b)
    return num_d.double() / num_d.sum()


def token_level_histogram(record_a: RoutingRecord, record_b: RoutingRecord) -> Float[Tensor, " LK_plus_1"]:
    """The share of rows with sum_l d = x, for x = 0..L K (R3 App. H, Fig. 3b); sums to 1.

    Over rows that both records have at every layer.
    """
    largest = record_a.num_slots * len(record_a.layer_numbers)
    return _histogram(_token_counts(record_a, record_b)[1], largest)


def sequence_level_histogram(record_a: RoutingRecord, record_b: RoutingRecord) -> Float[Tensor, " LK_plus_1"]:
    """The share of responses with x <= mean_t sum_l d < x + 1, for x = 0..L K (R3 App. H, Fig. 3c); sums to 1.

    Over responses with at least one row that both records have at every layer.
    """
    largest = record_a.num_slots * len(record_a.layer_numbers)
    is_whole_R, sum_W = _token_counts(record_a, record_b)
    means = _means_of_sequences(sum_W, is_whole_R, record_a)
    # The floor is exact: a quotient of whole numbers this small never rounds up to an integer.
    return _histogram(means.floor().long(), largest)


def router_disagreement(record_a: RoutingRecord, record_b: RoutingRecord) -> float:
    """The share of (row, layer) pairs whose sets of experts differ, in [0, 1] (R3 sec. 3.2)."""
    num_d = _num_differing(record_a, record_b)
    return int(num_d[1:].sum()) / int(num_d.sum())


def router_disagreement_by_layer(record_a: RoutingRecord, record_b: RoutingRecord) -> dict[int, float]:
    """`router_disagreement` of each layer that has a row in both records, in [0, 1], by its number."""
    d_RL = difference_counts(record_a, record_b)
    shares_L = (d_RL > 0).sum(dim=0) / (d_RL != MISSING).sum(dim=0)  # NaN where a layer has no row in both
    return {n: share for n, share in zip(record_a.layer_numbers, shares_L.tolist(), strict=True) if share == share}


def token_disagreement(record_a: RoutingRecord, record_b: RoutingRecord) -> float:
    """The share of rows whose sets differ at one layer or more, in [0, 1] (R3 sec. 3.2)."""
    return _mean(_token_counts(record_a, record_b)[1] > 0)


def route_kl(logits_p_FLE: Float[Tensor, "F L E"], logits_q_FLE: Float[Tensor, "F L E"]) -> Float[Tensor, ""]:
    """Mean over rows and layers of KL(softmax(p) || softmax(q)), in nats, at least 0 (Pr2 sec. 5.4).

    Per layer, so that depths compare; Eq. 8 sums over the layers instead.
    """
    return _mean_of_rows(_kl(logits_p_FLE, logits_q_FLE))


def route_tv(logits_p_FLE: Float[Tensor, "F L E"], logits_q_FLE: Float[Tensor, "F L E"]) -> Float[Tensor, ""]:
    """Mean over rows and layers of TV(softmax(p), softmax(q)), in [0, 1]: what Pr2 Prop. B.1 bounds by sqrt(KL / 2).

    By Pinsker per row and layer, and Jensen over them, it is at most sqrt(route_kl / 2). It is symmetric.
    """
    return _mean_of_rows(_tv(logits_p_FLE, logits_q_FLE))


def route_distances(a: RouterFeatures, b: RouterFeatures) -> tuple[float, float]:
    """`route_kl` and `route_tv` of a's logits from b's, computed where a's rows are.

    Raises ValueError where the features are of other rows or layers, or of none.
    """
    kl_FL, tv_FL = a.compared(b, _kl_and_tv).unbind(-1)
    # Contiguous: the order of a sum, and so its last bit, depends on the layout.
    return _mean_of_rows(kl_FL.contiguous()).item(), _mean_of_rows(tv_FL.contiguous()).item()


def _kl_and_tv(logits_p_FLE: Float[Tensor, "F L E"], logits_q_FLE: Float[Tensor, "F L E"]) -> Float[Tensor, "F L 2"]:
    # The same router on the same rows, as in a step of one mini-batch: both are 0, and no softmax is needed to know.
    if torch.equal(logits_p_FLE, logits_q_FLE) and bool(logits_p_FLE.isfinite().all()):
        return logits_p_FLE.new_zeros(*logits_p_FLE.shape[:-1], 2, dtype=torch.float64)
    return torch.stack([_kl(logits_p_FLE, logits_q_FLE), _tv(logits_p_FLE, logits_q_FLE)], dim=-1)


def _kl(logits_p_FLE: Float[Tensor, "F L E"], logits_q_FLE: Float[Tensor, "F L E"]) -> Float[Tensor, "F L"]:
    # In float64: float32's rounding, some 1e-7, is as large as the KL of two close routers.
    # For equal distributions rounding gives some 1e-16 of either sign.
    return kl_p_q(logits_p_FLE.double(), logits_q_FLE.double()).clamp(min=0)


def _tv(logits_p_FLE: Float[Tensor, "F L E"], logits_q_FLE: Float[Tensor, "F L E"]) -> Float[Tensor, "F L"]:
    return tv_p_q(logits_p_FLE.double(), logits_q_FLE.double())


def _mean_of_rows(x_FL: Float[Tensor, "F L"]) -> Float[Tensor, ""]:
    if x_FL.shape[0] == 0:
        raise ValueError("expected at least 1 feature row, got 0")
    return x_FL.mean()


def routing_metrics(
    record_a: RoutingRecord, record_b: RoutingRecord, *, has_sequences: bool = True
) -> dict[str, float]:
    """The scalars of this module that compare two records, under their registered names.

    Absent without data, never 0: router metrics need a row and layer in both records, token metrics a whole row.
    Without `has_sequences` the one that groups rows by response is left out: it takes as long as the others.
    """
    counts, K = route_counts(record_a, record_b), record_a.num_slots
    num_d = counts.num_d.tolist()
    metrics: dict[str, float] = {}
    if num := sum(num_d):
        metrics["routing/router_disagreement"] = (num - num_d[0]) / num
        metrics["routing/topk_agreement"] = 1.0 - sum(d * n for d, n in enumerate(num_d)) / num / K
        metrics["routing/zero_deviation"] = num_d[0] / num
        metrics["routing/one_deviation"] = num_d[1] / num
    is_whole_R = counts.num_missing_R == 0
    if bool(is_whole_R.any()):
        whole = counts.sum_R[is_whole_R]
        metrics["routing/token_disagreement"] = _mean(whole > 0)
        if has_sequences:
            means_b = _means_of_sequences(whole, is_whole_R, record_a)
            metrics["routing/sequence_mean_difference"] = _mean(means_b)
    return metrics


def _mean(values: Tensor) -> float:
    return values.double().mean().item()
