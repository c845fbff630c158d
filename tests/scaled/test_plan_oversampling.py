"""Over-sampling in the plan: a rollout that ends early, what it wastes, and where the responses in progress lie."""

from __future__ import annotations

from statistics import mean
from typing import Literal

import numpy as np
import pytest
import torch

from lab.backlog import to_tensors
from scaled.config import ScaledRun
from scaled.plan import compute, flops, payloads, records
from scaled.plan.hardware import gpu_named
from scaled.plan.in_progress import rollout_load
from scaled.plan.machines import machines
from scaled.plan.passes import quantiles
from scaled.plan.summary import assumptions, make_plan, step_payloads
from tests.scaled.plan_world import QWEN, loaded
from theory.contracts import Prompt, Response, Rollouts
from theory.oversampling import Backlog, StartedGroup
from theory.routing.packed_rows import offsets_of
from theory.routing.record import RoutingRecord, index_dtype
from theory.streams import derive_seed
from theory.top_tokens import TopTokens

H200 = gpu_named("H200-141GB")
MEAN, P, G = 10_000, 64, 8


def recipe(extra: int, unfinished: str = "keep", *words: str) -> ScaledRun:
    """64 prompts of 8 responses under R3, `extra` more in progress, none where that is 0."""
    over = f"{{extra_prompts: {extra}, unfinished: {unfinished}, max_staleness: 8}}" if extra else "null"
    batch = ("--algorithm.batch.num_prompts", str(P), "--algorithm.batch.num_responses", str(G))
    mode = ("--algorithm.replay.mode", "R3", "--rollout.routes", "capture", "--schedule.max_staleness", "8")
    words = (*mode, *batch, "--algorithm.oversampling", over, *words)
    return loaded("qwen3_30b_a3b", *words)


def played(extra: int, unfinished: Literal["keep", "drop"], longest: int, calls: int = 60) -> tuple[float, float]:
    """Mean decoding steps and sampled tokens of a call, group by group, after the first ten."""
    draws, open_groups = np.random.default_rng(derive_seed(0, "oversampling", extra)), []
    law = np.array(quantiles(draws.random(20_000), MEAN, longest), dtype=float)
    steps, tokens = [], []
    for _ in range(calls):
        while len(open_groups) < P + extra:
            open_groups.append(draws.choice(law, G))
        cut = sorted(group.max() for group in open_groups)[P - 1]
        steps.append(cut)
        tokens.append(sum(group.clip(0, cut).sum() for group in open_groups))
        left = [group - cut for group in open_groups if group.max() > cut]
        open_groups = left if unfinished == "keep" else []
    return mean(steps[10:]), mean(tokens[10:])


@pytest.mark.parametrize("unfinished", ["keep", "drop"])
@pytest.mark.parametrize("extra", [16, 64, 128])
def test_a_rollout_lasts_as_long_as_one_that_is_played(extra: int, unfinished: Literal["keep", "drop"]) -> None:
    """Decoding steps and sampled tokens are those of drawn groups, within a tenth; without extra prompts all wait."""
    config = recipe(extra, unfinished)
    longest = config.rollout.max_model_len
    steps, tokens = played(extra, unfinished, longest)
    found = rollout_load(config, MEAN, longest)
    assert found.responses == (P + extra) * G
    assert found.least_steps == pytest.approx(steps, rel=0.1)
    assert found.sampled * MEAN == pytest.approx(tokens, rel=0.05)
    alone = rollout_load(recipe(0), MEAN, longest)
    assert (alone.responses, alone.sampled, alone.least_steps) == (P * G, P * G, 32_768)


