"""The ledger's page as one self-contained HTML file, in the report's style: verdicts, maps, then every claim."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from lab.report.figures import HEIGHT, MARGIN, Figure
from lab.report.page import TEMPLATES
from lab.report.style import PALETTE
from sandbox.ledger.cells import Regime
from sandbox.ledger.claim import Claim, Row
from sandbox.ledger.figures import FAMILIES, over_updates, phase_diagram
from sandbox.ledger.page import (
    WARNING,
    WARNING_TITLES,
    criterion_text,
    effect_text,
    means_text,
    spent,
    tally,
    warning_rows,
    word_text,
)
from sandbox.ledger.verdicts import Outcome, together

PIECES = (Path(__file__).parent / "template", TEMPLATES)


def render(
    claims: Sequence[Claim],
    regimes: Sequence[Regime],
    found: Sequence[Outcome],
    rows: Mapping[str, Row],
    seeds: int | None = None,
) -> str:
    """The page as text."""
    drawn: list[tuple[Figure, str | None]] = []
    most = range(
        max(len(claim.seeds(name, seeds)) for claim in claims for name in claim.regimes if claim.first_seed == 0)
    )
    mapped = mapped_regimes(claims, regimes)
    maps = [phase_diagram(family, mapped, most, rows) for family in FAMILIES]
    for place, regime in enumerate(regimes):
        tried = [claim for claim in claims if regime.name in claim.regimes]
        drawn += [(figure, str(place)) for claim in tried for figure in over_updates(claim, regime, rows, seeds)]
    seen = {figure.id: figure for figure, _ in drawn}
    drawn += [(figure, None) for figure in maps if figure is not None]
    sections = [
        {
            "number": claim.number, "sentence": claim.sentence, "source": claim.source,
            "rows": _predictions(regimes, [o for o in found if o.claim == claim]),
            "remarks": [f"In {regime}: {words}" for regime, words in claim.remarks.items()],
            "arms": [arm.name for arm in claim.arms],
            "figures": [figure for id_, figure in seen.items() if id_.startswith(f"claim-{claim.number}-")],
        }
        for claim in claims
    ]  # fmt: skip
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PIECES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("ledger.html.jinja").render(
        title="What the papers found, tried again", sentences=_sentences(claims, regimes, found, rows),
        regimes=regimes, table=_table(claims, regimes, found), claims=sections, palette=PALETTE, height=HEIGHT,
        maps=[figure for figure in maps if figure is not None], first=_fullest(regimes, found),
        warning=WARNING, warning_titles=WARNING_TITLES, warning_rows=warning_rows(rows),
        payload=_payload(drawn), plotly=Markup(get_plotlyjs()),
    )  # fmt: skip


def mapped_regimes(claims: Sequence[Claim], regimes: Sequence[Regime]) -> list[Regime]:
    """The regimes of the claims that run the phase diagrams' arms, which are the steps of the engine gap."""
    drawn = {build(preset, "Pr2", 8) for build, preset in FAMILIES.values()}
    names = {name for claim in claims if drawn & set(claim.also) for name in claim.regimes}
    return [regime for regime in regimes if regime.name in names]


def _fullest(regimes: Sequence[Regime], found: Sequence[Outcome]) -> int:
    """The place of the regime with the most decided predictions, which the page shows first."""
    counts = Counter(o.regime for o in found if o.word is not None)
    return max(range(len(regimes)), key=lambda i: (counts[regimes[i].name], -i))


def _sentences(
    claims: Sequence[Claim], regimes: Sequence[Regime], found: Sequence[Outcome], rows: Mapping[str, Row]
) -> list[str]:
    counts = Counter(o.word for o in found if o.word is not None)
    parts = ", ".join(f"{number} {word}" for word, number in counts.most_common())
    return [
        f"{len(claims)} claims in {len(regimes)} regimes: {len(found)} predictions, of which "
        f"{sum(counts.values())} have all their runs" + (f": {parts}." if parts else "."),
        f"{spent(rows)} No verdict is typed by hand; predictions were written before their runs.",
    ]


def _table(claims: Sequence[Claim], regimes: Sequence[Regime], found: Sequence[Outcome]) -> list[dict[str, Any]]:
    table = []
    for claim in claims:
        words = []
        for regime in regimes:
            own = [o for o in found if o.claim == claim and o.regime == regime.name]
            word = together([o.word for o in own])
            words.append({"word": word or "none", "text": word or ("–" if own else ""), "tally": tally(own)})
        table.append({"number": claim.number, "sentence": claim.sentence, "source": claim.source, "words": words})
    return table


def _predictions(regimes: Sequence[Regime], found: Sequence[Outcome]) -> list[dict[str, Any]]:
    places = {regime.name: str(i) for i, regime in enumerate(regimes)}
    rows = []
    for one in found:
        prediction = one.prediction
        treatment, control = prediction.side_names
        rows.append({
            "slice": places[one.regime], "words": prediction.words, "measure": prediction.measure.name,
            "measure_words": f"{prediction.measure.words} [{prediction.measure.unit}]",
            "treatment": treatment, "control": control,
            "means": f"{means_text(one, 0)}, {means_text(one, 1)}", "effect": effect_text(one),
            "criterion": criterion_text(prediction), "word": one.word or "none", "text": word_text(one),
        })  # fmt: skip
    return rows


def _payload(drawn: Sequence[tuple[Figure, str | None]]) -> Markup:
    """What the page's script draws from; no `<` can end its element early."""
    payload = {
        "height": HEIGHT, "margin": MARGIN, "num_runs": 0, "palette": [asdict(ink) for ink in PALETTE],
        "figures": [
            {"id": f.id, "data": f.data, "layout": f.layout} | ({} if place is None else {"slice": place})
            for f, place in drawn
        ],
    }  # fmt: skip
    return Markup(json.dumps(payload, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"))


__all__ = ["mapped_regimes", "render"]
