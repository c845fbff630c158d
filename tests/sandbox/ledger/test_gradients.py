"""Laws of sandbox/ledger/gradients.py, on a model whose responses can be enumerated, so that grad J is known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from firstorder.worlds import Schemas
from lab.config.load import load
from sandbox.config import SandboxRun
from sandbox.engines import EngineConfig
from sandbox.exact.audit import moe_problem
from sandbox.ledger.gradients import ReferenceGradient, alignment, gradients, reference
from sandbox.run import build_learner
from sandbox.training.learner import Learner
from tests.sandbox.exact.tree_world import PROMPT, REWARD_Y, TREE, tiny_moe
from theory.contracts import Prompt, Response
from theory.exact.problem import true_gradient
from theory.loop import global_step, hand_over
from theory.streams import stream

PATHS = TREE.paths(0, TREE.num_responses)
REWARDS = {
    tuple(tokens[:length]): reward
    for tokens, length, reward in zip(PATHS.tokens_BT.tolist(), PATHS.length_B.tolist(), REWARD_Y.tolist(), strict=True)
}
NOISE = "[{kind: router_noise, std: 2.0}]"
REINFORCE, GRPO = "reinforce", "grpo"


class OnePrompt:
    """The tree's prompt again and again, and its rewards."""

    tokenizer = SimpleNamespace(end_ids=(TREE.num_tokens - 1,))
    max_response_tokens = TREE.max_length

    def prompts(self, step: int, num_prompts: int) -> Sequence[Prompt]:
        return [PROMPT] * num_prompts

    def held_out(self) -> Sequence[Prompt]:
        return [PROMPT]

    def reward(self, prompt: Prompt, response: Response) -> float:
        return REWARDS[tuple(response.tokens.tolist())]


TASK: Any = OnePrompt()


def config(preset: str, n: int = 1, defects: str = "[]", *more: str) -> SandboxRun:
    """Groups of 8, 8 of them a mini-batch, at a rate at which an update is felt."""
    words = [
        "--algorithm.objective.preset", preset, "--algorithm.batch.num_prompts", str(8 * n),
        "--algorithm.batch.num_responses", "8", "--algorithm.batch.num_minibatches", str(n),
        "--algorithm.sampling.max_tokens", str(TREE.max_length), "--engine.defects", defects, *more,
    ]  # fmt: skip
    found = load("configs/smoke.yaml", words, Schemas())
    assert isinstance(found, SandboxRun)
    return found


def learner(preset: str, n: int = 1, defects: str = "[]", *more: str) -> Learner:
    """The engines over the enumerable model, with its weights handed over."""
    made = build_learner(config(preset, n, defects, *more), TASK, tiny_moe(4, stream(13, "model"), torch.float32))
    hand_over(made.algorithm, made.rollout, made.training_engine, version=0)
    return made


@pytest.fixture(scope="module")
def exact_Q() -> Tensor:
    """7/8 of grad J, by enumeration: what groups of 8 with their own mean as baseline have as expectation."""
    model = tiny_moe(4, stream(13, "model"), torch.float64)
    return true_gradient(moe_problem(model, EngineConfig(), "none", TREE, PROMPT, REWARD_Y)) * 7 / 8


@pytest.fixture(scope="module")
def truth() -> ReferenceGradient:
    """The reference of 16,384 responses."""
    # The reference must not look at the engine, the objective and N of the config that it gets.
    return reference(config(GRPO, 2, NOISE), TASK, tiny_moe(4, stream(13, "model"), torch.float32), 500, 16_384)


@pytest.fixture(scope="module")
def right_KQ() -> Tensor:
    """Gradients of the reference's own objective, sampled by an exact engine."""
    return gradients(learner(REINFORCE), 3, 32).of_KQ


