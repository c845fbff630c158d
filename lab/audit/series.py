"""The lines of an audit's figures: a colour for each objective, and a marker for each replay mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.report.figures import line_trace
from lab.report.style import DASHES, PALETTE
from theory.routing.passes import MODES

SYMBOLS: dict[str, str] = dict(zip(MODES, ("circle", "square", "diamond", "triangle-up", "triangle-down"), strict=True))
"""plotly's marker of each replay mode."""
PATHS = {
    "circle": "M2 8a6 6 0 1 0 12 0a6 6 0 1 0-12 0z",
    "square": "M2.5 2.5h11v11h-11z",
    "diamond": "M8 .8 15.2 8 8 15.2.8 8z",
    "triangle-up": "M8 1.5 15 14H1z",
    "triangle-down": "M8 14.5 1 2h14z",
}
"""The markers of the legend, as paths on 16 x 16."""


@dataclass(frozen=True)
class AuditLine:
    """A pair of objective and replay mode: its number among the page's, its name, and its objective's ink."""

    index: int
    objective: str
    mode: str
    label: str
    ink: int

    @property
    def symbol(self) -> str:
        """The marker of its replay mode."""
        return SYMBOLS[self.mode]

    @property
    def path(self) -> str:
        """Its marker in the legend."""
        return PATHS[self.symbol]

    @property
    def meta(self) -> dict[str, int]:
        """Its number and its place in the palette, by which the page hides and colours it."""
        return {"run": self.index, "ink": self.ink}

    def trace(self, role: str, x: Sequence[Any], y: Sequence[Any], mode: str = "lines") -> dict[str, Any]:
        """A trace of its name, its marker, and the dash of its ink."""
        look = {"line": {"dash": DASHES[self.ink // len(PALETTE) % len(DASHES)]}, "marker": {"symbol": self.symbol}}
        return line_trace(self.index, self.label, role, x, y, mode) | look | {"meta": {**self.meta, "role": role}}


Series = dict[tuple[str, str], AuditLine]
"""The lines by objective and replay mode."""


def series(pairs: Sequence[tuple[str, str]]) -> Series:
    """A line for each pair of objective and mode; modes are named where there are several."""
    inks = {objective: place for place, objective in enumerate(dict.fromkeys(objective for objective, _ in pairs))}
    many = len({mode for _, mode in pairs}) > 1
    names = [f"{objective}, {mode}" if many and mode != "none" else objective for objective, mode in pairs]
    return {
        (objective, mode): AuditLine(i, objective, mode, name, inks[objective])
        for i, ((objective, mode), name) in enumerate(zip(pairs, names, strict=True))
    }


def modes_shown(lines: Series) -> list[AuditLine]:
    """One line of each replay mode, in the order of MODES, whose markers a legend explains; none of a single mode."""
    found = {line.mode: line for line in reversed(lines.values())}
    return [found[mode] for mode in MODES if mode in found] if len(found) > 1 else []
