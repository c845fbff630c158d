"""The ledger's page as one self-contained HTML file in the report's style: verdicts, phase diagrams, all claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.report.figures import Figure
from lab.report.page import Drawn, page
from sandbox.ledger import exact, outcomes
from sandbox.ledger.cells import Regime
from sandbox.ledger.claim import FRESH, Claim, Measure, Row
from sandbox.ledger.figures import maps, over_updates, phase_diagram, title_of, unbroken
from sandbox.ledger.page import (
    REACH_TITLES,
    VERDICT_TITLES,
    WARNING,
    WARNING_TITLES,
    exact_text,
    explored,
    reach_row,
    title,
    warning_rows,
)
from sandbox.ledger.power import needs
from sandbox.ledger.summary import (
    OPEN,
    OUT_OF_REACH,
    TRIED_AGAIN,
    UNDECIDED_TITLES,
    ClaimLine,
    counts_text,
    criterion_text,
    effect_text,
    lines,
    low_power_text,
    means_text,
    reach_text,
    spent,
    state_words,
    test_text,
    undecided,
    undecided_row,
    waiting_text,
    word_text,
)
from sandbox.ledger.verdicts import Finding


def render(
    claims: Sequence[Claim],
    regimes: Sequence[Regime],
    found: Sequence[Finding],
    rows: Mapping[str, Row],
    seeds: int | None = None,
) -> str:
    """The HTML of the page."""
    needed = needs(claims, regimes, rows)
    made = lines(claims, found, needed)
    open_ones = undecided(made, found, needed)
    shown = [line for line in made if line.state != OUT_OF_REACH]
    state = {line.claim.number: line.state for line in made}
    drawn: list[Drawn] = []
    seen: dict[str, Figure] = {}
    most = range(max((len(claim.seen(name, seeds)) for claim in claims for name in claim.regimes), default=0))
    mapped = mapped_regimes(claims, regimes)
    asked = [phase_diagram(name, arms, mapped, most, rows) for name, arms in maps(claims).items()]
    diagrams = [figure for figure in asked if figure is not None]
    for place, regime in enumerate(regimes):
        tried = [claim for claim in claims if regime.name in claim.places]
        placed = [(figure, str(place)) for claim in tried for figure in over_updates(claim, regime, rows, seeds)]
        seen |= {figure.id: figure for figure, _ in placed}
        drawn += placed
    bordering = [
        {"regime": regime, "figures": outcomes.diagrams(claims, regime, rows),
         "others": outcomes.others(claims, regime, rows)}
        for regime in outcomes.own_regimes(claims, regimes)
    ]  # fmt: skip
    drawn += [*diagrams, *(figure for one in bordering for figure in one["figures"])]
    sections = [
        {
            "number": claim.number, "sentence": claim.sentence, "source": claim.source,
            "text": state_words(state[claim.number]), "word": _style(state[claim.number]),
            "rows": _predictions(regimes, [one for one in found if one.claim == claim]),
            "remarks": [
                *(f"In {regime}: {words}" for regime, words in claim.remarks.items()),
                *exact.lines(claim.exact, exact.answers()),
            ],
            "arms": [arm.name for arm in claim.arms],
            "figures": [figure for id_, figure in seen.items() if id_.startswith(f"claim-{claim.number}-")],
        }
        for claim in claims
    ]  # fmt: skip
    return page(
        "ledger.html.jinja", drawn, own=Path(__file__).parent / "template",
        title="What the papers found, tried again", sentence=_sentence(made),
        waiting=waiting_text(found), spent=spent(rows), regimes=regimes, tiles=_tiles(made), titles=VERDICT_TITLES,
        reached=reach_text(made, [need for _, need in open_ones]), low=low_power_text(made, needed),
        # Side by side, so that all verdicts fit on a screen.
        halves=[[_cells(line) for line in half] for half in _halves(shown)], table=[_cells(line) for line in shown],
        why_titles=UNDECIDED_TITLES,
        why=[(claim.number, title(claim), *undecided_row(need)) for claim, need in open_ones],
        reach_titles=REACH_TITLES, explored=_explored(claims, regimes, found),
        reach=[reach_row(needed[line.claim.number]) for line in made if line.state == OUT_OF_REACH],
        claims=sections, maps=diagrams, unbroken=unbroken(diagrams), bordering=bordering,
        first=_fullest(regimes, found), fresh=FRESH,
        warning=WARNING, warning_titles=WARNING_TITLES, warning_rows=warning_rows(rows), title_of=title_of,
    )  # fmt: skip


def mapped_regimes(claims: Sequence[Claim], regimes: Sequence[Regime]) -> list[Regime]:
    """The regimes of the claims that run arms for the diagrams over regimes: the steps of the engine gap."""
    drawing = [claim for claim in claims if any(arm.on_map and not arm.on_map.regime for arm in claim.also)]
    names = {name for claim in drawing for name in claim.regimes}
    return [regime for regime in regimes if regime.name in names]


def _halves(shown: Sequence[ClaimLine]) -> list[Sequence[ClaimLine]]:
    """The lines in two parts of equal length, or with one more in the first; only those that have any."""
    middle = (len(shown) + 1) // 2
    return [half for half in (shown[:middle], shown[middle:]) if half]


def _fullest(regimes: Sequence[Regime], found: Sequence[Finding]) -> int:
    """The index of the regime with the most complete claims, which the page shows first."""
    counts = Counter(one.regime for one in found if one.joint is not None)
    return max(range(len(regimes)), key=lambda i: counts[regimes[i].name])


def _sentence(made: Sequence[ClaimLine]) -> str:
    return (
        f"{len(made)} claims, {counts_text(made)}: each within reach is tested in one regime on fresh "
        "seeds, by predictions that were written before these runs."
    )


def _tiles(made: Sequence[ClaimLine]) -> list[dict[str, Any]]:
    """The claims by state, in the table's order, drawn as one tile per claim."""
    states = dict.fromkeys(line.state for line in made)
    return [
        {"text": state_words(state), "word": _style(state),
         "claims": [line.claim for line in made if line.state == state]}
        for state in states
    ]  # fmt: skip