def test_seconds_and_flops_follow() -> None:
    """Keeping shortens the rollout at equal FLOPs; dropping shortens it less, and computes what it drops as well."""
    drops = recipe(64, "drop")
    plain, keep, drop = (compute.step_compute(config, QWEN, H200, MEAN) for config in (recipe(0), recipe(64), drops))
    assert keep.rollout_s < drop.rollout_s < plain.rollout_s
    assert keep.rollout_flops == plain.rollout_flops
    # What is dropped is at the end of long responses: the contexts that remain are shorter.
    loads = [rollout_load(config, MEAN, drops.rollout.max_model_len) for config in (recipe(0), drops)]
    tokens = [
        load.sampled * MEAN * (flops.matrix_flops(QWEN) + flops.attention_flops(QWEN, load.context + 0.5))
        for load in loads
    ]
    assert [plain.rollout_flops, drop.rollout_flops] == pytest.approx(tokens)
    assert loads[1].context < loads[0].context and drop.rollout_flops > 1.5 * plain.rollout_flops
    few = ("--rollout.max_num_seqs", "1")
    slow, wasteful = (
        compute.rollout_seconds(recipe(64, kind, *few), QWEN, H200, MEAN, 34_816) for kind in ("keep", "drop")
    )
    # One sequence at a time: nothing is gained by more in progress, and what is dropped costs its time.
    assert slow == compute.rollout_seconds(recipe(0, "keep", *few), QWEN, H200, MEAN, 34_816)
    assert wasteful > 1.5 * slow


def test_responses_in_progress_have_routes_where_they_were_sampled() -> None:
    """mu's record grows with the prompts in progress on the machines of engines; those of ranks have what they train
    on."""
    of_ranks, of_engines = machines(recipe(0), QWEN)
    plain, more = (records.routes(of_engines, recipe(n), QWEN, 34_816) for n in (0, 16))
    assert more - plain == 16 * G * payloads.routing_bytes(QWEN, 34_816) // 4
    plain, more = (records.routes(of_ranks, recipe(n), QWEN, 34_816) for n in (0, 16))
    assert plain == more > 0
    plain, more = (step_payloads(recipe(n), QWEN)["mu's routing records, int8"] for n in (0, 16))
    assert more == plain * 80 // 64


def test_a_checkpoints_backlog_is_counted_as_it_is_written() -> None:
    """The bytes of kept responses are those of the tensors that a checkpoint has, up to 8 bytes per response."""
    T, K, num_top = 50, QWEN.experts_per_token, 4
    layers = tuple(QWEN.moe_layers)
    prompt = Prompt("p", (1, 2), "")
    each = tuple(
        Response(prompt, torch.zeros(T, dtype=torch.int64), torch.zeros(T), torch.ones(T, dtype=torch.bool), "abort", 0)
        for _ in range(G)
    )
    R = G * (T + 1)
    ids_RLK = torch.arange(K, dtype=index_dtype(QWEN.num_experts)).expand(R, len(layers), K)
    record = RoutingRecord(ids_RLK, offsets_of([T + 1] * G), layers, QWEN.num_experts)
    top = TopTokens.of(torch.zeros(G * T, QWEN.vocab_size), num_top, offsets_of([T] * G))
    backlog = Backlog(1, (StartedGroup(0, prompt, Rollouts(each, record, top=top)),))
    written = sum(t.nbytes for name, t in to_tensors(backlog).items() if t.numel() >= G * T)
    assert payloads.backlog_bytes(QWEN, G, T, T + 1, num_top) == written


def test_only_what_is_kept_is_in_a_checkpoint() -> None:
    """`extra_prompts` groups, with their routes; dropped ones are in none."""
    name = "kept responses in a checkpoint"
    assert step_payloads(recipe(16), QWEN)[name] == 16 * G * (20 * 32_768 + payloads.routing_bytes(QWEN, 34_816))
    assert name not in step_payloads(recipe(16, "drop"), QWEN) and name not in step_payloads(recipe(0), QWEN)


def test_the_plan_says_it() -> None:
    """One sentence with the responses in progress and what is lost; none without over-sampling."""
    (line,) = (x for x in assumptions(make_plan(recipe(16))) if x.startswith("Over-sampling"))
    assert "80 prompts in progress for 64: 640 responses" in line and "decode together" in line
    (line,) = (x for x in assumptions(make_plan(recipe(64, "drop"))) if x.startswith("Over-sampling"))
    assert "48% of its tokens are dropped" in line
    assert not any(x.startswith("Over-sampling") for x in assumptions(make_plan(recipe(0))))
