"""Laws of simulated over-sampling: every group is trained on once, waits or is given up; rollouts end when they may."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from statistics import fmean

import numpy as np
import pytest

from scaled.plan.day import Day
from scaled.plan.passes import quantiles
from scaled.plan.simulated_engines import Events
from scaled.plan.simulated_groups import Groups
from scaled.plan.simulation import _Play, play_steps
from tests.scaled.plan_world import QWEN
from tests.scaled.test_plan_simulation import CERTAIN, H100, TOKENS, recipe
from theory.algorithm import Oversampling

P, G, MEAN = 8, 8, 300
DRAWN = replace(CERTAIN, is_length_drawn=True)


def sampled(extra: int, unfinished: str = "keep", max_staleness: int = 100, *words: str) -> _Play:
    """A play of that recipe; without extra prompts none of the block."""
    over = f"{{extra_prompts: {extra}, unfinished: {unfinished}, max_staleness: {max_staleness}}}" if extra else "null"
    lag = ("--schedule.max_staleness", str(max_staleness), "--rollout.routes", "capture")
    config = recipe("--algorithm.replay.mode", "R3", "--algorithm.oversampling", over, *lag, *words)
    return _Play(config, QWEN, H100, (MEAN, TOKENS), DRAWN, 0, Day(0.0))


def rollouts(played: _Play, num: int) -> list[list[int]]:
    """The batches of the first steps, rollouts alone."""

    def all_() -> Events:
        for step in range(num):
            yield from played.engines.rollout(step)

    played.env.run(played.env.process(all_()))
    return [played.engines.lengths(step) for step in range(num)]


@pytest.mark.parametrize("engines", ["1", "2", "3"])
def test_kept_groups_are_trained_on_once_and_have_the_laws_mean(engines: str) -> None:
    """Batches are of whole groups, oldest first, each once; what is not in one waits, and lengths are as drawn.

    4 standard errors of the mean of 40 x 64 lengths; dropping the tail is far below that.
    """
    played = sampled(4, "keep", 100, "--rollout.num_engines", engines)
    batches = rollouts(played, 40)
    groups = played.engines.groups
    assert groups is not None and all(len(batch) == P * G for batch in batches)
    trained = [tuple(batch[i : i + G]) for batch in batches for i in range(0, P * G, G)]
    waiting = [tuple(group.lengths) for group in groups.waiting]
    begun = [tuple(groups.draw(number)) for number in range(groups.next_number)]
    assert sorted(trained + waiting) == sorted(begun) and len(waiting) <= 4
    law = np.array(quantiles(np.random.default_rng(1).random(20_000), MEAN, TOKENS))
    error = law.std() / math.sqrt(len(batches) * P * G)
    assert fmean(map(fmean, batches)) == pytest.approx(law.mean(), abs=4 * error)
    dropped = rollouts(sampled(16, "drop", 100, "--rollout.num_engines", engines), 40)
    assert fmean(map(fmean, dropped)) < law.mean() - 8 * error


def test_a_rollout_lasts_until_enough_groups_are_complete() -> None:
    """One engine with room for all: it decodes the steps of group after group, played by hand, to the token."""
    played = sampled(4, "keep", 100, "--rollout.num_engines", "1", "--rollout.max_num_seqs", "1000")
    steps: list[int] = []
    played.engines.decode = lambda active: 1.0  # a second per token, whatever the number of responses
    for step in range(20):
        start = played.env.now
        played.env.run(played.env.process(played.engines.rollout(step)))
        steps.append(round(played.env.now - start))
    groups, open_ = played.engines.groups, []
    assert groups is not None
    number, wanted = 0, []
    for _ in range(20):
        while len(open_) < P + 4:
            open_.append(np.array(groups.draw(number)))
            number += 1
        cut = sorted(group.max() for group in open_)[P - 1]
        wanted.append(int(cut))
        ended = [group.max() <= cut for group in open_]
        # At most P are taken; ties wait, complete, and shorten no rollout here.
        assert sum(ended) == P
        open_ = [group - cut for group, has_ended in zip(open_, ended, strict=True) if not has_ended]
    assert steps == wanted


def test_batches_depend_on_no_engine() -> None:
    """Rollouts of one engine and of three that differ in speed, with few places and with losses, have the batches of
    one that decodes all at once, and leave the same groups: `test_cluster_pieces` has the law of the cluster's."""
    found = []
    separate = ("--cluster.placement", "separate")
    for engines, places, std, lost in (("1", "1000", 0.0, False), ("1", "16", 0.0, False), ("3", "8", 0.5, True)):
        words = (*separate, "--rollout.num_engines", engines, "--rollout.max_num_seqs", places)
        played = sampled(8, "keep", 100, *words)
        played.engines.chance = replace(DRAWN, slow_std=std)
        if lost:
            played.engines.failure[1] = 1.0
        batches = rollouts(played, 20)
        assert played.engines.groups is not None and played.day.num_engine_failures == lost
        found.append((batches, [(group.number, group.left) for group in played.engines.groups.waiting]))
    assert found[0] == found[1] == found[2]


