"""The findings of an audit in sentences, with every number computed from its rows."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from lab.audit.config import AuditConfig
from lab.audit.table import (
    CASE,
    FEWEST,
    at_longest,
    at_middle,
    distinct,
    error_column,
    has_interval,
    medians,
    numbers,
    parts,
    ratios,
    records,
    sample_sizes,
    tidy,
    where,
)
from lab.report.style import listed, number

NEAR = 1.02
"""Medians that differ by no larger factor count as equal, as in the league table (docs/league.md)."""


def group_words(group: str, baseline: str) -> str:
    """The group in words."""
    if group != "infinite":
        return f"groups of {group}"
    return f"baseline {baseline}" if baseline != "none" else "no baseline"


def sentences(config: AuditConfig, frame: pd.DataFrame) -> list[str]:
    """The summary: the least biased objectives, the least errors, the source of bias; the comparison; and the scope."""
    found = at_middle(at_longest(medians(frame)))
    ranked = _comparable(found)
    said = [_ranking(ranked, found), *(one for one in (_errors(frame, ranked), _split(found)) if one)]
    if config.compare is not None:
        said += _comparison(frame, config.compare.first, config.compare.second)
    return [*said, _scope(frame)]


def headline(frame: pd.DataFrame) -> str:
    """The objectives with the expected gradients nearest to and furthest from the true one.

    In direction alone where a group is finite: most objectives then take a step of another length on purpose.
    """
    found = _comparable(at_middle(at_longest(medians(frame))))
    is_finite = bool((found["group"] != "infinite").any())
    each = _by_objective(found, "direction_bias" if is_finite else "bias")
    if len(each) < 2:
        return f"How far {', '.join(distinct(found, 'objective'))} is from the true gradient"
    (least, _), (most, _) = _ends(each)
    truth = f"to the true gradient{' in direction' if is_finite else ''}"
    if len(least) == len(each):
        return f"The {len(each)} objectives are equally near {truth} (within {NEAR - 1:.0%})."
    are = "is" if len(least) == 1 else "are"
    return f"Of {len(each)} objectives, {_named(least)} {are} nearest {truth} and {_named(most)} furthest from it."


def _comparable(found: pd.DataFrame) -> pd.DataFrame:
    """The rows of cases that have all objectives, which alone tell them apart.

    Where no case has all of them, those of the objectives of the case that has the most.
    """
    wanted = max((distinct(part, "objective") for _, part in parts(found, CASE)), key=len)
    shared = [where(part, part["objective"].isin(wanted)) for _, part in parts(found, CASE)]
    return pd.concat([part for part in shared if len(set(part["objective"])) == len(wanted)])


def _scope(frame: pd.DataFrame) -> str:
    found = parts(frame, ["policy"])
    kinds = "; ".join(f"{key['policy']} up to T = {int(numbers(part, 'length').max())}" for key, part in found)
    sampled = int(np.count_nonzero(frame["num_draws"].notna()))
    exact = "every expectation is an exact sum" if not sampled else f"{sampled:,} of them with sampled groups"
    return (
        f"{len(distinct(frame, 'objective'))} objectives on random policies ({kinds}), {len(frame):,} rows, {exact}: "
        "no gradient is estimated."
    )


def _ranking(found: pd.DataFrame, everything: pd.DataFrame) -> str:
    """The least and the most biased objective at the middle distances, and the objectives that are not ranked."""
    said = []
    for name, words in (("bias", "bias"), ("direction_bias", "bias that no rescaling removes")):
        each = _by_objective(found, name)
        if not each:  # gradients of 0 have no direction
            continue
        (least, low), (most, high) = _ends(each)
        if len(least) == len(each):
            said.append(f"the {words} is {low if low == high else f'{low} to {high}'} with {_named(least)}")
        else:
            said.append(f"the {words} is least with {_named(least)} ({low}) and most with {_named(most)} ({high})")
    words = "; ".join(said)
    left = [one for one in distinct(everything, "objective") if one not in set(found["objective"])]
    others = f", without {listed(left)}, which have other cases" if left else ""
    return f"{words[0].upper()}{words[1:]}; relative to the length of the true gradient; {_place(found)}{others}."


def _place(found: pd.DataFrame) -> str:
    """The cases whose median is taken, as in "medians over 2 cases, at T = 5, KL(mu || old) = 1e-4 to 3e-4"."""
    cases = [part for _, part in parts(found, CASE)]
    said = [f"T = {', '.join(str(int(length)) for length in distinct(found, 'length'))}"]
    for words, name in (("KL(mu || old)", "kl_mu_old"), ("KL(old || pi)", "kl_old_pi")):
        gaps = sorted(float(np.median(numbers(part, name))) for part in cases)
        ends = dict.fromkeys(number(tidy(gap)) for gap in (gaps[0], gaps[-1]))
        if gaps[-1] > 1e-12:
            said.append(f"{words} = {' to '.join(ends)}")
    return f"medians over {len(cases)} case{'s' * (len(cases) > 1)}, at {', '.join(said)}"


def _errors(frame: pd.DataFrame, found: pd.DataFrame) -> str:
    best = []
    for n in sample_sizes(frame):
        each = _by_objective(found, error_column(n))
        (least, low), _ = _ends(each)
        best.append(f"{_named(least)} at {n:,} responses ({low})")
    return f"Lowest error, bias and variance together: {', '.join(best)}."


def _ends(each: dict[str, float]) -> tuple[tuple[list[str], str], tuple[list[str], str]]:
    """The objectives of the least and of the largest number, each end with that number as printed.

    Within NEAR of an end they stand at it, too: no few random policies rank them.
    """
    values = {name: tidy(value) for name, value in each.items()}
    low, high = min(values.values()), max(values.values())
    least = [name for name, value in values.items() if value <= low * NEAR]
    far = [name for name, value in values.items() if value * NEAR >= high]
    most = far if high <= low * NEAR else [name for name in far if name not in least]
    return (least, number(low)), (most, number(high))


def _named(objectives: list[str]) -> str:
    """The names, or how many they are."""
    return listed(objectives) if len(objectives) <= 3 else f"{len(objectives)} objectives"


def _by_objective(found: pd.DataFrame, name: str) -> dict[str, float]:
    """Each objective's median over cases; without objectives whose values are all nan."""
    each = {key["objective"]: numbers(part, name) for key, part in parts(found, ["objective"])}
    return {key: float(np.nanmedian(values)) for key, values in each.items() if not np.isnan(values).all()}


