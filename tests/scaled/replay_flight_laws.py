"""Laws of the passes that are in flight through a model chunk: recomputation, stale queues and reference passes.

The numbers in brackets are those of test_replay_laws.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.scaled.rank_world import OneRank, algorithm, altered, batch, farthest, layers, one_minibatch
from theory.contracts import MiniBatch, Rollouts
from theory.objectives import preset
from theory.routing.passes import RoutingPlan
from theory.routing.replay import LedgerError, ReplayContext


def minus_threes(rollouts: Rollouts) -> MiniBatch:
    """The whole batch as one mini-batch whose log pi_old is -3 everywhere."""
    B, T = len(rollouts), max(len(r.tokens) for r in rollouts.responses)
    return one_minibatch(rollouts, torch.full((B, T), -3.0))


def recomputation_without_the_pass_differs(folder: Path) -> None:
    """[16] If recomputation were routed by the live router, gradients would differ: what replay in backward guards."""
    from scaled.megatron_engine import replay

    rollouts = batch()
    gradients: dict[str, dict[str, Tensor]] = {}
    real = ReplayContext.choose

    def forgetful(self: ReplayContext, number: int, hidden: Tensor, logits: Tensor, *rest: Any) -> Tensor:
        experts = real(self, number, hidden, logits, *rest)
        if torch._C._current_graph_task_id() == -1:
            return experts
        return logits.topk(rest[0], dim=-1).indices.sort(dim=-1).values

    for name in ("faithful", "forgetful"):
        engine = OneRank(folder, algorithm("R3"), recompute="full")
        routing = altered(rollouts)
        with pytest.MonkeyPatch.context() as patch:
            if name == "forgetful":
                patch.setattr(replay.ReplayContext, "choose", forgetful)
            engine.update(minus_threes(rollouts), preset("minirl"), routing)
        gradients[name] = dict(engine.gradients())
    assert farthest(gradients["forgetful"], gradients["faithful"]) > 0.1


def many_scores_leave_nothing(folder: Path) -> None:
    """[16, 20] Forward-only passes close at once: an update after many of them, replayed or not, has the same bits."""
    rollouts = batch()
    routing = altered(rollouts)
    weights = []
    for num_scores in (0, 5):
        engine = OneRank(folder, algorithm("R3"), keep_reference=True, recompute="full")
        for _ in range(num_scores):
            engine.score(rollouts, altered(rollouts, seed=7))
            engine.score(rollouts, RoutingPlan("natural"))
            engine.score_reference(rollouts)
        assert all(chunk.num_waiting == 0 for chunk in engine.rank.policy.replays)
        engine.update(minus_threes(rollouts), preset("minirl"), routing)
        weights.append(dict(engine.named_tensors()))
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())


def a_pass_left_by_an_error_is_forgotten(folder: Path) -> None:
    """[16] An error in a loss fails every pass in flight; the next update has the bits of a fresh engine."""
    rollouts = batch()
    routing = altered(rollouts)
    engine, fresh = (OneRank(folder, algorithm("R3"), recompute="full") for _ in range(2))
    penalised = replace(preset("grpo"), kl_coefficient=0.1)  # and a mini-batch without logp_ref: raised by the loss
    with pytest.raises(ValueError, match="expected logp_ref_BT"):
        engine.update(minus_threes(rollouts), penalised, routing)
    assert all(chunk.num_waiting == 0 for chunk in engine.rank.policy.replays)
    for one in (engine, fresh):
        one.update(minus_threes(rollouts), preset("minirl"), routing)
    theirs = dict(fresh.named_tensors())
    assert all(torch.equal(theirs[name], tensor) for name, tensor in engine.named_tensors())


def a_forward_needs_a_pass_and_a_backward(folder: Path) -> None:
    """A model run outside a pass, one whose backward never comes, and a layer routed twice are ledger errors."""
    from scaled.megatron_engine.replay import ChunkReplay, in_flight

    engine = OneRank(folder, algorithm("R3"))
    chunk, replay = engine.rank.policy.chunks[0], engine.rank.policy.replays[0]
    assert isinstance(replay, ChunkReplay)
    device, head = engine.rank.policy.device, engine.rank.policy.head
    tokens, positions = torch.zeros(1, 3, dtype=torch.int64, device=device), torch.arange(3, device=device)[None]

    def forward() -> Tensor:
        rows = torch.arange(3, device=device)
        head.expect(torch.zeros_like(rows), rows, tokens.T, 1.0)  # type: ignore[union-attr]
        return chunk(tokens, positions, None)

    def routing() -> ReplayContext:
        return ReplayContext(RoutingPlan("natural"), [3], 3, layers())

    with pytest.raises(LedgerError, match="inside a replay context"):
        forward()
    with pytest.raises(LedgerError, match="backward of every forward, got 1"), in_flight([replay]):
        replay.run(routing(), forward, lambda _: None)
    with pytest.raises(LedgerError, match="one use per forward"), in_flight([replay]):
        replay.run(routing(), lambda: (forward(), forward())[1], lambda _: None)

    def last_first() -> None:
        with in_flight([replay]):
            replay.run(routing(), forward, lambda _: None)
            replay.run(routing(), forward, lambda _: None).sum().backward()

    with pytest.raises(LedgerError, match="in the order of their forwards"):
        last_first()
    with pytest.raises(ValueError, match="2 rows"), in_flight([replay]):
        replay.run(ReplayContext(RoutingPlan("natural"), [2], 2, layers()), forward, lambda _: None)
    done: list[ReplayContext] = []
    with in_flight([replay]):  # two forwards, then their backwards in order: 1F1B
        outputs = [replay.run(routing(), forward, done.append) for _ in range(2)]
        assert replay.num_waiting == 2 and done == []
        for position, output in enumerate(outputs):
            output.sum().backward()
            assert len(done) == position + 1
    assert all(one.used is not None for one in done)


FLIGHT_LAWS = (
    recomputation_without_the_pass_differs,
    many_scores_leave_nothing,
    a_pass_left_by_an_error_is_forgotten,
    a_forward_needs_a_pass_and_a_backward,
)
