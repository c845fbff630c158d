"""The comparison of an audit as Markdown, with every number computed from the audit's rows.

It compares the two objectives of the config's `compare:`; medians are over random policies, intervals are 95%
percentile-bootstrap intervals of the median over the same policies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from lab.audit.config import AuditConfig
from lab.audit.table import (
    CASE,
    at_level,
    at_longest,
    at_middle,
    cell,
    distinct,
    error_column,
    has_interval,
    medians,
    middle,
    numbers,
    parts,
    ratios,
    records,
    sample_sizes,
    where,
)
from lab.audit.words import group_words, sentences, turns
from lab.markdown import markdown_table
from lab.report.style import number


def study(config: AuditConfig, frame: pd.DataFrame) -> str:
    """The document as Markdown. Raises ValueError for a config without `compare`."""
    if config.compare is None:
        raise ValueError("compare: expected two objectives to compare, got null")
    first, second = config.compare.first, config.compare.second
    staleness = middle(numbers(frame, "asked_staleness"))
    frame = at_level(frame, "asked_staleness", staleness)
    # Engines without a dial get levels only afterwards: the sentences are of the middle level, which one alone has.
    said = sentences(config, frame)
    is_measured = bool(frame["asked_discrepancy"].isna().any())
    frame = _with_levels(frame)
    table = ratios(frame, first, second)
    text = [
        f"# {first} against {second}{_kind(frame)}: which gradient is less biased, and where this changes",
        "The policy mu that samples is not quite the policy pi that is trained, so every objective's gradient is "
        f"biased. This page says when that of `{first}` is less biased than that of `{second}` (formulas under "
        "*Design*), for small random policies, all of whose responses are enumerated.",
        "\n".join(f"- {one}" for one in [*said, *_raises(table, first, second)]),
        f"Made by `firstorder audit` from the records of `{config.name}` ({frame.attrs['config_hash']}); no number "
        "here is typed by hand. [audit.md](audit.md) explains the columns, `theory/exact/decomposition.py` has proofs "
        "about these weights.",
        "## Design",
        _setup(config, frame, staleness, is_measured),
        *_comparison(table, first, second),
        "## All objectives at the longest responses",
        "Median bias over policies by KL(mu || old) per token, nats; `at n`: the error from bias and variance of n "
        "responses at the middle distance.",
        *_biases(frame),
    ]
    return "\n\n".join(part.rstrip("\n") for part in text) + "\n"


def _comparison(table: pd.DataFrame, first: str, second: str) -> list[str]:
    """The sections that have the ratios; none where there is no ratio."""
    if table.empty:
        return []
    return [
        "## By length and distance",
        f"Median of bias({first}) / bias({second}) at the shortest and the longest responses, and at the smallest and "
        "the largest distance:",
        _trends(table),
        f"## bias({first}) / bias({second})",
        f"Median over policies with its 95% interval. Below 1, {first} has less bias; bold where the interval excludes "
        "1. Columns: KL(mu || old) per token, nats.",
        *_maps(table),
        "## Turning points",
        f"The shortest length from which the median ratio stays at 1 or more, with KL(mu || pi) of a whole response "
        f"there; a dash if {first} still has less bias than {second} at the longest responses.",
        _turns(table),
    ]


def _with_levels(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame, where engines without a dial count as requested at their median KL(mu || old), to two digits."""
    frame = frame.copy()
    # The tables need one level for all seeds of an engine, but each seed has another distance: hence the median.
    undialled = frame["asked_discrepancy"].isna()
    found = frame[undialled].groupby(["policy", "engine"])["kl_mu_old"].transform("median")
    frame.loc[undialled, "asked_discrepancy"] = [float(f"{kl:.1e}") for kl in found]
    return frame


def _kind(frame: pd.DataFrame) -> str:
    """The words in the title that tell a study of MoE policies from one of others."""
    return " on a MoE" if all(policy.startswith("moe") for policy in distinct(frame, "policy")) else ""


def _setup(config: AuditConfig, frame: pd.DataFrame, staleness: float, is_measured: bool) -> str:
    lengths = ", ".join(map(str, distinct(frame, "length")))
    levels = ", ".join(number(level) for level in _levels(frame))
    kinds = "; ".join(f"{key['policy']}, {key['engine']}" for key, _ in parts(frame, ["policy", "engine"]))
    where_measured = " (medians of each engine over all lengths)" if is_measured else ""
    what = (
        f"Policies: {kinds}. {len(distinct(frame, 'seed'))} random ones of each kind and length T = {lengths}, at "
        f"KL(mu || old) = {levels}{where_measured} and KL(old || pi) = {number(staleness)} nats per token, rewards "
        f"{', '.join(config.rewards)}. Objectives:"
    )
    return "\n".join([what, "", *(f"- `{one.name}`: {one.build().formula}" for one in config.objectives)])


