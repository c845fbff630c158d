"""The border as one number: the section of docs/border.md, and its fits, remedies and settings in tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.border import papers, rates
from sandbox.border.fit import ALIKE, BorderFit, alike, expected, known
from sandbox.border.lengths import asked_power
from sandbox.border.regimes import markdown as regimes_on_map
from sandbox.border.study import BorderStudy, paragraph
from sandbox.border.table import ended, on_map, summary, where
from sandbox.claims.border_arms import REMEDY_WORDS

PICTURE = """![Share of collapsed runs against KL x N, with the fitted curve](images/border-fit.svg)

*The share of collapsed runs without a remedy, a point per gap and N, with its 95% interval; the curve is the fit, which
leaves out the runs at half the rate and those with a [dual clip](#with-a-dual-clip).*
"""

MOVED = """## Remedies beside the fit

Does a remedy move the gap, or the border? A cell has the collapsed runs of all, and in brackets the number expected
from the fit without a remedy, at each run's own `{name}` of the first step (under R3 the gap is smaller there already).
If as many collapse as expected, the remedy leaves the border where it is; if fewer, it moves the border. The first row
shows how well the fit describes its own runs. The last rows are runs without a remedy whose engine has another kind of
error: if that number were all that matters, as many of them would collapse as expected.
"""

SETTINGS = """## The papers' settings

Where they lie, as a multiple of x*. Their length is the longest response, so the column with it is an upper bound. All
responses of the map have nearly one length, and all runs of the fit one learning rate, {rate}: these runs cannot
distinguish the three numbers.
"""

FAR = 2.0
"""Collapses by which a remedy's count differs from the fit's, for the page to name it."""

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
        "Exploratory ([fits](border-tables.md#the-fits), [papers](border-tables.md#the-papers-settings)).",
    )
    parts = ["## One number for the border\n", first, PICTURE, rates.markdown(study.unaided, study.slowed)]
    return "\n".join([*(part for part in parts if part), moved_said(study)])


def tables(study: BorderStudy) -> str:
    """The sections of docs/border-tables.md; empty if all runs end alike."""
    if not study.fits:
        return ""
    (rate,) = study.unaided["rate"].unique()
    borders = {name: one.border for name, one in study.borders.items()}
    power, answer = asked_power(study.rows, study.regime), ""
    if power is not None and len(rates.counted(study.slowed)):
        small = papers.small(study.unaided, borders["KL x N"])
        answer = papers.answer(small, power, rates.least_power(study.unaided, study.slowed))
    settings = f"{SETTINGS.format(rate=number(rate))}\n{papers.table(borders, float(rate))}"
    return "\n".join([_fits(study.fits), _moved(study), settings, *([answer] if answer else []),
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


@dataclass(frozen=True)
class Tally:
    """The runs of one kind at some N: their number, their collapses, and the collapses that the fit expects."""

    num_runs: int
    num_collapsed: int
    expected: float

    def __add__(self, other: Tally) -> Tally:
        runs, collapsed = self.num_runs + other.num_runs, self.num_collapsed + other.num_collapsed
        return Tally(runs, collapsed, self.expected + other.expected)

    @property
    def words(self) -> str:
        """As on the page, "3 of 8 (5)"; a dash without runs."""
        return f"{self.num_collapsed} of {self.num_runs} ({self.expected:.0f})" if self.num_runs else "–"


def tallies(study: BorderStudy) -> dict[str, dict[int, Tally]]:
    """No remedy, every remedy and every control by its words, each with a Tally for every N that has runs."""
    table = study.grpo
    kinds = {title: where(on_map(table), remedy=remedy) for remedy, title in REMEDY_WORDS.items()}
    kinds |= {f"no remedy, {words}": where(table, gap=gap, remedy="none") for gap, words in CONTROLS.items()}
    found = {words: _tallies(study, known(own)) for words, own in kinds.items()}
    return {words: by_n for words, by_n in found.items() if by_n}


def _tallies(study: BorderStudy, runs: pd.DataFrame) -> dict[int, Tally]:
    name, found = study.fits[0].name, {}
    for n in sorted(int(n) for n in runs["N"].unique()):
        own = where(runs, N=n)
        count = int(own["collapsed"].to_numpy(dtype=float).sum())
        found[n] = Tally(len(own), count, expected(name, study.unaided, own))
    return found


def moved_said(study: BorderStudy) -> str:
    """The remedies with fewer and with more collapses than the fit expects; N = 1, where signs turn, by itself."""
    found = {title: by_n for title, by_n in tallies(study).items() if title in REMEDY_WORDS.values()}
    found.pop(REMEDY_WORDS["none"], None)
    later = {title: sum(own, Tally(0, 0, 0.0)) for title, by_n in found.items()
             if (own := [one for n, one in by_n.items() if n > 1])}  # fmt: skip
    first = {title: by_n[1] for title, by_n in found.items() if 1 in by_n}
    return paragraph(
        "**Remedies.** Do they move the border? In brackets, the collapses that the fit expects at the runs' own first "
        "gap ([table](border-tables.md#remedies-beside-the-fit)).",
        _sides("From N = 2 on", later),
        _sides("At N = 1", first),
        _beside(study.grpo, list(first)),
    )


def _beside(grpo: pd.DataFrame, titles: Sequence[str]) -> str:
    """The collapses at N = 1 and the largest gap, with these remedies and without: the fit has an error of its own."""
    remedies = {title: remedy for remedy, title in REMEDY_WORDS.items() if title in titles}
    found = {title: summary(grpo, gap="r0.5", remedy=remedy, N=1) for title, remedy in remedies.items()}
    none = summary(grpo, gap="r0.5", remedy="none", N=1)
    counts = ", ".join(f"{title} {ended(one)}" for title, one in found.items() if one is not None)
    return f"At router noise 0.5: {counts}, no remedy {ended(none)}." if counts and none is not None else ""


def _sides(start: str, found: Mapping[str, Tally]) -> str:
    """A sentence on the remedies with fewer collapses than expected, then those with more; empty without any."""
    far, sides = {title: one for title, one in found.items() if abs(one.num_collapsed - one.expected) >= FAR}, []
    for word, is_fewer in (("fewer", True), ("more", False)):
        own = [f"{title}, {one.words}" for title, one in far.items() if (one.num_collapsed < one.expected) == is_fewer]
        sides += [f"{word} collapse with {'; '.join(own)}"] if own else []
    return f"{start} {', and '.join(sides)}." if sides else ""


def _moved(study: BorderStudy) -> str:
    found = tallies(study)
    degrees = sorted({n for by_n in found.values() for n in by_n})
    lines = [(words, *(by_n[n].words if n in by_n else "–" for n in degrees)) for words, by_n in found.items()]
    table = markdown_table(("runs with", *(f"N = {n}" for n in degrees)), lines)
    return f"{MOVED.format(name=study.fits[0].name)}\n{table}"


__all__ = ["Tally", "compared", "markdown", "moved_said", "tables", "tallies"]
