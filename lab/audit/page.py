"""The page of an audit: one figure and the findings in words, then the table and a figure for every question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lab.audit.config import AuditConfig
from lab.audit.figures import SLICE_FIGURES, Slice, along_distance, overview, ratio_map
from lab.audit.series import Series, modes_shown, series
from lab.audit.table import (
    CASE,
    COLUMNS,
    LEVEL,
    at_longest,
    cell,
    distinct,
    error_column,
    medians,
    parts,
    ratios,
    records,
    sample_sizes,
    text_columns,
)
from lab.audit.words import group_words, headline, sentences
from lab.report.figures import Figure
from lab.report.page import Section, page

NUM_FIRST = 3
"""Sentences of the summary on the first screen; the rest follow below the figure."""


def render(config: AuditConfig, frame: pd.DataFrame, manifest: Mapping[str, Any], config_text: str) -> str:
    """The page as HTML."""
    found = medians(frame)
    pairs = [(key["objective"], key["mode"]) for key, _ in parts(found, ["objective", "mode"])]
    lines = series(pairs)
    choices = _choices(frame)
    drawn = _drawn(frame, found, lines, choices)
    maps = _maps(config, frame)
    # Reversed, so that each id keeps the figure of its first slice.
    seen = {figure.id: figure for figure, _ in reversed(drawn)}
    own = [seen[id_] for id_ in dict.fromkeys(figure.id for figure, _ in drawn)]
    sections = [
        Section(
            "figures", "Objectives", "How far is the expected gradient from the true one, and at what variance?", own
        )
    ]
    if maps and config.compare is not None:
        question = f"Blue: {config.compare.first} has less bias than {config.compare.second}; orange: more."
        sections.append(Section("maps", f"{config.compare.first} against {config.compare.second}", question, maps))
    picture, said = overview(found, lines), sentences(config, frame)
    return page(
        "audit.html.jinja", [*drawn, *maps, picture], num_runs=len(lines), own=Path(__file__).parent / "template",
        title=config.name, headline=headline(frame), sentences=said[:NUM_FIRST], notes=said[NUM_FIRST:],
        picture=picture, choices=choices, lines=list(lines.values()), modes=modes_shown(lines),
        columns=text_columns(frame), meaning=_meaning(frame), sections=sections, manifest=manifest,
        rows=_table_rows(found, lines, choices, frame), folder=frame.attrs.get("config_hash", ""),
        config_text=config_text,
    )  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """One select element of the page: its name and its options in words."""

    name: str
    options: Sequence[str]


def _choices(frame: pd.DataFrame) -> list[Choice]:
    places = [_place(key) for key, _ in parts(frame, CASE)]
    names = ("policies", "reward", "group")
    return [Choice(name, list(dict.fromkeys(place[i] for place in places))) for i, name in enumerate(names)]


def _place(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """The three choices under which a row is shown."""
    return f"{row['policy']}; {row['engine']}", row["reward"], group_words(row["group"], row["baseline"])


def _key(row: Mapping[str, Any], choices: Sequence[Choice]) -> str:
    return "/".join(str(choice.options.index(one)) for choice, one in zip(choices, _place(row), strict=True))


def _drawn(
    frame: pd.DataFrame, found: pd.DataFrame, lines: Series, choices: Sequence[Choice]
) -> list[tuple[Figure, str]]:
    """Each figure of each slice, with the slice's key."""
    names = [name for name in CASE if name != "mode"]
    rows = {_key(key, choices): part for key, part in parts(frame, names)}
    drawn = []
    for place, part in parts(found, names):
        key = _key(place, choices)
        of = Slice(rows[key], part, lines)
        drawn += [(figure, key) for figure in (draw(of) for draw in SLICE_FIGURES) if figure is not None]
    return drawn


def _maps(config: AuditConfig, frame: pd.DataFrame) -> list[Figure]:
    if config.compare is None:
        return []
    first, second = config.compare.first, config.compare.second
    maps = []
    for row, part in parts(ratios(frame, first, second), CASE):
        mode = f", {row['mode']}" if row["mode"] != "none" else ""
        title = f"{_place(row)[0]}{mode}; {row['reward']}; {group_words(row['group'], row['baseline'])}"
        if len(distinct(part, "length")) > 1 or len(distinct(part, "kl_mu_pi")) > 1:
            maps.append(ratio_map(along_distance(part), first, second, f"map-{len(maps)}", title))
    return maps


def _table_rows(
    found: pd.DataFrame, lines: Series, choices: Sequence[Choice], frame: pd.DataFrame
) -> list[dict[str, Any]]:
    rows = []
    before = None
    for row in records(at_longest(found)):
        level = [str(row[name]) for name in LEVEL]
        line = lines[row["objective"], row["mode"]]
        cells = [cell(row, "kl_mu_old"), cell(row, "kl_old_pi")]
        for name in text_columns(frame):
            text = cell(row, name)
            cells.append(f"{text} [{cell(row, 'bias_q1')}, {cell(row, 'bias_q3')}]" if name == "bias" else text)
        rows.append({"line": line, "slice": _key(row, choices), "cells": cells, "begins": level != before})
        before = level
    return rows


def _meaning(frame: pd.DataFrame) -> dict[str, str]:
    errors = {error_column(n): f"sqrt(bias^2 + variance / {n})" for n in sample_sizes(frame)}
    return COLUMNS | errors