def _split(found: pd.DataFrame) -> str:
    gaps = np.minimum(numbers(found, "kl_mu_old"), numbers(found, "kl_old_pi"))
    # Under replay old and pi differ by their routes even if no weight has moved; that is not staleness.
    both = where(found, (gaps > 1e-12) & (numbers(found, "asked_staleness") > 0))
    if both.empty:
        return ""
    share = float((numbers(both, "bias_discrepancy") > numbers(both, "bias_staleness")).mean())
    return f"With both gaps, the discrepancy alone causes more bias than the staleness alone in {share:.0%} of cases."


def _comparison(frame: pd.DataFrame, first: str, second: str) -> list[str]:
    table = ratios(frame, first, second)
    said = []
    for key, part in parts(table, ["group", "baseline"]):
        middle = f"The median ratio is {number(float(np.median(numbers(part, 'ratio'))))}"
        known = where(part, has_interval(numbers(part, "low"), numbers(part, "high")))
        if known.empty:
            said.append(
                f"With {group_words(**key)}: {middle[0].lower()}{middle[1:]} of the bias of {first} to that of "
                f"{second}; fewer than {FEWEST} policies have no interval."
            )
            continue
        less, more = (float(share.mean()) for share in (numbers(known, "high") < 1, numbers(known, "low") > 1))
        said.append(
            f"With {group_words(**key)}, {first} has less bias than {second} in {less:.0%} of the "
            f"cells (length, distance, reward, policies){' with an interval' if len(known) < len(part) else ''} and "
            f"more in {more:.0%}; the other intervals contain 1. "
            f"{middle}."
        )
    return said


def turns(table: pd.DataFrame) -> pd.DataFrame:
    """For each case and distance, the shortest length from which the median ratio stays at 1 or more; nan for none.

    `kl_sequence` is KL(mu || pi) of whole responses there.
    """
    rows = []
    for place, part in parts(table, [*CASE, "asked_discrepancy", "asked_staleness"]):
        length, kl = math.nan, math.nan
        for row in records(part.sort_values("length", ascending=False)):
            if row["ratio"] < 1:  # from the longest down: the first ratio below 1 ends the run
                break
            length, kl = row["length"], row["kl_sequence"]
        rows.append(place | {"length": length, "kl_sequence": kl})
    return pd.DataFrame(rows)
