"""The contracts between the algorithm and its engines and tasks: frozen data and protocols, no behaviour of any engine.

Four policies. `mu` emitted the tokens (the inference engine: its numerics, weights and routing); `old` is the training
engine at the weights that were rolled out; `pi` is the training engine now; `ref` is a frozen reference.
Training-inference discrepancy is mu against old, policy staleness is old against pi (MiniRL, arXiv 2512.01374, Eq. 5).

Letters: B responses, T response positions, S prompt + response positions, P prompts, G responses per prompt,
N mini-batches, L MoE layers, K slots, E experts, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from theory.routing.features import RouterFeatures
from theory.routing.passes import RoutingPlan
from theory.routing.record import RoutingRecord
from theory.top_tokens import TopTokens

if TYPE_CHECKING:
    from theory.objectives import Objective


@dataclass(frozen=True)
class Prompt:
    """One problem: its tokens, and the verified answer that the task's grader compares with."""

    id: str
    tokens: tuple[int, ...]
    answer: str
    text: str = ""


@dataclass(frozen=True)
class Draw:
    """One response's own seed and length limit, in tokens; they make it independent of the rest of the call.

    The response's first `first` tokens are part of the prompt: an earlier call drew them from the same seed, and the
    draws of this one follow theirs. Responses of one `group` are trained on together (`Sampling.enough`).
    """

    seed: int
    max_tokens: int
    first: int = 0
    group: int = 0


@dataclass(frozen=True)
class Sampling:
    """Sampling of responses. `logp_mu` is that of the distribution at `temperature`, which is never truncated.

    Temperature 0 means greedy decoding, in an engine that has it; log-probabilities are then those at 1. `num_features`
    requests router features on at most that many rows of each response (Pr2, arXiv 2606.00395, App. E); 0 requests
    none. `seed` names the draw: same weights, prompts and seed give the same bits. `num_top` requests that many of mu's
    likeliest tokens at every sampled position, or all of a smaller vocabulary. `draws` is empty, or has one entry per
    response, which replaces `seed` and `max_tokens` for it, as for later turns (theory/turns.py); `max_tokens` is then
    at least each of theirs. `enough` > 0 ends the call once that many of the draws' groups have ended, all their
    responses; the others finish "abort", with their tokens so far (theory/oversampling.py).
    """

    max_tokens: int
    num_responses: int = 1
    temperature: float = 1.0
    seed: int = 0
    num_features: int = 0
    draws: tuple[Draw, ...] = ()
    num_top: int = 0
    enough: int = 0

    @property
    def scored_temperature(self) -> float:
        """The temperature T > 0 of the policy whose log-probabilities are written down: 1 for greedy decoding."""
        return self.temperature or 1.0

    def limits(self, num_responses: int) -> list[int]:
        """The length limit of each of the call's responses, in tokens; ValueError where `draws` do not fit them."""
        if self.enough and not self.draws:
            raise ValueError(f"sampling.enough: expected 0 without draws, which name the groups, got {self.enough}")
        if not self.draws:
            return [self.max_tokens] * num_responses
        limits = [draw.max_tokens for draw in self.draws]
        if len(limits) != num_responses or not all(1 <= limit <= self.max_tokens for limit in limits):
            raise ValueError(
                f"sampling.draws: expected {num_responses} draws of 1 to {self.max_tokens} tokens, got {len(limits)} "
                f"of {limits}"
            )
        return limits