def _raises(table: pd.DataFrame, first: str, second: str) -> Iterator[str]:
    """A sentence for each case in which the first objective has more bias, with an interval above 1 somewhere."""
    if table.empty:
        yield f"{first} and {second} are not compared: no policies that both are for have a gap between mu and pi."
        return
    sure = where(table, numbers(table, "low") > 1)
    if sure.empty:
        yield f"In no cell does {first} have more bias than {second} with an interval above 1."
    for place, part in parts(sure, CASE):
        rows = records(part)
        lengths = ", ".join(map(str, distinct(part, "length")))
        worst = max(rows, key=lambda row: row["ratio"])
        yield (
            f"{first} has more bias than {second} with an interval above 1 for {_case(place)}: at T = {lengths}, at "
            f"most {number(worst['ratio'])} times as much (T = {worst['length']}, KL "
            f"{number(worst['asked_discrepancy'])} per token)."
        )


def _trends(table: pd.DataFrame) -> str:
    """The table of the ratio at the ends of both axes: by length over all distances, by distance over all lengths."""
    rows = []
    for place, part in parts(table, CASE):
        ends = [f"{number(value)} (T = {length})" for length, value in _ends(part, "length")]
        ends += [f"{number(value)} ({number(level)})" for level, value in _ends(part, "asked_discrepancy")]
        rows.append([_case(place), *ends])
    return markdown_table(["case", "shortest T", "longest T", "least KL", "largest KL"], rows, numbers=True)


def _ends(part: pd.DataFrame, name: str) -> list[tuple[Any, float]]:
    """The smallest and the largest value of a column, each with the median ratio over its rows."""
    values = distinct(part, name)
    return [(v, float(np.median(numbers(where(part, part[name] == v), "ratio")))) for v in (values[0], values[-1])]


def _maps(table: pd.DataFrame) -> Iterator[str]:
    for place, part in parts(table, CASE):
        levels = _levels(part)
        rows = []
        for key, line in parts(part.sort_values("length"), ["length"]):
            by_level = {row["asked_discrepancy"]: row for row in records(line)}
            rows.append([str(key["length"]), *(_ratio(by_level[level]) for level in levels)])
        yield f"### {_case(place)}"
        yield markdown_table(["T", *(number(level) for level in levels)], rows, numbers=True)


def _ratio(row: Mapping[str, Any]) -> str:
    middle = number(float(row["ratio"]))
    # Bold where the interval excludes 1, so that it is clear which objective has less bias.
    strong = f"**{middle}**" if row["high"] < 1 or row["low"] > 1 else middle
    ends = f" [{number(float(row['low']))}, {number(float(row['high']))}]"
    return f"{strong}{ends if has_interval(row['low'], row['high']) else ''}"


def _turns(table: pd.DataFrame) -> str:
    found = turns(table)
    levels = _levels(found)
    rows = []
    for place, part in parts(found, CASE):
        by_level = {row["asked_discrepancy"]: row for row in records(part)}
        rows.append([_case(place), *(_turn(by_level[level]) if level in by_level else "" for level in levels)])
    return markdown_table(["case", *(f"KL {number(level)}" for level in levels)], rows, numbers=True)


def _turn(row: Mapping[str, Any]) -> str:
    if math.isnan(row["length"]):
        return "–"
    return f"T = {int(row['length'])} ({number(float(row['kl_sequence']))})"


def _biases(frame: pd.DataFrame) -> Iterator[str]:
    found = at_longest(medians(frame))
    sizes = sample_sizes(frame)
    for place, part in parts(found, CASE):
        levels = _levels(part)
        rows = []
        for key, line in parts(part, ["objective"]):
            by_level = {row["asked_discrepancy"]: row for row in records(line)}
            centre = records(at_middle(line))[0]
            errors = [cell(centre, error_column(n)) for n in sizes]
            rows.append([key["objective"], *(cell(by_level[level], "bias") for level in levels), *errors])
        yield f"### {_case(place)}; T = {records(part)[0]['length']}"
        heads = ["objective", *(number(level) for level in levels), *(f"at {n:,}" for n in sizes)]
        yield markdown_table(heads, rows, numbers=True)


def _levels(part: pd.DataFrame) -> list[float]:
    return distinct(part, "asked_discrepancy")


def _case(place: dict[str, str]) -> str:
    mode = f", {place['mode']}" if place["mode"] != "none" else ""
    group = group_words(place["group"], place["baseline"])
    return f"{place['policy']}, {place['engine']}{mode}; reward {place['reward']}; {group}"
