"""Runs of ten times the updates at half the rate (claim 70): a section of docs/border.md and its picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
from matplotlib.figure import Figure

from lab.markdown import markdown_table
from lab.report.style import PALETTE
from sandbox.border.pictures import BORDER
from sandbox.border.study import BorderStudy, interval, paragraph
from sandbox.border.table import where
from sandbox.claims.c70_half_the_rate_only_postpones import EXACT, NONE, R3, TIS, UPDATES
from sandbox.ledger.cells import Regime, key
from sandbox.ledger.claim import Arm, Row
from sandbox.ledger.course import FALL, area, collapse_step, collapsed, died, drawdown, evaluations, final

N = 8
SHORT = 400
"""Updates of the map's runs."""

ARMS: dict[str, tuple[Arm, tuple[str, str]]] = {
    "an exact engine": (EXACT, ("exact", "none")),
    "no remedy": (NONE, ("r0.5", "none")),
    "R3": (R3, ("r0.5", "R3")),
    "token TIS": (TIS, ("r0.5", "tis")),
}
"""The arms by their names in the table, and gap and remedy of the runs of SHORT updates at the same rate."""

KL_RULE = "kl_blowup"
"""The verdict's rule on the KL (lab/verdict.py)."""

SMOOTH = 10
"""Evaluations of the trailing mean that the picture shows: 160 updates, a standard error of some 0.01."""

WORDS = """## Ten times the updates

Is a gap that {short} updates survive harmless, or only slower? GRPO at N = {n}, router noise 0.5 and half the map's
rate, over {updates:,} updates (claim 70).
"""

PICTURE = """[![Accuracy over the updates, a panel per remedy](images/border-longer.svg)](images/border-longer.svg)

*Held-out accuracy of pi, a line per run (a trailing mean of {smooth} evaluations), collapsed ones in red. Dotted: where
the map's runs end.*
"""


def kept(rows: Mapping[str, Row], regime: Regime) -> dict[str, list[Row]]:
    """The rows of each arm that has any, by the arm's name in the table."""
    found = {
        # By key, which covers the regime: rows of other regimes and of an arm's former config drop out.
        name: [row for cell, row in rows.items() if row["arm"] == arm.name and cell == key(regime, arm, row["seed"])]
        for name, (arm, _) in ARMS.items()
    }
    return {name: own for name, own in found.items() if own}


def markdown(study: BorderStudy) -> str:
    """The section: collapsed runs of SHORT and of UPDATES updates, when they collapse, and accuracies; empty without
    runs of at least two arms."""
    found = kept(study.rows, study.regime)
    if len(found) < 2:
        return ""
    lines = [
        (name, _short(study, name), ended(own), _when(own), interval([area(row) for row in own], 3),
         interval([final(row) for row in own], 3))
        for name, own in found.items()
    ]  # fmt: skip
    titles = (
        "half the rate, N = 8", f"collapsed in {SHORT} updates", f"in {UPDATES:,}", "at update, median",
        "accuracy over the run", "in its last quarter",
    )  # fmt: skip
    words = WORDS.format(short=SHORT, n=N, updates=UPDATES)
    picture = PICTURE.format(short=SHORT, smooth=SMOOTH)
    said = "\n".join(part for part in (_answer(study, found), _warning(study, found)) if part)
    return f"{words}\n{markdown_table(titles, lines)}\n{said}\n{picture}"


def ended(own: Sequence[Row]) -> str:
    """The collapsed runs: `n of m`."""
    return f"{sum(collapsed(row) for row in own):.0f} of {len(own)}"


def _short(study: BorderStudy, name: str) -> str:
    gap, remedy = ARMS[name][1]
    own = where(study.slowed, gap=gap, remedy=remedy, N=N)
    return f"{int(own['collapsed'].to_numpy(dtype=float).sum())} of {len(own)}" if len(own) else "–"


def _when(own: Sequence[Row]) -> str:
    starts = [start * N for row in own if (start := collapse_step(row)) is not None]
    return f"{median(starts):,.0f}" if starts else "–"


