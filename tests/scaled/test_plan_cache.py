"""Laws of an engine's key-value cache: the sequences in progress that it holds, and the places that fit a GPU."""

from __future__ import annotations

import re

import numpy as np
import pytest

from scaled.plan import engine_memory, feasibility, in_progress
from scaled.plan.assumptions import sentences
from scaled.plan.compute import step_compute
from scaled.plan.hardware import gpu_named
from scaled.plan.passes import quantiles
from scaled.plan.summary import make_plan
from tests.scaled.plan_world import QWEN
from tests.scaled.test_plan_memory import recipe


def test_a_cache_has_room_for_what_fits():
    """At the number of sequences that the plan names the engine fits its GPU, and with one more it does not; the
    sentence has those of the plan's lengths and of full length. A plan refuses what exceeds the former alone."""
    config, gpu = recipe(), gpu_named("H100-80GB")
    budget, lengths = feasibility.rollout_budget(config, gpu), (10_445, 34_816)
    rooms = [engine_memory.places_that_fit(config, QWEN, budget, own, 4096) for own in (lengths, None)]
    for num, own in zip(rooms, (lengths, None), strict=True):
        configs = [recipe("--rollout.max_num_seqs", str(num + n)) for n in (0, 1)]
        fits, exceeds = (engine_memory.rollout_memory(one, QWEN, own).total for one in configs)
        assert fits <= budget < exceeds
    lines = sentences(config, QWEN, gpu, step_compute(config, QWEN, gpu))
    (line,) = (one for one in lines if "cache" in one)
    assert line.startswith(f"An engine's cache has room for {rooms[0]} sequences in progress 98% of the time, ")
    assert f"and always for {rooms[1]} of 34,816 tokens; rollout.max_num_seqs is 80. Where the cache is full" in line
    plans = [make_plan(recipe("--rollout.max_num_seqs", str(rooms[0] + n))) for n in (0, 1)]
    assert [len(plan.misfits) for plan in plans] == [0, 1]
    none = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_num_batched_tokens": 10**6})})
    assert engine_memory.places_that_fit(none, QWEN, budget, lengths, 4096) == 0


@pytest.mark.parametrize(("mean", "longest"), [(10_445, 34_816), (17_408, 34_816), (700, 1000)])
def test_the_cache_of_what_is_in_progress(mean: int, longest: int) -> None:
    """In 400 rollouts whose places begin empty and are taken again as soon as they are free, the sum of contexts
    exceeds the bound at its worst moment in about 2%: at least once, and in at most 5% (64 places are not quite
    normal)."""
    num, draws = 64, np.random.default_rng(7)
    moments = np.linspace(0, 2 * longest, 65)
    total = np.zeros((400, len(moments)))
    for row in total:
        ends = np.cumsum(np.reshape(quantiles(draws.random(num * 400), mean, longest), (num, 400)), axis=1)
        for own in ends:
            begun = np.concatenate([[0], own])
            row += moments - begun[np.searchsorted(own, moments, side="right")]
    bound = in_progress.cached_tokens(num, mean, longest, longest)
    assert 1 <= (total > bound).sum(axis=0).max() <= 20


def test_the_cache_has_at_least_one_whole_sequence() -> None:
    """vLLM does not start without; and no more than all at full length, which is the bound where all have it."""
    assert in_progress.cached_tokens(1, 100, 1000, 4000) == 4000
    assert in_progress.cached_tokens(64, 1000, 1000, 1000) == pytest.approx(64_000, rel=0.01)
    assert in_progress.cached_tokens(2, 900, 1000, 1000) <= 2000


def test_a_smaller_share_that_is_offered_holds_the_sequences_in_progress() -> None:
    """Where ranks need more of a colocated GPU, the line offers a share for vLLM by the same lengths as the plan's."""
    words = ("--cluster.placement", "colocated", "--training.num_ranks", "8", "--rollout.num_engines", "4")
    words += ("--cluster.num_nodes", "1", "--rollout.gpu_memory_utilization", "0.8", "--cluster.gpu", "H200-141GB")
    words += ("--training.offload", "[gradients]")
    (line,) = make_plan(recipe(*words)).misfits
    assert line.startswith("training, while engines are awake: ")
    (share,) = re.findall(r"fits with rollout\.gpu_memory_utilization (0\.\d+) ", line)
    fits = recipe(*words, "--rollout.gpu_memory_utilization", share)
    assert make_plan(fits).misfits == []
    budget = feasibility.rollout_budget(fits, gpu_named("H200-141GB"))
    assert engine_memory.rollout_memory(fits, QWEN).total > budget  # at full length it would not fit
