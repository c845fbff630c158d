"""Rollouts of several turns: generate, get the task's observation, and continue with the conversation as the prompt.

Observations are part of the response but not drawn from mu: they are in no loss, no denominator and no metric of a
policy. R3 (arXiv 2510.11370) sec. 4.2 replays such rollouts by the routes that each turn recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from theory.contracts import Draw, Environment, Prompt, Response, RolloutEngine, Rollouts, Sampling, Task
from theory.routing.features import RouterFeatures
from theory.routing.packed_rows import offsets_of
from theory.routing.record import RoutingRecord
from theory.streams import derive_seed, stream
from theory.top_tokens import TopTokens


def roll_out(
    engine: RolloutEngine, task: Task, prompts: Sequence[Prompt], sampling: Sampling, max_turns: int
) -> Rollouts:
    """`num_responses` responses per prompt; those of an `Environment` in up to `max_turns` turns, merged into one each.

    `sampling.max_tokens` counts all tokens after the prompt. An observation that leaves no room for one more token is
    dropped, as is one after the last turn, and the response finishes "length". Response b of the call draws turn
    n = 1, 2, ... from derive_seed(seed, "turn", n, b), whichever others continue. A row of its record is that of the
    turn which sampled the row's successor; observations' rows are those of the turn that first read them.
    """
    # The first turn is the call's own draw, the same as for a task without turns.
    first = engine.generate(prompts, sampling)
    if not isinstance(task, Environment):
        return first
    talks = [_Talk(b, response.prompt, [(first, b)]) for b, response in enumerate(first.responses)]
    going = talks
    for turn in range(1, max_turns + 1):
        answered = [(talk, talk.following(task, sampling.max_tokens)) for talk in going]
        going = [talk for talk, prompt in answered if prompt is not None]
        if not going or turn == max_turns:
            break
        following = [prompt for _, prompt in answered if prompt is not None]
        rollouts = engine.generate(following, _later(sampling, turn, going, following))
        for i, talk in enumerate(going):
            talk.turns.append((rollouts, i))
    # Those that had an observation after their last turn were cut by max_turns.
    for talk in going:
        talk.is_cut = True
    responses = tuple(talk.response() for talk in talks)
    return Rollouts(responses, _record(talks), _features(talks, sampling), first.temperature, _top(talks))


@dataclass
class _Talk:
    """Response `number` of the call while it grows: the rollouts of each of its turns, and its place in them."""

    number: int
    prompt: Prompt
    turns: list[tuple[Rollouts, int]]
    is_cut: bool = False

    def response(self) -> Response:
        """All turns as one response; the last one's prompt holds everything before it, observations included."""
        parts = [rollouts.responses[i] for rollouts, i in self.turns]
        last, num_prompt = parts[-1], len(self.prompt.tokens)
        tokens = torch.cat([torch.tensor(last.prompt.tokens[num_prompt:], dtype=last.tokens.dtype), last.tokens])
        logp_mu, is_response = last.logp_mu.new_zeros(len(tokens)), torch.zeros(len(tokens), dtype=torch.bool)
        # A turn starts where its prompt ends; the gaps between turns are observations, with log-prob 0 under False.
        for part in parts:
            start = len(part.prompt.tokens) - num_prompt
            logp_mu[start : start + len(part.tokens)] = part.logp_mu
            is_response[start : start + len(part.tokens)] = part.is_response
        finish = "length" if self.is_cut else last.finish
        # The oldest version of all turns, so that no token is staler than the response says.
        return Response(self.prompt, tokens, logp_mu, is_response, finish, min(part.version for part in parts))

    def following(self, task: Environment, max_tokens: int) -> Prompt | None:
        """The conversation with the task's observation; None where it is over, or has no room for another token."""
        response = self.response()
        observation = task.observe(self.prompt, response) if response.finish == "stop" else None
        if observation is None:
            return None
        if len(response.tokens) + len(observation) >= max_tokens:
            self.is_cut = True
            return None
        return replace(self.prompt, tokens=(*self.prompt.tokens, *response.tokens.tolist(), *observation))

    def stretches(self) -> list[tuple[RoutingRecord, int, int]]:
        """The routing rows: each turn adds those that no earlier turn had, though its record goes back to the start.

        A later turn may compute the conversation again with other routes; each token keeps the rows under which it was
        sampled.
        """
        found, start = [], 0
        for rollouts, i in self.turns:
            assert rollouts.experts is not None
            found.append((rollouts.experts, i, start))
            # The turn's last token was not an input yet: its row comes from the next turn.
            start = rollouts.responses[i].num_tokens - 1
        return found

    def features(self, num_features: int, seed: int) -> RouterFeatures:
        """At most `num_features` of the turns' features, uniform over all tokens that mu sampled.

        A draw over all tokens decides how many come from each turn, whose own features are already uniform.
        """
        parts = [rollouts.features.select([i]) for rollouts, i in self.turns if rollouts.features is not None]
        if len(parts) == 1:
            return parts[0]
        draws = stream(seed, "turns", self.number, "features")
        num_tokens = torch.tensor([len(rollouts.responses[i].tokens) for rollouts, i in self.turns])
        turn_of_token = torch.arange(len(parts)).repeat_interleave(num_tokens)
        chosen = turn_of_token[torch.randperm(len(turn_of_token), generator=draws)[:num_features]]
        whole, kept = RouterFeatures.concat(parts), []
        for turn, start in enumerate(whole.offsets[:-1].tolist()):
            order = torch.randperm(len(parts[turn].rows), generator=draws)[: int((chosen == turn).sum())]
            kept.append(start + order.sort().values)
        where = torch.cat(kept)
        hidden = None if whole.hidden is None else whole.hidden[where]
        return RouterFeatures(
            whole.rows[where], offsets_of([len(where)]), hidden, whole.logits[where], whole.layer_numbers
        )


