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
from theory.joining import Parts, join
from theory.rollouts import Finish
from theory.streams import derive_seed


def roll_out(
    engine: RolloutEngine, task: Task, prompts: Sequence[Prompt], sampling: Sampling, max_turns: int
) -> Rollouts:
    """`num_responses` responses per prompt; those of an `Environment` in up to `max_turns` turns, merged into one each.

    `sampling.max_tokens` counts all tokens after the prompt. An observation that leaves no room for one more token is
    dropped, and the response finishes "length"; so is one after the last turn, and the response finishes "turns" where
    there was room. Response b of the call draws turn n = 1, 2, ... from derive_seed(seed, "turn", n, b), whichever
    others continue. A row of its record is that of the turn which sampled the row's successor; observations' rows are
    those of the turn that first read them.
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
            talk.parts.append((rollouts, i))
    # Those that had an observation after their last turn were cut by max_turns.
    for talk in going:
        talk.cut_by = "turns"
    return join(talks, sampling)


@dataclass
class _Talk(Parts):
    """Response `number` of the call while it grows, a turn at a time; `cut_by`: the limit that ended it, if any did."""

    cut_by: Finish | None = None

    def response(self) -> Response:
        """All turns as one response."""
        whole = super().response()
        return whole if self.cut_by is None else replace(whole, finish=self.cut_by)

    def following(self, task: Environment, max_tokens: int) -> Prompt | None:
        """The conversation with the task's observation; None where it is over, or has no room for another token."""
        response = self.response()
        observation = task.observe(self.prompt, response) if response.finish == "stop" else None
        if observation is None:
            return None
        # Equality too: an observation must leave room for a token, as a response ends with one that mu sampled.
        if len(response.tokens) + len(observation) >= max_tokens:
            self.cut_by = "length"
            return None
        return replace(self.prompt, tokens=(*self.prompt.tokens, *response.tokens.tolist(), *observation))


def _later(sampling: Sampling, turn: int, going: Sequence[_Talk], following: Sequence[Prompt]) -> Sampling:
    """The sampling of a turn for the responses that continue: each has its own stream and its remaining budget."""
    draws = []
    for talk, prompt in zip(going, following, strict=True):
        # Tokens that are left after the earlier turns and their observations.
        room = sampling.max_tokens - (len(prompt.tokens) - len(talk.prompt.tokens))
        # A stream per turn, read from its start: `first` is 0, though the prompt holds sampled tokens.
        draws.append(Draw(derive_seed(sampling.seed, "turn", turn, talk.number), room))
    seed = derive_seed(sampling.seed, "turn", turn)
    longest = max(draw.max_tokens for draw in draws)
    return replace(sampling, max_tokens=longest, num_responses=1, seed=seed, draws=tuple(draws))


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
