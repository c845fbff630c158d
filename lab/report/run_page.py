"""The page of one run, or of several side by side: story, table, differing fields, figures and records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lab.files import atomic_write
from lab.records import RunFolder
from lab.report.differences import UNSET, Difference, differences
from lab.report.figures import Figure
from lab.report.overview import reward_picture
from lab.report.page import page
from lab.report.runs import ReportRun, load_runs, shared_prefix
from lab.report.sections import SECTIONS, ReportSection
from lab.report.story import story
from lab.report.style import listed
from lab.report.timing import Table


def write_report(run_folders: Sequence[RunFolder], out: Path, *, refresh_s: int | None = None) -> None:
    """Writes the page for one run, or for several side by side in this order, to the file `out`.

    With `refresh_s` an open page reloads itself after that many seconds.
    """
    atomic_write(out, render(run_folders, refresh_s=refresh_s))


def render(run_folders: Sequence[RunFolder], *, refresh_s: int | None = None) -> str:
    """The page as text; ValueError for no run folder."""
    runs = load_runs(run_folders)
    sections = [found for section in SECTIONS if not (found := Filled.of(section, runs)).is_empty]
    picture = reward_picture(runs)
    figures = [*([] if picture is None else [picture]), *(figure for one in sections for figure in one.figures)]
    found = differences(runs)
    return page(
        "page.html.jinja",
        figures,
        num_runs=len({run.index for run in runs}),
        title=_title(runs),
        runs=runs,
        coloured=[[run for run in runs if run.index == index] for index in dict.fromkeys(run.index for run in runs)],
        rows=[run.row() for run in runs],
        story=story(runs),
        picture=picture,
        sections=sections,
        rules=_rules(runs),
        differing=[RunSettings.of(found, place) for place in range(len(runs))] if found else None,
        usual=[Setting(one.field, one.name, one.usual) for one in found if one.usual is not None],
        refresh_s=refresh_s,
    )


FIRST = 6
"""Differing fields of a run that are shown unfolded, where it has many."""


@dataclass(frozen=True)
class Filled:
    """A section with the figures and tables for which the runs have data, and the titles of figures that are all 0."""

    section: ReportSection
    figures: list[Figure]
    tables: list[Table]
    zero: list[str]

    @staticmethod
    def of(section: ReportSection, runs: Sequence[ReportRun]) -> Filled:
        """The section of these runs."""
        made = _made(section.figures, runs)
        # An empty plot says no more than its title in a list.
        figures, zero = [one for one in made if not one.is_zero], [one.title for one in made if one.is_zero]
        return Filled(section, figures, _made(section.tables, runs), zero)

    @property
    def is_empty(self) -> bool:
        """Whether the runs have no data for it."""
        return not (self.figures or self.tables or self.zero)

    @property
    def note(self) -> str:
        """A sentence that names the figures left out; empty without any."""
        return f"All zero, so not drawn: {listed(self.zero, mark='; ')}." if self.zero else ""


Made = TypeVar("Made")


def _made(functions: Sequence[Callable[[Sequence[ReportRun]], Made | None]], runs: Sequence[ReportRun]) -> list[Made]:
    """The figures or tables for which these runs have data."""
    return [found for found in (function(runs) for function in functions) if found is not None]


@dataclass(frozen=True)
class Setting:
    """A field by its dotted and its short name, with the value to show, None for the usual one."""

    field: str
    name: str
    value: str | None

    @staticmethod
    def of(one: Difference, place: int) -> Setting:
        """The value of the field in the run at this place."""
        value = one.values[place]
        return Setting(one.field, one.name, None if value == one.usual else value)


@dataclass(frozen=True)
class RunSettings:
    """A run's differing fields but those with the usual value: the first ones, and the others, which are folded."""

    first: list[Setting]
    folded: list[Setting]

    @staticmethod
    def of(found: Sequence[Difference], place: int) -> RunSettings:
        """Those of the run at this place; fields that a run does not have come last, such as the other world's."""
        last = sorted(found, key=lambda one: UNSET in one.values)
        settings = [one for one in (Setting.of(each, place) for each in last) if one.value is not None]
        # A fold of two lines would save nothing.
        cut = FIRST if len(settings) > FIRST + 2 else len(settings)
        return RunSettings(settings[:cut], settings[cut:])


def _title(runs: Sequence[ReportRun]) -> str:
    if len(runs) == 1:
        return runs[0].name
    shared = shared_prefix([run.name for run in runs]).rstrip("-_ ")
    return f"{shared}: {len(runs)} runs" if shared else f"{len(runs)} runs"


def _rules(runs: Sequence[ReportRun]) -> dict[str, str]:
    """The rules of the verdict, if they are the same for all finished runs; empty otherwise."""
    found = [run.verdict.get("rules", {}) for run in runs if run.verdict is not None]
    return found[0] if found and all(rules == found[0] for rules in found) else {}
