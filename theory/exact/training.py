"""Exact training: runs whose every update is an expectation. No sample is drawn, so only bias can harm a run. A dial
adds Gaussian noise with the exact covariance of a batch of B responses.

A step rolls out all responses of an engine's mu with their probabilities, then makes N updates on them, each on the
whole expected batch: the limit of N mini-batches as the rollout grows. A run of n sampled responses per prompt is
1/sqrt(n) away from it (tests/theory/test_exact_training.py).

Letters: theory/exact/tree.py and forest.py. Papers: MiniRL (arXiv 2512.01374) Eq. 5, 7 and sec. 4.3.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from theory.exact.batch import Batch
from theory.exact.engines import MovablePolicy, Rollout, RollsOut
from theory.exact.expected import Update, mean_gradient
from theory.exact.groups import Group
from theory.exact.noise import draw
from theory.exact.settling import require_group
from theory.exact.trajectory import COLUMNS, ExactTask, Trajectory, observe
from theory.names import unknown_name
from theory.objectives import Objective

OPTIMIZERS = ("sgd", "adam", "flow")


@dataclass(frozen=True)
class Settings:
    """The training of a run.

    `optimizer` is sgd, adam, or flow: d theta / d time = expected gradient, `rate` units of time per update, by one
    fourth-order Runge-Kutta step in which mu follows pi. `num_minibatches` is N, `lag` the age in steps of the weights
    that an engine rolls out. `centred` subtracts the drift from every update. A finite `batch_size` B adds the Gaussian
    noise of B responses to each (theory/exact/noise.py). The objective's own centering, full or top_k, is part of its
    gradient; neither `centred` nor noise covers it, so it excludes both. `has_variance` adds the variance to rows, at
    the cost of one gradient per response. Raises ValueError for an unknown optimizer, numbers out of range, a KL
    penalty, which has no reference here, an advantage per token with finite groups, a flow with N > 1, a lag or noise,
    and for noise on a centred score whose objective treats the signs of advantages differently or has an advantage per
    token.
    """

    objective: Objective
    optimizer: str = "adam"
    rate: float = 1e-2
    num_updates: int = 400
    num_minibatches: int = 1
    lag: int = 0
    centred: bool = False
    group: Group = field(default_factory=lambda: Group(None, "mean"))
    batch_size: float = math.inf
    observe_every: int = 1
    has_variance: bool = True

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise unknown_name("optimizer", self.optimizer, OPTIMIZERS)
        for name, least in (("num_updates", 0), ("num_minibatches", 1), ("lag", 0), ("observe_every", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if not self.rate > 0:
            raise ValueError(f"rate: expected a rate > 0, got {self.rate}")
        if self.objective.kl_coefficient > 0:
            raise ValueError(
                f"{self.objective.name}: expected kl_coefficient 0 (there is no reference), got "
                f"{self.objective.kl_coefficient}"
            )
        require_group(self.objective, self.group)
        if not self.batch_size > 0:
            raise ValueError(f"batch_size: expected a number > 0, or inf for no noise, got {self.batch_size}")
        if self.objective.centering != "none" and (self.centred or self.is_noisy):
            wanted = "centred false" if self.centred else "batch_size inf"
            raise ValueError(
                f"{self.objective.name}: expected {wanted} beside the objective's own centering, got "
                f"{self.centred if self.centred else self.batch_size}"
            )
        if self.is_noisy and self.centred and self.objective.has_token_advantages:
            raise ValueError(
                f"{self.objective.name}: expected centred false or batch_size inf beside an advantage per token, got "
                f"true and {self.batch_size}"
            )
        if self.is_noisy and self.optimizer == "flow":
            raise ValueError(f"flow: expected batch_size inf, got {self.batch_size}: a flow has no noise")
        if self.is_noisy and self.centred and self.objective.trust_region.name != "none":
            raise ValueError(
                f"{self.objective.name}: expected the trust region none under a centred score with noise, got "
                f"{self.objective.trust_region.name}"
            )
        if self.optimizer == "flow" and (self.num_minibatches, self.lag) != (1, 0):
            raise ValueError(
                f"flow: expected num_minibatches 1 and lag 0, got {self.num_minibatches} and {self.lag}: a flow has no "
                f"steps between rollouts"
            )

    @property
    def is_noisy(self) -> bool:
        """Whether the batch is finite."""
        return self.batch_size < math.inf


def train(
    task: ExactTask,
    first: MovablePolicy,
    engine: RollsOut,
    settings: Settings,
    generator: torch.Generator | None = None,
) -> Trajectory:
    """The run from `first`, observed every `observe_every` updates and at its end; noise is drawn from `generator`.

    Raises ValueError for a policy on another forest than the task's, and for noise without a generator.
    """
    if settings.is_noisy and generator is None:
        raise ValueError(f"generator: expected one for the noise of batch_size {settings.batch_size}, got None")
    if first.tree != task.forest:
        raise ValueError(f"first: expected a policy on the task's forest, {task.forest}, got one on {first.tree}")
    observed: list[int] = []
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
    step = torch.zeros_like(first.parameters)
    move = _mover(task, first, engine, settings, step)
    # former[0] is the policy of `lag` rollouts ago, or the first one in a run that is younger.
    policy, former, rolled = first, deque([first], maxlen=settings.lag + 1), []
    # One pass more than updates: the last only observes.
    for number in range(settings.num_updates + 1):
        if number % settings.num_minibatches == 0:
            former.append(policy)
            rolled = _rolled_out(task, engine, settings, policy, former[0])
        updates = _updates(rolled, policy)
        is_last = number == settings.num_updates
        if is_last or number % settings.observe_every == 0:
            observed.append(number)
            seen = observe(task, policy, updates, settings.centred, settings.has_variance)
            for name, value in seen.items():
                columns[name].append(value)
        if not is_last:
            # Not at the first update of a rollout, where pi is old and nothing can be learned.
            if number % settings.num_minibatches > 0:
                engine.learn([one for _, one in rolled], [one.policy for one in updates])
            move(mean_gradient(updates, settings.centred) + _noise(updates, settings, generator))
            # `moved` adds, so this policy keeps its numbers while the optimiser moves `step` in place.
            policy = first.moved(step.detach())
    return Trajectory(tuple(observed), {name: tuple(values) for name, values in columns.items()}, policy)


Rolled = list[tuple[Batch, Rollout]]
"""A batch of each of the engine's rollouts."""


