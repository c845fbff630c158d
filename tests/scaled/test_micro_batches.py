"""Laws of the arrangement of responses into micro-batches: nothing is lost, ranks are in step, little is padding."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from scaled.config import TrainingBlock
from scaled.megatron_engine.micro_batches import SLOT_SHARE, Slot, arrange, split
from scaled.megatron_engine.parallel import Layout
from scaled.plan import memory
from tests.scaled.plan_world import loaded
from theory.contracts import Prompt, Response, Rollouts

ROWS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def _block(dp: int, tp: int = 1, budget: int | None = None, **fields) -> TrainingBlock:
    return TrainingBlock(num_ranks=dp * tp, tensor_parallel=tp, max_tokens_per_micro_batch=budget, **fields)


def _positions(slots: list[Slot]) -> int:
    return sum(slot.num_positions for slot in slots)


@given(ROWS, st.integers(1, 4), st.sampled_from([1, 2, 4]), st.one_of(st.none(), st.integers(60, 300)))
@settings(max_examples=200, deadline=None)
def test_every_response_has_a_place(rows_B, dp, tp, budget):
    """Each response is in one share of one slot that has room for it, and widths divide over TP; no slot is idle."""
    slots = arrange(rows_B, _block(dp, tp, budget))
    assert sorted(b for slot in slots for share in slot.shares for b in share) == list(range(len(rows_B)))
    for slot in slots:
        assert len(slot.shares) == dp
        assert slot.width % tp == 0
        assert all(len(share) <= slot.size for share in slot.shares)
        assert all(rows_B[b] <= slot.width for share in slot.shares for b in share)
        assert max(len(share) for share in slot.shares) > 0


@given(ROWS, st.integers(1, 4), st.sampled_from([1, 2]), st.integers(1, 300))
@settings(max_examples=200, deadline=None)
def test_a_budget_is_kept_and_ranks_are_in_step(rows_B, dp, tp, budget):
    """No micro-batch is larger than the budget but one of a single response; longer responses come first; shares of a
    slot differ by at most one response."""
    slots = arrange(rows_B, _block(dp, tp, budget))
    for slot in slots:
        assert slot.size == 1 or slot.size * slot.width <= budget
        counts = [len(share) for share in slot.shares]
        assert max(counts) - min(counts) <= 1
        assert slot.size == max(counts)
    shortest = [min(rows_B[b] for share in slot.shares for b in share) for slot in slots]
    longest = [max(rows_B[b] for share in slot.shares for b in share) for slot in slots]
    assert all(a >= b for a, b in zip(shortest, longest[1:], strict=False))


@given(responses=st.integers(1, 12), dp=st.integers(1, 4), budget=st.booleans(), size=st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_the_plan_counts_the_micro_batches_of_a_rank(responses, dp, budget, size):
    """Each micro-batch that a rank runs is counted, the empty ones of interleaved 1F1B too; under a budget as many as
    where none holds two responses."""
    width = loaded("qwen3_30b_a3b").rollout.max_model_len
    for pp, vpp in ((1, 1),) if budget else ((1, 1), (2, 1), (2, 3), (4, 2)):
        rows = responses if budget else responses * dp * size  # a config is refused otherwise
        fields = {"micro_batch_size": size, "pipeline_parallel": pp, "virtual_pipeline": vpp}
        block = TrainingBlock(num_ranks=dp * pp, max_tokens_per_micro_batch=width if budget else None, **fields)
        config = loaded("qwen3_30b_a3b").model_copy(update={"training": block})
        batch = config.algorithm.batch.model_copy(
            update={"num_prompts": 2 * rows, "num_responses": 1, "num_minibatches": 2}
        )
        config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"batch": batch})})
        assert memory.num_microbatches(config) == len(arrange([width] * rows, block))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=14), st.integers(1, 2), st.integers(60, 300))
@settings(max_examples=60, deadline=None)
def test_no_other_cut_is_cheaper(rows_B, dp, budget):
    """Positions and SLOT_SHARE of the budget a micro-batch, against every cut of the same order."""
    slots = arrange(rows_B, _block(dp, 1, budget))
    widths = sorted(rows_B, reverse=True)[::dp]
    cheapest = min(
        sum(k * widths[start] + budget * SLOT_SHARE for start, k in cut)
        for cut in _cuts(len(widths))
        if all(k == 1 or k * widths[start] <= budget for start, k in cut)
    )
    assert _positions(slots) / dp + len(slots) * budget * SLOT_SHARE == pytest.approx(cheapest)


def _cuts(num: int) -> list[list[tuple[int, int]]]:
    """Every way to cut `num` places into runs: (start, length) of each."""
    cuts = []
    for inner in range(2 ** (num - 1)):
        marks = [0, *(i + 1 for i in range(num - 1) if inner >> i & 1), num]
        cuts.append([(a, b - a) for a, b in pairwise(marks)])
    return cuts


@pytest.mark.parametrize(
    ("rows_B", "before", "after"),
    [
        ([20] * 7 + [200], 1600, 520),  # 2 x (1 x 200 + 3 x 20): the long one meets one short response
        ([100] * 8, 800, 800),
        (list(range(1, 201)), 40000, 21160),
    ],
)
def test_positions_by_number(rows_B, before, after):
    """Positions that two ranks compute together, four responses at a time and by 800 tokens."""
    assert _positions(arrange(rows_B, _block(2, micro_batch_size=4))) == before
    assert _positions(arrange(rows_B, _block(2, budget=800))) == after


def test_ranks_compute_the_same_number_of_positions_and_about_the_same_tokens():
    """Lengths of four ranks by a budget of 4,096: tokens of any two differ by less than one response in a slot."""
    rows_B = [16 + (b * b * 7919) % 2000 for b in range(256)]
    slots = arrange(rows_B, _block(4, budget=4096))
    tokens = [sum(rows_B[b] for slot in slots for b in slot.shares[rank]) for rank in range(4)]
    assert max(tokens) - min(tokens) < max(rows_B)
    assert _positions(slots) / sum(rows_B) < 1.12


@pytest.mark.parametrize(("budget", "widths"), [(800, [200, 20]), (None, [200, 200])])
def test_a_budget_bounds_what_is_scored_too(budget, widths):
    """Under a budget T is the longest of a micro-batch's own responses, so that b T, and K times that, keep to it."""
    responses = [
        Response(Prompt("p", (1,), ""), torch.ones(n, dtype=torch.int64), torch.zeros(n), torch.ones(n) > 0, "stop", 0)
        for n in [20] * 7 + [200]
    ]
    block = _block(1, budget=budget, micro_batch_size=4)
    found = split(Rollouts(tuple(responses)).padded(), Layout(), block, torch.device("cpu"))
    assert sorted(micro.num_positions for micro in found) == sorted(widths)
    assert [len(micro.rows_n) for micro in found] == [sum(len(responses[b].tokens) for b in m.indices) for m in found]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pipeline_parallel": 2, "virtual_pipeline": 2}, "virtual_pipeline: expected 1 with max_tokens"),
        ({"pipeline_parallel": 2, "token_dispatcher": "allgather"}, "token_dispatcher: expected alltoall with max"),
    ],
)
def test_layouts_that_take_one_width_are_refused(fields, message):
    """Interleaving, and the all-gather between stages."""
    with pytest.raises(ValidationError, match=message):
        TrainingBlock(num_ranks=2, max_tokens_per_micro_batch=100, **fields)
    TrainingBlock(num_ranks=2, **fields)
