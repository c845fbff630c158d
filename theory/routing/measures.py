"""Distances between two routings of the same rows: discrepancies at three levels, agreement, route KL and staleness.

Rows that either record lacks are left out of every mean, never counted as agreement.

Letters beyond theory/contracts.py: R rows, F feature rows, d in {0..K} differing choices of one row at one layer.
Papers: R3 (arXiv 2510.11370) sec. 3.2 and App. H, Pr2 (arXiv 2606.00395) sec. 3.3 and 5.4.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from theory.divergences import kl_p_q, tv_p_q
from theory.routing.record import MISSING, RoutingRecord

BLOCK = 2**15
"""Row-layers per comparison, few enough that their ids stay in a core's cache."""


def difference_counts(record_a: RoutingRecord, record_b: RoutingRecord) -> Int[Tensor, "R L"]:
    """d = K - |A and B| in [0, K] per row and layer, and -1 where either record lacks the row (R3 App. H).

    Raises ValueError where the records are over different rows, layers, slots or experts.
    """
    record_a.check_same_rows(record_b)
    # numpy compares narrow integers ten times as fast as torch does on a CPU.
    a_NK, b_NK = (record.experts.cpu().flatten(0, 1).contiguous().numpy() for record in (record_a, record_b))
    d_N = np.zeros(len(a_NK), dtype=np.int16)
    for start in range(0, len(a_NK), BLOCK):
        block = slice(start, start + BLOCK)
        _count_into(d_N[block], a_NK[block], b_NK[block])
    return torch.from_numpy(d_N).view(record_a.experts.shape[:2]).to(record_a.experts.device)


def _count_into(d_N: Int[np.ndarray, " N"], a_NK: Int[np.ndarray, "N K"], b_NK: Int[np.ndarray, "N K"]) -> None:
    """Writes d where it is not 0. Ids of a row ascend, so equal sets are equal bytes, and most rows are equal."""
    differs_N = np.zeros(len(d_N), dtype=bool)
    for a_N, b_N in zip(_words(a_NK).T, _words(b_NK).T, strict=True):
        differs_N |= a_N != b_N
    (where_M,) = differs_N.nonzero()
    # Slot by slot, each a run of all rows: loops over rows are then the innermost ones.
    a_KM, b_KM = (np.ascontiguousarray(ids_NK[where_M].T) for ids_NK in (a_NK, b_NK))
    d_M, is_equal_M = np.full(len(where_M), len(a_KM), dtype=np.int16), np.empty(len(where_M), dtype=bool)
    for a_M in a_KM:
        common_M = np.zeros(len(where_M), dtype=np.int8)  # at most 1: the ids of a row are distinct
        for b_M in b_KM:
            np.equal(a_M, b_M, out=is_equal_M)
            common_M += is_equal_M.view(np.int8)
        d_M -= common_M
    d_M[(a_KM[0] == MISSING) | (b_KM[0] == MISSING)] = MISSING
    d_N[where_M] = d_M
    d_N[(a_NK[:, 0] == MISSING) & (b_NK[:, 0] == MISSING)] = MISSING


def _words(ids_NK: Int[np.ndarray, "N K"]) -> Int[np.ndarray, "N W"]:
    """The same bytes as the widest integers that a row divides into."""
    size = math.gcd(ids_NK.shape[1] * ids_NK.itemsize, 8)
    return ids_NK.view(f"i{size}")


def _router_counts(d_RL: Tensor) -> Tensor:
    counts = d_RL[d_RL != MISSING].long()
    if len(counts) == 0:
        raise ValueError(f"expected a row and layer present in both records, got none of {d_RL.numel()}")
    return counts


def _token_counts(d_RL: Tensor) -> Tensor:
    is_whole = _is_whole(d_RL)
    if not bool(is_whole.any()):
        raise ValueError(f"expected a row present in both records at every layer, got none of {len(d_RL)}")
    return d_RL.sum(dim=1)[is_whole]


def _is_whole(d_RL: Tensor) -> Tensor:
    return d_RL.amin(dim=1) != MISSING


def _sequence_means(d_RL: Tensor, record: RoutingRecord) -> Tensor:
    is_whole = _is_whole(d_RL)
    token_counts = _token_counts(d_RL).double()
    num_rows_B = record.offsets.diff().to(d_RL.device)
    response_R = torch.repeat_interleave(torch.arange(len(record), device=d_RL.device), num_rows_B)[is_whole]
    num_whole_B = torch.bincount(response_R, minlength=len(record))
    total_B = torch.bincount(response_R, weights=token_counts, minlength=len(record))
    return total_B[num_whole_B > 0] / num_whole_B[num_whole_B > 0]


def _histogram(counts: Tensor, largest: int) -> Tensor:
    return torch.bincount(counts, minlength=largest + 1).double() / len(counts)


def router_level_histogram(record_a: RoutingRecord, record_b: RoutingRecord) -> Float[Tensor, " K_plus_1"]:
    """The share of (row, layer) pairs with d = x, for x = 0..K (R3 App. H, Fig. 3a); sums to 1."""
    return _histogram(_router_counts(difference_counts(record_a, record_b)), record_a.num_slots)


