"""The longest wait for an engine in a rollout, which `rollout.timeout_s` must exceed: it is that of a piece."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from scaled.pieces import Handout, in_pieces
from scaled.plan import compute
from scaled.plan.hardware import gpu_named
from scaled.plan.search import search
from scaled.plan.summary import make_plan
from scaled.plan.waits import largest_piece, longest_wait
from tests.scaled.plan_world import QWEN, loaded
from theory.streams import stream

H100, MEAN = gpu_named("H100-80GB"), 10_445


def longest_answer(num_prompts: int, num_responses: int, places: int, longest: int, seed: int) -> int:
    """Decoding steps of the longest call of an engine that plays a rollout of drawn lengths, the longest among them."""
    pieces = in_pieces([None] * num_prompts, num_responses, num_engines=1)
    handout, most, draws = Handout(pieces, 1, places), 0, stream(seed, "waits")
    waiting: deque[tuple[int, int]] = deque()
    active: list[list[int]] = []
    while True:
        for piece in handout.deal([0])[0]:
            drawn = torch.randint(longest // 2, longest + 1, (piece.num_responses,), generator=draws).tolist()
            waiting.extend((piece.number, length) for length in drawn)
        if not (held := set(handout.held[0])):
            return most
        room, steps, ended = places if handout.has_more(0) else 0, 0, set[int]()
        while not ended and len(active) + len(waiting) > room:
            while waiting and len(active) < places:
                active.append(list(waiting.popleft()))
            for one in active:
                one[1] -= 1
            active, steps = [one for one in active if one[1]], steps + 1
            ended = held - {number for number, _ in (*active, *waiting)}
        most = max(most, steps)
        handout.ended(0, sorted(ended), len(active) + len(waiting))


@pytest.mark.parametrize("places", [1, 5, 24, 64])
@pytest.mark.parametrize("num_responses", [2, 3, 8, 32])
def test_no_call_of_an_engine_lasts_longer(num_responses: int, places: int) -> None:
    """Calls of a played engine take at most the counted steps, and the longest half of them, whatever the pieces."""
    config = loaded(
        "qwen3_30b_a3b", "--algorithm.batch.num_responses", str(num_responses), "--evaluation.num_samples", "1",
        "--rollout.max_num_seqs", str(places), "--rollout.num_engines", "1",
    )  # fmt: skip
    num, longest = largest_piece(config), 40
    assert num == max(8 // num_responses, 1) * num_responses or num == 8  # an evaluation has 8 single responses
    counted = -(-num // places) * longest
    found = [longest_answer(24, num_responses, places, longest, seed) for seed in range(5)]
    assert counted / 2 <= max(found) <= counted
    steps = longest_wait(config, QWEN, H100, MEAN, 34_816).seconds
    steps /= compute.decode_step_seconds(config, QWEN, H100, places, MEAN)
    assert steps == pytest.approx(-(-num // places) * 32_768)


def test_the_limit_need_not_exceed_the_rollout() -> None:
    """More prompts make the rollout longer and no piece: a limit between both fits, in the plan and in the search; one
    below the piece is the only misfit."""
    few = ("--rollout.max_num_seqs", "24")
    words = (*few, "--algorithm.batch.num_prompts", "512")
    plan = make_plan(loaded("qwen3_30b_a3b", *words))
    assert plan.wait == make_plan(loaded("qwen3_30b_a3b", *few)).wait
    assert 2 * plan.wait.seconds < plan.compute.rollout_s
    limit = ("--rollout.timeout_s", f"{plan.wait.seconds + 1:.0f}")
    assert make_plan(loaded("qwen3_30b_a3b", *words, *limit)).misfits == []
    (line,) = make_plan(loaded("qwen3_30b_a3b", *words, "--rollout.timeout_s", "60")).misfits
    said = (
        f"rollout.timeout_s: expected more than the estimated {plan.wait.seconds:.0f} s of a piece of 32 responses of"
    )
    assert line == f"{said} 32,768 tokens, got 60"
    machine = ("--cluster.num_nodes", "1", "--training.num_ranks", "4", "--training.tensor_parallel", "1",
               "--training.expert_parallel", "4", "--rollout.num_engines", "2")  # fmt: skip
    for limit in (f"{2 * plan.wait.seconds:.0f}", "60"):
        found = search(loaded("qwen3_30b_a3b", *words, *machine, "--rollout.timeout_s", limit), QWEN, H100)
        assert all(one.rollout_s > float(limit) for one in found.found) and bool(found.found) == (limit != "60")
        reasons = {reason.what for reason in found.reasons}
        assert ("the longest wait for an engine exceeds rollout.timeout_s" in reasons) == (limit == "60")


def test_a_piece_may_be_that_of_an_evaluation_or_a_share() -> None:
    """Evaluations ask for other numbers of responses; over-sampled rollouts with features have fixed shares."""
    for num_samples, num in ((4, 8), (64, 64)):
        config = loaded("qwen3_30b_a3b", "--algorithm.batch.num_responses", "8", "--evaluation.num_samples",
                        str(num_samples))  # fmt: skip
        assert largest_piece(config) == num
    # Of three problems held out an evaluation has three, whatever `max_prompts` allows.
    task = ("--task", "{kind: arithmetic, num_held_out: 3}", "--evaluation.max_prompts", "1000000000000")
    few = loaded("qwen3_30b_a3b", *task, "--evaluation.num_samples", "1", "--rollout.num_engines", "1",
                 "--algorithm.batch", "{num_prompts: 16, num_responses: 2, num_minibatches: 1}")  # fmt: skip
    assert largest_piece(few) == 8
    many = ("--algorithm.batch.num_prompts", "512", "--algorithm.oversampling")
    many += ("{extra_prompts: 16, unfinished: drop, max_staleness: 1}",)
    for mode, is_share in (("R3", False), ("Pr3", True)):
        config = loaded("qwen3_30b_a3b", "--algorithm.replay.mode", mode, *many)
        rollout_s = compute.rollout_seconds(config, QWEN, H100, MEAN, 34_816)
        assert (longest_wait(config, QWEN, H100, MEAN, 34_816).seconds == rollout_s) == is_share
