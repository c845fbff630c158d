"""The runs of the border study as tables: one line per run, and one per place of the map."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from sandbox.claims import CLAIMS
from sandbox.claims.border_arms import (
    DEGREES,
    GAPS,
    NORMS,
    REMEDIES,
    ROUTER_GAPS,
    at,
    slower,
    with_dual_clip,
    with_free_norm,
)
from sandbox.ledger.cells import MAX_GRAD_NORM, NUM_WINDOWS, Regime, key
from sandbox.ledger.claim import Arm, Row
from sandbox.ledger.course import area, collapse_step, collapsed, final, initial, peak
from sandbox.ledger.measures import FINAL_ENTROPY, FINAL_KL

PLACE = ["preset", "gap", "N", "remedy"]
"""The columns that identify a place of the map."""

FIRST = {"kl": "rollout_corr/k3_kl", "f2": "rollout_corr/extreme_frac_tau2", "chi2": "rollout_corr/chi2_token",
         "routers": "routing/router_disagreement", "length": "response_length/mean"}  # fmt: skip
"""Columns with metrics of the first global step: the engine gap of the initial model."""

RATE = "algorithm.optimizer.learning_rate"

COLUMNS = [*PLACE, *FIRST, "cell", "seed", "rate", "area", "initial", "peak", "final", "collapsed", "collapse",
           "kl_final", "entropy_final", "clipped"]  # fmt: skip

NUM_EARLY = NUM_WINDOWS // 10
"""Number of windows in the first tenth of a run."""


def runs(rows: Mapping[str, Row], regime: Regime) -> pd.DataFrame:
    """One line per run at the regime's learning rate, with COLUMNS: its place, gap, course and clipping.

    `collapse` is the update (not the global step) from which a collapsed run stays low, nan for the others. `clipped`
    is the share of early windows whose mean gradient norm is above the threshold. A run belongs to the place whose
    config it has, whichever claim's arm it was made for. Rows whose arm has changed its config since are left out, and
    so are runs that were never evaluated or never right, whose collapse is not known.
    """
    return _runs(rows, regime, _place_of_arm(regime), lambda arm: arm)


def slower_runs(rows: Mapping[str, Row], regime: Regime) -> pd.DataFrame:
    """The lines of `runs` for the map's arms at half the learning rate (claim 45)."""
    return _runs(rows, regime, {slower(arm).name: place for place, arm in _places()}, slower)


def unclipped_runs(rows: Mapping[str, Row], regime: Regime) -> pd.DataFrame:
    """The lines of `runs` for the map's arms without gradient clipping (claim 58)."""
    return _runs(rows, regime, {with_free_norm(arm).name: place for place, arm in _places()}, with_free_norm)


def dual_clipped_runs(rows: Mapping[str, Row], regime: Regime, *, has_free_norm: bool) -> pd.DataFrame:
    """The lines of `runs` for GRPO's arms with a second clip, without gradient clipping (claim 62) or with it (63)."""

    def changed(arm: Arm) -> Arm:
        return with_dual_clip(with_free_norm(arm) if has_free_norm else arm)

    names = {changed(arm).name: place for place, arm in _places() if place[0] == "grpo"}
    return _runs(rows, regime, names, changed)


def _runs(
    rows: Mapping[str, Row],
    regime: Regime,
    names: Mapping[str, tuple[str, str, int, str]],
    changed: Callable[[Arm], Arm],
) -> pd.DataFrame:
    found = []
    for name, row in rows.items():
        place = names.get(row["arm"]) if row["regime"] == regime.name else None
        if place is None:
            continue
        arm = changed(at(place[1], place[3], place[2], place[0]))
        if key(regime, arm, row["seed"]) != name or math.isnan(collapsed(row)):
            continue
        start = collapse_step(row)
        found.append(
            dict(zip(PLACE, place, strict=True))
            | {column: row["first"].get(metric) for column, metric in FIRST.items()}
            | {
                "cell": name, "seed": row["seed"], "rate": rate_of(regime, arm), "area": area(row),
                "initial": initial(row), "peak": peak(row), "final": final(row), "collapsed": collapsed(row),
                "collapse": math.nan if start is None else start * place[2],
                "kl_final": FINAL_KL.of(row), "entropy_final": FINAL_ENTROPY.of(row),
                "clipped": _clipped(row, float(NORMS[place[0]])),
            }
        )  # fmt: skip
    return pd.DataFrame(found, columns=COLUMNS)


def rate_of(regime: Regime, arm: Arm | None = None) -> float:
    """The learning rate of an arm, or of the regime's file."""
    own = None if arm is None else dict(arm.changes).get(RATE)
    return float(own or json.loads(regime.stated)["algorithm"]["optimizer"]["learning_rate"])


def _clipped(row: Row, threshold: float) -> float:
    """The share of the windows of the first tenth whose mean gradient norm is above the threshold; nan without one."""
    norms = [value for value in row["series"].get("actor/grad_norm", [])[:NUM_EARLY] if value is not None]
    return sum(norm > threshold for norm in norms) / len(norms) if norms else math.nan


def where(table: pd.DataFrame, **values: object) -> pd.DataFrame:
    """The lines whose columns have these values."""
    is_wanted = np.ones(len(table), dtype=bool)
    for column, value in values.items():
        is_wanted &= (table[column] == value).to_numpy(dtype=bool)
    found = table.loc[is_wanted]
    assert isinstance(found, pd.DataFrame)
    return found