def test_groups_too_old_are_given_up() -> None:
    """With a bound of one version no waiting group is older; without one in reach some are."""
    ages = {}
    for bound in (1, 100):
        played, found = sampled(24, "keep", bound), []
        for step in range(40):
            played.env.run(played.env.process(played.engines.rollout(step)))
            assert played.engines.groups is not None
            found += [step + 1 - group.version for group in played.engines.groups.waiting]
        ages[bound] = max(found)
    assert ages[1] == 1 < ages[100]


def test_engines_that_sample_ahead_count_their_lag() -> None:
    """Two steps off, a group's first tokens are two versions old when trained on: at a bound of three it waits once."""
    words = ("--schedule.steps_off", "2", "--cluster.placement", "separate")
    played, found = sampled(4, "keep", 3, *words), []
    for step in range(40):
        played.env.run(played.env.process(played.engines.rollout(step)))
        assert played.engines.groups is not None
        found += [step + 1 - group.version for group in played.engines.groups.waiting if step > 2]
    assert set(found) == {3}


def test_extra_prompts_shorten_a_run() -> None:
    """Kept extra prompts save time, dropped ones less."""
    hours = {
        kind: play_steps(played.config, QWEN, H100, 20, MEAN, TOKENS, DRAWN).hours
        for kind, played in {"none": sampled(0), "keep": sampled(8), "drop": sampled(8, "drop")}.items()
    }
    assert hours["keep"] < hours["drop"] < hours["none"]


def training(played: _Play, trained: dict[int, list[int]], step: int) -> float:
    """The play's seconds of that step, whose lengths are noted."""
    trained[step] = played.engines.lengths(step)
    return played.training_of(tuple(trained[step]))


def test_a_failure_repeats_the_rollouts_since_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that loses ranks trains on the batches of one that does not, step by step, though it samples some twice;
    batches from before the last checkpoint are forgotten."""
    config = sampled(8, "keep", 100, "--cluster.placement", "colocated").config
    found, batches = [], []
    for gpu_hours in (math.inf, 20.0):
        chance = replace(DRAWN, gpu_hours_per_failure=gpu_hours, restart_s=60.0)
        played = _Play(config, QWEN, H100, (MEAN, TOKENS), chance, 0, Day(3.0))
        trained: dict[int, list[int]] = {}
        monkeypatch.setattr(played, "training_s", partial(training, played, trained))
        main = played.env.process(played.run())
        played.env.process(played.ranks_die(main))
        played.env.run(until=3600 * 3.0)
        found.append(played)
        batches.append(trained)
    calm, failing = found
    assert failing.day.num_failures > 3 and 10 < failing.day.num_steps < calm.day.num_steps
    steps = range(failing.day.num_steps)
    assert [batches[1][step] for step in steps] == [batches[0][step] for step in steps]
    # No more are kept than since the last checkpoint, every fifth step.
    assert all(len(played.engines._batches) <= 5 + 1 for played in found)


def test_a_checkpoint_keeps_the_groups_as_they_were() -> None:
    """Later rollouts change no copy."""
    groups = Groups(lambda n: [10 + n, 20], 2, Oversampling(extra_prompts=1, max_staleness=9))
    ((own, enough),) = groups.begin(0, 1)
    copy = groups.copied()
    assert enough == 2 and [group.number for group in own] == [0, 1, 2]
    for group in own[:2]:
        group.left[:] = [0, 0]
    assert groups.end(1) == [10, 20, 11, 20] and len(groups.waiting) == 1
    assert [group.left for group in copy.waiting] == [[10, 20], [11, 20], [12, 20]] and copy.next_number == 3
