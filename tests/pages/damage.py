"""Traces with the damage of real dumps: shifted by a token, padded with zeros, truncated, of other responses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lab.traces import Trace
from theory.streams import stream


def _parts(trace: Trace) -> list[slice]:
    """The place of each response's part among the A values."""
    stops = (trace.offsets.diff() - trace.num_prompt).cumsum(0).tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


def _by_response(values_A: Tensor, trace: Trace, change: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([change(values_A[part].clone()) for part in _parts(trace)])


def shifted_mu(trace: Trace) -> Trace:
    """log mu is one token late: the first value twice, the last one lost."""
    return replace(trace, logp_mu=_by_response(trace.logp_mu, trace, lambda x: torch.cat([x[:1], x[:-1]])))


def shifted_old(trace: Trace) -> Trace:
    """log old is one token early, as if logits [prompt:] were used instead of [prompt - 1 : -1]."""
    return replace(trace, logp_old=_by_response(trace.logp_old, trace, lambda x: torch.cat([x[1:], x[-1:]])))


def _zeroed(x: Tensor, start: int) -> Tensor:
    x[start:] = 0.0
    return x


def last_is_zero(trace: Trace) -> Trace:
    """The end token's log mu was not returned, and was padded with 0 (NeMo, vime #70)."""
    return replace(trace, logp_mu=_by_response(trace.logp_mu, trace, lambda x: _zeroed(x, len(x) - 1)))


def zeros_after_a_half(trace: Trace) -> Trace:
    """log mu of the second half of each response was lost and padded with 0 (vime #70)."""
    return replace(trace, logp_mu=_by_response(trace.logp_mu, trace, lambda x: _zeroed(x, len(x) // 2)))


def zeros_here_and_there(trace: Trace) -> Trace:
    """Every tenth log old is 0."""
    logp_old = trace.logp_old.clone()
    logp_old[torch.rand(len(logp_old), generator=stream(0, "doctor page", "zeros")) < 0.1] = 0.0
    return replace(trace, logp_old=logp_old)


def unrelated(trace: Trace) -> Trace:
    """log mu is that of other responses: the order was lost between engine and trainer."""
    order = torch.randperm(len(trace.logp_mu), generator=stream(0, "doctor page", "order"))
    return replace(trace, logp_mu=trace.logp_mu[order])


def without_end(trace: Trace) -> Trace:
    """Every response that stopped has lost its end token, on both sides."""
    # Responses that stopped share their last token, so the most frequent last token is the end token.
    end = torch.mode(trace.tokens[trace.offsets[1:] - 1]).values
    is_kept_N = torch.ones(len(trace.tokens), dtype=torch.bool)
    is_kept_N[trace.offsets[1:] - 1] = trace.tokens[trace.offsets[1:] - 1] != end
    is_part_N = torch.zeros_like(is_kept_N)
    for b, start in enumerate(trace.offsets[:-1].tolist()):
        is_part_N[start + int(trace.num_prompt[b]) : int(trace.offsets[b + 1])] = True
    is_kept_A = is_kept_N[is_part_N]
    names = ("logp_mu", "logp_old", "is_response", "entropy_old")
    changes = {name: getattr(trace, name)[is_kept_A] for name in names}
    sizes = [int(is_kept_N[a:b].sum()) for a, b in zip(trace.offsets[:-1], trace.offsets[1:], strict=True)]
    nothing = {"experts_mu": None, "experts_old": None, "layer_numbers": (), "num_experts": 0}
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    return replace(trace, tokens=trace.tokens[is_kept_N], offsets=offsets, **changes, **nothing)