def _style(state: str) -> str:
    """The name of a state's colour."""
    return {OPEN: "none", TRIED_AGAIN: "inconclusive"}.get(state, state)


def _cells(line: ClaimLine) -> dict[str, Any]:
    return {
        "number": line.claim.number, "title": title(line.claim), "sentence": line.claim.sentence,
        "home": line.claim.home, "word": _style(line.state) if line.n and line.effect else "none", "text": line.state,
        "n": line.n, "effect": line.effect,
        "numbers": (line.predictions, line.p, line.n, line.effect, line.power, line.cost, exact_text(line.claim)),
    }  # fmt: skip


def _explored(claims: Sequence[Claim], regimes: Sequence[Regime], found: Sequence[Finding]) -> list[dict[str, Any]]:
    """A row for each claim that was tried on exploratory seeds, with one word per regime."""
    rows = []
    for claim in claims:
        texts = [explored(claim, regime.name, found) for regime in regimes]
        if any(texts):
            words = [{"text": text, "word": text.partition(" (")[0]} for text in texts]
            rows.append({"number": claim.number, "title": title(claim), "words": words})
    return rows


def _predictions(regimes: Sequence[Regime], found: Sequence[Finding]) -> list[dict[str, Any]]:
    places = {regime.name: str(i) for i, regime in enumerate(regimes)}
    rows = []
    for one in found:
        for outcome in one.outcomes:
            prediction = outcome.prediction
            treatment, control = prediction.side_names
            rows.append({
                "slice": places[one.regime], "words": prediction.words, "measure": prediction.measure.name,
                "measure_words": _with_unit(prediction.measure),
                "treatment": treatment, "control": control, "decides": one.decides,
                "means": f"{means_text(outcome, 0)}, {means_text(outcome, 1)}", "effect": effect_text(outcome),
                "test": test_text(outcome), "criterion": criterion_text(prediction),
                "word": outcome.stand or "none", "text": word_text(outcome),
            })  # fmt: skip
    return rows


def _with_unit(measure: Measure) -> str:
    return measure.words + ("" if measure.unit == "1" else f" [{measure.unit}]")


__all__ = ["mapped_regimes", "render"]
