"""Laws of the simulated hours: without chance they are the plan's, and every chance costs as much as it should."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.records import RunFolder
from scaled.config import ScaledRun
from scaled.plan import compute, what_if
from scaled.plan.day import Chance, Day, Rates
from scaled.plan.hardware import gpu_named
from scaled.plan.measured import measured, rates_of, simulated
from scaled.plan.parameters import CHECKPOINT_BYTES
from scaled.plan.simulation import _Play, play, play_steps
from tests.lab.synthetic_runs import DEMO, made_up_trace
from tests.scaled.plan_world import QWEN, loaded

H100 = gpu_named("H100-80GB")
CERTAIN = Chance(gpu_hours_per_failure=math.inf, slow_std=0.0, is_length_drawn=False)
TOKENS = 1024


def recipe(*overrides: str) -> ScaledRun:
    """64 responses of at most 1,024 tokens on two engines that decode them all together."""
    small = (
        "--algorithm.batch.num_prompts", "8", "--algorithm.batch.num_responses", "8", "--rollout.num_engines", "2",
        "--algorithm.batch.num_minibatches", "1", "--rollout.max_num_seqs", "64",
        "--algorithm.sampling.max_tokens", str(TOKENS), "--checkpoint.every", "5",
    )  # fmt: skip
    return loaded("qwen3_30b_a3b", *small, *overrides)


def lagging(steps_off: int, *overrides: str) -> ScaledRun:
    """The recipe with engines that sample so many batches ahead."""
    lag = str(steps_off)
    return recipe("--schedule.steps_off", lag, "--schedule.max_staleness", lag, *overrides)


@pytest.mark.parametrize("steps_off", [0, 1])
def test_without_chance_a_step_is_the_plans(steps_off: int) -> None:
    """Equal lengths, equal engines, no failure: the tenth step ends when the plan says, a checkpoint between.

    One step off the first rollout has nothing to hide behind: the plan's step is that of all others.
    """
    config = lagging(steps_off)
    step = compute.step_compute(config, QWEN, H100, TOKENS, TOKENS)
    save = CHECKPOINT_BYTES * QWEN.num_parameters / (CERTAIN.save_gb_s * 1e9)
    first = 0.0 if steps_off == 0 else step.rollout_s
    seconds = first + 10 * step.step_s + save
    assert play(config, QWEN, H100, (seconds + 1e-3) / 3600, TOKENS, TOKENS, CERTAIN).num_steps == 10
    assert play(config, QWEN, H100, (seconds - 1e-3) / 3600, TOKENS, TOKENS, CERTAIN).num_steps == 9


def test_a_failure_takes_the_work_since_the_last_checkpoint() -> None:
    """The time lost to a failure is that of an exponential law cut off at the interval L between checkpoints:

    1/rate - L / (exp(rate L) - 1) on average. 4 standard errors over some 400 failures.
    """
    config = recipe("--checkpoint.every", "4")
    step = compute.step_compute(config, QWEN, H100, TOKENS, TOKENS)
    interval = 4 * step.step_s + CHECKPOINT_BYTES * QWEN.num_parameters / (CERTAIN.save_gb_s * 1e9)
    rate = 1 / (3 * interval)
    chance = replace(CERTAIN, gpu_hours_per_failure=config.training.num_ranks / rate / 3600, restart_s=0.0)
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"placement": "colocated"})})
    day = play(config, QWEN, H100, 400 / rate / 3600, TOKENS, TOKENS, chance)
    mean = 1 / rate - interval / math.expm1(rate * interval)
    assert 300 < day.num_failures < 500 and day.down_s == 0
    # At most one checkpoint interval of work ends at a failure that came while another was under way.
    assert day.lost_s / day.num_failures == pytest.approx(mean, abs=4 * interval / math.sqrt(12 * day.num_failures))


@pytest.mark.parametrize("steps_off", [0, 2])
def test_the_hours_add_up(steps_off: int) -> None:
    """Stages, lost work and restarts leave less than one step of the hours; every step that counts is in the stages."""
    config = lagging(steps_off)
    chance, hours = Chance(gpu_hours_per_failure=20.0, restart_s=100.0), 3.0
    day = play(config, QWEN, H100, hours, 300, TOKENS, chance)
    rest = 3600 * hours - sum(day.stages.values()) - day.lost_s - day.down_s
    assert day.num_failures > 5 and day.num_engine_failures > 0 and day.lost_s > 0 and day.down_s > 0
    assert 0 <= rest < 5 * 3600 * hours / day.num_steps
    assert day == play(config, QWEN, H100, hours, 300, TOKENS, chance)
    assert day != play(config, QWEN, H100, hours, 300, TOKENS, chance, seed=1)


def test_every_chance_costs_steps() -> None:
    """Drawn lengths, unequal engines and failures: each leaves fewer steps, alone and by its own share."""
    config = recipe()

    def steps(**chances: float | bool) -> int:
        return play(config, QWEN, H100, 8.0, 300, TOKENS, replace(CERTAIN, **chances)).num_steps

    assert steps(is_length_drawn=True) < steps() and steps(slow_std=0.3) < steps()
    assert steps(gpu_hours_per_failure=20.0) < steps(gpu_hours_per_failure=200.0) < steps()


def test_scenarios_change_one_thing() -> None:
    """Each scenario differs from the recipe in one block or one chance, and its sentence counts the hours."""
    config = recipe()
    first, *others = what_if.scenarios(config, Chance())
    for one in others:
        blocks = [name for name in type(config).model_fields if getattr(one.config, name) != getattr(config, name)]
        assert len(blocks) + (one.chance != first.chance) == 1, one.words
    assert len({one.words for one in others}) == len(others) == 11
    day = play(config, QWEN, H100, 2.0, 300, TOKENS)
    assert what_if.sentence(day).startswith(f"{day.num_steps} steps in 2 hours, ")
    assert "too few" in what_if.sentence(play(config, QWEN, H100, 1e-3, 300, TOKENS))


def alone(chance: Chance, lost_after: float, *overrides: str) -> tuple[_Play, float, float]:
    """A rollout of one engine that decodes the 8 responses of a prompt at a time, lost after so many of the 8 waves;
    the seconds of the rollout and of a wave."""
    separate = ("--cluster.placement", "separate", "--rollout.num_engines", "1", "--rollout.max_num_seqs", "8")
    config = recipe(*separate, *overrides)
    played = _Play(config, QWEN, H100, (TOKENS, TOKENS), chance, 0, Day(24.0))
    wave = TOKENS * compute.decode_step_seconds(config, QWEN, H100, 8, TOKENS / 2)
    played.engines.failure[0] = lost_after * wave
    played.env.run(played.env.process(played.engines.rollout(0)))
    return played, played.env.now, wave


@pytest.mark.parametrize("wave_lost", [1, 8])
def test_a_lost_engine_loses_what_was_in_flight(wave_lost: int) -> None:
    """Lost in the middle of a wave, an engine takes the restart and half a wave more, whichever wave it was; with a
    fixed share it takes all that it had sampled once more."""
    after = wave_lost - 0.5
    played, seconds, wave = alone(CERTAIN, after)
    assert seconds == pytest.approx(8.5 * wave + CERTAIN.engine_restart_s, rel=1e-12)
    assert played.day.num_engine_failures == 1 and played.day.idle_s == 0
    _, fixed, _ = alone(replace(CERTAIN, has_fixed_shares=True), after)
    assert fixed == pytest.approx((8 + after) * wave + CERTAIN.engine_restart_s, rel=1e-12)


def test_another_engine_takes_what_a_lost_one_had() -> None:
    """Of two engines one is lost at the start of a restart longer than the rollout: the other samples all prompts."""
    config = recipe("--cluster.placement", "separate", "--rollout.max_num_seqs", "8")
    chance = replace(CERTAIN, engine_restart_s=1e6)
    played = _Play(config, QWEN, H100, (TOKENS, TOKENS), chance, 0, Day(24.0))
    wave = TOKENS * compute.decode_step_seconds(config, QWEN, H100, 8, TOKENS / 2)
    played.engines.failure[0] = 0.0
    process = played.env.process(played.engines.rollout(0))
    played.env.run(until=8.001 * wave)
    assert process.is_alive  # until the lost engine is back: the next push needs it
    played.env.run(process)
    assert played.env.now == pytest.approx(1e6, rel=1e-12)
    assert played.day.idle_s == pytest.approx((1e6 - 8 * wave) / 2, rel=1e-9)


def test_an_idle_engine_takes_what_a_lost_one_had() -> None:
    """Of two engines one has ended its only prompt when the other is lost in the middle of its own: it begins that at
    once, and the rollout ends with the restart."""
    config = recipe("--cluster.placement", "separate", "--algorithm.batch.num_prompts", "2")
    chance = replace(CERTAIN, engine_restart_s=1e6)
    played = _Play(config, QWEN, H100, (TOKENS, TOKENS), chance, 0, Day(24.0))
    played.engines.lengths = lambda step: [TOKENS] * 8 + [TOKENS // 4] * 8
    whole = TOKENS * compute.decode_step_seconds(config, QWEN, H100, 8, TOKENS / 2)
    played.engines.failure[0] = 0.5 * whole
    played.env.run(played.env.process(played.engines.rollout(0)))
    assert played.env.now == pytest.approx(0.5 * whole + 1e6, rel=1e-12)
    assert played.day.idle_s == pytest.approx((played.env.now - 1.25 * whole) / 2, rel=1e-9)


def test_prompts_to_free_engines_save_the_wait() -> None:
    """On unequal engines with many more prompts than places, engines wait less than with fixed shares, and at most for
    the last pieces: of equal lengths each engine ends within the time of the prompts that it may hold."""
    config = recipe("--algorithm.batch.num_prompts", "64", "--rollout.max_num_seqs", "8")
    days = []
    for is_fixed in (False, True):
        chance = replace(CERTAIN, slow_std=0.3, has_fixed_shares=is_fixed)
        played = _Play(config, QWEN, H100, (TOKENS, TOKENS), chance, 0, Day(24.0))
        played.env.run(played.env.process(played.engines.rollout(0)))
        days.append(played.day)
    free, fixed = days
    wave = TOKENS * compute.decode_step_seconds(config, QWEN, H100, 8, TOKENS / 2)
    assert free.sampled_s < fixed.sampled_s and free.idle_s < fixed.idle_s / 2
    assert 2 * free.idle_s < 2 * wave * math.exp(3 * 0.3)


def test_engines_wait_for_the_last_one() -> None:
    """The time that engines wait is a mean over them: one of two that finishes at half of the rollout waits half of it.

    Prompts of equal length are on one engine and half as long ones on the other, as there is room for all.
    """
    config = recipe()
    played = _Play(config, QWEN, H100, (TOKENS, TOKENS), CERTAIN, 0, Day(24.0))
    played.engines.lengths = lambda step: ([TOKENS] * 8 + [TOKENS // 2] * 8) * 4
    played.env.run(played.env.process(played.engines.rollout(0)))
    assert played.day.idle_s == pytest.approx(played.env.now / 4, rel=1e-12)


@pytest.mark.parametrize("hours", [0.0, math.nan, math.inf])
def test_impossible_hours_are_an_error(hours: float) -> None:
    with pytest.raises(ValueError, match="--simulate: expected more than 0 and at most 8760 hours, got"):
        play(recipe(), QWEN, H100, hours, 300, TOKENS)


def test_a_run_of_steps_ends_with_a_checkpoint() -> None:
    """Seven steps are the plan's seven, a checkpoint after the fifth and the last; one step off the last one has
    nothing to sample beside it, so it takes a rollout less than seven that overlap and one before them."""
    config = recipe()
    step = compute.step_compute(config, QWEN, H100, TOKENS, TOKENS)
    save = CHECKPOINT_BYTES * QWEN.num_parameters / (CERTAIN.save_gb_s * 1e9)
    day = play_steps(config, QWEN, H100, 7, TOKENS, TOKENS, CERTAIN)
    assert day.num_steps == 7
    assert 3600 * day.hours == pytest.approx(7 * step.step_s + 2 * save, rel=1e-9)  # a sum of some thousand events
    off = play_steps(lagging(1), QWEN, H100, 7, TOKENS, TOKENS, CERTAIN)
    whole = step.rollout_s + 6 * max(step.rollout_s, step.training_s) + step.training_s + 7 * step.push_s + 2 * save
    assert 3600 * off.hours == pytest.approx(whole, rel=1e-9)


def test_rates_scale_their_own_stage() -> None:
    """A stage at rate r takes r times as long, and no other stage changes; lengths are drawn."""
    config, chance = recipe(), replace(CERTAIN, is_length_drawn=True)
    plain = play_steps(config, QWEN, H100, 5, 300, TOKENS, chance)
    rates = Rates(rollout=2.0, training=3.0, push=5.0, checkpoint=7.0)
    scaled = play_steps(config, QWEN, H100, 5, 300, TOKENS, chance, rates=rates)
    for stage, rate in vars(rates).items():
        assert scaled.stages[stage] == pytest.approx(rate * plain.stages[stage], rel=1e-9), stage


def test_rates_are_measured_over_planned(tmp_path: Path) -> None:
    """A run whose records say twice the plan's seconds has rates of 2; its lengths are those of its traces. A save's
    seconds count once, all of those recorded until the next save, and steps without one do not count.
    """
    config = recipe("--num_steps", "5", "--checkpoint.every", "2")
    tokens = (40, 60)
    plain = simulated(config, QWEN, H100, tokens, Rates())
    folder = RunFolder(tmp_path)
    saves = (1e-6, 1e-6, 1.5, 0.5, 2.0)  # the first is written while the run continues, the second at once
    for number, save in enumerate(saves, start=1):
        row = {"timing_s/step": 2 * plain["step"], "timing_s/push": 2 * plain["push"]}
        row |= {"timing_s/old_log_prob": 0.5 * plain["training"], "timing_s/update_actor": 1.5 * plain["training"]}
        folder.append_metrics(number, row | {"timing_s/save_checkpoint": save * plain["checkpoint"]})
    with pytest.raises(
        ValueError, match="expected a run with the time of a step and a trace, got 5 times and 0 traces"
    ):
        measured(folder, config)
    one = made_up_trace(DEMO[0], 5, torch.Generator().manual_seed(0))
    folder.save_trace(5, one)
    found = measured(folder, config)
    assert found.tokens == (round(one.offsets.diff().double().mean().item()), int(one.offsets.diff().max()))
    rates = rates_of(config, QWEN, H100, replace(found, tokens=tokens))
    assert vars(rates) == pytest.approx(dict.fromkeys(vars(rates), 2.0), rel=1e-9)
    with pytest.raises(ValueError, match=r"schedule.steps_off: expected 0 of a run to take rates from, got 1"):
        rates_of(lagging(1), QWEN, H100, found)


def test_a_failure_ends_the_rollout_under_way() -> None:
    """The engines of a rollout that a rank's death interrupts stop, so that none of it is counted later."""
    config = recipe()
    whole = compute.step_compute(config, QWEN, H100, TOKENS, TOKENS).rollout_s
    played = _Play(config, QWEN, H100, (TOKENS, TOKENS), CERTAIN, 0, Day(24.0))
    played.engines.lengths = lambda step: [TOKENS, TOKENS // 2] * 32
    main = played.env.process(played.run())
    played.env.run(until=whole / 3)
    main.interrupt()
    played.env.run(until=whole / 3 + CERTAIN.restart_s / 2)
    assert played.day.num_failures == 1 and played.day.idle_s == 0
    played.env.run(until=whole + CERTAIN.restart_s / 2)  # past the end that it would have had
    assert played.day.idle_s == 0


@pytest.mark.parametrize("steps_off", [0, 2])
def test_the_wait_is_a_share_of_the_rollouts(steps_off: int) -> None:
    """The sentence divides by the seconds of all rollouts, those beside training too: never above 100%."""
    day = play(lagging(steps_off), QWEN, H100, 3.0, 300, TOKENS, rates=Rates(training=300.0))
    assert 0 < day.idle_s < day.sampled_s
    assert f"in {day.idle_s / day.sampled_s:.0%} of the rollout. " in what_if.sentence(day)
    if steps_off == 0:
        assert day.sampled_s == pytest.approx(day.stages["rollout"], rel=1e-9)
    else:
        assert day.stages["rollout"] < day.idle_s


def test_checkpoints_are_at_multiples_of_every() -> None:
    """As the recorder's: after step 2 by the minutes, then after 5, not after 7; the minutes count from each save."""
    config = recipe()
    step = compute.step_compute(config, QWEN, H100, TOKENS, TOKENS)
    save = CHECKPOINT_BYTES * QWEN.num_parameters / (CERTAIN.save_gb_s * 1e9)
    timed = recipe("--checkpoint.every", "5", "--checkpoint.every_minutes", str(1.5 * step.step_s / 60))
    played = _Play(timed, QWEN, H100, (TOKENS, TOKENS), CERTAIN, 0, Day(24.0))
    saved, number = [], 0
    while number < 10:
        number += played.env.run(played.env.process(played.until_saved(number)))
        saved.append(number)
    assert saved == [2, 4, 5, 7, 9, 10]
    assert played.env.now == pytest.approx(10 * step.step_s + 6 * save, rel=1e-9)
