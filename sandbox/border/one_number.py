"""The border as one number: the section of docs/border.md, and its fits, remedies and settings in tables."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.border import papers, rates
from sandbox.border.fit import ALIKE, BorderFit, alike, expected, known
from sandbox.border.lengths import asked_power
from sandbox.border.pictures import TITLES
from sandbox.border.regimes import markdown as regimes_on_map
from sandbox.border.study import BorderStudy, paragraph
from sandbox.border.table import on_map, where

PICTURE = """![Share of collapsed runs against KL x N, with the fitted curve](images/border-fit.svg)

*The share of collapsed runs without a remedy, a point per gap and N, with its 95% interval; the curve is the fit, which
leaves out the runs at half the rate.*
"""

MOVED = """## Remedies beside the fit

Does a remedy move the gap, or the border? The table compares the collapses of runs with a remedy with the
number expected from the fit without one, at each run's own `{name}` of the first step (under R3 the gap is smaller
there already). If as many collapse as expected, the remedy leaves the border where it is; if fewer, it moves the
border. The last rows are runs without a remedy whose engine has another kind of error: if that number were all that
matters, as many of them would collapse as expected.
"""

SETTINGS = """## The papers' settings

Where they lie, as a multiple of x*. Their length is the longest response, so the column with it is an upper bound. All
responses of the map have nearly one length, and all runs of the fit one learning rate, {rate}: these runs cannot
distinguish the three numbers.
"""

CONTROLS = {
    "logits1.1": "noise on the logits (KL of router noise 0.3)",
    "logits1.6": "noise on the logits (KL of router noise 0.5)",
    "int4": "INT4 weights (KL of router noise 0.3)",
}
"""Engines with other errors than the map's, matched in KL before training."""


def markdown(study: BorderStudy) -> str:
    """The section of docs/border.md; empty if all runs end alike.

    The fits are of the map's runs without a remedy. They leave out the controls, whose errors are of other kinds, and
    gaps beyond the map.
    """
    if not study.fits:
        return ""
    own, (rate,) = study.borders["KL x N"], study.unaided["rate"].unique()
    first = paragraph(
        f"Where `KL x N` passes x* = {number(own.border)} ({number(own.low)} to {number(own.high)}) at a learning rate "
        f"of {number(rate)}, half of the runs without a remedy collapse.",
        f"KL is that before training; {own.num_runs} runs of the map, {own.num_collapsed} collapsed.",
        compared(study.fits),
        "Exploratory ([fits](border-tables.md#the-fits)).",
    )
    parts = ["## One number for the border\n", first, PICTURE, rates.markdown(study.unaided, study.slowed)]
    power = asked_power(study.rows, study.regime)
    if power is not None and len(rates.counted(study.slowed)):
        small = papers.small(study.unaided, own.border)
        parts.append(papers.answer(small, power, rates.least_power(study.unaided, study.slowed)))
    return "\n".join([*(part for part in parts if part), moved_said(study)])


def tables(study: BorderStudy) -> str:
    """The sections of docs/border-tables.md; empty if all runs end alike."""
    if not study.fits:
        return ""
    (rate,) = study.unaided["rate"].unique()
    borders = {name: one.border for name, one in study.borders.items()}
    settings = f"{SETTINGS.format(rate=number(rate))}\n{papers.table(borders, float(rate))}"
    return "\n".join([_fits(study.fits), _moved(study), settings,
                      regimes_on_map(study.rows, study.grpo, borders["KL x N"], float(rate))])  # fmt: skip


def _fits(fits: Sequence[BorderFit]) -> str:
    lines = [
        (f"`{one.name}`", number(one.null - one.deviance), f"{one.auc:.2f}", number(one.border),
         f"{number(one.low)} to {number(one.high)}", f"{one.slope:.2f}", str(one.num_best))
        for one in fits
    ]  # fmt: skip
    titles = ("number", "deviance explained", "area under ROC", "border x*", "95%", "slope", "best in")
    words = paragraph(
        f"{fits[0].num_runs} runs of the map without a remedy, {fits[0].num_collapsed} collapsed; "
        "P(collapse) = 1 / (1 + exp(-(a + b log x))), and half collapse at x*.",
        f"The last column counts the draws, of {sum(one.num_best for one in fits)} of a bootstrap over seeds, in which "
        "a number is the best of all.",
    )
    return f"## The fits\n\n{words}\n{markdown_table(titles, lines)}"


def compared(fits: Sequence[BorderFit]) -> str:
    """The numbers that predict collapse about as well as the best one, in a sentence."""
    best, *others = alike(fits)
    if not others:
        return f"Of {len(fits)} numbers tried, `{best.name}` predicts collapse best."
    *named, last = (f"`{one.name}`" for one in (best, *others))
    return (
        f"Of {len(fits)} numbers tried, {1 + len(others)} predict collapse about equally well: "
        f"{', '.join(named)} and {last}, whose deviances differ by less than {ALIKE:g}."
    )


def counts(study: BorderStudy) -> list[tuple[str, int, float, int]]:
    """For every remedy, then every control: words, runs, collapses expected by the best fit, and actual ones."""
    table, name = study.grpo, study.fits[0].name
    tried = [(title, where(on_map(table), remedy=remedy)) for remedy, title in TITLES.items() if remedy != "none"]
    tried += [(f"no remedy, {words}", where(table, gap=gap, remedy="none")) for gap, words in CONTROLS.items()]
    found: list[tuple[str, int, float, int]] = []
    for title, runs_of_it in tried:
        own: pd.DataFrame = known(runs_of_it)
        if len(own):
            count = int(own["collapsed"].to_numpy(dtype=float).sum())
            found.append((title, len(own), expected(name, study.unaided, own), count))
    return found


def moved_said(study: BorderStudy) -> str:
    """The remedies with fewer and with more collapses than the fit without a remedy expects."""
    remedies = [one for one in counts(study) if one[0] in TITLES.values()]
    sides = []
    for words, is_fewer in (("Fewer", True), ("More", False)):
        own = [f"{title}, {count} of {n} ({at:.0f})" for title, n, at, count in remedies if (count < at) == is_fewer]
        sides.append(f"{words} collapse with {'; '.join(own)}." if own else "")
    return paragraph(
        "**Remedies.** Do they move the gap, or the border? In brackets, the collapses that the fit expects at the "
        "gap of the runs' own first step.",
        *sides,
        "See the [table](border-tables.md#remedies-beside-the-fit).",
    )


def _moved(study: BorderStudy) -> str:
    lines = [(title, str(n), f"{at:.1f}", str(count)) for title, n, at, count in counts(study)]
    table = markdown_table(("runs with", "runs", "expected", "collapsed"), lines)
    return f"{MOVED.format(name=study.fits[0].name)}\n{table}"


__all__ = ["compared", "counts", "markdown", "moved_said", "tables"]