def _answer(study: BorderStudy, found: Mapping[str, Sequence[Row]]) -> str:
    """Whether most runs without a remedy collapse, and how many of these by accuracy alone."""
    if "no remedy" not in found:
        return ""
    share = sum(collapsed(row) for row in found["no remedy"]) / len(found["no remedy"])
    bare, short = ended(found["no remedy"]), _short(study, "no remedy")
    first = "Half the rate only postpones the collapse" if share > 0.5 else "Most runs hold at half the rate"
    runs = f"{bare} runs of {UPDATES:,} updates collapse"
    ill = sum(died(row) for row in found["no remedy"])
    low = sum(drawdown(row) > 1.0 - FALL for row in found["no remedy"])
    early = f"{ill} ended early, as a number overflowed: a collapse by the study's rule."
    return paragraph(
        f"{first}: without a remedy {runs}" + (f", and {short} of {SHORT}." if short != "–" else "."),
        f"{early} By accuracy alone {low} collapse." if ill else "",
    )


def _warning(study: BorderStudy, found: Mapping[str, Sequence[Row]]) -> str:
    """The updates by which the verdict's rule on the KL precedes the collapses, and its firings elsewhere."""
    fell = {row["seed"]: start for row in found.get("no remedy", ()) if (start := collapse_step(row)) is not None}
    # Of its rules a row has the earliest one's step alone.
    first = {row["seed"]: row["first_step"] for row in found.get("no remedy", ()) if row["rules"][:1] == [KL_RULE]}
    warned = [seed for seed in fell if first.get(seed, math.inf) < fell[seed]]
    if not warned:
        return ""
    others = [row for name, own in found.items() if name != "no remedy" for row in own]
    limit = json.loads(study.regime.stated)["verdict"]["kl_limit"]
    start, lead = (
        median(updates) * N for updates in ([first[s] for s in warned], [fell[s] - first[s] for s in warned])
    )
    return paragraph(
        f"The KL warns: in {len(warned)} of these {len(fell)} it stays above {limit:g} nats per token (the verdict's "
        f"rule) from update {start:,.0f} on, {lead:,.0f} before the collapse (medians); of the {len(others)} other "
        f"runs in {sum(KL_RULE in row['rules'] for row in others)} (exploratory).",
    )


def path(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """The updates of a run's evaluations, and the trailing mean of SMOOTH of them (fewer at the start)."""
    steps, values = (np.array(column) for column in zip(*evaluations(row), strict=True))
    sums = np.concatenate(([0.0], np.cumsum(values)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - SMOOTH)
    return steps * N, (sums[ends] - sums[starts]) / (ends - starts)


def longer_picture(rows: Mapping[str, Row], regime: Regime) -> Figure:
    """A panel per arm: the smoothed accuracy of each run over its updates, collapsed runs in red."""
    found = kept(rows, regime)
    figure = Figure(figsize=(2.1 * max(1, len(found)) + 0.5, 2.4), layout="constrained")
    axes = figure.subplots(1, max(1, len(found)), sharey=True, squeeze=False)[0]
    top = 0.0
    for axis, (name, own) in zip(axes, found.items(), strict=False):
        for row in own:
            x, level = path(row)
            top = max(top, float(level.max()))
            axis.plot(x, level, color=BORDER if collapsed(row) else PALETTE[0].line, lw=0.8, alpha=0.75)
        axis.axvline(SHORT, color="#888888", lw=0.9, ls=":")
        axis.set_title(f"{name}\n{ended(own)} collapsed", fontsize=9)
        axis.set(xlim=(0, UPDATES), xlabel="updates")
        axis.set_xticks([0, UPDATES // 2, UPDATES])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set(ylabel="held-out accuracy", ylim=(0.0, math.ceil(10 * top + 0.5) / 10))
    return figure


__all__ = ["ARMS", "SHORT", "ended", "kept", "longer_picture", "markdown", "path"]
