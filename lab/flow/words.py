"""The findings of a flow, in sentences whose every number is computed from its rows.

An objective's entropy collapses where it ends below half of the median over all objectives (each problem's own,
averaged), and stays high where it ends above twice that, both with a 95% interval over problems of the paired
difference that leaves out 0. One problem has no intervals, so that nothing is said of its objectives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lab.audit.table import distinct, numbers, parts
from lab.flow.table import MeanInterval, difference, ends, focus, has_intervals, interval
from lab.report.style import listed, number

FACTOR = 2.0
"""The multiple of the others' entropy that counts as high; its inverse is a collapse."""


@dataclass(frozen=True)
class Turn:
    """An objective whose entropy leaves the others' under an engine error."""

    error: str
    objective: str
    way: Literal["collapses", "stays high"]
    end: MeanInterval
    middle: float

    def __str__(self) -> str:
        return f"{self.error} ({self.end}; the median over objectives {number(self.middle)})"


def by_objective(found: pd.DataFrame, name: str) -> dict[str, NDArray[np.float64]]:
    """The values of a column at the end of each objective's runs, in the order of problems."""
    # One order of problems for all objectives: callers subtract the arrays problem by problem.
    each = parts(ends(found).sort_values("problem", kind="stable"), ["objective"])
    return {key["objective"]: numbers(part, name) for key, part in each}


def turns(frame: pd.DataFrame) -> list[Turn]:
    """Every engine error's objectives whose entropy collapses or stays high, at the least N and the largest B."""
    found: list[Turn] = []
    for place, part in parts(focus(frame), ["error"]):
        values = by_objective(part, "entropy")
        for objective, own in values.items():
            # The median of two is their mean; each is then compared with the other.
            among = [each for name, each in values.items() if len(values) != 2 or name != objective]
            rest = np.median(among, axis=0)
            gap = interval(own - rest, "turn", place["error"], objective)
            # A ratio of means: a mean of ratios would hang on one problem whose other entropies are near 0.
            factor = float(own.mean() / rest.mean())
            if gap.leaves_out_0 and not 1 / FACTOR <= factor <= FACTOR:
                end = interval(own, "entropy", place["error"], objective)
                way = "collapses" if factor < 1 else "stays high"
                found.append(Turn(place["error"], objective, way, end, float(rest.mean())))
    return found


def headline(frame: pd.DataFrame) -> str:
    """One objective whose entropy leaves the others', with the engine errors under which it does."""
    if not has_intervals(frame):
        return "1 problem: no intervals, and no ranking of objectives"
    found = turns(frame)
    if not found:
        return "No objective's entropy ends at twice or at half of the others'"
    objective = max((turn.objective for turn in found), key=[turn.objective for turn in found].count)
    told = []
    for way in ("collapses", "stays high"):
        errors = dict.fromkeys(turn.error for turn in found if (turn.objective, turn.way) == (objective, way))
        told += [f"{way} under {listed(errors, '; ')}"] if errors else []
    return f"With {objective}, entropy {' and '.join(told)}"


def sentences(frame: pd.DataFrame) -> list[str]:
    """The findings: entropies that leave the others', final rewards, the effect of N, and the scope of the study."""
    if not has_intervals(frame):
        return [_scope(frame)]
    return [*_entropy(frame), *_reward(frame), *_staleness(frame), _scope(frame)]


def _entropy(frame: pd.DataFrame) -> list[str]:
    found = turns(frame)
    said = []
    for objective in dict.fromkeys(turn.objective for turn in found):
        for way in ("collapses", "stays high"):
            own = [str(turn) for turn in found if (turn.objective, turn.way) == (objective, way)]
            if own:
                said.append(f"Entropy {way} with {objective} under {listed(own, '; ')}.")
    return said or [
        "No entropy at the end is twice or half of the median over objectives, beyond its interval over problems."
    ]


def _reward(frame: pd.DataFrame) -> list[str]:
    """The objective that ends highest under each engine error, and its distance from the lowest."""
    said, alike = [], []
    for place, part in parts(focus(frame), ["error"]):
        values = by_objective(part, "reward")
        if len(values) < 2:
            continue
        best, worst = (pick(values, key=lambda name: values[name].mean()) for pick in (max, min))
        # The best and the worst are picked from all pairs, so that a gap is between them by chance, too.
        gap = interval(values[best] - values[worst], "reward", place["error"], among=math.comb(len(values), 2))
        if not gap.leaves_out_0:
            alike.append(place["error"])
            continue
        end = interval(values[best], "reward", place["error"], best)
        said.append(f"{place['error']} with {best} ({end}; {worst} is lowest, by {gap})")
    told = [f"Reward ends highest under {listed(said, '; ')}."] if said else []
    if alike:
        words = "the interval of the largest difference, corrected for the number of pairs, holds 0"
        told.append(f"Under {listed(alike, '; ')} reward tells no objectives apart: {words}.")
    return told


def _staleness(frame: pd.DataFrame) -> list[str]:
    """The change of each objective's reward at the largest N, over all engine errors."""
    degrees, size = distinct(frame, "N"), max(distinct(frame, "B"))
    if len(degrees) < 2:
        return []
    gaps = {
        name: difference(frame, "reward", *({"objective": name, "N": n, "B": size} for n in (degrees[-1], degrees[0])))
        for name in frame["objective"].unique()
    }
    least, most = (pick(gaps, key=lambda name: gaps[name].mean) for pick in (min, max))
    span = f"From N = {degrees[0]:g} to {degrees[-1]:g}"
    if least == most:
        return [f"{span} the reward at the end changes by {gaps[least]}, over all engine errors."]
    return [
        f"{span} the reward at the end changes least favourably with {least} (by {gaps[least]}) and most favourably "
        f"with {most} (by {gaps[most]}), over all engine errors."
    ]


def _scope(frame: pd.DataFrame) -> str:
    num, runs = len(distinct(frame, "problem")), len(ends(frame))
    noise = "no sampling noise" if math.isinf(max(distinct(frame, "B"))) else "the least noise of the config"
    made = f"{runs:,} run{'s' * (runs != 1)} of exact expected updates on {num} problem{'s' * (num != 1)}"
    told = ": means, and 95% intervals over problems. These sentences and the first picture are"
    if not has_intervals(frame):
        told = ", so without intervals over problems and a ranking of objectives. The first picture is"
    return f"{made}{told} at N = {min(distinct(frame, 'N')):g} with {noise}."
