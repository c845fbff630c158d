"""The page of a flow: findings in words and one picture, then the table, portraits, maps and curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from lab.audit.table import distinct, numbers, parts
from lab.flow.config import FlowConfig
from lab.flow.figures import BANDS, COURSES, panels, portraits, reward_maps
from lab.flow.table import COLUMNS, TEXT, focus, has_intervals, of_cell, table_rows
from lab.flow.words import headline, sentences
from lab.report.figures import Figure
from lab.report.page import Section, page
from lab.report.style import number

MAX_BLOCKS = 4
"""The largest number of engine errors in the first picture."""


@dataclass(frozen=True)
class Block:
    """One engine error of the first picture: its name and its figures."""

    title: str
    figures: Sequence[Figure]


@dataclass(frozen=True)
class ColumnChoice:
    """One select element of the page: its name, the column whose value it chooses, and its options."""

    name: str
    column: str
    values: Sequence[Any]

    @property
    def options(self) -> list[str]:
        """The options in words."""
        return [value if isinstance(value, str) else number(value) for value in self.values]


def render(config: FlowConfig, frame: pd.DataFrame, manifest: Mapping[str, Any], config_text: str) -> str:
    """The page as HTML."""
    labels, found = list(dict.fromkeys(frame["objective"])), focus(frame)
    errors = {key["error"]: part for key, part in parts(found, ["error"])}
    first = {error: errors[error] for error in list(errors)[:MAX_BLOCKS]}
    rows_of = {name: panels(list(first.values()), labels, name) for name in ("entropy", "reward")}
    blocks = [Block(error, [rows_of[name][i] for name in rows_of]) for i, error in enumerate(first)]
    choices = [
        ColumnChoice("engine error", "error", list(errors)),
        ColumnChoice("N", "N", distinct(frame, "N")),
        ColumnChoice("B", "B", sorted(distinct(frame, "B"), reverse=True)),
    ]
    drawn = _drawn(frame, labels, choices)
    # One figure per id, that of its first cell: the page swaps in the data of the others.
    seen = {figure.id: figure for figure, _ in reversed(drawn)}
    own = [seen[id_] for id_ in dict.fromkeys(figure.id for figure, _ in drawn)]
    phases = portraits(errors, labels)
    # A map is for one B: the largest, which has the least noise.
    maps = reward_maps(of_cell(frame, B=max(distinct(frame, "B"))), float(numbers(frame, "optimum").mean()))
    sections = [
        Section("portraits", "Reward against entropy", "Which way do the policies go, and where do they end?", phases),
        Section(
            "maps",
            "Gap and staleness",
            "How much reward does each engine error cost, as a rollout serves more updates?",
            maps,
        ),
        Section("curves", "Over the updates", "At the engine error, N and B chosen above.", own),
    ]
    return page(
        "flow.html.jinja", [*drawn, *phases, *maps, *(figure for block in blocks for figure in block.figures)],
        num_runs=len(labels), own=Path(__file__).parent / "template", title=config.name, headline=headline(frame),
        sentences=sentences(frame), blocks=blocks, num_errors=len(errors), choices=choices, series=labels,
        bands=BANDS if has_intervals(frame) else "", columns=TEXT, meaning=COLUMNS,
        sections=[section for section in sections if section.figures], manifest=manifest,
        rows=_table_rows(frame, labels, choices), folder=frame.attrs.get("config_hash", ""), config_text=config_text,
        num_updates=config.training.num_updates,
    )  # fmt: skip


def _drawn(frame: pd.DataFrame, labels: Sequence[str], choices: Sequence[ColumnChoice]) -> list[tuple[Figure, str]]:
    """Each curve of each cell, with the cell's key."""
    drawn = []
    for place, part in parts(frame, ["error", "N", "B"]):
        made = [course(part, labels) for course in COURSES]
        drawn += [(figure, _key(place, choices)) for figure in made if figure is not None]
    # The note of every curve is on its bands, which have no width for one problem.
    return drawn if has_intervals(frame) else [(replace(figure, note=""), key) for figure, key in drawn]


def _key(place: Mapping[str, Any], choices: Sequence[ColumnChoice]) -> str:
    return "/".join(str(choice.values.index(place[choice.column])) for choice in choices)


def _table_rows(frame: pd.DataFrame, labels: Sequence[str], choices: Sequence[ColumnChoice]) -> list[dict[str, Any]]:
    return [
        {
            "run": labels.index(row["objective"]), "label": row["objective"], "slice": _key(row, choices),
            "cells": row["cells"],
        }
        for row in table_rows(frame)
    ]  # fmt: skip