def _rolled_out(
    task: ExactTask, engine: RollsOut, settings: Settings, policy: MovablePolicy, sampling: MovablePolicy
) -> Rolled:
    """The samples of the engine at its current weights: one batch for each of its mu."""
    objective, group = settings.objective, settings.group
    return [
        (Batch(task.forest, one.logp_mu, one.logp_old, task.reward_Y, objective, group), one)
        for one in engine.roll_out(sampling, policy)
    ]


def _updates(rolled: Rolled, policy: MovablePolicy) -> list[Update]:
    # A router shift takes a scoring pass of the policy, so that it is asked for only where it is used.
    return [
        Update.at(
            batch, rollout.trained(policy), rollout.router_shift(policy) if batch.objective.uses_router_shift else None
        )
        for batch, rollout in rolled
    ]


def _noise(
    updates: Sequence[Update], settings: Settings, generator: torch.Generator | None
) -> Float[Tensor, " Q"] | float:
    if generator is None or not settings.is_noisy:
        return 0.0
    return draw(updates, settings.centred, generator) / settings.batch_size**0.5


def _mover(
    task: ExactTask, first: MovablePolicy, engine: RollsOut, settings: Settings, step: Float[Tensor, " Q"]
) -> Callable[[Tensor], None]:
    """The function that moves `step`, the displacement from `first`, in place by one update, given the gradient."""
    if settings.optimizer == "flow":

        def slope(at: Tensor) -> Tensor:
            policy = first.moved(at)
            updates = _updates(_rolled_out(task, engine, settings, policy, policy), policy)
            return mean_gradient(updates, settings.centred)

        return lambda gradient: _runge_kutta(step, settings.rate, gradient, slope)
    # torch's optimiser moves `step` in place, by a gradient that is set here and not by autograd.
    kind = torch.optim.SGD if settings.optimizer == "sgd" else torch.optim.Adam
    # maximize: the gradient is that of the objective, not of a loss.
    optimizer = kind([step.requires_grad_()], lr=settings.rate, maximize=True)

    def follow(gradient: Tensor) -> None:
        step.grad = gradient
        optimizer.step()

    return follow


def _runge_kutta(step: Tensor, time: float, a: Tensor, slope: Callable[[Tensor], Tensor]) -> None:
    # `a` is the slope at the start, which the caller has already.
    b = slope(step + time / 2 * a)
    c = slope(step + time / 2 * b)
    d = slope(step + time * c)
    # In place, as the caller holds this tensor.
    step += time / 6 * (a + 2 * b + 2 * c + d)
