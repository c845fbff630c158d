"""MiniRL's Table 1 as theorems on a real model: which replays leave the target policy alone, and by how much not.

The target policy of a mini-batch is untouched on every token whose experts are the natural ones as far as it can see,
to the last bit, and altered on every other. Papers: MiniRL (arXiv 2512.01374) sec. 3.2, Table 1; Pr2 (2606.00395).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from sandbox.engines import RouterNoise
from sandbox.engines.engine import SandboxEngine
from sandbox.model import MoE
from sandbox.model.config import ModelConfig
from sandbox.training.engine import SandboxTrainingEngine
from tests.contracts import worlds
from theory.algorithm import Algorithm
from theory.bounds.routing import replay_bias, replay_bias_mean
from theory.collection import Collected, collect
from theory.contracts import Prompt, Rollouts
from theory.exact.tree import PrefixTree
from theory.loop import hand_over, split, take
from theory.objectives import preset
from theory.old_pass import OldPass, old_pass
from theory.routing.gates import GATES
from theory.routing.measures import difference_counts
from theory.routing.passes import RoutingPlan
from theory.routing.predictor import PredictorSettings
from theory.routing.record import RoutingRecord
from theory.routing.replay import ReplayContext
from theory.streams import stream

PREDICTOR = PredictorSettings(learning_rate_multiplier=30.0)


@pytest.fixture(autouse=True)
def _float32(_float64: None) -> None:
    """Engines compute in float32: it is their bits that are compared here."""
    torch.set_default_dtype(torch.float32)


@dataclass(frozen=True)
class Cell:
    """One mini-batch before its update: log pi naturally routed and replayed, and where a token sees another route."""

    natural_BT: Tensor
    replayed_BT: Tensor
    in_update_BT: Tensor
    is_response_BT: Tensor
    sees_change_BT: Tensor


def sees_change(rollouts: Rollouts, replayed: RoutingRecord, natural: RoutingRecord) -> Tensor:
    """True where a route that log pi of the token depends on differs: on its own row, or on an earlier one.

    Not that of the last layer on an earlier row: what it makes of that row goes into that row's logits alone.
    """
    batch = rollouts.padded()
    sees_BT = torch.zeros_like(batch.is_response_BT)
    for b, differs_RL in enumerate((difference_counts(replayed, natural) > 0).split(replayed.num_rows_B)):
        upstream_R = torch.cat([torch.zeros(1, dtype=torch.bool), differs_RL[:-1, :-1].any(1)]).cumsum(0) > 0
        seen_R = upstream_R | differs_RL.any(1)
        T = len(rollouts.responses[b].tokens)
        sees_BT[b, :T] = seen_R[batch.predicting_row_BT[b, :T]]
    return sees_BT


@cache
def minibatches(mode: str, noise: float = 0.03) -> list[Cell]:
    """Three mini-batches of one global step, each looked at before the update that follows.

    The noise on mu's routers and the learning rate are such that some tokens see another route and some do not.
    """
    weights = worlds.model()
    algorithm = Algorithm(
        preset("minirl"), mode=mode, num_prompts=6, num_responses=4, num_minibatches=3, max_tokens=8,
    )  # fmt: skip
    trainer = worlds.training_engine(weights, learning_rate=4e-4)
    rollout = SandboxEngine(weights.config, (RouterNoise(std=noise),), stop_tokens=(worlds.STOP,))
    hand_over(algorithm, rollout, trainer, version=0)
    collected = collect(0, algorithm, rollout, worlds.EvenTokens(), seed=5)
    old = old_pass(0, algorithm, trainer, collected, seed=5)
    advantages_B = (collected.rewards_PG - collected.rewards_PG.mean(1, keepdim=True)).reshape(-1)
    cells = []
    for index, chosen in enumerate(split(0, algorithm, seed=5)):
        minibatch = take(collected.rollouts, old, advantages_B, chosen, index, 3)
        natural = trainer.score(minibatch.rollouts, RoutingPlan("natural"))
        replayed = trainer.score(minibatch.rollouts, old.gradient.select(chosen))
        stats = trainer.update(minibatch, algorithm.objective, old.gradient.select(chosen))
        assert replayed.experts is not None
        assert natural.experts is not None
        cells.append(
            Cell(
                natural.logp_BT,
                replayed.logp_BT,
                stats.logp_pi_BT,
                minibatch.rollouts.padded().is_response_BT,
                sees_change(minibatch.rollouts, replayed.experts, natural.experts),
            )
        )
    return cells


def test_r2_leaves_the_first_minibatch_alone() -> None:
    """R2, first mini-batch: e_old is e, no route differs, and log pi is the natural one bit for bit."""
    first = minibatches("R2")[0]
    assert not first.sees_change_BT.any()
    assert torch.equal(first.replayed_BT, first.natural_BT)
    assert torch.equal(first.in_update_BT, first.natural_BT)


@pytest.mark.parametrize(("mode", "index"), [("R2", 1), ("R2", 2), ("R3", 0), ("R3", 1), ("R3", 2)])
def test_the_other_cells_are_altered_exactly_where_a_route_differs(mode: str, index: int) -> None:
    """R2 later, R3 first and later: log pi of a token is altered if and only if it sees another route, to the bit."""
    cell = minibatches(mode)[index]
    is_altered_BT = cell.replayed_BT != cell.natural_BT
    assert torch.equal(is_altered_BT, cell.sees_change_BT)
    assert torch.equal(cell.in_update_BT, cell.replayed_BT)
    # Both sides of the equivalence occur.
    assert 0 < int(cell.sees_change_BT.sum()) < int(cell.is_response_BT.sum())


@pytest.mark.parametrize("index", [0, 1, 2])
def test_natural_routing_alters_nothing(index: int) -> None:
    """Without replay the target policy is the natural one on every mini-batch, however far off policy."""
    cell = minibatches("none")[index]
    assert torch.equal(cell.in_update_BT, cell.natural_BT)


def test_r3_is_r2_where_the_engines_agree() -> None:
    """With an exact engine e_old^mu is e_old^pi: R3's first mini-batch is untouched, and the later ones are R2's."""
    for r2, r3 in zip(minibatches("R2", 0.0), minibatches("R3", 0.0), strict=True):
        assert torch.equal(r2.replayed_BT, r3.replayed_BT)
    first = minibatches("R3", 0.0)[0]
    assert torch.equal(first.replayed_BT, first.natural_BT)


# ---- what it does to the gradient, by enumeration --------------------------------------------------------------------

TREE = PrefixTree(num_tokens=4, max_length=2, has_end=True)
PROMPT = Prompt("0", (1,), "")


def tiny_model() -> MoE:
    """Two layers of four experts over four tokens: the end, or one of three and any: 13 responses."""
    config = ModelConfig(
        vocab_size=4, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, num_experts=4,
        experts_per_token=2, expert_size=8, gate=GATES["olmoe"],
    )  # fmt: skip
    return MoE(config, stream(6, "tiny"))


def gradients(model: MoE, rollouts: Rollouts, plan: RoutingPlan) -> tuple[Tensor, RoutingRecord]:
    """g_y = (pi_y / mu_y) R_y grad log pi_y of every response in float64, and the experts that each used."""
    parameters, rows, used = list(model.parameters()), [], []
    for b, response in enumerate(rollouts.responses):
        tokens = torch.cat([torch.tensor(response.prompt.tokens), response.tokens])
        num_rows, num_prompt = len(tokens) - 1, len(response.prompt.tokens)
        with ReplayContext(plan.select([b]), [num_rows], num_rows, model.config.moe_layers) as context:
            logp_SV = model(tokens[None, :-1], context)[0].log_softmax(-1)
            logp = logp_SV.gather(1, tokens[1:, None])[num_prompt - 1 :].sum()
            grads = torch.autograd.grad(logp, parameters, allow_unused=True, materialize_grads=True)
        flat = torch.cat([g.flatten() for g in grads])
        weight = float((logp.detach() - response.logp_mu.sum()).exp()) * reward(response.tokens)
        rows.append(weight * flat.double())
        assert context.used is not None
        used.append(context.used)
    return torch.stack(rows), RoutingRecord.concat(used)


def reward(tokens: Tensor) -> float:
    """1 where the tokens' sum is even."""
    return float(tokens.sum() % 2 == 0)


