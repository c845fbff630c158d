"""Layouts for the GPUs of a config: those that fit, the quickest first, and why the others do not.

The search covers placement, ranks and engines, TP, CP, PP and EP, recomputation, offloading, and the engines' TP,
sequences and share of a colocated GPU. The algorithm, the lengths and the precision are fixed. Parallel sizes are the
divisors of the number of GPUs that they split. Times are those of `compute`, which has one rate for all layouts. Ties
go to less TP, then less CP, PP and EP, whose communication is not counted.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pydantic

from lab.hf import ModelShape
from lab.strict import ConfigError
from scaled.config import ScaledRun
from scaled.megatron_engine.parallel import smaller_last_stage
from scaled.plan import compute, division, engine_memory, feasibility, host_memory, memory, passes
from scaled.plan.feasibility import with_fields
from scaled.plan.hardware import Gpu
from scaled.plan.memory import GIB
from scaled.plan.waits import longest_wait

LAST = "num_layers_in_last_pipeline_stage"
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
"""Shares of a colocated GPU for vLLM that are tried."""

MOST_SEQS = 512
"""The most sequences of one engine that are tried."""


@dataclass(frozen=True)
class FittingLayout:
    """A layout that fits, its seconds of a global step, and GiB of a GPU: an update, what ranks keep, an engine."""

    config: ScaledRun
    training_s: float
    rollout_s: float
    step_s: float
    update_gib: float
    kept_gib: float | None
    rollout_gib: float

    @property
    def options(self) -> list[str]:
        """The layout as options of the command, in the shell's words."""
        training, rollout = self.config.training, self.config.rollout
        fields: dict[str, Any] = {
            f"training.{name}": getattr(training, name)
            for name in ("num_ranks", "tensor_parallel", "context_parallel", "pipeline_parallel", "virtual_pipeline",
                         "expert_parallel", "expert_tensor_parallel", "recompute")
        }  # fmt: skip
        if training.num_layers_in_last_pipeline_stage is not None:
            fields[f"training.{LAST}"] = training.num_layers_in_last_pipeline_stage
        fields["training.offload"] = "null" if training.offload is None else f"'[{', '.join(training.offload)}]'"
        for name in ("num_engines", "tensor_parallel", "max_num_seqs", "gpu_memory_utilization"):
            fields[f"rollout.{name}"] = getattr(rollout, name)
        return [f"--cluster.placement {self.config.cluster.placement}", *(f"--{k} {v}" for k, v in fields.items())]


@dataclass(frozen=True)
class Shortfall:
    """A reason why `count` layouts are not listed, with the closest miss where numbers tell, or the usual refusal."""

    what: str
    count: int
    least: str | None = None
    usual: str | None = None

    def __str__(self) -> str:
        return "; ".join(words for words in (self.what, self.least, self.usual) if words is not None)


@dataclass(frozen=True)
class Search:
    """All layouts that were tried: those that fit, in order, and the others by reason."""

    found: list[FittingLayout]
    reasons: list[Shortfall]

    @property
    def num_tried(self) -> int:
        """The number of layouts tried."""
        return len(self.found) + sum(reason.count for reason in self.reasons)


@dataclass(frozen=True)
class _Engines:
    """The engines' half of a layout, fitting its share of a GPU. `wait_s` is the longest wait for one of them."""

    rollout: dict[str, Any]
    seconds: float
    wait_s: float
    gib: float


def search(
    config: ScaledRun, shape: ModelShape, gpu: Gpu, mean_tokens: int | None = None, longest_tokens: int | None = None
) -> Search:
    """Every layout of the config's GPUs. Raises ValueError for lengths that are not possible.

    Where the layers do not divide, the last stage has fewer, as few as leave all others equal.
    """
    for place, number in zip(("first", "last"), config.training.uneven_stages, strict=True):
        if number is not None:
            field = f"training.num_layers_in_{place}_pipeline_stage"
            raise ConfigError(f"{field}: expected null with --search, which tries layouts of its own, got {number}")
    lengths = compute.lengths_of(config, mean_tokens, longest_tokens)
    tally = _Tally()
    seconds: dict[tuple[Any, ...], float] = {}
    found = []
    for placement, ranks, gpus in _splits(config):
        engines = list(_engines(config, shape, gpu, placement, gpus, lengths))
        for one in _layouts(config, shape, placement, ranks, tally):
            try:
                division.check_divides(one, shape)
                placed = _placed(one, engines)
            except ConfigError as error:
                tally.add_refusal(str(error))
                continue
            fitting = _fits(one, shape, gpu, placed, tally)
            if fitting is None:
                continue
            if not _fits_machines(one, shape, gpu, tally):
                continue
            training = one.training
            # Training takes as long with any EP, and with or without offloading.
            key = (
                training.num_ranks, training.tensor_parallel, training.context_parallel, training.pipeline_parallel,
                training.recompute,
            )  # fmt: skip
            if key not in seconds:
                made = passes.passes(one, shape, *lengths)
                total = made.score_flops + made.update_flops
                seconds[key] = passes.training_seconds(training, shape.num_layers, gpu, total, made.num_micro)
            whole = with_fields(one, "rollout", **fitting.rollout)
            found.append(_found(whole, shape, fitting, seconds[key], lengths[0]))
    found.sort(key=_order)
    return Search(found, tally.reasons())


