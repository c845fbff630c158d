"""The stages of a run as it recorded them, and the rates that a simulation takes from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from lab.hf import ModelShape
from lab.records import RunFolder
from lab.report.timing import TRAINING
from lab.traces import Trace
from scaled.config import ScaledRun
from scaled.plan.day import STAGES, Chance, Rates
from scaled.plan.hardware import Gpu
from scaled.plan.simulation import play_steps

CERTAIN = Chance(gpu_hours_per_failure=math.inf, slow_std=0.0)
"""No chance except that of lengths."""

HANDING_OVER = ("timing_s/push", "timing_s/turn")
"""The parts of `push`: weights to the engines, and GPUs from ranks to engines and back."""

PARTS = ("rollout", "training", "push", "step", "checkpoint")
"""The stages that are compared, in seconds per step; a checkpoint in seconds per save."""


@dataclass(frozen=True)
class Measured:
    """Seconds of each of PARTS, medians over steps and median distances from them, and the tokens of a sequence.

    A median is not moved by the few steps in which a shared machine did something else. `rollout` is the time of a step
    that is neither training nor push: sampling that training waits for, and rewards.
    """

    num_steps: int
    median: dict[str, float]
    distance: dict[str, float]
    tokens: tuple[int, int]


def measured(folder: RunFolder, config: ScaledRun) -> Measured:
    """The stages of a run of that config; ValueError where it recorded no step's time or left no trace, whose lengths
    are needed.
    """
    # Row 0, measured before the first step, has no time.
    rows = [row for row in folder.metrics() if row.get("timing_s/step") is not None]
    lengths = [n for path in folder.traces() for n in Trace.load(path).offsets.diff().tolist()]
    if not rows or not lengths:
        raise ValueError(
            f"{folder.path}: expected a run with the time of a step and a trace, got {len(rows)} times and "
            f"{len(folder.traces())} traces"
        )
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    for row in rows:
        training, push = (sum(row.get(name) or 0.0 for name in names) for names in (TRAINING, HANDING_OVER))
        parts = {"training": training, "push": push, "step": row["timing_s/step"]}
        parts["rollout"] = parts["step"] - training - push
        for name, value in parts.items():
            found[name].append(value)
    found["checkpoint"] = _saves(rows, config.checkpoint.every)
    medians = {part: median(values) for part, values in found.items() if values}
    return Measured(
        len(rows),
        medians,
        {part: median(abs(value - middle) for value in found[part]) for part, middle in medians.items()},
        (round(fmean(lengths)), max(lengths)),
    )


def _saves(rows: Sequence[Mapping[str, Any]], every: int) -> list[float]:
    """Seconds that each save took the run: recorded with the step after it and, where writing continued, later ones."""
    found: dict[int, float] = {}
    for row in rows:
        # The save after step n is in row n + 1 (`Session.between`); that of the last step is in no row.
        number = (row["step"] - 1) // every
        if number > 0:  # older runs recorded some microseconds without a save, too
            found[number] = found.get(number, 0.0) + (row.get("timing_s/save_checkpoint") or 0.0)
    return [seconds for seconds in found.values() if seconds > 0]


def simulated(
    config: ScaledRun, shape: ModelShape, gpu: Gpu, tokens: tuple[int, int], rates: Rates, seed: int = 0
) -> dict[str, float]:
    """Seconds of each of PARTS in a run of `config.num_steps` whose sequences have that mean and longest length."""
    day = play_steps(config, shape, gpu, config.num_steps, *tokens, CERTAIN, seed, rates)
    found = {part: day.stages[part] / day.num_steps for part in ("rollout", "training", "push")}
    # Before the checkpoint joins: a recorded timing_s/step has no save in it either.
    found["step"] = sum(found.values())
    # Rounded up: the last step makes a checkpoint, too.
    num_saves = -(-day.num_steps // config.checkpoint.every)
    found["checkpoint"] = day.stages["checkpoint"] / num_saves
    return found


def rates_of(config: ScaledRun, shape: ModelShape, gpu: Gpu, found: Measured) -> Rates:
    """Measured over planned seconds, stage by stage, of a run of that config; 1 for stages that it did not record.

    Raises ValueError for a schedule that hides a part of the rollout.
    """
    if config.schedule.steps_off > 0:
        raise ValueError(f"schedule.steps_off: expected 0 of a run to take rates from, got {config.schedule.steps_off}")
    # Simulated, as a recorded rollout too waits for the longest of its lengths.
    plain = simulated(config, shape, gpu, found.tokens, Rates())
    return Rates(**{stage: found.median[stage] / plain[stage] for stage in STAGES if stage in found.median})


__all__ = ["CERTAIN", "PARTS", "Measured", "measured", "rates_of", "simulated"]
