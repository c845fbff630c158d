"""The gap by place: an engine or rank, a place in the batch, a range of positions or of response lengths.

Each step ranks the groups by their mean k3. Null hypothesis: within each step every order of the groups is equally
likely, and steps are independent. The statistic is the largest mean rank of a group over the steps; its null
distribution depends only on the numbers of groups and steps and is drawn, so that the level is exact whatever the law
of k3, heavy tails included. Engines and places in the batch get prompts by chance; positions and lengths differ to
begin with, so that they are reported, not called faults, and only at a large multiple of the others' KL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lab.doctor.change_point import LEVEL, NUM_ORDERS, p_value
from lab.doctor.view import View
from theory.streams import stream

MOST_GROUPS = 4096
"""Most groups of a step: the null distribution draws a rank for each. A step with more is skipped for that grouping."""
NUM_BINS = 12
"""Bins of the positions, with equal numbers of tokens, and of the lengths, with equal numbers of responses."""


@dataclass(frozen=True)
class Grouping:
    """A way to group tokens.

    title: a group's number in words. times: the smallest multiple of the others' KL that is reported. group_of: the
    group of each token by the bins' edges; None where the trace lacks it. is_fault: whether such a group is a fault.
    """

    name: str
    title: Callable[[int], str]
    times: float
    group_of: Callable[[View, Sequence[int]], Int[Tensor, " n"] | None]
    is_fault: bool


@dataclass(frozen=True)
class GapGroup:
    """The group of a place with more of the gap than by chance, at p < LEVEL.

    times: its KL over that of the others, the median over steps. edges: those of the bins; empty for numbered groups.
    """

    place: Grouping
    group: int
    times: float
    p: float
    edges: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """The group in words."""
        if not self.edges:
            return self.place.title(self.group)
        first = 0 if self.group == 0 else self.edges[self.group - 1]
        if self.group == len(self.edges):
            return f"{self.place.name} from {first} on"
        last = self.edges[self.group] - 1
        return f"{self.place.name} {first}" + (f" to {last}" if last > first else "")


def _engine(view: View, edges: Sequence[int]) -> Tensor | None:
    engines = view.trace.engines
    return None if engines is None else engines.long()[view.response_n]


def _slot(view: View, edges: Sequence[int]) -> Tensor:
    return view.response_n


def _position(view: View, edges: Sequence[int]) -> Tensor:
    # right=True: a value on an edge belongs to the bin above, as in `GapGroup.title`.
    return torch.bucketize(view.position_n, torch.tensor(edges, dtype=torch.long), right=True)


def _length(view: View, edges: Sequence[int]) -> Tensor:
    lengths_B = view.trace.offsets.diff() - view.trace.num_prompt
    return torch.bucketize(lengths_B[view.response_n], torch.tensor(edges, dtype=torch.long), right=True)


PLACES: dict[str, Grouping] = {
    "engine": Grouping("engine", lambda group: f"engine (or rank) {group}", 2.0, _engine, True),
    "slot": Grouping("slot", lambda group: f"place {group} of the batch", 5.0, _slot, True),
    "position": Grouping("positions", str, 10.0, _position, False),
    "length": Grouping("lengths", str, 10.0, _length, False),
}


class Places:
    """Sums of k3 by group and step: a few numbers per step, whatever the number of tokens."""

    def __init__(self) -> None:
        self.edges: dict[str, tuple[int, ...]] = {}
        self._sums: dict[str, dict[int, tuple[Tensor, Float[Tensor, "two g"]]]] = {name: {} for name in PLACES}
        """By place and step the groups' numbers in ascending order, and beside each its sum of k3 and its tokens."""

    def add(self, step: int, view: View) -> None:
        """Adds a step with finite log-probabilities; the first one sets the bins of positions and lengths."""
        if not self.edges:
            lengths_B = view.trace.offsets.diff() - view.trace.num_prompt
            self.edges = {"position": _edges(view.position_n), "length": _edges(lengths_B)}
        for name, place in PLACES.items():
            group_n = place.group_of(view, self.edges.get(name, ()))
            if group_n is None:
                continue
            # Renumbered for bincount, since an engine's number may be a port or a process id.
            number_g, packed_n = group_n.unique(return_inverse=True)
            if len(number_g) <= MOST_GROUPS:
                sums = torch.stack([torch.bincount(packed_n, view.k3_n), torch.bincount(packed_n).double()])
                self._sums[name][step] = number_g, sums

    def found(self, first: int) -> list[GapGroup]:
        """For each place the group with more of the gap than by chance, if any, over the steps from `first` on."""
        late = {name: [of for step, of in sums.items() if step >= first] for name, sums in self._sums.items()}
        found = [self._found(name, sums) for name, sums in late.items()]
        return [one for one in found if one is not None]

    def _found(self, name: str, sums: Sequence[tuple[Tensor, Tensor]]) -> GapGroup | None:
        # Only groups present at every step: ranks among fewer groups are not comparable.
        kept = sorted(set.intersection(*(set(number_g.tolist()) for number_g, _ in sums))) if sums else []
        if len(kept) < 2:
            return None
        # Leave out steps without any gap, whose ties argsort would rank arbitrarily, and steps with an infinite gap,
        # where the others' part would be inf - inf.
        tables = [
            table[:, torch.isin(number_g, torch.tensor(kept))]
            for number_g, table in sums
            if 0 < float(table[0].sum()) < math.inf
        ]
        if not tables:
            return None
        mean_tg = torch.stack([table[0] / table[1] for table in tables])
        # argsort of argsort gives ranks, from 0.
        rank_tg = mean_tg.argsort(1).argsort(1).double()
        score_g = rank_tg.mean(0)
        g = int(score_g.argmax())
        total_t, count_t = (torch.stack([table[i].sum() for table in tables]) for i in (0, 1))
        own_t, own_count_t = (torch.stack([table[i, g] for table in tables]) for i in (0, 1))
        others_t = (total_t - own_t) / (count_t - own_count_t)
        # The median: one step with a very unlikely token cannot make a group reportable.
        times = (mean_tg[:, g] / others_t.clamp(min=1e-12)).median().item()
        # Before the p-value, because the null distribution takes seconds.
        if times < PLACES[name].times:
            return None
        p = p_value(score_g[g], _null(len(tables), len(kept)))
        return None if p >= LEVEL else GapGroup(PLACES[name], kept[g], times, p, self.edges.get(name, ()))


