"""The border and the length of responses: the runs on sums, whose digits set the length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from scipy import stats

from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.border.alarm import AlarmRule, shares
from sandbox.border.table import FIRST, where
from sandbox.claims.border_arms import REMEDY_WORDS, SUMS, sums
from sandbox.ledger.cells import Regime, key
from sandbox.ledger.claim import Row
from sandbox.ledger.course import area, collapsed

N = 8
LONG, SHORT = "r0.2", "r0.5"
"""The engines at which the two lengths are compared: six digits at the first, two at the second."""
LEVEL = 0.05
NUMBERS = ("KL x N", "KL x length x N")


def lengths(rows: Mapping[str, Row], regime: Regime) -> pd.DataFrame:
    """One line per run on sums: digits, gap, remedy, seed, FIRST, area and whether pi's accuracy collapsed.

    Rows whose arm has changed its config since are left out, and so are runs whose collapse is not known.
    """
    arms = {sums(*place).name: place for place in SUMS}
    found = []
    for name, row in rows.items():
        place = arms.get(row["arm"]) if row["regime"] == regime.name else None
        if place is None or key(regime, sums(*place), row["seed"]) != name or math.isnan(collapsed(row)):
            continue
        found.append(
            {"digits": place[0], "gap": place[1], "remedy": place[2], "seed": row["seed"]}
            | {column: row["first"].get(metric) for column, metric in FIRST.items()}
            | {"area": area(row), "collapsed": collapsed(row)}
        )
    return pd.DataFrame(found, columns=["digits", "gap", "remedy", "seed", *FIRST, "area", "collapsed"])


def places(found: pd.DataFrame) -> pd.DataFrame:
    """One line per place that has runs, in the order of SUMS: n, number of collapses, means, and both NUMBERS."""
    lines = []
    for digits, gap, remedy in SUMS:
        own = where(found, digits=digits, gap=gap, remedy=remedy)
        if len(own):
            means = {column: float(own[column].to_numpy(dtype=float).mean()) for column in ("kl", "length", "area")}
            kl_n, num_collapsed = means["kl"] * N, int(own["collapsed"].to_numpy(dtype=float).sum())
            lines.append(
                {"digits": digits, "gap": gap, "remedy": remedy, "n": len(own)} | means
                | {"collapsed": num_collapsed, "KL x N": kl_n, "KL x length x N": kl_n * means["length"]}
            )  # fmt: skip
    return pd.DataFrame(lines)


def orders(long: Mapping[str, Any], short: Mapping[str, Any], name: str) -> bool:
    """Whether a number is larger at the place where the larger share of runs collapsed."""
    shares = long["collapsed"] / long["n"], short["collapsed"] / short["n"]
    return bool((long[name] - short[name]) * (shares[0] - shares[1]) > 0)


def markdown(rows: Mapping[str, Row], regime: Regime) -> str:
    """The table of docs/border-tables.md on longer responses; empty without a run."""
    found = places(lengths(rows, regime))
    if found.empty:
        return ""
    lines = [
        (
            f"{one['length']:.0f}", one["gap"], REMEDY_WORDS[one["remedy"]], number(one["kl"]),
            f"{one['collapsed']} of {one['n']}", number(one["area"]), *(number(one[name]) for name in NUMBERS),
        )
        for one in found.to_dict("records")
    ]  # fmt: skip
    titles = ("tokens", "engine", "remedy", "KL before", "collapsed", "accuracy", *(f"`{name}`" for name in NUMBERS))
    return f"{TABLE}\n{markdown_table(titles, lines)}"


TABLE = """## Longer responses

