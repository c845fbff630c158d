"""The cells of the map that have no runs, in words."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from lab.report.style import listed
from sandbox.border.pictures import FULL
from sandbox.border.study import paragraph
from sandbox.border.table import where
from sandbox.claims.border_arms import DEGREES, GAP_WORDS, REMEDIES, REMEDY_WORDS, ROUTER_GAPS, remedies_at

Place = tuple[str, int, str]


def arms() -> list[Place]:
    """Gap, N and remedy of every arm of the map."""
    return [(gap, n, remedy) for gap in ROUTER_GAPS for n in DEGREES for remedy in remedies_at(gap, n)]


def missing(grpo: pd.DataFrame) -> list[Place]:
    """The map's arms without a run."""
    return [(gap, n, remedy) for gap, n, remedy in arms() if where(grpo, gap=gap, N=n, remedy=remedy).empty]


def markdown(grpo: pd.DataFrame) -> str:
    """A paragraph: the number of arms without runs, engines that have none, then remedies without any at an engine; and
    the number of arms with fewer runs than in the design."""
    lacking, planned = missing(grpo), arms()
    few = _few(grpo, planned)
    if not lacking:
        return paragraph(few)
    empty = [gap for gap in ROUTER_GAPS if {one for one in planned if one[0] == gap} <= set(lacking)]
    by_remedy = {
        remedy: tuple(
            gap
            for gap in ROUTER_GAPS
            if gap not in empty
            and (own := {one for one in planned if (one[0], one[2]) == (gap, remedy)})
            and own <= set(lacking)
        )
        for remedy in REMEDIES
    }
    together: dict[tuple[str, ...], list[str]] = {}
    for remedy, gaps in by_remedy.items():
        if gaps:
            together.setdefault(gaps, []).append(REMEDY_WORDS[remedy])
    named = {(gap, n, remedy) for gap, n, remedy in lacking if gap in empty or gap in by_remedy[remedy]}
    parts = [f"{GAP_WORDS[gap]} without router noise" if gap == "r0" else GAP_WORDS[gap] for gap in empty]
    parts += [f"{listed(remedies)} with {listed(_gaps(gaps))}" for gaps, remedies in together.items()]
    rest = len(lacking) - len(named)
    ends = f"; the other {rest} lack some N" if rest and parts else ""
    return paragraph(f"Of the map's {len(planned)} arms, {len(lacking)} have no run: {'; '.join(parts)}{ends}.", few)


def _few(grpo: pd.DataFrame, planned: list[Place]) -> str:
    """The sentence on arms that have some runs, but fewer than FULL; empty where there are none."""
    counts = [len(where(grpo, gap=gap, N=n, remedy=remedy)) for gap, n, remedy in planned]
    some = [count for count in counts if 0 < count < FULL]
    if not some:
        return ""
    words = f"{len(some)} of the map's {len(planned)} arms have fewer runs than the {FULL} of the design"
    return f"{words}, {min(some)} or more."


def _gaps(gaps: Iterable[str]) -> list[str]:
    """The gaps in words, those of router noise under one head."""
    noises = [gap.removeprefix("r") for gap in gaps if gap.startswith("r0.")]
    words = ["an exact engine" for gap in gaps if gap == "exact"]
    return [*words, *([f"router noise {listed(noises)}"] if noises else [])]


__all__ = ["arms", "markdown", "missing"]
