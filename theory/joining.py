"""Responses that were sampled in several calls, joined: the turns of an environment, or the parts of a partial rollout.

Each call's prompt is everything before it, so that a part starts where its prompt ends. Tokens between two parts are
observations, which mu did not sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from theory.contracts import Prompt, Response, Rollouts, Sampling
from theory.routing.features import RouterFeatures
from theory.routing.packed_rows import offsets_of
from theory.routing.record import RoutingRecord
from theory.streams import stream
from theory.top_tokens import TopTokens


@dataclass
class Parts:
    """Response `number` to a prompt: the rollouts of each of its parts, in order, and its place in them."""

    number: int
    prompt: Prompt
    parts: list[tuple[Rollouts, int]]

    def response(self) -> Response:
        """All parts as one response; the last one's prompt holds everything before it, observations included."""
        parts = [rollouts.responses[i] for rollouts, i in self.parts]
        last, num_prompt = parts[-1], len(self.prompt.tokens)
        tokens = torch.cat([torch.tensor(last.prompt.tokens[num_prompt:], dtype=last.tokens.dtype), last.tokens])
        logp_mu, is_response = last.logp_mu.new_zeros(len(tokens)), torch.zeros(len(tokens), dtype=torch.bool)
        versions: list[tuple[int, int]] = []
        # A part starts where its prompt ends; gaps between parts are observations, with log-prob 0 under False.
        for part in parts:
            start = len(part.prompt.tokens) - num_prompt
            logp_mu[start : start + len(part.tokens)] = part.logp_mu
            is_response[start : start + len(part.tokens)] = part.is_response
            for first, version in part.versions or ((0, part.version),):
                # A stretch of the version before it needs no entry of its own.
                if not versions or versions[-1][1] != version:
                    versions.append((start + first, version))
        oldest = min(version for _, version in versions)
        stretches = tuple(versions) if len(versions) > 1 else ()
        return Response(self.prompt, tokens, logp_mu, is_response, last.finish, oldest, stretches)

    def stretches(self) -> list[tuple[RoutingRecord, int, int]]:
        """The routing rows: each part adds those that no earlier part had, though its record goes back to the start.

        A later part may compute the earlier tokens again with other routes; each token keeps the rows under which it
        was sampled.
        """
        found, start = [], 0
        for rollouts, i in self.parts:
            assert rollouts.experts is not None
            found.append((rollouts.experts, i, start))
            # The part's last token was not an input yet: its row comes from the next part.
            start = rollouts.responses[i].num_tokens - 1
        return found

    def features(self, num_features: int, seed: int) -> RouterFeatures:
        """At most `num_features` of the parts' features, uniform over all tokens that mu sampled.

        A draw over all tokens decides how many come from each part, whose own features are already uniform.
        """
        parts = [rollouts.features.select([i]) for rollouts, i in self.parts if rollouts.features is not None]
        if len(parts) == 1:
            return parts[0]
        draws = stream(seed, "turns", self.number, "features")
        num_tokens = torch.tensor([len(rollouts.responses[i].tokens) for rollouts, i in self.parts])
        part_of_token = torch.arange(len(parts)).repeat_interleave(num_tokens)
        chosen = part_of_token[torch.randperm(len(part_of_token), generator=draws)[:num_features]]
        whole, kept = RouterFeatures.concat(parts), []
        for number, start in enumerate(whole.offsets[:-1].tolist()):
            # Sorted, as a response's features are in ascending rows (RouterFeatures).
            order = torch.randperm(len(parts[number].rows), generator=draws)[: int((chosen == number).sum())]
            kept.append(start + order.sort().values)
        # Row numbers stay: every part counts them from the start of the conversation, which its prompt holds.
        where = torch.cat(kept)
        return whole.at(where, offsets_of([len(where)]))


def join(each: Sequence[Parts], sampling: Sampling) -> Rollouts:
    """These responses, joined, with what all of their parts have: routes, features, mu's likeliest tokens."""
    temperature = each[0].parts[0][0].temperature
    responses = tuple(parts.response() for parts in each)
    return Rollouts(responses, _record(each), _features(each, sampling), temperature, _top(each))


def _record(each: Sequence[Parts]) -> RoutingRecord | None:
    if any(rollouts.experts is None for parts in each for rollouts, _ in parts.parts):
        return None
    return RoutingRecord.spliced([parts.stretches() for parts in each])


def _features(each: Sequence[Parts], sampling: Sampling) -> RouterFeatures | None:
    if any(rollouts.features is None for parts in each for rollouts, _ in parts.parts):
        return None
    return RouterFeatures.concat([parts.features(sampling.num_features, sampling.seed) for parts in each])


def _top(each: Sequence[Parts]) -> TopTokens | None:
    """mu's likeliest tokens of every part; an observation's rows have probability 0."""
    if each[0].parts[0][0].top is None:
        return None
    placed, lengths = [], []
    for parts in each:
        own = []
        for rollouts, i in parts.parts:
            assert rollouts.top is not None, "a later part lacks the likeliest tokens that the first one has"
            own.append((rollouts.top, i, len(rollouts.responses[i].prompt.tokens) - len(parts.prompt.tokens)))
        last, last_i = parts.parts[-1]
        placed.append(own)
        lengths.append(last.responses[last_i].num_tokens - len(parts.prompt.tokens))
    return TopTokens.placed(placed, lengths)
