"""The table of the advantages' laws: each formula written once more, by hand, on plain lists."""

from __future__ import annotations

import math
from collections.abc import Callable


def _mean(x: list[float]) -> float:
    return math.fsum(x) / len(x)


def _group_norm(rewards: list[float]) -> list[float]:
    centred = [r - _mean(rewards) for r in rewards]
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + 1e-6) if max(rewards) > min(rewards) else 0.0 for c in centred]


ADVANTAGE_ROWS: dict[str, Callable[[list[float]], list[float]]] = {
    "group_mean": lambda R: [r - _mean(R) for r in R],
    "group_norm": _group_norm,
    "leave_one_out": lambda R: [r - _mean(R[:i] + R[i + 1 :]) for i, r in enumerate(R)],
}
"""The advantages of rewards alone, on the rewards of one group."""


def _opo(rewards: list[list[float]], lengths: list[list[int]]) -> list[list[float]]:
    rows = zip(rewards, lengths, strict=True)
    base = [math.fsum(r * n for r, n in zip(R, N, strict=True)) / sum(N) for R, N in rows]
    return [[r - b for r in R] for R, b in zip(rewards, base, strict=True)]


def _whiten(rewards: list[list[float]], lengths: list[list[int]]) -> list[list[float]]:
    tokens = [r for R, N in zip(rewards, lengths, strict=True) for r, n in zip(R, N, strict=True) for _ in range(n)]
    mean = _mean(tokens)
    variance = math.fsum((x - mean) ** 2 for x in tokens) / (len(tokens) - 1)
    return [[(r - mean) / math.sqrt(variance + 1e-8) for r in R] for R in rewards]


LENGTH_ADVANTAGE_ROWS: dict[str, Callable[[list[list[float]], list[list[int]]], list[list[float]]]] = {
    "opo": _opo,
    "reinforce_pp": _whiten,
    "reinforce_pp_baseline": lambda R, N: _whiten([[r - _mean(row) for r in row] for row in R], N),
}
"""The advantages that see lengths, on the rewards and lengths of the whole batch."""


def optimal_token_by_hand(rewards: list[float], tokens: list[list[tuple[float, float]]]) -> list[list[float]]:
    """Of one group: responses of (old(y), sum_v old(v)^2) a sampled token; each token's reward less its baseline."""
    W = [[math.fsum(1 - 2 * p + q for p, q in row[: t + 1]) for t in range(len(row))] for row in tokens]
    found: list[list[float]] = []
    for own, R in zip(tokens, rewards, strict=True):
        found.append([])
        for t in range(len(own)):
            there = [(w[t], r) for w, r in zip(W, rewards, strict=True) if len(w) > t]
            found[-1].append(R - math.fsum(w * r for w, r in there) / math.fsum(w for w, _ in there))
    return found


TOKEN_ADVANTAGE_ROWS = {"optimal_token": optimal_token_by_hand}
"""The advantages per token, on one group."""