def enumerated(mode: str, noise: float) -> tuple[MoE, Rollouts, OldPass]:
    """A tiny model, all responses that a noisy engine may sample, and the old pass of that mode over them."""
    model = tiny_model()
    algorithm = Algorithm(
        preset("minirl"), mode=mode, predictor=PREDICTOR, num_prompts=1, num_responses=TREE.num_responses
    )
    predicts = algorithm.passes.trains_predictor
    trainer: SandboxTrainingEngine = worlds.training_engine(model, PREDICTOR if predicts else None)
    if trainer.predictor is not None:
        for number, parameter in trainer.predictor.parameters.items():
            parameter.data.normal_(0, 0.2, generator=stream(0, "predictor", number))
    engine = SandboxEngine(model.config, (RouterNoise(std=noise),) if noise else (), stop_tokens=(3,))
    hand_over(algorithm, engine, trainer, version=0)
    rollouts = engine.enumerate(PROMPT, TREE)
    rewards = torch.tensor([[reward(r.tokens) for r in rollouts.responses]])
    return model, rollouts, old_pass(0, algorithm, trainer, Collected(rollouts, rewards, {}), seed=0)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("mode", ["R2", "R3", "Pr2", "Pr3"])
def test_the_bias_of_replay_is_within_its_bound(mode: str, later: bool) -> None:
    """||grad J replayed - grad J natural||, over all responses, is at most 2 M P(a route differs), and 0 if none does.

    None does in R2's first mini-batch; in every other cell some do, and the bias is not 0.
    """
    model, rollouts, old = enumerated(mode, noise=0.3)
    if later:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=stream(1, "later", *parameter.shape))
    probability_Y = torch.stack([r.logp_mu.double().sum().exp() for r in rollouts.responses])
    assert len(rollouts) == 13
    assert float(probability_Y.sum()) == pytest.approx(1, abs=1e-5)  # float32 log-probabilities
    replayed_YC, used = gradients(model, rollouts, old.gradient)
    natural_YC, natural = gradients(model, rollouts, RoutingPlan("natural"))
    differs_Y = torch.stack([x.any() for x in (difference_counts(used, natural) > 0).split(used.num_rows_B)])
    # Where no route differs, the bits are the same: no tolerance.
    assert torch.equal(replayed_YC[~differs_Y], natural_YC[~differs_Y])
    probability_Y = probability_Y / probability_Y.sum()
    is_untouched = mode == "R2" and not later
    for function in (replay_bias, replay_bias_mean):
        bound = function(replayed_YC, natural_YC, probability_Y, differs_Y)
        assert float(bound.lhs) <= float(bound.rhs)
        assert (float(bound.rhs) == 0) == is_untouched
        assert (float(bound.lhs) == 0) == is_untouched


def test_without_noise_and_drift_only_prediction_alters_the_target() -> None:
    """Exact engine, first mini-batch: R2 and R3 have no bias at all, Pr2 and Pr3 have that of their predictions."""
    biased = {}
    for mode in ("R2", "R3", "Pr2", "Pr3"):
        model, rollouts, old = enumerated(mode, noise=0.0)
        replayed_YC, _ = gradients(model, rollouts, old.gradient)
        natural_YC, _ = gradients(model, rollouts, RoutingPlan("natural"))
        biased[mode] = not torch.equal(replayed_YC, natural_YC)
    assert biased == {"R2": False, "R3": False, "Pr2": True, "Pr3": True}