@lru_cache(maxsize=64)
def _null(num_steps: int, num_groups: int) -> Float[Tensor, " m"]:
    """NUM_ORDERS draws of the largest mean rank of a group, with random ranks at every step."""
    generator, out = stream(0, "places", f"{num_steps} {num_groups}"), []
    # In chunks of at most about 2,000,000 numbers, to bound the memory.
    num = max(1, min(NUM_ORDERS, 2_000_000 // (num_steps * num_groups)))
    for _ in range(-(-NUM_ORDERS // num)):
        draws = torch.rand((num, num_steps, num_groups), generator=generator)
        out.append(draws.argsort(2).double().mean(1).amax(1))
    return torch.cat(out)[:NUM_ORDERS]


def _edges(values_n: Int[Tensor, " n"]) -> tuple[int, ...]:
    """The edges of NUM_BINS bins with equal numbers of values; fewer if edges coincide."""
    # torch.quantile refuses more than 16 million values, and a stride changes the edges little.
    values_n = values_n.double()[:: max(1, len(values_n) // 100_000)]
    cuts = torch.quantile(values_n, torch.arange(1, NUM_BINS).double() / NUM_BINS)
    return tuple(sorted({int(cut) for cut in cuts.tolist() if cut > 0}))


def named(found: Sequence[GapGroup]) -> Mapping[str, GapGroup]:
    """The groups that are faults, by the name of their place."""
    return {one.place.name: one for one in found if one.place.is_fault}
