"""Laws of the ledger's pages: they say what the rows say, and a real browser draws all of it."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.claims import CLAIMS, REGIMES
from sandbox.ledger import html, page
from sandbox.ledger.cells import KEPT, NUM_WINDOWS, key
from sandbox.ledger.claim import Row
from sandbox.ledger.verdicts import Outcome, outcomes, together
from tests.lab.test_report import Page, browse, payload

CHOSEN = tuple(claim for claim in CLAIMS if claim.number in (3, 5, 9, 17, 20, 34))
SEEDS = range(3)


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    """Rows of all cells in `paper`, of some in `stress`, of none in `hot`: random numbers, R3's ten times lower."""
    draws, found = random.Random(5), {}
    for regime in REGIMES[:2]:
        for arm in dict.fromkeys(arm for claim in CHOSEN for arm in claim.arms):
            for seed in SEEDS:
                if regime.name == "stress" and draws.random() < 0.3:
                    continue
                level = 1e-3 if "R3" in arm.name else 1e-2
                series = {name: [level * (1 + draws.random()) for _ in range(NUM_WINDOWS)] for name in KEPT}
                first = draws.choice([None, 100])
                found[key(regime, arm, seed)] = {
                    "series": series, "first_step": first, "verdict": "collapsed" if first else "stable",
                    "num_steps": 400, "regime": regime.name, "seconds": 36.0,
                    "machine": "a machine", "torch": "2",
                    "probes": {"token_share_of_routing": 0.2 + 0.01 * draws.random()},
                }  # fmt: skip
    return found


@pytest.fixture(scope="module")
def found(rows: dict[str, Row]) -> list[Outcome]:
    return outcomes(CHOSEN, REGIMES, rows, len(SEEDS))


@pytest.fixture(scope="module")
def text(rows: dict[str, Row], found: list[Outcome]) -> str:
    return html.render(CHOSEN, REGIMES, found, rows, len(SEEDS))


def test_the_markdown_counts_what_it_shows(found: list[Outcome], rows: dict[str, Row]) -> None:
    """A claim has one line with a word a regime that it is tried in, the last one counts them; outcomes have a line."""
    lines = page.markdown(CHOSEN, REGIMES, found, rows).splitlines()
    start = lines.index(next(line for line in lines if line.startswith("|  | claim")))
    table = [line.split(" | ") for line in lines[start + 2 : start + 3 + len(CHOSEN)]]
    for place, regime in enumerate(REGIMES):
        tried = [c for c in CHOSEN if regime.name in c.regimes]
        own = {
            c.name: together([o.word for o in found if o.claim == c and o.regime == regime.name]) or "–" for c in tried
        }
        words = [own.get(claim.name, "") for claim in CHOSEN]
        shown = [line[3 + place].strip(" |") for line in table]
        assert [text.partition(" (")[0] for text in shown[:-1]] == words
        counted = {name: int(n) for n, name in (part.split(" ", 1) for part in shown[-1].split(", ") if part)}
        assert counted == {word: words.count(word) for word in own.values()}
    for one in found:
        words = one.prediction.words.replace("|", "\\|")
        assert sum(line.startswith(f"| {words} | {one.regime} |") for line in lines) >= 1
    assert f"{len(rows)} runs, {len(rows) * 36 / 3600:.1f} hours" in "\n".join(lines)


def test_what_leans_is_counted_beside_the_word(found: list[Outcome]) -> None:
    """Brackets hold how many predictions are reproduced and how many lean to each side; none while runs are missing."""
    claim = next(claim for claim in CHOSEN if len(claim.predictions) == 6)
    own = [o for o in found if o.claim == claim and o.regime == "paper"]
    undecided = [("inconclusive", alone) for alone in ("reproduced", "opposite", "not reproduced", "inconclusive")]
    pairs = [*undecided, ("reproduced", "reproduced"), ("not reproduced", "not reproduced")]
    made = [replace(o, word=word, alone=alone) for o, (word, alone) in zip(own, pairs, strict=True)]
    assert page.tally(made) == "1 of 6; leaning: 1 for, 2 against"
    assert [page.word_text(o) for o in made[:4]] == [
        "inconclusive, leans for", "inconclusive, leans against", "inconclusive, leans against", "inconclusive",
    ]  # fmt: skip
    assert page.tally(made[3:]) == "1 of 3" and page.tally(made[:1]) == "leans for" and page.tally(made[4:5]) == ""
    assert page.tally([*made, replace(own[0], word=None)]) == "" and page.tally([]) == ""
    moot = replace(made[0], word="not applicable", alone=None)
    assert page.tally([moot, moot]) == "" and page.tally([moot, *made[3:]]) == "1 of 3"
    assert page.verdict_table([claim], REGIMES[:1], made).count("(1 of 6; leaning: 1 for, 2 against)") == 1


def test_a_collapse_too_early_to_be_warned_of_is_counted(found: list[Outcome], rows: dict[str, Row]) -> None:
    """Runs that collapsed before any window that could warn are counted, not left out; without them none has."""
    stable = {name: {**row, "first_step": None} for name, row in rows.items()}
    early = stable | {name: {**rows[name], "first_step": 1} for name in list(rows)[:2]}
    assert "No run has collapsed." in page.markdown(CHOSEN, REGIMES, found, stable)
    assert "Collapsed runs: 2. None was late enough" in page.markdown(CHOSEN, REGIMES, found, early)


def test_effects_are_shown_on_their_scale(found: list[Outcome]) -> None:
    """A factor is shown as exp of the effect, a difference as it is, with interval, n and p; no runs, no numbers."""
    for one in found:
        shown = page.effect_text(one)
        if one.effect is None:
            assert shown == "–"
            continue
        is_ratio = one.prediction.scale in ("ratio", "ratio_of_means")
        mean = math.exp(one.effect.mean) if is_ratio else one.effect.mean
        assert shown.startswith(f"{'× ' if is_ratio else ''}{mean:.3g} (")
        assert f"n = {len(SEEDS)}, p = {one.p:.2g}" in shown


def test_a_browser_draws_the_ledger_without_a_word(text: str, tmp_path: Path) -> None:
    """Chromium shows the regime with the most decided predictions, draws each of its figures, and logs nothing."""
    (tmp_path / "ledger.html").write_text(text)
    dom, console = browse(tmp_path / "ledger.html", tmp_path)
    drawn = [figure["id"] for figure in payload(text)["figures"] if figure.get("slice") in (None, "0")]
    seen = Page(dom)
    assert console == []
    assert seen.root.get("data-drawn") == str(len(drawn))
    assert {id_ for id_ in seen.drawings if seen.drawings[id_]} == set(drawn)
    assert {"map-MiniRL", "claim-3-actor-entropy"} <= set(drawn)


def test_the_page_is_whole_and_loads_nothing(text: str) -> None:
    """Tags balance, ids are unique, no address is loaded, and links inside lead somewhere."""
    seen = Page(text)
    assert seen.open == [] and len(seen.ids) == len(set(seen.ids))
    inner = [address for address in seen.addresses if address.startswith("#")]
    assert len(inner) == len(CHOSEN) and {address[1:] for address in inner} <= set(seen.ids)
    assert all(address.startswith(("data:", "#")) for address in seen.addresses)
