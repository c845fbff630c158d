"""The simulated hours of a recipe as it is and with one thing changed at a time, to compare their steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from lab.config.algorithm import OversamplingBlock
from lab.hf import ModelShape
from scaled.config import ScaledRun
from scaled.plan.day import STAGES, Chance, Day, Rates
from scaled.plan.feasibility import with_fields
from scaled.plan.hardware import Gpu
from scaled.plan.simulation import play
from scaled.plan.tables import titled_table

if TYPE_CHECKING:
    from rich.table import Table


LAGS = (0, 1, 2, 4)
"""Values of schedule.steps_off that are compared, where ranks and engines have GPUs of their own."""

KEPT_FOR = 4
"""Versions for which responses to extra prompts are kept; there are a quarter as many of these as in the batch."""


@dataclass(frozen=True)
class Scenario:
    """A recipe and its chances, in words."""

    words: str
    config: ScaledRun
    chance: Chance


def scenarios(config: ScaledRun, chance: Chance) -> Iterator[Scenario]:
    """The recipe itself, then without each chance, and with fixed shares, another schedule, over-sampling, padding and
    checkpoint interval."""
    # Unchecked: a scenario may break rules that no simulation reads, such as max_staleness >= steps_off.
    # First: the sentence that `firstorder plan` prints is that of the first scenario.
    algorithm = config.algorithm.build()
    yield Scenario("as it is", config, chance)
    yield Scenario("no failures", config, replace(chance, gpu_hours_per_failure=math.inf))
    yield Scenario("engines equally fast", config, replace(chance, slow_std=0.0))
    yield Scenario("every length the mean", config, replace(chance, is_length_drawn=False))
    if algorithm.oversampling is None or algorithm.passes.rollout != "predicted":  # else shares are fixed
        yield Scenario("fixed shares", config, replace(chance, has_fixed_shares=True))
    if config.cluster.placement == "separate":
        for lag in LAGS:
            if lag != config.schedule.steps_off:
                yield Scenario(f"schedule.steps_off {lag}", with_fields(config, "schedule", steps_off=lag), chance)
    if algorithm.oversampling is not None:
        yield Scenario("no over-sampling", with_fields(config, "algorithm", oversampling=None), chance)
    elif algorithm.max_turns == 1 and algorithm.passes.rollout != "predicted":  # where partial rollouts are allowed
        more = OversamplingBlock(extra_prompts=-(-algorithm.num_prompts // 4), max_staleness=KEPT_FOR)
        words = f"{more.extra_prompts} extra prompts, kept"
        yield Scenario(words, with_fields(config, "algorithm", oversampling=more), chance)
    if config.training.max_tokens_per_micro_batch is None:
        budget = config.rollout.max_model_len
        words = f"{budget} tokens per micro-batch"
        yield Scenario(words, with_fields(config, "training", max_tokens_per_micro_batch=budget), chance)
    else:
        changed = with_fields(config, "training", max_tokens_per_micro_batch=None, micro_batch_size=1)
        yield Scenario("padded, one at a time", changed, chance)
    for every in dict.fromkeys((1, 5 * config.checkpoint.every)):
        if every != config.checkpoint.every:
            yield Scenario(f"checkpoint.every {every}", with_fields(config, "checkpoint", every=every), chance)


def played(
    config: ScaledRun,
    shape: ModelShape,
    gpu: Gpu,
    hours: float,
    tokens: tuple[int, int],
    chance: Chance,
    seed: int,
    rates: Rates | None = None,
) -> Iterator[tuple[Scenario, Day]]:
    """Every scenario with its hours; `tokens` are the mean and the longest length."""
    for one in scenarios(config, chance):
        yield one, play(one.config, shape, gpu, hours, *tokens, one.chance, seed, rates)


def sentence(day: Day) -> str:
    """The hours in words."""
    if not day.num_steps:
        return f"{day.hours:g} hours are too few for one step that counts."
    whole = 3600 * day.hours
    parts = ", ".join(f"{name} {day.stages[name] / whole:.0%}" for name in STAGES)
    return (
        f"{day.num_steps} steps in {day.hours:g} hours, {day.step_s:.0f} s each: {parts}; "
        f"engines wait for the last one in {day.idle_s / max(day.sampled_s, 1e-9):.0%} of the rollout. "
        f"{day.num_failures} failure{'s' * (day.num_failures != 1)} of ranks and {day.num_engine_failures} of engines "
        f"cost {(day.lost_s + day.down_s) / 60:.0f} min of repeated work and restarts."
    )


def assumed(chance: Chance) -> str:
    """The chances and rates, which no plan can know of a cluster, in words."""
    return (
        f"Assumed: a failure every {chance.gpu_hours_per_failure:,.0f} GPU hours, after which ranks are back in "
        f"{chance.restart_s:g} s and an engine in {chance.engine_restart_s:g} s; engines' times vary by "
        f"{chance.slow_std:.0%}; checkpoints are written at {chance.save_gb_s:g} GB/s."
    )


def table(found: list[tuple[Scenario, Day]]) -> Table:
    """One row per scenario. wait: engines that wait for the last one, within rollout; lost: failures."""
    columns = ("recipe", "steps", "rollout", "train", "push", "save", "wait", "lost")
    made = titled_table("With one thing changed, in shares of the hours", *columns)
    for one, day in found:
        shares = [*day.stages.values(), day.idle_s, day.lost_s + day.down_s]
        made.add_row(one.words, str(day.num_steps), *(f"{share / (3600 * day.hours):.1%}" for share in shares))
    return made


def to_json(found: list[tuple[Scenario, Day]]) -> list[dict[str, Any]]:
    """Plain numbers under plain names; seconds."""
    return [{"scenario": one.words} | asdict(day) for one, day in found]


__all__ = ["Scenario", "assumed", "played", "scenarios", "sentence", "table", "to_json"]
