"""Laws of a simulated schedule in which engines sample several batches ahead: when that saves time, and how much."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scaled.plan import compute
from scaled.plan.day import Chance, Day, Rates
from scaled.plan.host_memory import stored_bytes, stored_on
from scaled.plan.machines import machines
from scaled.plan.simulation import _Play, play_steps
from tests.scaled.plan_world import QWEN
from tests.scaled.test_plan_simulation import CERTAIN, H100, TOKENS, lagging

ROOMY = ("--checkpoint.every", "1000", "--cluster.object_store_gib", "1000")
"""No checkpoint but the last, and room for all versions that wait."""

MEAN = 300


def seconds(steps_off: int, num_steps: int, chance: Chance, mean: int = TOKENS, rates: Rates | None = None) -> float:
    config = lagging(steps_off, *ROOMY)
    return 3600 * play_steps(config, QWEN, H100, num_steps, mean, TOKENS, chance, rates=rates).hours


def balanced(mean: int) -> Rates:
    """Rates at which training takes as long as the rollout of mean length."""
    step = compute.step_compute(lagging(1, *ROOMY), QWEN, H100, mean, TOKENS)
    return Rates(training=step.rollout_s / step.training_s)


@pytest.mark.parametrize("rate", [0.5, 1.0, 2.0])
def test_equal_times_gain_nothing_from_a_second_step(rate: float) -> None:
    """Where every rollout and every update take the same time, a step is max(rollout, training) + push, whatever the
    lag: ten more steps take ten times that."""
    step = compute.step_compute(lagging(1, *ROOMY), QWEN, H100, TOKENS, TOKENS)
    rates = Rates(training=rate * step.rollout_s / step.training_s)
    for steps_off in (1, 2, 4):
        ten = seconds(steps_off, 30, CERTAIN, rates=rates) - seconds(steps_off, 20, CERTAIN, rates=rates)
        assert ten == pytest.approx(10 * (max(1.0, rate) * step.rollout_s + step.push_s), rel=1e-9), steps_off


def test_unequal_rollouts_gain_up_to_their_mean() -> None:
    """Where rollouts of unequal length meet training of the same mean, a longer lag takes less time, but the engines'
    and the ranks' own work, each without a wait for the other, is a floor."""
    chance, num, rates = replace(CERTAIN, is_length_drawn=True, slow_std=0.3), 60, balanced(MEAN)
    found = {k: seconds(k, num, chance, MEAN, rates) for k in (0, 1, 2, 4, 16)}
    assert list(found.values()) == sorted(set(found.values()), reverse=True)
    played = _Play(lagging(1, *ROOMY), QWEN, H100, (MEAN, TOKENS), chance, 0, Day(0.0), rates)
    training = sum(played.training_s(step) for step in range(num)) + num * played.push_s
    played.env.run(played.env.process(_all(played, num)))
    engines = {k: played.env.now + (num - 1 - k) * played.push_s for k in (2, 4, 16)}
    floors = {k: max(training, engines[k]) + played.save_s for k in engines}
    assert all(found[k] >= floors[k] for k in floors)
    # Of what one step off waits above the floor, four steps off leave less than half (49 s of 153).
    assert found[4] - floors[4] < (found[1] - floors[4]) / 2


def _all(played: _Play, num: int):
    for step in range(num):
        yield from played.engines.rollout(step)


@pytest.mark.parametrize("steps_off", [1, 2, 3])
def test_batches_of_a_checkpoint_are_not_sampled_again(steps_off: int) -> None:
    """A rank's death after a checkpoint costs the work since then, not the rollouts that the checkpoint has: a run that
    dies at once afterwards takes the time of the restart longer."""
    config = lagging(steps_off, "--checkpoint.every", "5")
    played = _Play(config, QWEN, H100, (TOKENS, TOKENS), CERTAIN, 0, Day(24.0))
    main = played.env.process(played.run())
    alone = _Play(config, QWEN, H100, (TOKENS, TOKENS), CERTAIN, 0, Day(24.0))
    alone.env.process(alone.run())
    while played.day.num_steps < 5 or not played.saved:
        played.env.step()
    saved = played.env.now
    played.env.run(saved + 1e-6)
    main.interrupt()
    for one in (played, alone):
        while one.day.num_steps < 10:
            one.env.step()
    assert played.day.num_failures == 1
    assert played.env.now == pytest.approx(alone.env.now + 1e-6 + CERTAIN.restart_s, rel=1e-9)


def test_a_push_counts_for_every_version_in_the_store() -> None:
    """Two steps off, a second version waits in the object stores of the ranks' four machines, beside the version that
    they sent: a store with room for one version and what the step leaves there spills."""
    of_ranks, of_engines = machines(lagging(2), QWEN)
    two = stored_on(of_ranks, lagging(2), QWEN, MEAN, has_updates=True)
    assert two["weights that wait for engines"] == two["the weights of the last push"]
    whole = stored_on(of_engines, lagging(2), QWEN, MEAN, has_updates=True)["the weights of the last push"]
    assert two["the weights of the last push"] == -(-whole // 4)
    one = stored_bytes(lagging(1), QWEN, MEAN)
    room = ("--cluster.object_store_gib", str(sum(one.values()) / 2**30))
    rates = [compute.push_rate(lagging(k, *room), QWEN, MEAN) for k in (1, 2)]
    assert rates == [compute.PUSH_GB_S, compute.PUSH_SPILLED_GB_S]
