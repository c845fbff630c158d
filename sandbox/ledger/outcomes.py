"""The outcomes of a regime in which runs collapse: its phase diagrams, and a table of its claims' other arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from lab.report.figures import Caption, Figure
from sandbox.ledger.cells import Regime, finished, key
from sandbox.ledger.claim import Arm, Claim, Row
from sandbox.ledger.course import area, collapsed
from sandbox.ledger.figures import Map, maps
from theory.routing.passes import MODES

NOTE = "Orange: every run collapsed; blue: none."
EMPTY = "Empty: equal to another by construction, or not run."
FORMULA = (
    "mean held-out accuracy of pi over the run, sampled by an exact engine, over seeds; below it the runs that "
    "collapsed, if any did"
)


def own_regimes(claims: Sequence[Claim], regimes: Sequence[Regime]) -> list[Regime]:
    """The regimes that have phase diagrams of their own."""
    names = {arm.on_map.regime for claim in claims for arm in claim.also if arm.on_map is not None}
    return [regime for regime in regimes if regime.name in names]


def diagrams(claims: Sequence[Claim], regime: Regime, rows: Mapping[str, Row]) -> list[Figure]:
    """Accuracy and collapses over row and N: the regime's own diagrams, then those of its other objectives.

    Of the diagrams over regimes, only those that have an arm that no former diagram shows.
    """
    seeds = _seeds(claims, regime)
    found, seen = [], set[str]()
    for title, arms in (maps(claims, regime.name) | maps(claims)).items():
        keys = {key(regime, one, 0) for one in arms.values() if finished(regime, one, seeds, rows)}
        if len(keys) > 1 and not keys <= seen:
            found.append(_diagram(title, arms, regime, seeds, rows, _readers(claims, regime, arms)))
            seen |= keys
    return found


def others(claims: Sequence[Claim], regime: Regime, rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    """A line for each arm of the claims' predictions that no diagram shows: its claims, runs, collapses, accuracy."""
    seeds = _seeds(claims, regime)
    shown = {key(regime, one, 0) for arms in (maps(claims, regime.name) | maps(claims)).values()
             for one in arms.values()}  # fmt: skip
    # By key, not by name: two claims may name the same runs differently.
    found: dict[str, Arm] = {}
    for claim in (one for one in claims if one.home == regime.name):
        for prediction in claim.predictions:
            found |= {key(regime, one, 0): one for one in prediction.arms}
    lines = []
    for name, one in found.items():
        runs = [row for row in finished(regime, one, seeds, rows) if collapsed(row) in (0.0, 1.0)]
        if name not in shown and runs:
            lines.append({
                "name": one.name, "claims": _readers(claims, regime, {("", 0): one}), "n": len(runs),
                "collapsed": round(sum(map(collapsed, runs))), "accuracy": f"{fmean(map(area, runs)):.3f}",
            })  # fmt: skip
    return lines


def _seeds(claims: Sequence[Claim], regime: Regime) -> list[int]:
    """Every seed that some claim has there: arms are shared."""
    return sorted({seed for claim in claims if regime.name in claim.places for seed in claim.seeds(regime.name)})


def _readers(claims: Sequence[Claim], regime: Regime, arms: Map) -> list[int]:
    """The numbers of the claims at home there whose predictions compare one of these arms."""
    own = {key(regime, one, 0) for one in arms.values()}
    return [
        claim.number
        for claim in claims
        if claim.home == regime.name
        and any(key(regime, one, 0) in own for prediction in claim.predictions for one in prediction.arms)
    ]


def _diagram(
    title: str, arms: Map, regime: Regime, seeds: Sequence[int], rows: Mapping[str, Row], readers: Sequence[int]
) -> Figure:
    places = {one.on_map.row: one.on_map.place for one in arms.values() if one.on_map is not None}
    names = sorted(places, key=lambda row: (places[row], MODES.index(row) if row in MODES else 0))
    degrees = sorted({n for _, n in arms})
    lines = {row: [_cell(arms.get((row, n)), regime, seeds, rows) for n in degrees] for row in names}
    # A replay mode of which nothing has run here has no line.
    lines = {row: cells for row, cells in lines.items() if any(cell.text for cell in cells)}
    is_full = all(cell.text for cells in lines.values() for cell in cells)
    cells = {
        "type": "heatmap", "x": [f"N = {n}" for n in degrees], "y": [*lines], "zmin": 0.0, "zmax": 1.0,
        "z": [[cell.held for cell in cells] for cells in lines.values()],
        "text": [[cell.text for cell in cells] for cells in lines.values()], "texttemplate": "%{text}",
        "customdata": [[cell.words for cell in cells] for cells in lines.values()], "hoverongaps": False,
        "hovertemplate": "%{y}, %{x}: %{customdata}<extra></extra>",
        "showscale": False, "meta": {"run": 0, "role": "share"}, "xgap": 2, "ygap": 2,
    }  # fmt: skip
    layout = {"xaxis": {"type": "category"}, "yaxis": {"type": "category", "autorange": "reversed", "automargin": True}}
    note = " ".join(filter(None, (NOTE, "" if is_full else EMPTY, _claims_text(readers))))
    words = title.lower().replace(",", "").replace(" ", "-")
    return Figure(f"{regime.name}-{words}", title, Caption(FORMULA, "1", "here"), [cells], layout, note)


def _claims_text(readers: Sequence[int]) -> str:
    if not readers:
        return ""
    return f"Compared by claim{'s' * (len(readers) > 1)} {', '.join(map(str, readers))}."


class _Cell(NamedTuple):
    """The share of runs that did not collapse, the text of the cell, and that of its hover box; without runs empty."""

    held: float | None = None
    text: str = ""
    words: str = ""


def _cell(one: Arm | None, regime: Regime, seeds: Sequence[int], rows: Mapping[str, Row]) -> _Cell:
    found = [] if one is None else finished(regime, one, seeds, rows)
    known = [row for row in found if collapsed(row) in (0.0, 1.0)]
    if not known:
        return _Cell()
    fell, mean = round(sum(map(collapsed, known))), fmean(map(area, known))
    short = f"{mean:.2f}" + (f"<br>{fell}/{len(known)}" if fell else "")
    return _Cell(1.0 - fell / len(known), short, f"accuracy {mean:.3f}, {fell} of {len(known)} runs collapsed")


__all__ = ["diagrams", "others", "own_regimes"]