@functools.cache
def _place_of_arm(regime: Regime) -> dict[str, tuple[str, str, int, str]]:
    """Name to place, of the map's own arms and of the claims' that change a regime's config in the same way."""
    by_changes = {_changes(regime, arm): place for place, arm in _places()}
    of_claims = [arm for claim in CLAIMS if regime.name in claim.places for arm, _ in claim.runs(regime.name)]
    same = {arm.name: by_changes.get(_changes(regime, arm)) for arm in of_claims}
    return {name: place for name, place in same.items() if place} | {arm.name: place for place, arm in _places()}


def _changes(regime: Regime, arm: Arm) -> tuple[frozenset[tuple[str, str]], int]:
    """Everything in which an arm's config differs from the regime's, the regime's own gradient clipping included."""
    changes = dict(arm.changes)
    # The regime's clipping first: an arm that states its own keeps it, as in `cells._unseeded`.
    norm = dict(regime.norms).get(changes.get("algorithm.objective.preset", ""))
    return frozenset((({} if norm is None else {MAX_GRAD_NORM: norm}) | changes).items()), arm.num_minibatches


def _places() -> list[tuple[tuple[str, str, int, str], Arm]]:
    product = itertools.product(NORMS, GAPS, DEGREES, REMEDIES)
    return [((preset, gap, n, remedy), at(gap, remedy, n, preset)) for preset, gap, n, remedy in product]


def places(found: pd.DataFrame) -> pd.DataFrame:
    """One line per place: runs n, mean area with its 95% Student interval, share of collapsed runs, final values.

    `kl_final`, `entropy_final` and `collapse` are medians, the others means.
    """
    grouped = found.groupby(PLACE, sort=False)
    table = grouped.agg(
        n=("seed", "size"), area=("area", "mean"), sd=("area", "std"), collapsed=("collapsed", "mean"),
        final=("final", "mean"), kl=("kl", "mean"), kl_final=("kl_final", "median"), collapse=("collapse", "median"),
        entropy_final=("entropy_final", "median"), clipped=("clipped", "mean"),
    )  # fmt: skip
    # A single run has no spread: its interval is nan, as its standard deviation is.
    half = stats.t.ppf(0.975, np.maximum(table["n"] - 1, 1)) * table["sd"] / np.sqrt(table["n"])
    return table.assign(low=table["area"] - half, high=table["area"] + half).reset_index()


def by_staleness(found: pd.DataFrame, gap: str, measure: str) -> dict[str, dict[int, float]]:
    """A column of `places` at one gap, by remedy and N (ascending): the lines of a figure."""
    lines: dict[str, dict[int, float]] = {}
    for place in places(where(found, gap=gap)).sort_values("N").to_dict("records"):
        lines.setdefault(place["remedy"], {})[int(place["N"])] = float(place[measure])
    return lines


def on_map(table: pd.DataFrame) -> pd.DataFrame:
    """The runs whose engine is one of the map's: FP8 and router noise up to 0.5, or exact; not the controls."""
    found = table.loc[table["gap"].isin(ROUTER_GAPS)]
    assert isinstance(found, pd.DataFrame)
    return found


STORY = {
    ("grpo", "exact", "none"): False, ("grpo", "r0.5", "none"): True, ("grpo", "r0.5", "R2"): True,
    ("grpo", "r0.5", "tis"): False, ("grpo", "r0.5", "R3"): False, ("minirl", "r0.5", "none"): False,
}  # fmt: skip
"""The story of `make demo` at N = 8: preset, gap and remedy of its runs, and whether the run collapses."""


def story(found: pd.DataFrame) -> pd.DataFrame:
    """One line per seed with all six runs of the demo: whether each agrees with the story, and `all` of them."""
    lines = []
    for seed, own in where(found, N=8).groupby("seed"):
        collapsed = own.set_index(["preset", "gap", "remedy"])["collapsed"].to_dict()
        if STORY.keys() <= collapsed.keys():
            came = {" ".join(place): bool(collapsed[place]) == expected for place, expected in STORY.items()}
            lines.append({"seed": seed} | came | {"all": all(came.values())})
    return pd.DataFrame(lines, columns=["seed", *(" ".join(place) for place in STORY), "all"])


def same_as(gap: str, n: int, remedy: str) -> str:
    """The remedy whose runs are used for this one: they are equal by construction and run only once.

    With one mini-batch R2 and Pr2 replay pi's own routes, and Pr3 is R3; an exact engine has weights of 1 and the
    trainer's routes, so that R3 is R2 under it.
    """
    if gap == "exact":
        remedy = {"tis": "none", "R3": "R2", "tis-R3": "R2"}.get(remedy, remedy)
    if n == 1:
        remedy = {"R2": "none", "Pr2": "none", "Pr3": "R3"}.get(remedy, remedy)
        remedy = "none" if gap == "exact" else remedy
    return remedy


def ended(place: Mapping[str, Any]) -> str:
    """The collapsed runs of a line of `places`: `n of m`."""
    return f"{round(place['collapsed'] * place['n'])} of {place['n']}"


def summary(table: pd.DataFrame, **place: object) -> dict[str, Any] | None:
    """The line of `places` with these values; None where it has no runs."""
    found = places(where(table, **place)).to_dict("records")
    return {str(name): value for name, value in found[0].items()} if found else None


__all__ = [
    "COLUMNS", "FIRST", "PLACE", "STORY", "by_staleness", "ended", "on_map", "places", "rate_of", "runs", "same_as",
    "slower_runs", "story", "summary", "where",
]  # fmt: skip