def test_the_reference_is_the_gradient_of_the_expected_reward(truth: ReferenceGradient, exact_Q: Tensor) -> None:
    """It lies within its own standard error of the enumerated gradient, and so does its unbiased square.

    The norm of an error in many directions is near its root mean square: between a half and twice of it.
    """
    off = float((truth.mean_Q.double() - exact_Q).norm() / exact_Q.norm())
    assert 0.01 < truth.error < 0.1
    assert 0.5 * truth.error < off < 2 * truth.error
    assert truth.square == pytest.approx(float(exact_Q @ exact_Q), rel=4 * truth.error)


def test_an_exact_engine_and_no_other_objective_have_cosine_1_and_no_bias(
    truth: ReferenceGradient, right_KQ: Tensor
) -> None:
    """Within three errors, those of the mini-batches and of the reference."""
    found = alignment(right_KQ, truth)
    error = math.hypot(found["cosine_error"], truth.error**2)
    assert error < 0.03
    assert abs(found["cosine"] - 1.0) < 3 * error
    # Errors of the reference along itself cancel in |r|^2 / (m.r)^2; those across it are of second order.
    assert abs(found["bias_square"]) < 3 * math.hypot(found["bias_square_error"], 2 * truth.error**2)
    assert found["bias"] * abs(found["bias"]) == pytest.approx(found["bias_square"])


def test_wrong_rewards_turn_the_gradient_round(truth: ReferenceGradient, right_KQ: Tensor) -> None:
    """With every reward R exchanged for 1 - R the gradient is minus what it was, so its cosine is near -1."""
    wrong = gradients(learner(REINFORCE, 1, "[]", "--algorithm.label_noise", "1.0"), 3, 32)
    torch.testing.assert_close(wrong.of_KQ, -right_KQ, rtol=1e-4, atol=1e-6)  # float32
    found = alignment(wrong.of_KQ, truth)
    assert abs(found["cosine"] + 1.0) < 3 * math.hypot(found["cosine_error"], truth.error**2)


def test_a_noisy_engine_is_biased(truth: ReferenceGradient) -> None:
    """An engine whose routers are mostly noise gives a gradient that is not along grad J, by more than three errors."""
    found = alignment(gradients(learner(REINFORCE, 1, NOISE), 3, 64).of_KQ, truth)
    assert found["cosine"] < 1.0 - 3 * found["cosine_error"]
    assert found["bias"] > 0.1


def test_gradients_are_taken_and_no_step() -> None:
    """Weights, moments, rate, clipping and update count are what they were, and norms those that a step would see."""
    one = learner(GRPO, 1, "[]", "--algorithm.optimizer.max_grad_norm", "1e-3")
    before, settings = one.training_engine.state_tensors(), one.training_engine.settings
    found = gradients(one, 3, 4)
    after = one.training_engine.state_tensors()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert one.training_engine.settings is settings
    assert found.metrics["actor/grad_norm"] == pytest.approx(found.of_KQ.norm(dim=1).mean().item(), rel=1e-5)
    assert found.of_KQ.norm(dim=1).min() > 0.01  # not clipped


@pytest.mark.parametrize("n", [2, 4])
def test_the_last_mini_batch_is_that_of_an_ordinary_step(n: int) -> None:
    """N - 1 updates, and a step along what was kept of mini-batch N, make the bits of a global step of N updates."""
    clip = ("--algorithm.optimizer.max_grad_norm", "0.05")
    whole, cut = (learner(GRPO, n, NOISE, *clip) for _ in range(2))
    global_step(3, whole.algorithm, whole.rollout, whole.training_engine, TASK, whole.seed)
    found = gradients(cut, 3, 1, after=n - 1)
    assert found.of_KQ.shape[0] == 1 and cut.training_engine.num_updates == n - 1
    cut.training_engine._take_step()  # its gradient is still there, and clipped only now
    ours, theirs = cut.training_engine.state_tensors(), whole.training_engine.state_tensors()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_is_not_trained_has_no_gradient() -> None:
    """With frozen routers the vector is as long as ever, and 0 in their place."""
    free, frozen = learner(REINFORCE), learner(REINFORCE, 1, "[]", "--algorithm.freeze_router", "true")
    routers = torch.cat(
        [
            torch.full((p.numel(),), any(p is router for router in free.model.router_parameters()))
            for p in free.model.parameters()
        ]
    )
    of_free, of_frozen = gradients(free, 3, 1).of_KQ[0], gradients(frozen, 3, 1).of_KQ[0]
    assert routers.any() and of_free[routers].abs().max() > 0
    torch.testing.assert_close(of_frozen, torch.where(routers, 0.0, of_free))


