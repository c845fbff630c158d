"""Laws of a call of several engines that ends once enough groups are complete, on a real Ray with real processes.

test_cluster_pieces.py has them at any pace, with engines that count; those inside here are the sandbox's.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from scaled.cluster.ray_cluster import Cluster
from scaled.cluster.rollout_group import RolloutGroup
from tests.contracts import worlds
from tests.scaled import cluster_world as world
from tests.scaled.ray_marks import RAY
from tests.scaled.test_cluster_engines import DEFECT, meanwhile
from theory.contracts import Draw, Sampling

pytestmark = RAY


def early_end(num_top: int = 0) -> Sampling:
    """Five groups of nine responses, three of them enough."""
    order = [0, 0, 1, 2, 2, 2, 3, 4, 4]
    draws = tuple(Draw(seed=100 + b, max_tokens=60, group=group) for b, group in enumerate(order))
    return Sampling(max_tokens=60, draws=draws, seed=5, enough=3, num_top=num_top)


def test_a_killed_engine_loses_only_what_was_in_flight_of_an_early_end(cluster: Cluster, tmp_path: Path) -> None:
    """Two engines with a group of three each in flight, killed (-9) when a group has ended: of all responses only those
    in flight are asked again, and what the call leaves is the same."""
    hold, asked = tmp_path / "hold", tmp_path / "asked"
    build = partial(world.build_engine, DEFECT, hold, None, asked)
    group = RolloutGroup(cluster, build, 2, max_num_seqs=2, bucket_bytes=world.BUCKET, timeout_s=60.0, max_restarts=2)
    group.load_weights(worlds.training_engine(worlds.model()).named_tensors(), version=7)
    killed: dict[str, list[str]] = {}

    def kill() -> None:
        end = time.monotonic() + 60
        while not asked.exists() or len(asked.read_text().splitlines()) < 3:
            assert time.monotonic() < end, "there were not so many pieces"
            time.sleep(0.002)
        hold.mkdir()
        while len(list(hold.iterdir())) < 2:
            assert time.monotonic() < end, "all groups had been sampled"
            time.sleep(0.02)
        killed.update({pid: ids for pid, *ids in map(str.split, asked.read_text().splitlines())})
        pids = [int(path.name) for path in hold.iterdir()]
        hold.rename(hold.with_name("released"))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    prompts = worlds.prompts(54)
    sampling = replace(early_end(), draws=tuple(Draw(100 + b, 60, group=b // 3) for b in range(54)), enough=12)
    found = meanwhile(lambda: group.generate(prompts, sampling), kill)
    group.close()
    assert worlds.same(found, worlds.rollout_engine(DEFECT, worlds.model()).generate(prompts, sampling))
    assert group.restarts == 2
    begun = [prompt for line in asked.read_text().splitlines() for prompt in line.split()[1:]]
    again = Counter(begun) - Counter(prompt.id for prompt in prompts)
    assert again == Counter(prompt for ids in killed.values() for prompt in ids) and len(again) == 6


def test_an_early_end_does_not_depend_on_the_number_of_engines(cluster: Cluster) -> None:
    """Two engines that each sample whole groups give, to the bit, what one engine gives that decodes all side by side
    until the third group is complete: tokens, routes, mu's likeliest tokens; what an engine had beyond is cut off."""
    engines = RolloutGroup(
        cluster, partial(world.build_engine, DEFECT), 2,
        max_num_seqs=128, bucket_bytes=world.BUCKET, timeout_s=60.0, max_restarts=0,
    )  # fmt: skip
    engines.load_weights(worlds.training_engine(worlds.model()).named_tensors(), version=7)
    local, prompts = worlds.rollout_engine(DEFECT, worlds.model()), worlds.prompts(9)
    whole = local.generate(prompts, replace(early_end(3), enough=0))
    assert [len(r.tokens) for r in whole.responses] == [5, 54, 60, 1, 20, 33, 60, 4, 39]
    found = engines.generate(prompts, early_end(3))
    engines.close()
    assert [(b, len(r.tokens)) for b, r in enumerate(found.responses) if r.finish == "abort"] == [(2, 54), (6, 54)]
    expected = local.generate(prompts, early_end(3))
    assert worlds.same(found, expected) and found.experts.num_rows_B == expected.experts.num_rows_B
    assert torch.equal(found.top.ids, expected.top.ids) and torch.equal(found.top.offsets, expected.top.offsets)
