"""GRPO with a dual clip: the section of docs/border.md that compares its runs and its border with those without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.border import controls, peaks
from sandbox.border.fit import BorderFit, alike, comparable, fit_all
from sandbox.border.rates import NUMBER
from sandbox.border.study import BorderStudy, paragraph
from sandbox.border.table import ended, on_map, places, summary, where
from sandbox.claims.border_arms import REMEDY_WORDS

LEAST = 3
"""The least number of places to which a border is fitted: two points lie on any curve."""

HEAD = """## With a dual clip

Where the advantage is negative GRPO's clip does not bound pi/old, with which a token's gradient grows. A *dual clip*
does, here at 3 (arXiv 1912.09729): beyond it the token has no gradient. At N = 1 pi is old and a dual clip changes
nothing: what was found there holds with one.
"""


def beside(study: BorderStudy) -> str:
    """The sentence near the top of the page that says that GRPO has no dual clip here; empty without runs with one."""
    alone = _at(study.dual_clipped, remedy="none", N=8)
    return "" if alone is None else paragraph(
        f"GRPO has no *dual clip* here. With one, and no other remedy, {ended(alone)} runs collapse, with an accuracy "
        f"of {alone['area']:.3f} ([below](#with-a-dual-clip))."
    )  # fmt: skip


def fits(runs: pd.DataFrame) -> list[BorderFit]:
    """The candidates' fits to these runs, the best first; none with fewer than LEAST places or if all end alike."""
    has_border = len(runs.groupby(["gap", "N"])) >= LEAST and len(set(runs["collapsed"])) == 2
    return fit_all(runs) if has_border else []


def border(found: Sequence[BorderFit]) -> BorderFit | None:
    """The border by NUMBER of these fits, if no candidate predicts collapse better; else None."""
    return next((one for one in alike(found) if one.name == NUMBER), None) if found else None


def unaided(study: BorderStudy) -> pd.DataFrame:
    """The runs with a dual clip, gradients clipped, to which the border is fitted: no other remedy, the map's gaps."""
    return comparable(where(on_map(study.dual_clipped), remedy="none"))


def markdown(study: BorderStudy, looked_at: pd.DataFrame) -> str:
    """The section; empty without runs with a dual clip. `looked_at` has the updates of peaks.py, or is empty."""
    found = places(study.dual_clipped)
    found = found.assign(order=[list(REMEDY_WORDS).index(remedy) for remedy in found["remedy"]])
    found = found.sort_values(["gap", "N", "order"], kind="stable")
    lines = []
    for place in found.to_dict("records"):
        plain = _at(study.grpo, gap=place["gap"], remedy=place["remedy"], N=place["N"])
        engine, remedy = controls.words_of(str(place["gap"])), REMEDY_WORDS[str(place["remedy"])]
        lines.append((engine, str(place["N"]), remedy, *_outcome(plain), *_outcome(place)))
    if not lines:
        return ""
    titles = ("engine", "N", "remedy", "collapsed, GRPO", "accuracy", "with a dual clip", "accuracy")
    shown = [HEAD, markdown_table(titles, lines), paragraph(_border_said(study)), peaks.markdown(looked_at)]
    return "\n".join(one for one in [*shown, paragraph(peaks.said(looked_at), _unclipped(study))] if one)


def _outcome(place: dict[Any, Any] | None) -> tuple[str, str]:
    return ("–", "–") if place is None else (ended(place), f"{place['area']:.3f}")


def _at(table: pd.DataFrame, gap: str = "r0.5", **place: object) -> dict[str, Any] | None:
    return summary(table, preset="grpo", gap=gap, **place)


def _border_said(study: BorderStudy) -> str:
    """The border with a second clip beside that without; that there is none where another number is the better one."""
    found = fits(unaided(study))
    if not found or NUMBER not in study.borders:
        return ""
    plain, own = study.borders[NUMBER], border(found)
    if own is None:
        best, (tried,) = found[0], [one for one in found if one.name == NUMBER]
        return (
            f"With a dual clip `{NUMBER}` orders the collapses less well: of {len(found)} numbers tried `{best.name}` "
            f"predicts them best, and explains {number(best.null - best.deviance)} of the deviance, `{NUMBER}` "
            f"{number(tried.null - tried.deviance)} ({best.num_runs} runs without another remedy, exploratory): "
            "no x*."
        )
    largest = _largest(unaided(study))
    beyond = f" The largest that was tried is {number(largest)}, so {number(own.border)} is an extrapolation."
    return (
        f"By `{NUMBER}` half of the runs without another remedy collapse at {number(own.border)} ({number(own.low)} "
        f"to {number(own.high)}) with a dual clip, and at {number(plain.border)} without one ({own.num_runs} and "
        f"{plain.num_runs} runs, exploratory).{beyond if own.border > largest else ''}"
    )


def _largest(runs: pd.DataFrame) -> float:
    """The largest number of a place, by the mean KL of its runs."""
    found = places(runs)
    return float((found["kl"].to_numpy(dtype=np.float64) * found["N"].to_numpy(dtype=np.float64)).max())


def _unclipped(study: BorderStudy) -> str:
    """The outcome without gradient clipping, and the frameworks that have a dual clip; empty without such runs."""
    with_r3 = _at(study.dual_unclipped, remedy="R3", N=8)
    if with_r3 is None:
        return ""
    return (
        f"With a dual clip and no gradient clipping {ended(with_r3)} runs collapse under R3 (claim 62). verl has a "
        "dual clip on by default, slime, TRL and others off ([options](how-to/remedies-by-framework.md)); all other "
        "counts of GRPO here are without it."
    )


__all__ = ["beside", "border", "fits", "markdown", "unaided"]
