"""The border as one number, a section of docs/border.md: its fits, remedies beside them, papers' settings, regimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.border.fit import ALIKE, BorderFit, alike, expected, fit_all, known
from sandbox.border.pictures import TITLES
from sandbox.border.regimes import markdown as regimes_on_map
from sandbox.border.table import on_map, where
from sandbox.ledger.claim import Row

PAPERS = (
    ("R3 (arXiv 2510.11370) sec. 3.1, 5.1", 1.535e-3, 8, 30720),
    ("R3 (arXiv 2510.11370) sec. 3.1, 5.1", 1.535e-3, 1, 30720),
    ("Pr2 (arXiv 2606.00395) App. E.1, at R3's KL", 1.535e-3, 8, 16384),
)
"""Settings of papers: source, k3 KL(mu || old) per token, N, and the largest response length (an upper bound)."""

MOVED = """Does a remedy move the gap, or the border? The table compares the collapses of runs with a remedy with the
number expected from the fit without one, at each run's own `{name}` of the first step (under R3 the gap is smaller
there already). If as many collapse as expected, the remedy leaves the border where it is; if fewer, it moves the
border. The last rows are runs without a remedy whose engine has another kind of error: if that number were all that
matters, as many of them would collapse as expected.
"""

CONTROLS = {
    "logits1.1": "noise on the logits (KL of router noise 0.3)",
    "logits1.6": "noise on the logits (KL of router noise 0.5)",
    "int4": "INT4 weights (KL of router noise 0.3)",
}
"""Engines with other errors than the map's, matched in KL before training."""


def markdown(table: pd.DataFrame, rows: Mapping[str, Row]) -> str:
    """The section: the fits of the candidates on the map's runs without a remedy, then what they say elsewhere.

    `table` is GRPO's part of `table.runs`. The fits leave out the controls, whose errors are of other kinds, and gaps
    beyond the map. Empty if all runs end alike.
    """
    own = where(on_map(table), remedy="none")
    try:
        fits = fit_all(own)
    except ValueError:
        return ""
    lines = [
        (f"`{one.name}`", number(one.null - one.deviance), f"{one.auc:.2f}", number(one.border),
         f"{number(one.low)} to {number(one.high)}", f"{one.slope:.2f}", str(one.num_best))
        for one in fits
    ]  # fmt: skip
    titles = ("number", "deviance explained", "area under ROC", "border x*", "95%", "slope", "best in")
    words = (
        f"## One number for the border\n\n{fits[0].num_runs} runs of the map without a remedy, "
        f"{fits[0].num_collapsed} collapsed; P(collapse) = 1 / (1 + exp(-(a + b log x))), x* = where half collapse. "
        "Exploratory.\n"
    )
    (border,) = (one.border for one in fits if one.name == "KL x N")
    parts = [words, _compared(fits), markdown_table(titles, lines), _moved(table, fits[0].name), _papers(fits)]
    return "\n".join([*parts, regimes_on_map(rows, table, border)])


def _compared(fits: Sequence[BorderFit]) -> str:
    """The numbers that predict collapse about as well as the best one, in a sentence."""
    best, *others = alike(fits)
    start = f"Of {len(fits)} numbers tried, `{best.name}` predicts collapse best."
    if others:
        *named, last = (f"`{one.name}`" for one in (best, *others))
        start = (
            f"Of {len(fits)} numbers tried, {1 + len(others)} predict collapse about equally well: "
            f"{', '.join(named)} and {last}, whose\ndeviances differ by less than {ALIKE:g}."
        )
    draws = sum(one.num_best for one in fits)
    return (
        f"{start} The last column counts the draws, of {draws} of a bootstrap over seeds, in\n"
        "which a number is the best of all.\n"
    )


def _moved(table: pd.DataFrame, name: str) -> str:
    """For every remedy and control: the number of collapses expected by the regression on the map's runs without a
    remedy, and the actual number."""
    unaided = where(on_map(table), remedy="none")
    tried = [(title, where(on_map(table), remedy=remedy)) for remedy, title in TITLES.items() if remedy != "none"]
    tried += [(f"no remedy, {words}", where(table, gap=gap, remedy="none")) for gap, words in CONTROLS.items()]
    lines = []
    for title, runs_of_it in tried:
        own = known(runs_of_it)
        if len(own):
            count = int(own["collapsed"].to_numpy(dtype=float).sum())
            lines.append((title, str(len(own)), f"{expected(name, unaided, own):.1f}", str(count)))
    return MOVED.format(name=name) + "\n" + markdown_table(("runs with", "runs", "expected", "collapsed"), lines)


def _papers(fits: Sequence[BorderFit]) -> str:
    borders = {one.name: one.border for one in fits}
    wanted = ("KL x N", "KL x length x N")
    lines = []
    for source, kl, n, length in PAPERS:
        values = {"KL x N": kl * n, "KL x length x N": kl * n * length}
        shown = [f"{number(values[name])} ({number(values[name] / borders[name])} of x*)" for name in wanted]
        lines.append((source, number(kl), str(n), str(length), *shown))
    table = markdown_table(("setting", "KL", "N", "longest response", *(f"`{name}`" for name in wanted)), lines)
    return (
        "The papers' settings on two of these numbers. The length is their longest response, so the last column is\n"
        "an upper bound. All responses of the map have nearly one length: these runs cannot distinguish the two\n"
        "numbers.\n"
        f"\n{table}"
    )


__all__ = ["markdown"]
