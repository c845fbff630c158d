"""miles's policy loss dump: `policy_loss_debug/rank_{R}_call_{C}.pt` under `--dump-details`, one micro-batch per file.

`miles/backends/training_utils/debug_dump.py` writes {"rank", "call", "samples": [...], "ppo_kl", "pg_loss", "finite"}.
A sample:

| field              | holds    | meaning                                                                              |
|--------------------|----------|--------------------------------------------------------------------------------------|
| total_length       | int      | S, prompt and response                                                               |
| response_length    | int      | T                                                                                    |
| rollout_log_probs  | T floats | mu; present if the engine returned them                                              |
| old_log_probs      | T floats | old, or mu itself under `--use-rollout-logprobs`                                     |
| train_log_probs    | T floats | pi, from the gradient pass                                                           |
| local_loss_mask    | T floats | 1 where the sampled token is trained on                                              |

Also: index, advantages, train_rollout_abs_diff. There are no token ids: every token gets a number that is unique in its
file, so that no two contexts are equal and no clue uses them; folders.py keeps those of several files apart. Under
context parallelism a rank has a part of each response. Where `old_log_probs` is `rollout_log_probs` to the bit, pi is
used for old, with a caveat.

`dashboard_columns/rollout_{N}.parquet` (`miles/ray/rollout/debug_data.py`) has a row per sample: sample_index,
response_length, total_length, tokens, loss_mask, rollout_log_probs: mu alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from lab.doctor.importers.aligned import listed, mask_of
from lab.doctor.importers.format import Format, Row
from lab.traces import Trace

MOST_TOKENS = 2**24
"""Bound on a response's tokens, which get a number each; a damaged length would fill the memory."""
SIDES = ("rollout_log_probs", "old_log_probs", "train_log_probs")
NO_TOKENS = "The dump has no tokens: clues from repeats, prompts and end tokens are missing."
PI = "pi stands for old here (--use-rollout-logprobs, or no old pass): they are equal only before updates."


def _columns(content: Row) -> Iterable[str]:
    samples = content.get("samples")
    return samples[0] if isinstance(samples, list) and samples and isinstance(samples[0], dict) else ()


def _is_mine(content: Row) -> bool:
    return "train_log_probs" in _columns(content)


def _is_pi(trace: Trace) -> bool:
    return trace.logp_pi is not None and trace.logp_old.equal(trace.logp_pi)


def _caveat(trace: Trace) -> str:
    return f"{NO_TOKENS} {PI}" if _is_pi(trace) else NO_TOKENS


def _read(content: Row, place: str) -> Iterator[Row]:
    # One counter over all samples: no token, and so no context, occurs twice.
    samples, numbers = content["samples"], itertools.count()
    old = "train_log_probs" if _is_copied(samples) else "old_log_probs"
    for b, sample in enumerate(samples):
        S, T = (_length(sample, name, b) for name in ("total_length", "response_length"))
        # `old` may name pi's values: a copy of mu would show no gap at all.
        mu, logp_old, pi = (_values(sample, name, b, T) for name in (SIDES[0], old, SIDES[2]))
        mask = _values(sample, "local_loss_mask", b, T)
        yield {
            "tokens": list(itertools.islice(numbers, S)), "num_prompt": S - T, "is_response": [x > 0 for x in mask],
            "logp_mu": mu, "logp_old": logp_old, "logp_pi": pi,
        }  # fmt: skip


def _is_copied(samples: list[Any]) -> bool:
    """Whether old_log_probs are rollout_log_probs to the bit in every sample."""
    for sample in samples:
        mu, old = (sample.get(name) if isinstance(sample, dict) else None for name in SIDES[:2])
        if not isinstance(mu, torch.Tensor) or not isinstance(old, torch.Tensor) or not torch.equal(mu, old):
            return False
    return True


def _length(sample: Any, name: str, b: int) -> int:
    value = sample.get(name) if isinstance(sample, dict) else None
    if type(value) is not int:
        raise ValueError(f"response {b}: {name}: expected an int, got {type(value).__name__}")
    if not 0 <= value <= MOST_TOKENS:
        raise ValueError(f"response {b}: {name}: expected 0 to {MOST_TOKENS} tokens, got {value}")
    return value


def _values(sample: Mapping[str, Any], name: str, b: int, T: int) -> list[float]:
    values = sample.get(name)
    if values is None and name == SIDES[0]:
        raise ValueError(f"response {b}: {name}: missing (mu): ask the engine for log-probabilities")
    if not isinstance(values, torch.Tensor) or values.dim() != 1 or not values.is_floating_point():
        is_tensor = isinstance(values, torch.Tensor)
        got = f"{values.dtype} of shape {tuple(values.shape)}" if is_tensor else type(values).__name__
        raise ValueError(f"response {b}: {name}: expected a float tensor of {T} values, got {got}")
    if len(values) != T:
        raise ValueError(
            f"response {b}: {name}: expected {T} values, got {len(values)}; under context parallelism a rank has only "
            "a part: dump with --context-parallel-size 1"
        )
    return values.tolist()


FORMAT = Format(
    steps=(r"rank_(?P<part>\d+)_call_(?P<step>\d+)\.pt",),
    name="miles, policy loss", files="policy_loss_debug/rank_{R}_call_{C}.pt", has="mu, old, pi",
    lacks="Tokens (no clues from repeats, prompts or end tokens), experts of both, entropies, rewards.",
    source="radixark/miles miles/backends/training_utils/debug_dump.py at 31f1ca9",
    uses=("total_length", "response_length", "local_loss_mask", *SIDES),
    is_mine=_is_mine, read=_read, caveat=_caveat, is_pi=_is_pi, columns=_columns, has_tokens=False,
)  # fmt: skip


def _of_dashboard(raw: Row, place: str) -> Iterator[Row]:
    tokens, T = listed(raw, "tokens", place), raw.get("response_length")
    if type(T) is not int:
        raise ValueError(f"{place}: response_length: expected an int, got {type(T).__name__}")
    row = {"tokens": tokens, "num_prompt": len(tokens) - T, "logp_mu": listed(raw, "rollout_log_probs", place, T)}
    if raw.get("loss_mask") is not None:
        row["is_response"] = mask_of(raw, "loss_mask", place, T)
    yield row


DASHBOARD = Format(
    name="miles, dashboard", files="dashboard_columns/rollout_{N}.parquet", has="tokens, mu",
    lacks="old (pass it with --old), experts of both, entropies, rewards.",
    source="radixark/miles miles/ray/rollout/debug_data.py at 31f1ca9",
    uses=("response_length", "tokens", "loss_mask", "rollout_log_probs"),
    is_mine=lambda first: {"sample_index", "total_length", "tokens"} <= set(first), read=_of_dashboard, has_old=False,
)  # fmt: skip
