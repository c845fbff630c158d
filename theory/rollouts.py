"""The data of rollouts: prompts, how responses to them are sampled, and the responses, packed or padded.

Letters: theory/contracts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from theory.routing.features import RouterFeatures
from theory.routing.record import RoutingRecord
from theory.top_tokens import TopTokens


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


Finish = Literal["stop", "length", "abort", "turns"]


@dataclass(frozen=True)
class Response:
    """One sampled response. `is_response` is False on tokens that mu did not sample (a task's observations).

    `logp_mu` is 0 there. `finish` is "length" where a limit on tokens cut it, "turns" where the limit on turns did, and
    "abort" where the call ended before it; `version` is that of the oldest weights that sampled it. `versions` has
    (first token, version) of each stretch of one version, in order; empty where `version` sampled all.
    """

    prompt: Prompt
    tokens: Int[Tensor, " T"]
    logp_mu: Float[Tensor, " T"]
    is_response: Bool[Tensor, " T"]
    finish: Finish
    version: int
    versions: tuple[tuple[int, int], ...] = ()

    @property
    def version_T(self) -> Int[Tensor, " T"]:
        """The version of the weights that sampled each token; an observation has that of the token before it."""
        # Each stretch ends where the next one starts, the last at the end of the response.
        starts, versions = zip(*(self.versions or ((0, self.version),)), strict=True)
        lengths = torch.tensor([*starts, len(self.tokens)]).diff()
        return torch.tensor(versions).repeat_interleave(lengths)

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens together (S)."""
        return len(self.prompt.tokens) + self.tokens.shape[0]


@dataclass(frozen=True)
class TokenBatch:
    """Rollouts as right-padded tensors: response position t is sequence position num_prompt + t.

    `temperature` is that of the rollouts. mu's likeliest tokens stay packed: they may lie in other processes.
    """

    tokens_BS: Int[Tensor, "B S"]
    num_prompt_B: Int[Tensor, " B"]
    num_tokens_B: Int[Tensor, " B"]
    is_response_BT: Bool[Tensor, "B T"]
    logp_mu_BT: Float[Tensor, "B T"]
    temperature: float = 1.0
    top: TopTokens | None = None

    @property
    def predicting_row_BT(self) -> Int[Tensor, "B T"]:
        """The input row whose logits predict response token t: num_prompt + t - 1, clipped to the padded width."""
        # The clip keeps padding positions of long prompts inside the width; the mask leaves them out.
        T = self.is_response_BT.shape[1]
        row_BT = self.num_prompt_B[:, None] + torch.arange(T, device=self.num_prompt_B.device) - 1
        return row_BT.clamp(max=self.tokens_BS.shape[1] - 1)

    @property
    def num_sampled_B(self) -> list[int]:
        """The number of tokens of each response that mu sampled."""
        return self.is_response_BT.sum(1).tolist()

    @property
    def sampling_rows_B(self) -> tuple[Int[Tensor, " _"], ...]:
        """The input rows of each response that predict the tokens which mu sampled, ascending."""
        # `nonzero` goes through the mask row by row: these are `sampling_rows` (theory/routing/features.py) of all.
        b_n, t_n = self.is_response_BT.nonzero(as_tuple=True)
        return (self.num_prompt_B[b_n] - 1 + t_n).split(self.num_sampled_B)

    def select(self, indices: Sequence[int]) -> TokenBatch:
        """These rows, in this order, as wide as their own longest response and sequence."""
        indices = list(indices)
        if indices == list(range(len(self.num_tokens_B))):
            return self
        prompt_b, tokens_b = self.num_prompt_B[indices], self.num_tokens_B[indices]
        S, T = int(tokens_b.max()), int((tokens_b - prompt_b).max())
        top = None if self.top is None else self.top.select(indices)
        of_tokens = self.is_response_BT[indices, :T], self.logp_mu_BT[indices, :T]
        return TokenBatch(self.tokens_BS[indices, :S], prompt_b, tokens_b, *of_tokens, self.temperature, top)


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
        # The trainer compares the tuple of responses by identity, too (sandbox/training/forward.py::Kept.serves).
        if indices == list(range(len(self))):
            return self
        chosen = Rollouts(
            responses=tuple(self.responses[i] for i in indices),
            experts=None if self.experts is None else self.experts.select(indices),
            features=None if self.features is None else self.features.select(indices),
            temperature=self.temperature,
            top=None if self.top is None else self.top.select(indices),
        )
        return chosen._with_padding(None if self._made is None else self._made.select(indices))

    def without_records(self) -> Rollouts:
        """The same responses without the routing record and features."""
        return replace(self, experts=None, features=None)._with_padding(self._made)

    def __getstate__(self) -> dict[str, object]:
        # A copy for another process can pad for itself.
        return {name: value for name, value in vars(self).items() if name != "_padded"}

    @property
    def _made(self) -> TokenBatch | None:
        """The padded tensors if they were made already."""
        return vars(self).get("_padded")

    def _with_padding(self, padded: TokenBatch | None) -> Rollouts:
        """These new rollouts, whose padded tensors are rows of others' (None: not made yet)."""
        if padded is not None:
            vars(self)["_padded"] = padded
        return self

    def padded(self) -> TokenBatch:
        """The responses as right-padded tensors; padding tokens are 0, padding log-probs 0 under a False mask."""
        return self._padded

    # Made once, as no field ever changes; cached_property writes past the frozen class's setter.
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
    num_prompt_B = torch.tensor([len(r.prompt.tokens) for r in responses])
    length_B = torch.tensor([r.tokens.shape[0] for r in responses])
    num_tokens_B = num_prompt_B + length_B
    prompts = torch.tensor([token for r in responses for token in r.prompt.tokens], dtype=torch.int64)
    # Boolean masks are filled row by row: one copy for the batch, and no loop over rows.
    place_S = torch.arange(int(num_tokens_B.max()))
    is_prompt_BS = place_S < num_prompt_B[:, None]
    tokens_BS = torch.zeros(is_prompt_BS.shape, dtype=torch.int64)
    tokens_BS[is_prompt_BS] = prompts
    tokens_BS[(place_S < num_tokens_B[:, None]) & ~is_prompt_BS] = torch.cat([r.tokens for r in responses])
    exists_BT = torch.arange(int(length_B.max())) < length_B[:, None]
    is_response_BT = exists_BT.masked_scatter(exists_BT, torch.cat([r.is_response for r in responses]))
    logp_mu = torch.cat([r.logp_mu for r in responses])
    logp_mu_BT = logp_mu.new_zeros(exists_BT.shape).masked_scatter_(exists_BT, logp_mu)
    return TokenBatch(tokens_BS, num_prompt_B, num_tokens_B, is_response_BT, logp_mu_BT, temperature, top)