def _splits(config: ScaledRun) -> Iterator[tuple[str, int, int]]:
    """(placement, ranks, GPUs of engines): all GPUs for both in turn, or about one to three quarters for ranks."""
    all_gpus = config.cluster.num_nodes * config.cluster.gpus_per_node
    # A run refuses colocated engines that sample ahead (`conditions.check_settings`).
    if config.schedule.steps_off == 0:
        yield "colocated", all_gpus, all_gpus
    # Rounded down, as few numbers of GPUs have whole quarters.
    for ranks in sorted({all_gpus * quarters // 4 for quarters in (1, 2, 3)} - {0}):
        yield "separate", ranks, all_gpus - ranks


def _layouts(config: ScaledRun, shape: ModelShape, placement: str, ranks: int, tally: _Tally) -> Iterator[ScaledRun]:
    offloads = (None, ("gradients", "optimizer")) if placement == "colocated" else (None,)
    raw = config.model_dump()
    raw["cluster"]["placement"] = placement
    sizes = division.divisors(ranks)
    for tp, cp, pp, ep, recompute, offload in product(
        sizes, sizes, sizes, sizes, ("none", "selective", "full"), offloads
    ):
        if tp * cp > config.cluster.gpus_per_node:
            continue
        # Not tallied: the config itself refuses it (`_states_are_apart`), so it is no layout that misses.
        if offload is not None and config.training.precision != "bf16":
            continue
        raw["training"] |= {
            "num_ranks": ranks, "tensor_parallel": tp, "context_parallel": cp, "pipeline_parallel": pp,
            "virtual_pipeline": 1, "expert_parallel": ep, "expert_tensor_parallel": 1, "recompute": recompute,
            "offload": offload, LAST: smaller_last_stage(shape.num_layers, pp),
        }  # fmt: skip
        try:
            yield ScaledRun.model_validate(raw)
        except pydantic.ValidationError as error:
            # A block's own validator names the bare field, the run's validators name block and field.
            said = error.errors()[0]["msg"].removeprefix("Value error, ")
            tally.add_refusal(said if "." in said.split(":")[0] else f"training.{said}")


def _engines(
    config: ScaledRun, shape: ModelShape, gpu: Gpu, placement: str, gpus: int, lengths: tuple[int, int]
) -> Iterator[_Engines]:
    """The engines that fit these GPUs, each with as many sequences of these lengths as its share holds, the quickest
    first."""
    own = config.rollout.gpu_memory_utilization
    made = []
    shares, widths = SHARES if placement == "colocated" else (own,), division.divisors(config.cluster.gpus_per_node)
    for share, tp in product(shares, widths):
        if gpus % tp or shape.num_heads % tp:
            continue
        fields = {"num_engines": gpus // tp, "tensor_parallel": tp, "gpu_memory_utilization": share}
        one = with_fields(config, "rollout", **fields)
        # vLLM refuses more sequences than tokens of an engine step (`conditions.check_engine_step`).
        most = min(MOST_SEQS, config.rollout.max_num_batched_tokens)
        num_seqs = engine_memory.places_that_fit(one, shape, feasibility.rollout_budget(one, gpu), lengths, most)
        if num_seqs < 1:
            continue
        fields["max_num_seqs"] = num_seqs
        one = with_fields(config, "rollout", **fields)
        try:
            division.check_divides(one, shape)
        except ConfigError:
            continue
        gib = engine_memory.rollout_memory(one, shape, lengths).total / GIB
        wait_s = longest_wait(one, shape, gpu, *lengths).seconds
        made.append(_Engines(fields, compute.rollout_seconds(one, shape, gpu, *lengths), wait_s, gib))
    # Of equally quick engines first those with the smallest share of a GPU, which leave ranks the most.
    yield from sorted(made, key=lambda engines: (engines.seconds, engines.rollout["gpu_memory_utilization"]))


def _placed(one: ScaledRun, engines: list[_Engines]) -> list[_Engines]:
    """The engines that have places beside these ranks; raises ConfigError where none have."""
    if not engines:
        division.check_places(one)
    refused: dict[int, ConfigError] = {}
    # All engines of a width take the same places.
    for width, each in {each.rollout["tensor_parallel"]: each for each in engines}.items():
        try:
            division.check_places(with_fields(one, "rollout", **each.rollout))
        except ConfigError as error:
            refused[width] = error
    placed = [each for each in engines if each.rollout["tensor_parallel"] not in refused]
    if refused and not placed:
        raise next(iter(refused.values()))
    return placed


def _fits(one: ScaledRun, shape: ModelShape, gpu: Gpu, engines: list[_Engines], tally: _Tally) -> _Engines | None:
    """The quickest engines beside which this layout fits; None, with the reason in the tally, where there are none."""
    if not engines:
        tally.add("no engine fits its GPUs")
        return None
    # The quickest come first.
    engines = [each for each in engines if each.wait_s <= one.rollout.timeout_s]
    if not engines:
        tally.add("the longest wait for an engine exceeds rollout.timeout_s")
        return None
    over = (memory.peak_training_memory(one, shape).total - feasibility.training_budget(one, gpu)) / GIB
    if over > 0:
        tally.add("an update does not fit a GPU", over, one)
        return None
    kept = memory.resident_memory(one, shape).total
    for each in engines:
        if not one.takes_turns or kept <= feasibility.resident_budget(with_fields(one, "rollout", **each.rollout), gpu):
            return each
    room = max(feasibility.resident_budget(with_fields(one, "rollout", **each.rollout), gpu) for each in engines)
    tally.add("the ranks' kept memory does not fit beside any engine", (kept - room) / GIB, one)
    return None


def _fits_machines(one: ScaledRun, shape: ModelShape, gpu: Gpu, tally: _Tally) -> bool:
    """Whether a machine's CPU memory, where the config states one, is enough; the tally has the reason if not."""
    have = feasibility.host_budget(one, gpu)
    over = 0.0 if math.isinf(have) else (host_memory.peak_host_memory(one, shape).total - have) / GIB
    if over > 0:
        tally.add("a step, or loading a checkpoint, does not fit a machine's CPU memory", over, one)
    return over <= 0


def _found(one: ScaledRun, shape: ModelShape, engines: _Engines, training_s: float, mean: int) -> FittingLayout:
    others = compute.push_seconds(one, shape, mean) + compute.turn_seconds(one, shape)
    together = compute.together_seconds(one, engines.seconds, training_s)
    kept = memory.resident_memory(one, shape).total / GIB if one.takes_turns else None
    update = memory.peak_training_memory(one, shape).total / GIB
    return FittingLayout(one, training_s, engines.seconds, together + others, update, kept, engines.gib)


def _order(found: FittingLayout) -> tuple[float, ...]:
    training = found.config.training
    parallel = (
        training.tensor_parallel, training.context_parallel, training.pipeline_parallel, training.expert_parallel
    )  # fmt: skip
    is_offloaded = float(training.offload is not None)
    # Rounded, so that equal times are ties.
    return (round(found.step_s, 3), *map(float, parallel), is_offloaded, found.update_gib)


class _Tally:
    """Counts by reason, and of each the layout that misses by least, or the refusal that comes most often."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._least: dict[str, tuple[float, ScaledRun]] = {}
        self._said: dict[str, Counter[str]] = defaultdict(Counter)

    def add(self, what: str, over: float | None = None, layout: ScaledRun | None = None) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1
        if over is not None and layout is not None and (what not in self._least or over < self._least[what][0]):
            self._least[what] = over, layout

    def add_refusal(self, message: str) -> None:
        """Counts a layout refused with `field: what is wrong; what would serve`, by its field."""
        field, _, said = message.partition(": ")
        what = f"does not divide: {field}"
        self.add(what)
        # What would serve this layout is no advice to a search.
        self._said[what][said.partition(";")[0]] += 1

    def reasons(self) -> list[Shortfall]:
        found = []
        for what, count in sorted(self._counts.items(), key=lambda item: -item[1]):
            least = usual = None
            if what in self._said:
                usual = f"mostly: {self._said[what].most_common(1)[0][0]}"
            if what in self._least:
                over, layout = self._least[what]
                # Not 0.0 GiB.
                gap = f"{over:.1f} GiB" if over >= 0.05 else f"{math.ceil(over * 1024)} MiB"
                least = f"the closest misses by {gap}: {shown(layout)}"
            found.append(Shortfall(what, count, least, usual))
        return found


def shown(config: ScaledRun) -> str:
    """A layout of ranks in a few words."""
    t = config.training
    offload = "" if t.offload is None else f", {' and '.join(t.offload)} offloaded"
    sizes = (
        f"TP {t.tensor_parallel}, CP {t.context_parallel}, {division.pipeline_words(t)}, EP {t.expert_parallel}, "
        f"recompute {t.recompute}"
    )
    return f"{t.num_ranks} ranks {config.cluster.placement}, {sizes}{offload}"
