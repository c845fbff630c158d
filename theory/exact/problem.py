"""The setting of an exact estimate, and its true value and gradient, summed over every response.

Letters: theory/exact/tree.py. Papers: MiniRL (arXiv 2512.01374) Eq. 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from theory.exact.levels import Edges
from theory.exact.policies import TreePolicy
from theory.exact.tree import PrefixTree


@dataclass(frozen=True)
class Problem:
    """The setting of an estimate: the target policy, the one that sampled, the old one, one reward per response.

    `trained` is the policy whose gradients an estimator takes, where it is not the target: the same weights under
    replayed routes. `router_shift` is the distance of its routers from old's at every node, in nats, where there
    are routers (theory/routing/shift.py). Raises ValueError where the rewards are not one per response, or not finite.
    """

    target: TreePolicy
    logp_mu: Edges
    logp_old: Edges
    reward_Y: Float[Tensor, " Y"]
    trained: TreePolicy | None = None
    router_shift: Sequence[Float[Tensor, " _n"]] | None = None

    def __post_init__(self) -> None:
        require_rewards(self.reward_Y, self.target.tree.num_responses, "response")

    @property
    def policy(self) -> TreePolicy:
        """The policy whose gradients the estimator takes."""
        return self.target if self.trained is None else self.trained


def require_rewards(reward_Y: Float[Tensor, "*any"], num: int, unit: str) -> None:
    """Raises ValueError unless there are `num` finite rewards, one per `unit`."""
    if reward_Y.shape != (num,):
        raise ValueError(f"reward_Y: expected {num} rewards, one per {unit}, got shape {tuple(reward_Y.shape)}")
    if not reward_Y.isfinite().all():
        raise ValueError(f"reward_Y: expected finite rewards, got {reward_Y[~reward_Y.isfinite()][0]}")


def value(problem: Problem) -> float:
    """J_seq = E_pi[R], in units of reward (MiniRL Eq. 1)."""
    return expected_reward(problem.target.tree, problem.target.logp(), problem.reward_Y)


def expected_reward(tree: PrefixTree, logp: Edges, reward_Y: Float[Tensor, " Y"]) -> float:
    """E[R] of the responses that these conditionals generate, in units of reward."""
    return float((tree.log_probabilities(logp).exp() * reward_Y).sum())


def true_gradient(problem: Problem) -> Float[Tensor, " Q"]:
    """grad J_seq = E_pi[R sum_t grad log pi_t], exactly (MiniRL Eq. 2).

    Subtracting the mean reward does not change the expectation and saves digits.
    """
    tree, logp = problem.target.tree, problem.target.logp()
    probability_Y = tree.log_probabilities(logp).exp()
    centred_Y = problem.reward_Y - (probability_Y * problem.reward_Y).sum()
    edges = tree.zero_edges()
    for rows, paths in tree.chunks():
        each_B1 = (probability_Y[rows] * centred_Y[rows])[:, None]
        tree.scatter(edges, each_B1.expand(-1, tree.max_length), paths)
    # The target's, also where another policy is `trained`: the bias of replayed routes is measured against it.
    return problem.target.pullback(edges)
