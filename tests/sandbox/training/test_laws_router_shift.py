"""Laws of the routers' shift in the sandbox: what a scoring pass keeps, and what the loop makes of two passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.contracts import worlds
from theory.algorithm import Algorithm
from theory.contracts import MiniBatch, Rollouts, Sampling, TokenScores, UpdateStats
from theory.loop import global_step
from theory.objectives import Objective, preset
from theory.routing.passes import RoutingPlan
from theory.routing.predictor import PredictorSettings
from theory.routing.record import RoutingRecord

RSPO = preset("gmpo", router_shift_floor=0.8)


class Watched:
    """A training engine, what it was asked, and its routers' logits on every row before each update."""

    def __init__(self, mode: str, **options) -> None:
        predictor = PredictorSettings(1.0) if mode.startswith("Pr") else None
        self.engine = worlds.training_engine(worlds.model(), predictor, **options)
        self.scored: list[tuple[RoutingPlan, TokenScores]] = []
        self.updates: list[tuple[MiniBatch, Tensor, UpdateStats]] = []

    def score(self, rollouts: Rollouts, plan: RoutingPlan) -> TokenScores:
        self.scored.append((plan, self.engine.score(rollouts, plan)))
        return self.scored[-1][1]

    def update(self, minibatch: MiniBatch, objective: Objective, plan: RoutingPlan) -> UpdateStats:
        logits = logits_of(self.engine, minibatch.rollouts, plan)
        self.updates.append((minibatch, logits, self.engine.update(minibatch, objective, plan)))
        return self.updates[-1][2]

    def __getattr__(self, name: str):
        return getattr(self.engine, name)


def logits_of(engine, rollouts: Rollouts, plan: RoutingPlan) -> Tensor:
    """Router logits of all rows, (R, L, E), by the features that a pass can keep."""
    rows = tuple(torch.arange(response.num_tokens - 1) for response in rollouts.responses)
    features = engine.score(rollouts, replace(plan, feature_rows=rows, keep_hidden=False)).features
    assert features is not None
    return features.logits


def step(mode: str, N: int = 2, objective: Objective = RSPO, **options) -> Watched:
    """One global step at a rate that moves the routers by more than the floor on some tokens."""
    rate = options.pop("learning_rate", 5e-2)
    learner = Watched(mode, learning_rate=rate, **options)
    algorithm = Algorithm(
        objective, mode=mode, num_prompts=4, num_responses=3, num_minibatches=N, max_tokens=6,
        predictor=PredictorSettings(1.0),
    )  # fmt: skip
    rollout = worlds.rollout_engine("router-noise", worlds.model())
    learner.result = global_step(0, algorithm, rollout, learner, worlds.EvenTokens(), seed=1)
    return learner


@pytest.mark.parametrize("gate", ["qwen3", "softmax_after", "moonlight"])
def test_a_pass_keeps_the_scores_that_it_is_asked_for(gate: str) -> None:
    """log p of the experts used, or of a record's, is of the gate's own score; to the bit in any micro-batches."""
    weights = worlds.model(gate=gate)
    sampling = Sampling(max_tokens=8, num_responses=2, seed=3)
    rollouts = worlds.rollout_engine("router-noise", weights).generate(worlds.prompts(), sampling)
    engines = [worlds.training_engine(weights, micro_batch_size=size) for size in (128, 3)]
    logits = logits_of(engines[0], rollouts, RoutingPlan("natural"))
    score = torch.nn.functional.logsigmoid(logits) if gate == "moonlight" else logits.softmax(-1).log()
    for asked in ("used", rollouts.experts):
        found = [engine.score(rollouts, RoutingPlan("natural", scored=asked)) for engine in engines]
        experts = found[0].experts if asked == "used" else asked
        assert isinstance(experts, RoutingRecord)
        one, other = (each.router_scores for each in found)
        assert one is not None and other is not None and torch.equal(one.offsets, experts.offsets)
        torch.testing.assert_close(one.logits, score.gather(2, experts.experts.long()))
        assert torch.equal(one.logits, other.logits)
    assert engines[0].score(rollouts, RoutingPlan("natural")).router_scores is None


@pytest.mark.parametrize("mode", ["none", "R2", "R3", "Pr2", "Pr3"])
def test_the_shift_is_pis_from_old_on_olds_experts(mode: str) -> None:
    """The second mini-batch's is mean |log p_pi - log p_old| over layers and the experts that old used, on the row
    before each token, from all logits of pi's pass; the first one's is 0, or under Pr2 what its gates shift."""
    learner = step(mode)
    old, experts = learner.scored[0][1], learner.scored[0][1].experts
    assert experts is not None and old.router_scores is not None
    order = [r.tokens for r in learner.result.rollouts.responses]
    for index, (minibatch, logits, stats) in enumerate(learner.updates):
        shift_BT, at = minibatch.router_shift_BT, 0
        assert shift_BT is not None
        for b, response in enumerate(minibatch.rollouts.responses):
            place = next(i for i, tokens in enumerate(order) if tokens is response.tokens)
            rows, first = response.num_tokens - 1, len(response.prompt.tokens) - 1
            ids, start = experts.rows(place).long(), int(experts.offsets[place])
            pi = logits[at : at + rows].log_softmax(-1).gather(2, ids)
            delta = (pi - old.router_scores.logits[start : start + rows]).abs().mean((1, 2))[first:]
            assert torch.allclose(shift_BT[b, : len(delta)], delta, atol=2e-6, rtol=0)
            at += rows
        moved = shift_BT[minibatch.rollouts.padded().is_response_BT]
        assert (moved > 0.05).any() if index else (moved < 0.05).all()
        gamma = (-moved).exp().clamp(min=0.8)
        assert stats.metrics["actor/router_shift_ratio"] == pytest.approx(float(gamma.mean()), abs=1e-6)


def test_only_later_mini_batches_cost_a_pass() -> None:
    """N mini-batches score N times in all, the old pass included; without a floor, once. Pr2's first has one, too."""
    assert [len(step("R2", N).scored) for N in (1, 2, 4)] == [1, 2, 4]
    assert len(step("R2", 2, preset("gmpo")).scored) == 1
    assert len(step("Pr2", 2).scored) == 3


def test_the_update_does_not_depend_on_micro_batches() -> None:
    """gamma is known before the gradient pass: one weight change, whatever the cut."""
    a, b = (dict(step("none", 2, micro_batch_size=size).engine.named_tensors()) for size in (128, 2))
    plain = dict(step("none", 2, preset("gmpo")).engine.named_tensors())
    # AdamW moves each weight by its rate of 0.05: sums in another order move it by less than a hundredth of that.
    assert max((a[name] - b[name]).abs().max().item() for name in a) < 5e-4
    assert max((a[name] - plain[name]).abs().max().item() for name in a) > 5e-3


def test_a_dense_model_has_no_routers_to_shift() -> None:
    """The loop says so before anything is trained."""
    dense = worlds.training_engine(worlds.model(dense_layers=(0, 1, 2)))
    rollout = worlds.rollout_engine("exact", worlds.model(dense_layers=(0, 1, 2)))
    algorithm = Algorithm(RSPO, num_prompts=2, num_responses=2, max_tokens=4)
    with pytest.raises(ValueError, match=r"router_shift_floor 0.8 needs the old pass's router scores, got none"):
        global_step(0, algorithm, rollout, dense, worlds.EvenTokens(), seed=1)
