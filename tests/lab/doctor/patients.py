"""Traces whose every fault is known: tokens drawn from given distributions, scored as a test wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lab.doctor.importers import rows
from lab.traces import Trace
from theory.streams import stream

VOCABULARY = 6
END = 5


def logits_of(context: tuple[int, ...]) -> Tensor:
    """A policy: the next-token logits after these tokens, a fixed function of them."""
    return 2.0 * torch.randn(VOCABULARY, generator=stream(0, "patient", *map(str, context)), dtype=torch.float64)


def draw_rows(
    num_prompts: int = 12,
    num_responses: int = 8,
    length: int = 10,
    drawn: Callable[[Tensor], Tensor] = lambda logits: logits,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Rows of importers/rows.py: tokens from softmax(drawn(logits)), both sides scored by the logits themselves."""
    generator, out = stream(seed, "patients"), []
    for prompt in range(num_prompts):
        for _ in range(num_responses):
            tokens, logp, entropy = [prompt % 5, prompt // 5], [], []
            for _ in range(length):
                logits = logits_of(tuple(tokens))
                token = int(torch.multinomial(drawn(logits).softmax(-1), 1, generator=generator))
                all_logp = logits.log_softmax(-1)
                tokens.append(token)
                logp.append(float(all_logp[token]))
                entropy.append(float(-(all_logp.exp() * all_logp).sum()))
                if token == END:
                    break
            out.append(
                {"tokens": tokens, "num_prompt": 2, "logp_mu": logp, "logp_old": list(logp), "entropy_old": entropy}
            )
    return out


def trace_of(drawn_rows: Sequence[dict[str, Any]], change: Callable[[list[float], int], list[float]]) -> Trace:
    """The trace of these rows with log mu changed: `change(log old, number of the response)`."""
    return rows.trace([row | {"logp_mu": change(list(row["logp_old"]), b)} for b, row in enumerate(drawn_rows)])


def with_experts(row: dict[str, Any], mu: Tensor, old: Tensor) -> dict[str, Any]:
    """The row with a route a row for both sides, of shape (S - 1, L, K)."""
    return row | {"experts_mu": mu.tolist(), "experts_old": old.tolist()}
