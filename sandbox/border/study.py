"""The study's rows as the pages need them, each part computed once."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from lab.ladder import seed_mean
from sandbox.border.alarm import AlarmRule, choose
from sandbox.border.fit import BorderFit, fit_all
from sandbox.border.lengths import is_branch, is_on_sums
from sandbox.border.table import dual_clipped_runs, on_map, runs, slower_runs, unclipped_runs, where
from sandbox.ledger.cells import Regime
from sandbox.ledger.claim import FRESH, Row

WIDTH = 119
"""Characters of a line of the pages."""


@dataclass(frozen=True, eq=False)
class BorderStudy:
    """The kept rows and the study's regime."""

    rows: Mapping[str, Row]
    regime: Regime

    @cached_property
    def table(self) -> pd.DataFrame:
        """`table.runs`: one line per run at the regime's learning rate."""
        return runs(self.rows, self.regime)

    @cached_property
    def grpo(self) -> pd.DataFrame:
        """GRPO's part of the table."""
        return where(self.table, preset="grpo")

    @cached_property
    def unaided(self) -> pd.DataFrame:
        """GRPO's runs without a remedy on the map's engines: those to which the border is fitted."""
        return where(on_map(self.grpo), remedy="none")

    @cached_property
    def slowed(self) -> pd.DataFrame:
        """GRPO's runs at half the learning rate, on the map's engines."""
        return where(on_map(slower_runs(self.rows, self.regime)), preset="grpo")

    @cached_property
    def unclipped(self) -> pd.DataFrame:
        """GRPO's runs without gradient clipping."""
        return where(unclipped_runs(self.rows, self.regime), preset="grpo")

    @cached_property
    def dual_clipped(self) -> pd.DataFrame:
        """GRPO's runs with a second clip, gradients clipped as in `table`."""
        return dual_clipped_runs(self.rows, self.regime, has_free_norm=False)

    @cached_property
    def dual_unclipped(self) -> pd.DataFrame:
        """GRPO's runs with a second clip and without gradient clipping."""
        return dual_clipped_runs(self.rows, self.regime, has_free_norm=True)

    @cached_property
    def fits(self) -> list[BorderFit]:
        """The candidates' fits, the best first; empty if all runs end alike."""
        try:
            return fit_all(self.unaided)
        except ValueError:
            return []

    @cached_property
    def borders(self) -> dict[str, BorderFit]:
        """The fits by the candidate's name."""
        return {one.name: one for one in self.fits}

    @cached_property
    def explored(self) -> list[Row]:
        """Rows of whole runs on the map's task, of seeds on which an alarm may be chosen."""
        return [row for row in self._whole if row["seed"] < FRESH]

    @cached_property
    def fresh(self) -> list[Row]:
        """Those of all other seeds, in the setting on which it was chosen: the study's rate, batch and clipping."""
        of_setting = set(self.table["cell"])
        return [row for row in self._whole if row["seed"] >= FRESH and row["cell"] in of_setting]

    @cached_property
    def _whole(self) -> list[Row]:
        own = [row for row in self.rows.values() if row["regime"] == self.regime.name]
        return [row for row in own if not is_on_sums(row) and not is_branch(row)]

    @cached_property
    def alarms(self) -> list[tuple[AlarmRule, float]]:
        """The best alarm of each metric where it was chosen, the largest score first."""
        return choose(self.explored)


def interval(values: Sequence[float], decimals: int) -> str:
    """The mean with its 95% Student interval; an en dash with fewer than two values."""
    if len(values) < 2:
        return "–"
    found = seed_mean(values)
    low, high = found.mean - found.half_width, found.mean + found.half_width
    return f"{found.mean:.{decimals}f} ({low:.{decimals}f} to {high:.{decimals}f})"


def paragraph(*sentences: str) -> str:
    """The sentences as one wrapped paragraph that ends with a line break; empty ones are left out."""
    text = " ".join(one for one in sentences if one)
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n" if text else ""


__all__ = ["BorderStudy", "interval", "paragraph"]