@dataclass(frozen=True)
class Response:
    """One sampled response. `is_response` is False on tokens that mu did not sample (a task's observations).

    `logp_mu` is 0 there. `finish` is "length" where a limit on tokens or turns cut it, "abort" where the call ended
    before it; `version` is that of the oldest weights that sampled it. `versions` has (first token, version) of each
    stretch of one version, in order; empty where `version` sampled all.
    """

    prompt: Prompt
    tokens: Int[Tensor, " T"]
    logp_mu: Float[Tensor, " T"]
    is_response: Bool[Tensor, " T"]
    finish: Literal["stop", "length", "abort"]
    version: int
    versions: tuple[tuple[int, int], ...] = ()

    @property
    def version_T(self) -> Int[Tensor, " T"]:
        """The version of the weights that sampled each token; an observation has that of the token before it."""
        starts, versions = zip(*(self.versions or ((0, self.version),)), strict=True)
        lengths = torch.tensor([*starts, len(self.tokens)]).diff()
        return torch.tensor(versions).repeat_interleave(lengths)

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens together (S)."""
        return len(self.prompt.tokens) + len(self.tokens)


@dataclass(frozen=True)
class TokenBatch:
    """Rollouts as right-padded tensors: response position t is sequence position num_prompt + t.

    `temperature` is that of the rollouts. `top_ids_BTK` and `top_logp_mu_BTK` are mu's likeliest tokens (TopTokens).
    """

    tokens_BS: Int[Tensor, "B S"]
    num_prompt_B: Int[Tensor, " B"]
    num_tokens_B: Int[Tensor, " B"]
    is_response_BT: Bool[Tensor, "B T"]
    logp_mu_BT: Float[Tensor, "B T"]
    temperature: float = 1.0
    top_ids_BTK: Int[Tensor, "B T K"] | None = None
    top_logp_mu_BTK: Float[Tensor, "B T K"] | None = None

    @property
    def predicting_row_BT(self) -> Int[Tensor, "B T"]:
        """The input row whose logits predict response token t: num_prompt + t - 1, clipped to the padded width."""
        # The clip keeps padding positions of long prompts inside the width; the mask leaves them out.
        T = self.is_response_BT.shape[1]
        row_BT = self.num_prompt_B[:, None] + torch.arange(T, device=self.num_prompt_B.device) - 1
        return row_BT.clamp(max=self.tokens_BS.shape[1] - 1)


@dataclass(frozen=True)
class Rollouts:
    """B responses, the G of one prompt adjacent, with mu's routing record where there is one.

    `temperature` is the T > 0 of `logp_mu`. A training engine divides its logits by it, so that old, pi, ref and the
    entropy are those of the policies at T. `top` has mu's likeliest tokens, also at T, where they were requested.
    """

    responses: tuple[Response, ...]
    experts: RoutingRecord | None = None
    features: RouterFeatures | None = None
    temperature: float = 1.0
    top: TopTokens | None = None

    def __len__(self) -> int:
        return len(self.responses)

    def select(self, indices: Sequence[int]) -> Rollouts:
        """These responses, in this order, with their rows of the routing record and features."""
        indices = list(indices)
        # The whole batch in order: no copy, and the cached padding is kept.
        if indices == list(range(len(self))):
            return self
        return Rollouts(
            responses=tuple(self.responses[i] for i in indices),
            experts=None if self.experts is None else self.experts.select(indices),
            features=None if self.features is None else self.features.select(indices),
            temperature=self.temperature,
            top=None if self.top is None else self.top.select(indices),
        )

    def padded(self) -> TokenBatch:
        """The responses as right-padded tensors; padding tokens are 0, padding log-probs 0 under a False mask."""
        return self._padded

    @cached_property
    def _padded(self) -> TokenBatch:
        return _token_batch(self.responses, self.temperature, self.top)

    @staticmethod
    def concat(parts: Sequence[Rollouts]) -> Rollouts:
        """The parts one after the other; records are kept only if every part has one.

        Raises ValueError for parts of several temperatures.
        """
        if len(parts) == 1:
            return parts[0]
        temperatures = sorted({part.temperature for part in parts})
        if len(temperatures) > 1:
            raise ValueError(f"rollouts: expected one temperature, got {', '.join(f'{t:g}' for t in temperatures)}")
        experts = [p.experts for p in parts if p.experts is not None]
        features = [p.features for p in parts if p.features is not None]
        top = [p.top for p in parts if p.top is not None]
        return Rollouts(
            responses=tuple(r for p in parts for r in p.responses),
            experts=RoutingRecord.concat(experts) if len(experts) == len(parts) else None,
            features=RouterFeatures.concat(features) if len(features) == len(parts) else None,
            temperature=temperatures[0],
            top=TopTokens.concat(top) if len(top) == len(parts) else None,
        )


def _token_batch(responses: Sequence[Response], temperature: float, top: TopTokens | None) -> TokenBatch:
    num_prompt = [len(r.prompt.tokens) for r in responses]
    lengths = [len(r.tokens) for r in responses]
    prompts = torch.tensor([token for r in responses for token in r.prompt.tokens], dtype=torch.int64)
    # Prompt and response alternate, in the order in which `_padded` fills its rows.
    tokens = zip(prompts.split(num_prompt), (r.tokens for r in responses), strict=True)
    num_prompt_B, length_B = torch.tensor(num_prompt), torch.tensor(lengths)
    return TokenBatch(
        _padded([part for pair in tokens for part in pair], num_prompt_B + length_B),
        num_prompt_B,
        num_prompt_B + length_B,
        _padded([r.is_response for r in responses], length_B),
        _padded([r.logp_mu for r in responses], length_B),
        temperature,
        *((None, None) if top is None else top.padded()),
    )


def _padded(parts: Sequence[Tensor], length_B: Int[Tensor, " B"]) -> Shaped[Tensor, "B width"]:
    """Rows of these lengths, filled in order from the concatenated `parts`, then zeros."""
    out = parts[0].new_zeros(len(length_B), int(length_B.max()))
    # A boolean mask is filled row by row: one copy for the batch, and no loop over rows.
    out[torch.arange(out.shape[1]) < length_B[:, None]] = torch.cat(list(parts))
    return out


@dataclass(frozen=True)
class TokenScores:
    """The old pass: log-probabilities of the sampled tokens under `old` at the rollouts' temperature, and its routes.

    `experts` are the experts that the pass used, `natural` those that its live router logits would have chosen; the
    two are the same record unless the pass replayed or predicted. `features` holds (h_old, p_old) on the requested
    rows. `logp_top_BTK` is log old of the rollouts' likeliest tokens, where they have them; `router_logp` has the
    log-scores of the experts that the plan names (`RoutingPlan.scored`), on the rows of `experts`. `sum_squares_BT` is
    sum_v old(v)^2 of the distribution that each token was scored under, in (0, 1].
    """

    logp_BT: Float[Tensor, "B T"]
    entropy_BT: Float[Tensor, "B T"]
    experts: RoutingRecord | None = None
    natural: RoutingRecord | None = None
    features: RouterFeatures | None = None
    logp_top_BTK: Float[Tensor, "B T K"] | None = None
    router_logp: Float[Tensor, "R L _K"] | None = None
    sum_squares_BT: Float[Tensor, "B T"] | None = None


@dataclass(frozen=True)
class MiniBatch:
    """The inputs of one gradient update. `index` counts from 0 within the global step; `num_minibatches` is N.

    `logp_ref_BT` is present where the objective has a KL penalty, `features` where the predictor learns,
    `logp_old_top_BTK` where the rollouts have mu's likeliest tokens, `router_shift_BT` where the objective scales
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
    logp_old_top_BTK: Float[Tensor, "B T K"] | None = None
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
