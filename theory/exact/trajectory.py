"""Exact quantities of a policy in training: reward, distances, entropy, and the error of its next update.

Letters: theory/exact/tree.py and forest.py. Papers: MiniRL (arXiv 2512.01374) Eq. 1, 2, 5 and sec. 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from theory import divergences
from theory.exact.engines import MovablePolicy, mean_kl
from theory.exact.estimator import Estimate
from theory.exact.expected import Update
from theory.exact.forest import Forest
from theory.exact.levels import Edges, token_kl
from theory.exact.noise import variance
from theory.exact.problem import Problem, expected_reward, require_rewards, true_gradient

COLUMNS: dict[str, str] = {
    "reward": "J(pi) = E_pi[R], in units of reward",
    "reward_mu": "J(mu), the reward that a run's own metrics would show",
    "distance": "the largest J of any policy on the forest, less J(pi)",
    "entropy": "entropy of pi's next token, nats, over the tokens that pi generates",
    "kl_mu_old": "KL(mu || old), the engine's gap at the rollout, nats per token",
    "kl_old_mu": "KL(old || mu), nats per token; inf where mu never takes what old does",
    "kl_mu_pi": "KL(mu || pi), gap and staleness together, nats per token",
    "kl_old_pi": "KL(old || pi), the staleness, nats per token",
    "gradient_norm": "length of the expected update's gradient",
    "true_norm": "length of grad J(pi)",
    "drift_norm": "length of the drift in the objective's expected gradient (theory/exact/expected.py)",
    "bias": "||expected gradient - grad J|| / ||grad J||",
    "cosine": "cosine of the angle between the two",
    "variance": "trace of the covariance of one response's share; B leave variance / B; nan if centred or off",
    "draw_error": "standard error of the mean over an engine's draws, over the gradient's length; 0 if the draws agree "
    "(or there is one), nan if they differ and the gradient is 0",
}
"""The columns of a trajectory. The gradient is the one that the run follows: less its drift where that is centred."""


@dataclass(frozen=True)
class ExactTask:
    """A problem to train on: contexts, and the reward of each of their responses.

    Raises ValueError where the rewards are not one per response, or not finite.
    """

    forest: Forest
    reward_Y: Float[Tensor, " Y"]

    def __post_init__(self) -> None:
        require_rewards(self.reward_Y, self.forest.num_responses, "response of each context")

    @property
    def optimum(self) -> float:
        """The largest J of any policy: the best response in every context."""
        best_C = self.reward_Y.view(self.forest.num_contexts, -1).max(1).values
        return float((self.forest.roots * best_C).sum())


@dataclass(frozen=True)
class Trajectory:
    """Exact quantities over a run: `columns` by name (COLUMNS), with the number of `updates` made before each value.

    `policy` is the last one.
    """

    updates: tuple[int, ...]
    columns: Mapping[str, tuple[float, ...]]
    policy: MovablePolicy

    def __getitem__(self, column: str) -> tuple[float, ...]:
        """The values of a column."""
        return self.columns[column]


def mean_entropy(forest: Forest, logp: Edges) -> float:
    """Entropy of the next token over the tokens that a policy generates, nats, in [0, log V] (MiniRL sec. 4.2)."""
    reach = forest.reach(logp)
    total = sum(
        float((reach_n * divergences.entropy(logp_nV)).sum()) for reach_n, logp_nV in zip(reach, logp, strict=True)
    )
    return total / sum(float(reach_n.sum()) for reach_n in reach)


def observe(
    task: ExactTask, policy: MovablePolicy, updates: Sequence[Update], centred: bool = False, has_variance: bool = True
) -> dict[str, float]:
    """Every column at `policy`, about to follow the mean of the updates' gradients, less their drift where `centred`.

    There is one update for each sampler of the engine.
    """
    batches = [update.batch for update in updates]
    forest, logp = task.forest, policy.logp()
    samplers, K = [batch.logp_mu for batch in batches], len(batches)
    is_centred = centred or batches[0].objective.centering != "none"
    gradients_KQ = torch.stack([one.gradient - one.drift if centred else one.gradient for one in updates])
    gradient = gradients_KQ.mean(0)
    # The true gradient has neither mu nor old: pi's own conditionals stand in for both.
    truth = true_gradient(Problem(policy, logp, logp, task.reward_Y))
    # For bias and cosine only: the variance has its own column.
    estimate = Estimate(gradient, truth, 0.0)
    reward = expected_reward(forest, logp, task.reward_Y)
    # The variance of a mean of K independent draws.
    spread = float(gradients_KQ.var(0).sum() / K) ** 0.5 if K > 1 else 0.0
    return {
        "reward": reward,
        "reward_mu": sum(expected_reward(forest, mu, task.reward_Y) for mu in samplers) / K,
        "distance": task.optimum - reward,
        "entropy": mean_entropy(forest, logp),
        "kl_mu_old": sum(token_kl(forest, one.logp_mu, one.logp_old) for one in batches) / K,
        "kl_old_mu": sum(token_kl(forest, one.logp_old, one.logp_mu) for one in batches) / K,
        "kl_mu_pi": mean_kl(forest, samplers, logp),
        "kl_old_pi": sum(token_kl(forest, one.logp_old, logp) for one in batches) / K,
        "gradient_norm": float(gradient.norm()),
        "true_norm": float(truth.norm()),
        "drift_norm": float(torch.stack([update.drift for update in updates]).mean(0).norm()),
        "bias": estimate.bias,
        "cosine": estimate.cosine,
        # Of the score as it is (theory/exact/noise.py): a centred update has another variance.
        "variance": variance(updates) if has_variance and not is_centred else math.nan,
        "draw_error": _share(spread, float(gradient.norm())),
    }


def _share(spread: float, length: float) -> float:
    """spread / length; 0 for a spread of 0, whatever the length, and nan for any other over a length of 0."""
    if spread == 0:
        return 0.0
    return spread / length if length > 0 else math.nan
