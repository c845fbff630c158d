"""Over-sampling: more prompts are in progress than a global step needs, and its rollout ends once enough groups have.

The responses that have not ended are given up, or kept: the next step's weights continue them (partial rollouts). A
kept response keeps its tokens, their log-probabilities, routes and versions; its later tokens are drawn from the same
stream, whichever step draws them. Design and bias: docs/decisions/0013-partial-rollouts.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from theory.advantages import keep_mixed_groups
from theory.algorithm import Algorithm, Oversampling
from theory.contracts import Draw, Prompt, Response, RolloutEngine, Rollouts, Sampling, Task
from theory.joining import Parts, join
from theory.streams import derive_seed


class OpenGroups:
    """The groups of an engine's call whose responses have not all ended; `sampling` is that of the call.

    Without `sampling.enough` a call ends with its last response.
    """

    def __init__(self, sampling: Sampling):
        self._groups = [draw.group for draw in sampling.draws]
        self._open = Counter(self._groups)
        self._num_groups, self._enough = len(self._open), sampling.enough

    def end(self, responses: Sequence[int]) -> None:
        """Counts these responses of the call, which have just ended."""
        # Without `enough` a call may have no draws, and then no group to look up.
        if self._enough:
            self._open.subtract(self._groups[b] for b in responses)

    @property
    def are_enough_complete(self) -> bool:
        """Whether as many groups as `sampling.enough` have ended."""
        return 0 < self._enough <= self._num_groups - sum(count > 0 for count in self._open.values())


@dataclass(frozen=True)
class StartedGroup:
    """One prompt and its G responses so far; `rollouts` is None before their first call.

    `number` counts the groups that the run has started: it names the prompt, and the streams of the responses.
    """

    number: int
    prompt: Prompt
    rollouts: Rollouts | None = None

    @property
    def responses(self) -> tuple[Response, ...]:
        """The responses so far; none before the first call."""
        return () if self.rollouts is None else self.rollouts.responses

    @property
    def is_complete(self) -> bool:
        """Whether all responses have ended."""
        return self.rollouts is not None and all(r.finish != "abort" for r in self.responses)

    @property
    def version(self) -> int | None:
        """The version of the oldest token, or None without a token."""
        return min((r.version for r in self.responses if len(r.tokens)), default=None)

    @property
    def num_tokens(self) -> int:
        """The tokens that mu has sampled for it."""
        return sum(len(r.tokens) for r in self.responses)


@dataclass(frozen=True)
class Backlog:
    """The state between two rollouts: the groups that continue, oldest first, and the number of the next new one."""

    next_number: int
    groups: tuple[StartedGroup, ...] = ()

    @staticmethod
    def at(step: int, algorithm: Algorithm) -> Backlog:
        """Nothing in progress at this global step, with numbers that no earlier step has used."""
        assert algorithm.oversampling is not None
        # A round starts at most this many groups, and a step has at most `dynamic_sampling_rounds` rounds.
        most_started = algorithm.num_prompts + algorithm.oversampling.extra_prompts
        return Backlog(step * most_started * algorithm.dynamic_sampling_rounds)


def first_complete(
    step: int, algorithm: Algorithm, engine: RolloutEngine, task: Task, seed: int, backlog: Backlog
) -> tuple[Rollouts, Float[Tensor, "P G"], dict[str, float], Backlog]:
    """The first P groups to be complete, oldest first, with rewards and metrics; and the backlog after them.

    Group n has prompt `task.prompts(n, 1)`, and its response g draws from derive_seed(seed, "rollout", n, g): neither
    depends on the steps that sample it. Dynamic sampling continues until P groups with mixed rewards are complete, or
    the rounds are used up, as in `theory.loop.collect`.
    """
    over = algorithm.oversampling
    assert over is not None
    P, rounds = algorithm.num_prompts, algorithm.dynamic_sampling_rounds
    waiting, next_number = list(backlog.groups), backlog.next_number
    mixed: list[tuple[StartedGroup, Tensor]] = []
    uniform: list[tuple[StartedGroup, Tensor]] = []
    drawn = 0
    for drawn in range(1, rounds + 1):
        # Groups that waited for a batch may be enough: then none is begun.
        if sum(group.is_complete for group in waiting) < P:
            numbers = range(next_number, next_number + P + over.extra_prompts - len(waiting))
            waiting += [StartedGroup(number, task.prompts(number, 1)[0]) for number in numbers]
            next_number += len(numbers)
            waiting = continued(engine, waiting, P, algorithm, seed, call=step * rounds + drawn - 1)
        # `waiting` is in the order of numbers, so that the oldest complete groups are taken.
        taken = [group for group in waiting if group.is_complete][:P]
        is_taken = {group.number for group in taken}
        waiting = [group for group in waiting if group.number not in is_taken]
        for group in taken:
            rewards_G = torch.tensor([task.reward(group.prompt, r) for r in group.responses], dtype=torch.float32)
            is_mixed = rounds == 1 or bool(keep_mixed_groups(rewards_G[None])[0])
            (mixed if is_mixed else uniform).append((group, rewards_G))
        if len(mixed) >= P:
            break
    batch = (mixed + uniform)[:P]
    rewards_PG = torch.stack([rewards_G for _, rewards_G in batch])
    # Given up, as equal rewards stay equal: the next step would set the group aside again.
    spare = [group for group, _ in uniform[max(0, P - len(mixed)) :]]
    left = [*(group for group, _ in mixed[P:]), *waiting]
    # step + 1 is the version that could next train on them. Sorted, as the next rollout takes the oldest first.
    kept, given_up = split(sorted(left, key=lambda group: group.number), over, step + 1)
    given_up += spare
    metrics = {
        "sampling/rounds": float(drawn),
        "sampling/kept_group_fraction": keep_mixed_groups(rewards_PG).float().mean().item(),
        "sampling/kept_responses": float(sum(len(group.responses) for group in kept)),
        "sampling/dropped_responses": float(sum(len(group.responses) for group in given_up)),
        "sampling/dropped_tokens": float(sum(group.num_tokens for group in given_up)),
    }
    rollouts = Rollouts.concat([group.rollouts for group, _ in batch if group.rollouts is not None])
    return rollouts, rewards_PG, metrics, Backlog(next_number, tuple(kept))


def split(
    groups: Sequence[StartedGroup], over: Oversampling, version: int
) -> tuple[list[StartedGroup], list[StartedGroup]]:
    """The groups that may continue, and those given up: all under `drop`, else those too stale at `version`.

    A group is given up whole, as its responses' rewards are compared.
    """
    kept, given_up = [], []
    for group in groups:
        oldest = version if group.version is None else group.version
        is_kept = over.unfinished == "keep" and version - oldest <= over.max_staleness
        (kept if is_kept else given_up).append(group)
    return kept, given_up


def continued(
    engine: RolloutEngine, groups: Sequence[StartedGroup], enough: int, algorithm: Algorithm, seed: int, call: int
) -> list[StartedGroup]:
    """The groups after one call of the engine, which ends once `enough` of them are complete.

    Makes no call if enough are complete already.
    """
    # Complete groups have no draw in the call, so that its `enough` counts the others alone.
    need = enough - sum(group.is_complete for group in groups)
    if need <= 0:
        return list(groups)
    G = algorithm.num_responses
    asked = [
        (i, g)
        for i, group in enumerate(groups)
        for g in range(G)
        if group.rollouts is None or group.responses[g].finish == "abort"
    ]
    prompts = [_prompt(groups[i], g) for i, g in asked]
    draws = []
    for (i, g), prompt in zip(asked, prompts, strict=True):
        first = len(prompt.tokens) - len(groups[i].prompt.tokens)
        own = derive_seed(seed, "rollout", groups[i].number, g)
        # Token t has its own place in the response's stream: it draws the same number whichever call samples it.
        draws.append(Draw(own, algorithm.max_tokens - first, first, group=i))
    sampling = Sampling(
        max_tokens=max(draw.max_tokens for draw in draws),
        temperature=algorithm.temperature,
        # Responses draw from their own seeds; this one is that of an engine's noise in the call.
        seed=derive_seed(seed, "rollout", "call", call),
        num_features=algorithm.predictor.num_positions if algorithm.passes.rollout == "predicted" else 0,
        draws=tuple(draws),
        num_top=algorithm.objective.num_top,
        enough=need,
    )
    rollouts = engine.generate(prompts, sampling)
    places: dict[int, dict[int, int]] = {}
    for place, (i, g) in enumerate(asked):
        places.setdefault(i, {})[g] = place
    return [
        replace(group, rollouts=_grown(group, rollouts, places[i], sampling)) if i in places else group
        for i, group in enumerate(groups)
    ]


def _prompt(group: StartedGroup, g: int) -> Prompt:
    """The prompt of response g's next part: with the tokens that it has."""
    if not group.responses or len(group.responses[g].tokens) == 0:
        return group.prompt
    return replace(group.prompt, tokens=(*group.prompt.tokens, *group.responses[g].tokens.tolist()))


def _grown(group: StartedGroup, rollouts: Rollouts, places: dict[int, int], sampling: Sampling) -> Rollouts:
    """The group's responses with the call's new parts, each at its place in the call."""
    if group.rollouts is None:
        # Without an earlier part the engine's own responses need no joining.
        return rollouts.select([places[g] for g in sorted(places)])
    each = []
    for g in range(len(group.responses)):
        found = [(group.rollouts, g), *([(rollouts, places[g])] if g in places else [])]
        # A part without a token has nothing to keep: not even its prompt need have been read.
        parts = [(part, i) for part, i in found if len(part.responses[i].tokens)]
        each.append(Parts(g, group.prompt, parts or found[-1:]))
    return join(each, sampling)
