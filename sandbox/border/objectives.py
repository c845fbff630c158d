"""GRPO, MiniRL and GSPO side by side at the border's largest gap: collapsed runs, accuracy, entropy and clipping."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from lab.markdown import markdown_table
from sandbox.border.study import BorderStudy, paragraph
from sandbox.border.table import ended, summary
from sandbox.claims.border_arms import NORMS, REMEDY_WORDS

GAP = "r0.5"
DEGREES = (1, 2, 4, 8)
OBJECTIVES = {"grpo": "GRPO", "minirl": "MiniRL", "minirl_no_is": "MiniRL without its weight", "gspo": "GSPO"}
REMEDIES = ("none", "tis", "R3")
CLIPPED = ("none", "R2", "R3", "tis")
FREE = (*CLIPPED, "tis-R3")
"""The remedies whose runs without clipping are shown."""

NEARLY = 0.1
"""Binding shares that differ by less are called about equal."""

SIDES = """## GRPO, MiniRL and GSPO

At router noise 0.5: collapsed runs and the mean accuracy over the run ([entropy](border-tables.md#entropy)). MiniRL's
own weight is part of it.
"""

CLIPPING = """## Clipping

The gradient's norm is clipped at three times the median norm of a run with an exact engine, for each objective. The
table has the share of windows (a twentieth of the run each) in the first tenth whose mean norm is above the threshold,
at router noise 0.5 unless it says exact.
"""

DUAL_CLIPPED = {"none": "dual clip", "R3": "R3 and dual clip"}
"""The remedies whose runs with a second clip are shown, and their words."""

UNCLIPPED = """Do these outcomes come from clipping? The same runs of GRPO with a threshold above every norm (claims 58
to 60), and with a *dual clip*, under which a token of negative advantage has no gradient where pi/old is above 3
(claims 62 and 63; arXiv 1912.09729). A dash stands where no run was made.
"""


def sides(table: pd.DataFrame) -> str:
    """The section on objectives: a line per objective and remedy that has runs; empty without any."""
    lines = []
    for preset, words in OBJECTIVES.items():
        for remedy in REMEDIES:
            found = [summary(table, preset=preset, gap=GAP, remedy=remedy, N=n) for n in DEGREES]
            if any(found):
                name = words if remedy == "none" else f"{words} + {REMEDY_WORDS[remedy]}"
                lines.append((name, *("–" if one is None else f"{ended(one)}, {one['area']:.3f}" for one in found)))
    if not lines:
        return ""
    titles = ("objective", *(f"N = {n}" for n in DEGREES))
    return f"{SIDES}\n{markdown_table(titles, lines)}"


def clipping_of(table: pd.DataFrame) -> dict[str, float]:
    """The mean of `clipped` at N = 8 by words for objective and remedy, with an exact engine first."""
    asked = [("grpo", "exact", "none", "GRPO, exact engine")]
    asked += [("grpo", GAP, remedy, f"GRPO with {REMEDY_WORDS[remedy]}") for remedy in CLIPPED]
    asked += [(preset, GAP, "none", words) for preset, words in OBJECTIVES.items() if preset != "grpo"]
    found = {}
    for preset, gap, remedy, words in asked:
        one = summary(table, preset=preset, gap=gap, remedy=remedy, N=8)
        if one is not None:
            found[words] = float(one["clipped"])
    return found


def clipping(study: BorderStudy) -> str:
    """The tables of the binding share by arm, and of the runs without clipping, for the page of tables."""
    titles = ("N = 8", "threshold", "windows above it")
    norms = {words: NORMS[preset] for preset, words in OBJECTIVES.items()}
    lines = [
        (words, norms[re.split(",| with ", words)[0]], f"{share:.0%}")
        for words, share in clipping_of(study.table).items()
    ]
    return f"{CLIPPING}\n{markdown_table(titles, lines)}{_beside_clipped(study)}" if lines else ""


def _beside_clipped(study: BorderStudy) -> str:
    lines = []
    for words, gap, remedy in (("an exact engine", "exact", "none"), *((REMEDY_WORDS[one], GAP, one) for one in FREE)):
        found = [_at_8(one, remedy, gap) for one in (study.table, study.unclipped)]
        if all(found):
            lines.append((words, *_cells(found)))
    for remedy, words in DUAL_CLIPPED.items():
        found = [_at_8(one, remedy) for one in (study.dual_clipped, study.dual_unclipped)]
        if any(found):
            lines.append((words, *_cells(found)))
    titles = ("GRPO, N = 8", "collapsed, clipped", "accuracy", "collapsed, never clipped", "accuracy")
    return f"\n{UNCLIPPED}\n{markdown_table(titles, lines)}" if lines else ""


def _at_8(table: pd.DataFrame, remedy: str, gap: str = GAP) -> dict[str, Any] | None:
    return summary(table, preset="grpo", gap=gap, remedy=remedy, N=8)


def _cells(found: Sequence[dict[str, Any] | None]) -> list[str]:
    """Collapsed runs and mean accuracy of each; dashes for one without runs."""
    return [cell for one in found for cell in (("–", "–") if one is None else (ended(one), f"{one['area']:.3f}"))]


def _outcomes(unclipped: pd.DataFrame) -> str:
    """Collapsed runs without clipping, by remedy; empty unless all of FREE have runs."""
    found = {REMEDY_WORDS[remedy]: _at_8(unclipped, remedy) for remedy in FREE}
    counts = [f"{ended(one)} with {words}" for words, one in found.items() if one is not None]
    return ", ".join(counts) if len(counts) == len(FREE) else ""


def clipping_said(study: BorderStudy) -> str:
    """The page's paragraph on clipping; empty without the runs that it names."""
    share = clipping_of(study.table)
    if len(share) < 2:
        return ""
    (_, exact), *others = share.items()
    least, most = (pick(value for _, value in others) for pick in (min, max))
    verb = "is about equal in all arms" if most - least < NEARLY else "is not equal in all arms"
    shown = "; ".join(f"{words} {value:.0%}" for words, value in others)
    return paragraph(
        f"**Clipping** {verb}.",
        "The threshold is three times an objective's median gradient norm with an exact engine, where "
        f"{exact:.0%} of the windows of the first tenth have a larger mean norm.",
        f"The shares at router noise 0.5 and N = 8: {shown}.",
        f"Never clipped, GRPO collapses in {outcomes} (claims 58 to 60; [tables](border-tables.md#clipping))."
        if (outcomes := _outcomes(study.unclipped))
        else "A comparison of these arms is therefore also one of clipped and unclipped updates "
        "([table](border-tables.md#clipping)).",
    )


__all__ = ["OBJECTIVES", "clipping", "clipping_of", "clipping_said", "sides"]