def _later(sampling: Sampling, turn: int, going: Sequence[_Talk], following: Sequence[Prompt]) -> Sampling:
    """The sampling of a turn for the responses that continue: each has its own stream and its remaining budget."""
    draws = []
    for talk, prompt in zip(going, following, strict=True):
        # Tokens that are left after the earlier turns and their observations.
        room = sampling.max_tokens - (len(prompt.tokens) - len(talk.prompt.tokens))
        draws.append(Draw(derive_seed(sampling.seed, "turn", turn, talk.number), room))
    seed = derive_seed(sampling.seed, "turn", turn)
    longest = max(draw.max_tokens for draw in draws)
    return replace(sampling, max_tokens=longest, num_responses=1, seed=seed, draws=tuple(draws))


def _record(talks: Sequence[_Talk]) -> RoutingRecord | None:
    if any(rollouts.experts is None for talk in talks for rollouts, _ in talk.turns):
        return None
    return RoutingRecord.spliced([talk.stretches() for talk in talks])


def _features(talks: Sequence[_Talk], sampling: Sampling) -> RouterFeatures | None:
    if any(rollouts.features is None for talk in talks for rollouts, _ in talk.turns):
        return None
    return RouterFeatures.concat([talk.features(sampling.num_features, sampling.seed) for talk in talks])


def _top(talks: Sequence[_Talk]) -> TopTokens | None:
    """mu's likeliest tokens of every turn; an observation's rows have probability 0."""
    found = [[(rollouts.top, rollouts.responses[i], i) for rollouts, i in talk.turns] for talk in talks]
    some = found[0][0][0]
    if some is None:
        return None
    ids, logp = [], []
    for talk, turns in zip(talks, found, strict=True):
        num = turns[-1][1].num_tokens - len(talk.prompt.tokens)
        ids_TK = some.ids.new_zeros(num, some.ids.shape[1])
        logp_TK = some.logp.new_full(ids_TK.shape, -torch.inf)
        for top, response, i in turns:
            start = len(response.prompt.tokens) - len(talk.prompt.tokens)
            assert top is not None, "a later turn lacks the likeliest tokens that the first one has"
            ids_TK[start : start + len(response.tokens)], logp_TK[start : start + len(response.tokens)] = top.rows(i)
        ids.append(ids_TK)
        logp.append(logp_TK)
    offsets = offsets_of([len(rows) for rows in ids])
    return TopTokens(torch.cat(ids), torch.cat(logp), offsets, some.vocab_size)


def sampled_tokens(task: Task, prompt: Prompt, tokens: Sequence[int], stop_token: int) -> Bool[Tensor, " T"]:
    """`is_response` of a whole response that was written out rather than rolled out: False on its observations.

    Raises ValueError where the tokens after a turn are not the task's observation.
    """
    tokens = tuple(tokens)
    is_response, start = torch.ones(len(tokens), dtype=torch.bool), 0
    while isinstance(task, Environment) and stop_token in tokens[start:]:
        end = tokens.index(stop_token, start) + 1
        so_far = Response(prompt, torch.tensor(tokens[:end]), torch.zeros(end), is_response[:end], "stop", 0)
        observation = task.observe(prompt, so_far)
        if observation is None:
            break
        start = end + len(observation)
        if tokens[end:start] != observation:
            raise ValueError(f"prompt {prompt.id}: expected the observation {observation}, got {tokens[end:start]}")
        is_response[end:start] = False
    return is_response


__all__ = ["roll_out", "sampled_tokens"]
