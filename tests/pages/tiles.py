"""The picture of docs/ledger.md: the claims by state, a tile each, in the colours of ledger.html on a white page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from sandbox.ledger.summary import OUT_OF_REACH, ClaimLine, state_words

COLUMNS = 14
"""Tiles in a row: as many as leave their numbers legible on a phone 400 pixels wide."""
WIDTH, UNIT, LABEL = 4.2, 4.2 / COLUMNS, 0.85
"""Inches of the picture and of a tile with its gap, and the height of a state's words in tiles."""


@dataclass(frozen=True)
class Paint:
    """A tile's ground, edge and ink, and the dashes of its edge."""

    ground: str = "#ffffff"
    edge: str = "#5c636d"
    ink: str = "#1c1f23"
    dashes: str = "solid"


PAINTS = {
    "reproduced": Paint("#00694d", "#00694d", "#ffffff"),
    "not reproduced": Paint("#a33c00", "#a33c00", "#ffffff"),
    "opposite": Paint("#a33c00", "#ffffff", "#ffffff", "dashed"),
    OUT_OF_REACH: Paint(ink="#5c636d", dashes="dashed"),
}


def tiles(made: Sequence[ClaimLine]) -> Figure:
    """A block per state, in the order of the lines: its count in words, and the numbers of its claims."""
    states = {state: [line.claim.number for line in made if line.state == state]
              for state in dict.fromkeys(line.state for line in made)}  # fmt: skip
    height = sum(LABEL + -(-len(own) // COLUMNS) for own in states.values()) + 0.1
    figure = Figure(figsize=(WIDTH, UNIT * height))
    axis = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axis.set(xlim=(0, COLUMNS), ylim=(height, 0))
    axis.set_axis_off()
    top = 0.0
    for state, own in states.items():
        axis.text(0.08, top + 0.5, f"{len(own)} {state_words(state)}", va="center", size=10, color="#1c1f23")
        top += LABEL
        paint = PAINTS.get(state, Paint())
        for place, number in enumerate(own):
            x, y = place % COLUMNS, top + place // COLUMNS
            box = FancyBboxPatch(
                (x + 0.13, y + 0.13), 0.74, 0.74, boxstyle="round,pad=0.04", fc=paint.ground, ec=paint.edge,
                ls=paint.dashes, lw=0.8,
            )  # fmt: skip
            axis.add_patch(box)
            axis.text(x + 0.5, y + 0.51, f"{number}", ha="center", va="center", size=9, color=paint.ink)
        top += -(-len(own) // COLUMNS)
    return figure