def planted(K: int, draw: int) -> tuple[Tensor, ReferenceGradient]:
    """Normal gradients of mean 2 (r + w) and covariance 4 in each of 100 directions; |r| = 3, |w| = 4, w across r."""
    generator = stream(draw, "planted")
    r_Q, w_Q = torch.zeros(100), torch.zeros(100)
    r_Q[0], w_Q[1] = 3.0, 4.0
    of_KQ = 2.0 * (r_Q + w_Q) + 2.0 * torch.randn(K, 100, generator=generator)
    return of_KQ, ReferenceGradient(r_Q + 0.2 * torch.randn(2, 100, generator=generator))


def test_the_figures_of_planted_gradients_come_back() -> None:
    """cosine 3/5, bias_square (4/3)^2 and variance tr(4 I) / (2 |r|)^2, as means over 200 draws.

    Within four standard errors, and 2% for the bias of ratios of unbiased numbers; the raw cosine is below by 5%.
    """
    found = [alignment(*planted(16, draw)) for draw in range(200)]
    for name, expected in (("cosine", 0.6), ("bias_square", 16 / 9), ("variance", 400 / 36)):
        values = [one[name] for one in found]
        assert abs(fmean(values) - expected) < 4 * stdev(values) / 200**0.5 + 0.02 * expected
    assert fmean(one["raw_cosine"] for one in found) < 0.95 * 0.6


def test_the_errors_are_the_spread_over_draws() -> None:
    """Of every figure, over draws of the gradients with one reference; a jackknife of 16 to a quarter."""
    truth = planted(16, 0)[1]
    found = [alignment(planted(16, draw)[0], truth) for draw in range(1, 301)]
    for name in ("cosine", "bias_square"):
        assert fmean(one[f"{name}_error"] for one in found) == pytest.approx(stdev(o[name] for o in found), rel=0.25)
    logs = [math.log(one["variance"]) for one in found]
    assert fmean(one["variance_error"] for one in found) == pytest.approx(stdev(logs), rel=0.25)


def test_the_scale_of_an_objective_is_nothing() -> None:
    """Twice the gradient has the same cosine, bias and variance."""
    of_KQ, truth = planted(8, 0)
    assert alignment(2 * of_KQ, truth) == pytest.approx(alignment(of_KQ, truth), rel=1e-5)


def test_noise_alone_has_no_cosine() -> None:
    """Where the mean's square comes out below 0 there is no cosine, and where the reference's does no figure at all."""
    of_KQ, truth = planted(8, 0)
    found = alignment(of_KQ - 0.9 * of_KQ.mean(0), truth)
    assert math.isnan(found["cosine"]) and found["bias_square"] < -1.0 and found["variance"] > 0.0
    opposite = ReferenceGradient(torch.stack([truth.mean_Q, -truth.mean_Q]))
    assert math.isnan(opposite.error) and math.isnan(alignment(of_KQ, opposite)["variance"])


def test_one_piece_is_no_reference() -> None:
    """Fewer responses than two pieces is one line."""
    with pytest.raises(ValueError, match="num_responses: expected at least two pieces of 512, got 1023"):
        reference(config(REINFORCE), TASK, learner(REINFORCE).model, 0, 1023)
