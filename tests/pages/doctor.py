"""How often the doctor names what was planted: engines with defects, historic bugs in code, and damaged traces.

`python -m tests.pages.doctor` writes docs/doctor.md; test_doctor.py plants a part of it again, on another model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from firstorder.worlds import Schemas
from lab.config.load import load
from lab.doctor.diagnosis import Diagnosis, diagnose
from lab.traces import Trace
from sandbox.defect_table import Bench
from sandbox.engines import (
    ActivationPrecision,
    KVPrecision,
    LogitNoise,
    ReductionOrder,
    RouterNoise,
    SamplingMismatch,
    StaleWeights,
    WeightPrecision,
)
from sandbox.engines.defect import Defect
from tests.mutants.catalogue_capture import CAPTURE
from tests.mutants.mutant import edited
from theory.routing.passes import PassRouting
from theory.streams import stream

MUTANTS = {mutant.name: mutant for mutant in CAPTURE}


@dataclass(frozen=True)
class Plant:
    """Something wrong: the cause that has to be named, and how it comes about."""

    cause: str
    defect: Defect | None = None
    mutant: str = ""
    damage: Callable[[Trace], Trace] = field(default=lambda trace: trace)


# ---- damaged traces --------------------------------------------------------------------------------------------------


def _parts(trace: Trace) -> list[slice]:
    """Where each response's part stands among the A values."""
    stops = (trace.offsets.diff() - trace.num_prompt).cumsum(0).tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]


def _by_response(values_A: Tensor, trace: Trace, change: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([change(values_A[part].clone()) for part in _parts(trace)])


def shifted_mu(trace: Trace) -> Trace:
    """log mu stands one token late: the first value twice, the last one lost."""
    return replace(trace, logp_mu=_by_response(trace.logp_mu, trace, lambda x: torch.cat([x[:1], x[:-1]])))


def shifted_old(trace: Trace) -> Trace:
    """log old stands one token early, as where logits [prompt:] are taken for [prompt - 1 : -1]."""
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


# ---- what is planted -------------------------------------------------------------------------------------------------

PLANTS: dict[str, Plant] = {
    "exact engine": Plant("nothing"),
    "weights bf16": Plant("precision", WeightPrecision(format="bf16")),
    "weights int8": Plant("precision", WeightPrecision(format="int8")),
    "weights fp8": Plant("precision", WeightPrecision()),
    "weights fp8, blocks": Plant("precision", WeightPrecision(scale="block", block_size=32)),
    "activations bf16": Plant("precision", ActivationPrecision(format="bf16")),
    "activations fp8": Plant("precision", ActivationPrecision()),
    "cache bf16": Plant("precision", KVPrecision(format="bf16")),
    "cache fp8": Plant("precision", KVPrecision()),
    "8 units, partial sums in bf16": Plant("precision", ReductionOrder(units=8, partials="bf16")),
    "logit noise 0.1": Plant("precision", LogitNoise(std=0.1)),
    "router noise 0.03": Plant("routing", RouterNoise(std=0.03)),
    "router noise 0.1": Plant("routing", RouterNoise(std=0.1)),
    "router noise 0.3": Plant("routing", RouterNoise(std=0.3)),
    "1 version behind": Plant("stale", StaleWeights(versions=1)),
    "2 versions behind": Plant("stale", StaleWeights(versions=2)),
    "4 versions behind": Plant("stale", StaleWeights(versions=4)),
    "4 behind, half new, cache recomputed": Plant(
        "switched", StaleWeights(versions=4, switch_at=0.5, cache="recomputed")
    ),
    "4 behind, half new, cache kept": Plant("switched", StaleWeights(versions=4, switch_at=0.5)),
    "top-p 0.9, scored": Plant("mask", SamplingMismatch(top_p=0.9, score="processed")),
    "top-k 2, scored": Plant("mask", SamplingMismatch(top_k=2, score="processed")),
    "temperature 0.7, scored": Plant("temperature", SamplingMismatch(temperature=0.7, score="processed")),
    "temperature 1.3, scored": Plant("temperature", SamplingMismatch(temperature=1.3, score="processed")),
    "top-p 0.9": Plant("sampler_mask", SamplingMismatch(top_p=0.9)),
    "min-p 0.1": Plant("sampler_mask", SamplingMismatch(min_p=0.1)),
    "temperature 0.7": Plant("sampler_temperature", SamplingMismatch(temperature=0.7)),
    "log mu a token late": Plant("shifted", damage=shifted_mu),
    "log old a token early, fp8": Plant("shifted", WeightPrecision(), damage=shifted_old),
    "end token's log mu is 0": Plant("last_token", damage=last_is_zero),
    "end token's log mu is 0, bf16": Plant("last_token", WeightPrecision(format="bf16"), damage=last_is_zero),
    "half of log mu is 0, fp8": Plant("zero_padded", WeightPrecision(), damage=zeros_after_a_half),
    "a tenth of log old is 0": Plant("zero_padded", damage=zeros_here_and_there),
    "end tokens cut off": Plant("end_token", damage=without_end),
    "log mu of other responses": Plant("unrelated", damage=unrelated),
} | {
    name: Plant("route_record", mutant=name)
    for name in ("record_is_a_row_late", "decoding_repeats_the_prompts_route", "last_stage_overwrites_the_first")
}  # fmt: skip


class Ward:
    """A trained model of some versions, and the traces of whatever engine was planted."""

    def __init__(self, config: str, overrides: Sequence[str], num_steps: int):
        self.bench = Bench(load(config, overrides, Schemas()), num_steps)

    def trace(self, plant: Plant, draw: int) -> Trace:
        """What the planted engine samples and the trainer scores, on the draw's problems."""
        with ExitStack() as stack:
            mutant = MUTANTS[plant.mutant] if plant.mutant else None
            for target in dict.fromkeys(edit.target for edit in mutant.edits) if mutant else ():
                stack.enter_context(edited(target, [edit for edit in mutant.edits if edit.target == target]))
            rollouts = self.bench.sample(self.bench.engine(plant.defect), draw)
        scores = self.bench.trainer.score(rollouts, PassRouting("natural"))
        rewards = [self.bench.task.reward(response.prompt, response) for response in rollouts.responses]
        return plant.damage(Trace.of(rollouts, scores, torch.tensor(rewards), step=draw))

    def named(self, plant: Plant, draw: int) -> Diagnosis:
        """The doctor's word on it."""
        return diagnose(self.trace(plant, draw))


def confusion(ward: Ward, names: Sequence[str], num_draws: int) -> dict[str, Counter[str]]:
    """For each plant how often each cause was named first."""
    return {name: Counter(ward.named(PLANTS[name], draw).named[0].name for draw in range(num_draws)) for name in names}


def num_right(found: Mapping[str, Counter[str]]) -> int:
    """How often the planted cause was named first."""
    return sum(counts[PLANTS[name].cause] for name, counts in found.items())
