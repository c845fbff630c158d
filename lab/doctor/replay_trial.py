"""The replay trial: how much of the gap is left when the model scores the trace again on mu's experts (R3).

A trace shows what comes with the gap. A trial changes one thing, and so shows what causes it:

    removed = 1 - k3 KL(mu, replayed) / k3 KL(mu, natural), at most 1; below 0 where the gap has grown.

Both are without the largest 0.5 % of their tokens: one token may carry most of a KL, and would decide alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lab.doctor.layers.reference import PRECISIONS, Precision, ReferenceModules, Routed
from lab.doctor.routes import most
from lab.doctor.view import View
from lab.doctor.words import CAUSED, share
from lab.report.style import number
from lab.traces import Trace
from theory.divergences import k3_kl_mu_old
from theory.routing.record import RoutingRecord

SAME = 0.1
"""Largest k3 KL of the model from old, as a share of that of mu from old, at which the model counts as old's."""


@dataclass(frozen=True)
class ReplayTrial:
    """The model in the precision nearest to old: its k3 KL from mu on its own experts (`natural`) and on mu's, nats per
    token, without the largest 0.5 %; `distance`: that of old from `natural`, all tokens included."""

    precision: Precision
    distance: float
    natural: float
    replayed: float

    @property
    def removed(self) -> float:
        """The share of the gap that replay removes, at most 1; 0 where all of the gap is on fewer than 0.5 %."""
        return 1 - self.replayed / self.natural if self.natural > 0 else 0.0

    @property
    def sentence(self) -> str:
        """The outcome in words."""
        told = (
            "most of it comes through the routers"
            if self.removed >= CAUSED
            else "most of it does not come through them"
        )
        own, mus = number(self.natural), number(self.replayed)
        return (
            f"Tried: the model's k3 KL from mu is {own} on its own experts, {mus} on mu's (without the largest 0.5 %). "
            f"Replay removes {share(self.removed)} of the gap: {told}."
        )


def try_replay(trace: Trace, reference: ReferenceModules) -> ReplayTrial:
    """Scores the trace on mu's experts and without; ValueError where that would tell nothing.

    It tells nothing where mu and old are equal, where mu's experts are unknown, where the model cannot replay them, and
    where it does not score as old does: in some precision, up to SAME of the gap.
    """
    if trace.old_pass == "replay_rollout":
        raise ValueError("--model: expected a trace that old scored on its own experts, got one scored on mu's (R3)")
    record = trace.record_mu
    if record is None:
        raise ValueError("experts_mu: expected mu's experts for --model, got none")
    if not reference.replays:
        raise ValueError(f"--model: expected a model that can replay experts, got one for {reference.name}")
    scored = _Scored(trace, reference)
    gap = k3(scored.mu_n, scored.old_n)
    # Not `gap <= 0`, which lets nan pass; the same below.
    if not gap > 0:
        raise ValueError(f"logp_old: expected a gap for --model to explain, got a k3 KL of {number(gap)}")
    natural = {precision: scored.under(precision) for precision in PRECISIONS}
    distances = {precision: k3(scored.old_n, found) for precision, found in natural.items()}
    # A trace does not say in which precision old scored: the nearest one stands for it.
    own = min(PRECISIONS, key=lambda precision: distances[precision])
    if not distances[own] <= SAME * gap:
        raise ValueError(
            f"--model: expected old's weights, at most {SAME:g} of mu's k3 KL of {number(gap)} from old, got "
            f"{number(distances[own])} (in {own}); a trainer that replays scores differently, too"
        )
    ways = (k3_kl_mu_old(found, scored.mu_n) for found in (natural[own], scored.under(own, record)))
    return ReplayTrial(own, distances[own], *map(most, ways))


def with_experts_old(trace: Trace, reference: ReferenceModules, precision: Precision) -> Trace:
    """The trace with the experts that the model of old's weights chooses in that precision, as old's own."""
    natural = _Scored(trace, reference).routed(precision).natural
    experts = torch.stack([natural[layer] for layer in trace.layer_numbers], dim=1).to(torch.int16)
    return replace(trace, experts_old=experts, num_experts=max(trace.num_experts, int(experts.max()) + 1))


class _Scored:
    """The sampled tokens of a trace, and their log-probabilities under the model."""

    def __init__(self, trace: Trace, reference: ReferenceModules) -> None:
        # Without a temperature in the trace, log-probabilities count as those at 1.
        self.reference, self.temperature = reference, trace.temperature or 1.0
        self.sequences = [trace.tokens[a:b].long() for a, b in itertools.pairwise(trace.offsets.tolist())]
        view = View.of(trace)
        self.row_n, self.mu_n, self.old_n = view.row_n, view.mu_n, view.old_n

    def under(self, precision: Precision, record: RoutingRecord | None = None) -> Float[Tensor, " n"]:
        """Log-probabilities in that precision; float32 is exact."""
        return self.routed(precision, record).logp_R[self.row_n].double()

    def routed(self, precision: Precision, record: RoutingRecord | None = None) -> Routed:
        """A pass over the trace in that precision, on the record's experts or the model's own."""
        # Rounded again at every call: the copies of all precisions would be in memory at once otherwise.
        model = self.reference if precision == "fp32" else self.reference.rounded(precision)
        return model.routed(self.sequences, record, self.temperature)


def k3(sampled_n: Float[Tensor, " n"], scored_n: Float[Tensor, " n"]) -> float:
    """k3 estimate of KL(sampled || scored), nats per token; nan where a log-probability is not finite."""
    return k3_kl_mu_old(scored_n, sampled_n).mean().item()