def token_level_histogram(record_a: RoutingRecord, record_b: RoutingRecord) -> Float[Tensor, " LK_plus_1"]:
    """The share of rows with sum_l d = x, for x = 0..L K (R3 App. H, Fig. 3b); sums to 1.

    Over rows that both records have at every layer.
    """
    largest = record_a.num_slots * len(record_a.layer_numbers)
    return _histogram(_token_counts(difference_counts(record_a, record_b)), largest)


def sequence_level_histogram(record_a: RoutingRecord, record_b: RoutingRecord) -> Float[Tensor, " LK_plus_1"]:
    """The share of responses with x <= mean_t sum_l d < x + 1, for x = 0..L K (R3 App. H, Fig. 3c); sums to 1.

    Over responses with at least one row that both records have at every layer.
    """
    largest = record_a.num_slots * len(record_a.layer_numbers)
    means = _sequence_means(difference_counts(record_a, record_b), record_a)
    return _histogram(means.floor().long(), largest)


def router_disagreement(record_a: RoutingRecord, record_b: RoutingRecord) -> float:
    """The share of (row, layer) pairs whose sets of experts differ, in [0, 1] (R3 sec. 3.2)."""
    return _mean(_router_counts(difference_counts(record_a, record_b)) > 0)


def is_noop(replayed: RoutingRecord, natural: RoutingRecord, discrepancy: float) -> bool:
    """Whether replay changed no route although the engines disagree: then it was probably not plugged in.

    `replayed` is the record given to replay, `natural` the choice of the live logits, `discrepancy` a
    non-negative measure of disagreement between the two passes (mean |log mu - log old| in nats). True where every
    recorded route is the natural one and the discrepancy is above 0; with bit-equal engines replay may change nothing.
    """
    if not discrepancy >= 0:
        raise ValueError(f"expected a discrepancy of at least 0, got {discrepancy}")
    return discrepancy > 0 and router_disagreement(replayed, natural) == 0


def token_disagreement(record_a: RoutingRecord, record_b: RoutingRecord) -> float:
    """The share of rows whose sets differ at one layer or more, in [0, 1] (R3 sec. 3.2)."""
    return _mean(_token_counts(difference_counts(record_a, record_b)) > 0)


def route_kl(logits_p_FLE: Float[Tensor, "F L E"], logits_q_FLE: Float[Tensor, "F L E"]) -> Float[Tensor, ""]:
    """Mean over rows and layers of KL(softmax(p) || softmax(q)), in nats, at least 0 (Pr2 sec. 5.4).

    Per layer, so that depths compare; Eq. 8 sums over the layers instead.
    """
    if logits_p_FLE.shape[0] == 0:
        raise ValueError("expected at least 1 feature row, got 0")
    # For equal distributions rounding gives some 1e-16 of either sign.
    return kl_p_q(logits_p_FLE.double(), logits_q_FLE.double()).clamp(min=0).mean()


def route_tv(logits_p_FLE: Float[Tensor, "F L E"], logits_q_FLE: Float[Tensor, "F L E"]) -> Float[Tensor, ""]:
    """Mean over rows and layers of TV(softmax(p), softmax(q)), in [0, 1]: what Pr2 Prop. B.1 bounds by sqrt(KL / 2).

    By Pinsker per row and layer, and Jensen over them, it is at most sqrt(route_kl / 2). It is symmetric.
    """
    if logits_p_FLE.shape[0] == 0:
        raise ValueError("expected at least 1 feature row, got 0")
    return tv_p_q(logits_p_FLE.double(), logits_q_FLE.double()).mean()


def routing_metrics(record_a: RoutingRecord, record_b: RoutingRecord) -> dict[str, float]:
    """The scalars of this module that compare two records, under their registered names.

    Absent without data, never 0: router metrics need a row and layer in both records, token metrics a whole row.
    """
    d_RL = difference_counts(record_a, record_b)
    K = record_a.num_slots
    # The count of each d, without the missing -1: all router metrics are ratios of these whole numbers.
    num_d = torch.bincount(d_RL.flatten() + 1, minlength=K + 2)[1:].tolist()
    metrics: dict[str, float] = {}
    if num := sum(num_d):
        metrics["routing/router_disagreement"] = (num - num_d[0]) / num
        metrics["routing/topk_agreement"] = 1.0 - sum(d * n for d, n in enumerate(num_d)) / num / K
        metrics["routing/zero_deviation"] = num_d[0] / num
        metrics["routing/one_deviation"] = num_d[1] / num
    if bool(_is_whole(d_RL).any()):
        metrics["routing/token_disagreement"] = _mean(_token_counts(d_RL) > 0)
        metrics["routing/sequence_mean_difference"] = _mean(_sequence_means(d_RL, record_a))
    return metrics


def _mean(values: Tensor) -> float:
    return values.double().mean().item()
