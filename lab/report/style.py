"""The report's style: a colour for a run or a treatment, the same in every figure, and numbers of three digits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Ink:
    """One colour as a line and as text, on a light and on a dark page."""

    line: str
    text: str
    line_dark: str
    text_dark: str


# The colours of Okabe and Ito (2008), distinct for colour-blind readers, without the yellow, which is invisible on
# white. Text has the same hue, darker or lighter until it is legible (contrast of 4.5 or more against the page).
PALETTE = (
    Ink("#0072B2", "#00639B", "#3D9BD9", "#6CB6E6"),
    Ink("#D55E00", "#B04E00", "#F0792A", "#F5935A"),
    Ink("#009E73", "#00795A", "#1DBA8D", "#3FCBA2"),
    Ink("#CC79A7", "#A6487B", "#DB8FB8", "#E5A6C8"),
    Ink("#E69F00", "#8F6200", "#E9AC28", "#EDBB52"),
    Ink("#56B4E9", "#1F77AB", "#86CBF2", "#9AD4F5"),
    Ink("#555555", "#555555", "#B0B0B0", "#B0B0B0"),
)

DASHES = ("solid", "dash", "dot", "dashdot")
"""The dashes that distinguish runs of one colour: those of one treatment, and those beyond the palette."""


def number(value: float | int | None, decimals: int | None = None) -> str:
    """Three significant digits, small and large values as 3.4e-4; an en dash for None and nan.

    With `decimals`, that many, so that columns of fractions line up.
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if decimals is not None:
        return f"{value:.{decimals}f}"
    if value == 0:
        return "0"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e6):
        return f"{int(value)}"
    if 1e-2 <= abs(value) < 1e4:
        # Not up to 1000: from 999.5 on, three digits would round to 1e+03.
        return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    if int(exponent) == -2:  # rounded up to a hundredth, which has one spelling
        return f"{value:.2g}"
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def listed(texts: Iterable[str], mark: str = ", ") -> str:
    """`a, b and c`; `mark` separates all but the last two."""
    *most, last = texts
    return f"{mark.join(most)} and {last}" if most else last


def shortened(text: str, length: int) -> str:
    """The text, cut to `length` characters where it has more; the last one is then an ellipsis."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def spread(positions: list[float], gap: float, low: float, high: float) -> list[float]:
    """The positions moved as little as needed to stand at least `gap` apart, inside [low, high] as far as they fit."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    clusters: list[tuple[float, list[int]]] = []
    for i in order:
        centre, members = positions[i], [i]
        while True:
            half = gap * (len(members) - 1) / 2
            # Before the comparison: an edge may push the cluster into the one before it.
            centre = max(low + half, min(high - half, centre))
            if not clusters:
                break
            before, others = clusters[-1]
            if centre - half - (before + gap * (len(others) - 1) / 2) >= gap:
                break
            # Clusters that touch are merged around the mean of their members' wanted positions.
            members = [*others, *members]
            centre = sum(positions[m] for m in members) / len(members)
            clusters.pop()
        clusters.append((centre, members))
    placed = [0.0] * len(positions)
    for centre, members in clusters:
        for rank, i in enumerate(members):
            placed[i] = centre + gap * (rank - (len(members) - 1) / 2)
    return placed