GRPO at N = 8 on sums, whose digits set the length; [in words](border.md#longer-responses).
"""


WORDS = """## Longer responses

All responses of the map have one length, so it cannot distinguish `KL x N` from `KL x length x N`. The digits of sums
set the length: 2 digits take 22 tokens, 6 digits 61. The model and format are the same, with GRPO at N = 8 and a
quarter of the learning rate (at the map's own, runs on sums collapse even with an exact engine), from an accuracy of
0.3.
"""


def said(rows: Mapping[str, Row], regime: Regime) -> str:
    """The section of docs/border.md: which numbers order the two lengths as their collapses do; empty without both."""
    found = places(lengths(rows, regime))
    both = _both(found)
    if both is None:
        return ""
    long, short = both
    facts = [
        f"{one['length']:.0f} tokens and a KL of {number(one['kl'])}, {one['collapsed']} of {one['n']} runs collapse"
        for one in (long, short)
    ]
    order, other = ([f"`{n}`" for n in NUMBERS if orders(long, short, n) == asked] for asked in (True, False))
    subject = " and ".join(order) or f"neither {' nor '.join(other)}"
    facts_of_both = f"At {facts[0]}; at {facts[1]}."
    told = [f"{subject} {'order' if len(order) > 1 else 'orders'} the two lengths as their collapses do"]
    told += [f"{' and '.join(other)} does not"] if order and other else []
    if powers := _powers(found, short):
        told.append(f"`KL x length^p x N` does for a power p above {number(max(powers.values()))}{_of(found, powers)}")
    return f"{WORDS}\n{facts_of_both} So {'; '.join(told)} ([table](border-tables.md#longer-responses)).\n"


def _both(found: pd.DataFrame) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """The places of long and of short responses that the study compares, from `places`; None if either has no runs."""
    if found.empty:
        return None
    long, short = (where(found, digits=digits, gap=gap, remedy="none") for digits, gap in ((6, LONG), (2, SHORT)))
    return None if long.empty or short.empty else (long.to_dict("records")[0], short.to_dict("records")[0])


def _powers(found: pd.DataFrame, short: Mapping[str, Any]) -> dict[str, float]:
    """`least_power` of each engine at which longer responses collapse more often, though their KL is smaller.

    More often by Fisher's exact test, one-sided, at LEVEL: there KL x N cannot be the number.
    """
    powers = {}
    for long in where(found, digits=6, remedy="none").to_dict("records"):
        counts = [[one["collapsed"], one["n"] - one["collapsed"]] for one in (long, short)]
        test: Any = stats.fisher_exact(counts, alternative="greater")
        if long["kl"] < short["kl"] and test.pvalue < LEVEL:
            powers[long["gap"]] = least_power(long, short)
    return powers


def _of(found: pd.DataFrame, powers: Mapping[str, float]) -> str:
    """The runs that ask for the largest power, if they are not those that the sentence is about."""
    gap = max(powers, key=lambda one: powers[one])
    if gap == LONG:
        return ""
    (one,) = where(found, digits=6, gap=gap, remedy="none").to_dict("records")
    return f", by {one['collapsed']} of {one['n']} long runs at a KL of {number(one['kl'])}"


def least_power(long: Mapping[str, Any], short: Mapping[str, Any]) -> float:
    """The power p at which KL x length^p is the same for both places: log(KL ratio) / log(length ratio)."""
    return math.log(short["kl"] / long["kl"]) / math.log(long["length"] / short["length"])


def asked_power(rows: Mapping[str, Row], regime: Regime) -> float | None:
    """The largest power of the length that an engine's long responses ask for; None where none refutes `KL x N`."""
    found = places(lengths(rows, regime))
    both = _both(found)
    return max(_powers(found, both[1]).values(), default=None) if both else None


def alarm_elsewhere(chosen: Sequence[tuple[AlarmRule, float]], rows: Mapping[str, Row], regime: Regime) -> str:
    """The best of the alarms chosen on Countdown, tried on another task, sums; empty without runs."""
    # Of all seeds: no run on sums had a part in the choice.
    others = [row for row in rows.values() if row["regime"] == regime.name and is_on_sums(row)]
    if not chosen or not others:
        return ""
    rule = chosen[0][0]
    told, false = shares(rule, others)
    return (
        f"On the {len(others)} runs on sums, {rule.words} warns of {told} collapses in time, and goes "
        f"off in {false} others.\n"
    )


def is_on_sums(row: Row) -> bool:
    """Whether a run was on sums and not on the map's task."""
    return "-sums" in row["arm"]


def is_branch(row: Row) -> bool:
    """Whether a run continues from another run's state for 64 updates (claim 43): too short for an alarm."""
    return row["arm"].endswith("-branch")


__all__ = [
    "N", "NUMBERS", "alarm_elsewhere", "asked_power", "is_branch", "is_on_sums", "least_power", "lengths", "markdown",
    "orders", "places", "said",
]  # fmt: skip
