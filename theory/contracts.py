"""The contracts between the algorithm and its engines and tasks: frozen data and protocols, no behaviour of any engine.

Four policies. `mu` emitted the tokens (the inference engine: its numerics, weights and routing); `old` is the training
engine when it scores the rollout, before the step's updates (the weights that were rolled out, unless mu lags behind);
`pi` is the training engine now; `ref` is a frozen reference.
Training-inference discrepancy is mu against old, policy staleness is old against pi (MiniRL, arXiv 2512.01374, Eq. 5).

Letters: B responses, T response positions, S prompt + response positions, P prompts, G responses per prompt,
N mini-batches, L MoE layers, K slots, E experts, D model width, V vocabulary.

The data of rollouts are in theory/rollouts.py, and are imported from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from theory.rollouts import Draw, Prompt, Response, Rollouts, Sampling, TokenBatch
from theory.routing.features import RouterFeatures
from theory.routing.passes import RoutingPlan
from theory.routing.record import RoutingRecord
from theory.top_tokens import TokenRows

if TYPE_CHECKING:
    from theory.objectives import Objective


@dataclass(frozen=True)
class TokenScores:
    """The old pass: log-probabilities of the sampled tokens under `old` at the rollouts' temperature, and its routes.

    `experts` are the experts that the pass used, `natural` those that its live router logits would have chosen; the
    two are the same record unless the pass replayed or predicted. `features` holds (h_old, p_old) on the requested
    rows. `logp_top` is log old of the rollouts' likeliest tokens, where they have them; `router_scores` has, on
    every row, the log-scores of the experts that the plan names (`RoutingPlan.scored`) in the place of logits.
    `sum_squares_BT` is sum_v old(v)^2 of the distribution that each token was scored under, in (0, 1].
    """

    logp_BT: Float[Tensor, "B T"]
    entropy_BT: Float[Tensor, "B T"]
    experts: RoutingRecord | None = None
    natural: RoutingRecord | None = None
    features: RouterFeatures | None = None
    logp_top: TokenRows | None = None
    router_scores: RouterFeatures | None = None
    sum_squares_BT: Float[Tensor, "B T"] | None = None


@dataclass(frozen=True)
class MiniBatch:
    """The inputs of one gradient update. `index` counts from 0 within the global step; `num_minibatches` is N.

    `logp_ref_BT` is present where the objective has a KL penalty, `features` where the predictor learns,
    `logp_old_top` where the rollouts have mu's likeliest tokens, `router_shift_BT` where the objective scales
    ratios by it. `advantages_BT` are advantages per token, where the objective has them; they replace `advantages_B`,
    which is then the response's reward less its group's mean.
    """

    rollouts: Rollouts
    logp_old_BT: Float[Tensor, "B T"]
    advantages_B: Float[Tensor, " B"]
    index: int
    num_minibatches: int
    features: RouterFeatures | None = None
    logp_ref_BT: Float[Tensor, "B T"] | None = None
    logp_old_top: TokenRows | None = None
    router_shift_BT: Float[Tensor, "B T"] | None = None
    advantages_BT: Float[Tensor, "B T"] | None = None


@dataclass(frozen=True)
class UpdateStats:
    """The result of one gradient update: scalar metrics by registered name, and pi's values before the step was taken.

    `natural` are the experts that pi's live logits would choose; `features` holds pi's router logits on the rows of
    the mini-batch's cached features (the targets of the predictor, Pr2 Eq. 8).
    """

    metrics: dict[str, float]
    logp_pi_BT: Float[Tensor, "B T"]
    natural: RoutingRecord | None = None
    features: RouterFeatures | None = None


# Possibly a generator, as `predictor.fold` is: an engine can read it only once.
NamedTensors = Iterable[tuple[str, Tensor]]


@runtime_checkable
class RolloutEngine(Protocol):
    """An inference engine: it holds its own copy of the weights, in its own numerics, and samples from mu."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        """`num_responses` responses per prompt, adjacent, with logp_mu and the routing record of every input row.

        `Rollouts.temperature` is that of logp_mu, `sampling.scored_temperature`.
        """
        ...

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Takes Hugging Face-named weights; later responses carry `version`."""
        ...


@runtime_checkable
class TrainingEngine(Protocol):
    """A training engine: it holds the master weights, scores sampled tokens and takes gradient steps."""

    def score(self, rollouts: Rollouts, plan: RoutingPlan) -> TokenScores:
        """The old pass at the current weights, without gradients, routed as `plan` says."""
        ...

    def score_reference(self, rollouts: Rollouts) -> Float[Tensor, "B T"]:
        """log pi_ref of the sampled tokens: the frozen weights that training started from, naturally routed, at the
        rollouts' temperature.
        """
        ...

    def update(self, minibatch: MiniBatch, objective: Objective, plan: RoutingPlan) -> UpdateStats:
        """One optimiser step on the mini-batch, and one predictor step where the mini-batch carries features."""
        ...

    def named_tensors(self, folded: bool = False) -> NamedTensors:
        """The current weights under their Hugging Face names; `folded`: gates hold W + W_p^T (`predictor.fold`)."""
        ...

    def predictor_weights(self) -> dict[int, Float[Tensor, "D E"]]:
        """W_p by layer number (Pr2 Eq. 4); empty where the mode trains no predictor."""
        ...


@runtime_checkable
class Task(Protocol):
    """A source of prompts with verifiable rewards."""

    def prompts(self, step: int, num_prompts: int) -> Sequence[Prompt]:
        """`num_prompts` training prompts for this global step; the same step gives the same prompts."""
        ...

    def held_out(self) -> Sequence[Prompt]:
        """The evaluation prompts; none of them is ever returned by `prompts`."""
        ...

    def reward(self, prompt: Prompt, response: Response) -> float:
        """The reward of one response, in [0, 1]."""
        ...


# theory/turns.py asks isinstance, which looks at names alone: any task with an `observe` has turns.
@runtime_checkable
class Environment(Task, Protocol):
    """A task with turns: a response that has ended may be answered, and then continues."""

    def observe(self, prompt: Prompt, response: Response) -> tuple[int, ...] | None:
        """The environment's tokens after the response so far, whose last turn has just ended; None where it is over.

        Depends on its arguments alone.
        """
        ...


__all__ = [
    "Draw", "Environment", "MiniBatch", "NamedTensors", "Prompt", "Response", "RolloutEngine", "Rollouts", "Sampling",
    "Task", "TokenBatch", "TokenScores", "TrainingEngine", "UpdateStats",
]  # fmt: skip
