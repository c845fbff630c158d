"""From one state: the gradient's bias, cosine and variance by remedy, and the accuracy after 64 updates (claim 43)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.border.study import interval, paragraph
from sandbox.claims.c43_from_one_state import branch
from sandbox.ledger.cells import Regime, key
from sandbox.ledger.claim import Row

REMEDIES = {
    "none": "no remedy", "R2": "R2", "Pr2": "Pr2", "R3": "R3", "Pr3": "Pr3", "tis": "token TIS",
    "tis-R3": "token TIS and R3",
}  # fmt: skip
SAID = ("none", "R3", "tis")
"""The remedies of claim 43's predictions; the others are for comparison."""
DEGREES = (1, 8)

WORDS = """## From one state

Runs with different remedies drift to different states. Here each remedy starts from the same {num} states of runs with
an exact engine. The gradient of its objective is compared with the exact policy gradient at the state. The *bias* is
the tangent of the angle between its mean and the exact one, corrected for noise; the *variance* is that of one
mini-batch, over the squared length of the mean along the exact gradient. Neither depends on N. The last columns have
pi's accuracy after 64 updates, and its gain within a state. Means over the states, with 95% intervals (claim 43).
"""


def found(rows: Mapping[str, Row], regime: Regime, remedy: str, n: int) -> list[Row]:
    """The branches of a remedy at N."""
    arm = branch(remedy, n)
    return [row for name, row in rows.items() if row["arm"] == arm.name and key(regime, arm, row["seed"]) == name]


def values(own: Sequence[Row], probe: str) -> list[float]:
    """A probe of the branches that have it."""
    return [float(row["probes"][probe]) for row in own if row["probes"].get(probe) is not None]


def gains(own: Sequence[Row], none: Sequence[Row]) -> list[float]:
    """Gains in accuracy of a remedy's branches over those without one, within each state that both have."""
    without = {row["seed"]: row["probes"]["accuracy_after"] for row in none}
    return [row["probes"]["accuracy_after"] - without[row["seed"]] for row in own if row["seed"] in without]


def markdown(rows: Mapping[str, Row], regime: Regime) -> str:
    """The section; empty unless the remedies of claim 43 have branches at the largest N."""
    most = {remedy: own for remedy in REMEDIES if (own := found(rows, regime, remedy, max(DEGREES)))}
    if not all(remedy in most for remedy in SAID):
        return ""
    lines = []
    for remedy, own in most.items():
        words = REMEDIES[remedy]
        after = [values(found(rows, regime, remedy, n), "accuracy_after") for n in DEGREES]
        lines.append(
            (words, interval(values(own, "bias"), 2), interval(values(own, "cosine"), 2),
             interval(values(own, "variance"), 0), *(interval(one, 3) for one in after),
             "–" if remedy == "none" else interval(gains(own, most["none"]), 3))
        )  # fmt: skip
    after = (f"after 64 updates, N = {n}" for n in DEGREES)
    titles = ("remedy", "bias", "cosine", "variance", *after, f"gain over no remedy, N = {max(DEGREES)}")
    bias, cosine, variance = (
        {remedy: fmean(values(most[remedy], probe)) for remedy in SAID} for probe in ("bias", "cosine", "variance")
    )
    # Only the numbers are computed, and the sentence takes no side: the words must hold for other rows, too.
    said = paragraph(
        f"The gradient's bias is {bias['none']:.2f} without a remedy, {bias['R3']:.2f} under R3 and {bias['tis']:.2f} "
        f"with the weight (cosine {cosine['none']:.2f}, {cosine['R3']:.2f} and {cosine['tis']:.2f}), whose variance is "
        f"{number(variance['tis'] / variance['none'])} times that without a remedy."
    )
    return f"{WORDS.format(num=len(most['none']))}\n{markdown_table(titles, lines)}\n{said}"


__all__ = ["found", "gains", "markdown", "values"]
