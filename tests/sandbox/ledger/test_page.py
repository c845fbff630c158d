"""Laws of the ledger's pages: they say what the rows say."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from sandbox.claims import CLAIMS, REGIMES
from sandbox.ledger import command, html, page, summary
from sandbox.ledger.cells import key
from sandbox.ledger.claim import Row
from sandbox.ledger.hindsight import AsFound
from sandbox.ledger.power import MOST_HOURS, needs
from sandbox.ledger.spreads import ResidualSpread
from sandbox.ledger.statistics import Expected, Word
from sandbox.ledger.verdicts import Finding, findings
from tests.pages.ledger import block
from tests.sandbox.ledger.chosen import CHOSEN, SEEDS, made_rows


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return made_rows()


@pytest.fixture(scope="module")
def found(rows: dict[str, Row]) -> list[Finding]:
    return findings(CHOSEN, REGIMES, rows, len(SEEDS))


@pytest.fixture(scope="module")
def text(rows: dict[str, Row], found: list[Finding]) -> str:
    return html.render(CHOSEN, REGIMES, found, rows, len(SEEDS))


def test_the_markdown_counts_what_it_shows(found: list[Finding], rows: dict[str, Row]) -> None:
    """One line per claim, decided ones first, with its word and its runs' hours; every prediction has its lines."""
    needed = needs(CHOSEN, REGIMES, rows)
    made = summary.lines(CHOSEN, found, needed)
    words = {one.claim.number: one.word for one in found if one.decides}
    assert {line.claim.number for line in made} == {claim.number for claim in CHOSEN}
    places = [summary.ORDER.index(line.state) for line in made]
    assert places == sorted(places) and any(line.effect for line in made)
    text = page.markdown(CHOSEN, REGIMES, found, rows)
    table = [
        line for line in text.partition("## Verdicts")[2].partition("## Out of reach")[0].splitlines() if "|" in line
    ]
    for line in made:
        assert words.get(line.claim.number) in (line.state, None)
        start = f"| {page.link(line.claim)} | {line.claim.home} | {line.state} |"
        assert sum(row.startswith(start) for row in table) == (line.state != summary.OUT_OF_REACH)
        own = needed[line.claim.number]
        if line.n and "/" not in line.n:
            assert line.cost == summary.cost_text(int(line.n) * own.hours_per_seed)
    counted = dict(part.split(" ", 1)[::-1] for part in summary.counts_text(made).split(", "))
    assert sum(map(int, counted.values())) == len(CHOSEN)
    for one in found:
        for outcome in one.outcomes:
            words_of = outcome.prediction.words.replace("|", "\\|")
            mark = "" if one.decides else " (exploratory)"
            assert f"| {words_of} | {one.regime}{mark} |" in text
    assert f"{len(rows)} runs, {len(rows) * 36 / 3600:.1f} hours" in text


@pytest.mark.parametrize(("word", "state"), [("inconclusive", "tried again"), ("reproduced", "reproduced")])
def test_an_inconclusive_claim_that_another_repeats_was_tried_again(
    found: list[Finding], rows: dict[str, Row], word: Word, state: str
) -> None:
    """Its line says so, is counted so, and has the colour of an inconclusive one; a decided claim keeps its word."""
    first = next(claim for claim in CHOSEN if claim.number == 9)
    claims = (*CHOSEN, first.again(99, 300, 3))
    given = [replace(one, word=word) if one.decides and one.claim == first else one for one in found]
    made = summary.lines(claims, given, needs(claims, REGIMES, rows))
    assert [line.state for line in made if line.claim.number in (9, 99)] == [state, summary.OPEN]
    assert f" {state}" in summary.counts_text(made)
    tile = f'class="tile {word}" href="#claim-9"'
    assert tile in html.render(claims, REGIMES, given, rows, len(SEEDS))


def test_a_claims_p_stands_on_its_side_of_the_level(found: list[Finding], rows: dict[str, Row]) -> None:
    """Two digits, more where they would round a decided claim's p to the level; it is the p by which claims stand."""
    shown = [summary.p_text(p) for p in (0.049966, 0.05, 0.0500001, 1.234e-7, 1.0, None)]
    assert shown == ["0.04997", "0.05", "0.05", "1.2e-07", "1", ""]
    by_number = {one.claim.number: one for one in found if one.decides}
    ready = [line for line in summary.lines(CHOSEN, found, needs(CHOSEN, REGIMES, rows)) if line.p]
    assert ready
    for line in ready:
        assert float(line.p) == pytest.approx(by_number[line.claim.number].p, rel=0.05)
        assert (float(line.p) < 0.05) == (line.state not in ("inconclusive", summary.TRIED_AGAIN))


def given_words(found: list[Finding], **words: Word) -> list[Finding]:
    """The findings with these verdicts, by the number of the claim (c9)."""
    return [replace(one, word=words.get(f"c{one.claim.number}", one.word)) if one.decides else one for one in found]


def test_the_page_says_how_many_questions_are_decided(found: list[Finding], rows: dict[str, Row]) -> None:
    """A second trial stands for its first; claims without runs count as undecided, those without deciding seeds not at
    all; the share, its aim, and how many would need more than forty seeds are computed."""
    first = next(claim for claim in CHOSEN if claim.number == 9)
    claims = (*CHOSEN, first.again(99, 300, 3), replace(CHOSEN[0], number=98, fresh_seeds=0))
    given = given_words(found, c3="reproduced", c5="inconclusive", c9="inconclusive", c17="opposite",
                        c20="not reproduced", c34="inconclusive")  # fmt: skip
    needed = needs(claims, REGIMES, rows)
    made = summary.lines(claims, given, needed)
    # 3, 17 and 20 are decided; 5 and 34 are not, and 99, in the place of 9, lacks its runs.
    assert {line.claim.number for line in summary.questions(made)} == {3, 5, 17, 20, 34, 99}
    wants = [AsFound(seeds, MOST_HOURS / 8, is_at_margin=True) for seeds in (None, 8, 9)]
    words = summary.reach_text(made, wants)
    assert words == (
        "Of 6 questions within reach 3 are decided and 3 (50%) are not, where the aim is at most 20%. Runs are missing "
        "for 1 of these. At the effects found, 2 of the 3 inconclusive ones would need more than 3 hours for 80% "
        "power, the most that a second trial is given."
    )
    tried = [replace(line, state="inconclusive") if line.claim.number == 99 else line for line in made]
    last = " 1 of the inconclusive ones had a second trial already, and there is no third."
    assert summary.reach_text(tried, wants).endswith(last)
    assert summary.reach_text([], []) == "" and "At the effects" not in summary.reach_text(made, [])


def test_each_inconclusive_claim_says_why(found: list[Finding], rows: dict[str, Row]) -> None:
    """A line on both pages with its clause, seeds and hours, for those that are open and were not tried again."""
    first = next(claim for claim in CHOSEN if claim.number == 9)
    claims, given = (*CHOSEN, first.again(99, 300, 3)), given_words(found, c9="inconclusive", c17="inconclusive")
    needed = needs(claims, REGIMES, rows)
    open_ones = summary.undecided(summary.lines(claims, given, needed), given, needed)
    assert [claim.number for claim, _ in open_ones] == [17]
    for text in (page.markdown(claims, REGIMES, given, rows), html.render(claims, REGIMES, given, rows, len(SEEDS))):
        for claim, need in open_ones:
            clause = summary.undecided_row(need)[0]
            assert f"{claim.number}. {page.title(claim)}" in text.partition("nconclusive, why")[2] and clause in text
        assert "questions within reach" in text
    assert summary.undecided_row(AsFound(30, 0.1, is_at_margin=False)) == ("too few seeds", "30", "3.0 h")
    beyond = ("effect at its margin; beyond 3 hours", "over 4096", "–")
    assert summary.undecided_row(AsFound(None, 0.1, is_at_margin=True)) == beyond


def test_verdicts_against_their_power_are_explained(found: list[Finding], rows: dict[str, Row]) -> None:
    """Claims with little power that were decided all the same: those that hold apart from those that fail."""
    wide = {
        number: replace(need, plans=tuple((one, ResidualSpread(100.0, "a guess")) for one, _ in need.plans))
        for number, need in needs(CHOSEN, REGIMES, rows).items()
    }
    needed = wide | {number: need for number, need in needs(CHOSEN, REGIMES, rows).items() if number not in (9, 17)}
    given = given_words(found, c9="reproduced", c17="not reproduced", c3="reproduced")
    words = summary.low_power_text(summary.lines(CHOSEN, given, needed), needed)
    held, _, failed = words.partition("Below 70%, and yet reproduced")[2].partition("Below 70%, and decided")
    assert held.endswith("by luck: 9. ") and failed.endswith("nothing: 17.")
    open_ones = [replace(one, word="inconclusive") if one.decides else one for one in found]
    assert summary.low_power_text(summary.lines(CHOSEN, open_ones, needed), needed) == ""


def test_all_verdicts_are_on_one_screen(found: list[Finding], rows: dict[str, Row], text: str) -> None:
    """The page begins with a row per state that names each claim once; the HTML has the claims in two halves."""
    made = summary.lines(CHOSEN, found, needs(CHOSEN, REGIMES, rows))
    table = page.overview(made)
    named = [name for _, names in table for name in names.split("; ")]
    assert sorted(named) == sorted(map(page.link, CHOSEN))
    assert [int(state.split(" ")[0]) for state, _ in table] == [len(names.split("; ")) for _, names in table]
    halves = [len(half) for half in html._halves(made)]
    assert halves == [3, 3] and html._halves(made[:1]) == [made[:1]] and html._halves([]) == []
    assert text.count('class="n seeds"') == len([line for line in made if line.state != summary.OUT_OF_REACH])


def test_no_page_says_that_an_open_claim_is_decided(found: list[Finding], rows: dict[str, Row]) -> None:
    """Each claim is tested in one regime; that is said of all of them, the inconclusive ones included."""
    given = given_words(found, c9="inconclusive")
    pages = (
        html.render(CHOSEN, REGIMES, given, rows, len(SEEDS)),
        page.markdown(CHOSEN, REGIMES, given, rows),
        block(),
    )
    for text in pages:
        said = " ".join(text.split())
        assert "tested in one regime" in said and not re.search(r"(claim is|each is|each) decided in one regime", said)


def test_a_claims_section_begins_with_its_verdict(found: list[Finding], rows: dict[str, Row]) -> None:
    """A sentence of a paper that does not hold here does not stand there as if it did."""
    given = given_words(found, c3="not reproduced", c9="reproduced", c20="opposite")
    text = html.render(CHOSEN, REGIMES, given, rows, len(SEEDS))
    table = page.markdown(CHOSEN, REGIMES, given, rows)
    made = summary.lines(CHOSEN, given, needs(CHOSEN, REGIMES, rows))
    assert {"not reproduced", "reproduced", "opposite"} <= {line.state for line in made}
    for line in made:
        section = text.partition(f'<section id="claim-{line.claim.number}">')[2]
        shown = section.partition('<p class="question">')[2].partition("</p>")[0]
        said = "without all runs" if line.state == summary.OPEN else line.state
        assert f">{said}</span>" in shown and line.claim.source in shown
        heading = f'\n### <a id="claim-{line.claim.number}"></a>{line.claim.number}. {line.claim.sentence}\n\n'
        fold = f'<details markdown="1">\n<summary><b>{said.capitalize()}.</b> {line.claim.source}</summary>\n\n'
        assert table.partition(heading)[2].startswith(fold)


def test_a_link_on_the_page_finds_a_heading_that_is_shown(found: list[Finding], rows: dict[str, Row]) -> None:
    """Each claim has one place of its own, outside every fold, and tables of a line per claim are inside one."""
    text = page.markdown(CHOSEN, REGIMES, found, rows)
    shown = re.sub(r"<details.*?</details>", "", text, flags=re.DOTALL)
    places = re.findall(r'^### <a id="(claim-\d+)"></a>', shown, re.MULTILINE)
    assert sorted(places) == sorted(f"claim-{claim.number}" for claim in CHOSEN)
    wanted = re.findall(r"\]\(#([^)]*)\)", text)
    assert set(wanted) == set(places) and text.count("<details") == text.count("</details>") == len(places) + 2
    assert not re.findall(r"^\| prediction \||^\| claim \| home \| verdict", shown, re.MULTILINE)


def test_the_list_has_the_pages_words_and_says_what_is_left(found: list[Finding], rows: dict[str, Row]) -> None:
    """`tried again` as on the page, whichever claims are listed; where only runs of pictures or exploratory seeds are
    missing, the number of those that decide is said."""
    first = next(claim for claim in CHOSEN if claim.number == 9)
    claims = (*CHOSEN, first.again(99, 300, 3))
    given = given_words(found, c9="inconclusive")
    wanted = command.Wanted((first,), REGIMES, len(SEEDS), smoke=False)
    (line,) = command._listed(wanted, rows, given, claims).splitlines()[2:]
    assert line.endswith("| tried again |")
    (line,) = command._listed(wanted, rows, given, (first,)).splitlines()[2:]
    assert line.endswith("| inconclusive |")
    some = next(one for one in CHOSEN if one.home in {"paper"} and len(one.regimes) > 1)
    deciding = {key(REGIMES[0], arm, seed) for arm in some.arms if not some.is_drawn_alone(arm)
                for seed in some.deciding(len(SEEDS))}  # fmt: skip
    listed = command.Wanted((some,), REGIMES, len(SEEDS), smoke=False)
    (line,) = command._listed(listed, {name: rows[name] for name in deciding}, given, claims).splitlines()[2:]
    assert f"(all {len(deciding)} that decide) |" in line
    fewer = {name: rows[name] for name in list(deciding)[1:]}
    assert "that decide" not in command._listed(listed, fewer, given, claims)


def test_a_line_counts_its_predictions_by_their_own_tests(found: list[Finding], rows: dict[str, Row]) -> None:
    """As many as the claim has, in the readings of its table; none while runs are missing."""
    deciding = {one.claim.number: one for one in found if one.decides}
    counted = 0
    for line in summary.lines(CHOSEN, found, needs(CHOSEN, REGIMES, rows)):
        one = deciding.get(line.claim.number)
        if one is None or one.word is None:
            assert line.predictions == ""
            continue
        words = [summary.word_text(outcome) for outcome in one.outcomes]
        parts = dict(part.split(" ", 1)[::-1] for part in line.predictions.split(", "))
        assert parts == {word: str(words.count(word)) for word in set(words)}
        counted += len(words)
    assert counted > 1


def test_the_effect_shown_is_the_one_on_which_the_word_rests(found: list[Finding]) -> None:
    """Of a claim that holds the prediction with the largest p, of one that fails the one that is surest to."""
    for one in found:
        key_one = summary.key_outcome(one)
        if one.joint is None or key_one is None:
            continue
        place = 0 if one.joint[0] < one.joint[1] else 1
        ends = [o.p[place] for o in one.applicable if o.p]
        assert key_one.p is not None and key_one.p[place] == (min(ends) if place else max(ends))


def test_what_explores_is_said_so(found: list[Finding], text: str) -> None:
    """Seen seeds have for, against or open with their number, in their own table, and no verdict."""
    explored = [one for one in found if not one.decides and one.stand]
    assert explored and all(one.word is None for one in explored)
    assert page.explored(explored[0].claim, explored[0].regime, found) == f"{explored[0].stand} ({len(SEEDS)})"
    assert 'class="word exploratory' in text and "(exploratory)" in text


def test_out_of_reach_is_apart_with_its_cost(rows: dict[str, Row]) -> None:
    """A claim that needs more than forty seeds and asks for none has no line among the verdicts, but its cost."""
    claim = next(claim for claim in CLAIMS if claim.number == 18)
    one = next(iter(rows.values()))
    cells = [(place, arm, seed) for place, arm in enumerate(claim.arms) for seed in range(12)]
    # The arms' times are out of step, so that seeds do not matter.
    extra = {
        key(REGIMES[0], arm, seed): one
        | {"arm": arm.name, "seed": seed, "last_step": 400, "cpu_seconds": 9.0 + 9 * ((seed + place) % 3)}
        for place, arm, seed in cells
    }
    need = needs([claim], REGIMES, extra)[18]
    assert need.is_out_of_reach and need.seeds is not None and need.seeds > 40
    text = page.markdown([claim], REGIMES, [], extra)
    assert "1 out of reach" in text and f"{need.seeds} (out of reach)" in text
    assert "| 18. r3 costs little |" not in text.partition("## Out of reach")[0]


def test_a_collapse_too_early_to_be_warned_of_is_counted(found: list[Finding], rows: dict[str, Row]) -> None:
    """Runs that collapsed before any window that could warn are counted, not left out; without them none has."""
    stable = {name: {**row, "evaluations": [[0, 0.4], [400, 0.4]]} for name, row in rows.items()}
    early = stable | {name: {**rows[name], "evaluations": [[0, 0.4], [1, 0.0], [2, 0.0]]} for name in list(rows)[:2]}
    assert "No run has collapsed." in page.markdown(CHOSEN, REGIMES, found, stable)
    assert "Collapsed runs: 2. None collapsed late enough" in page.markdown(CHOSEN, REGIMES, found, early)


def test_effects_are_shown_on_their_scale(found: list[Finding]) -> None:
    """A factor is shown as exp of the effect, a difference as it is, with its interval; no runs, no numbers."""
    for one in (outcome for finding in found for outcome in finding.outcomes):
        shown = summary.effect_text(one)
        if one.effect is None:
            assert shown == "–"
            continue
        is_ratio = one.prediction.scale in ("ratio", "ratio_of_means")
        mean = math.exp(one.effect.mean) if is_ratio else one.effect.mean
        assert shown.startswith(f"{'× ' if is_ratio else ''}{mean:.3g} (")
        assert one.p is None or f"{one.effect.test}, n = {one.effect.n}" in summary.test_text(one)


@pytest.mark.parametrize(
    ("expected", "margin", "words"),
    [("more", 0.0, "e > 0"), ("less", 0.0, "e < 0"), ("less", 0.05, "e < -0.05"), ("at_most", 0.1, "e < 0.1"),
     ("same", 0.1, "|e| < 0.1")],
)  # fmt: skip
def test_a_criterion_is_an_inequality(expected: Expected, margin: float, words: str) -> None:
    """On the effect e, with the margin on the side that is expected; 0 has no sign."""
    said = replace(CHOSEN[0].predictions[0], expected=expected, margin=margin, scale="difference", planned=None)
    assert summary.criterion_text(said) == words


def test_effects_have_three_digits_and_no_exponent_below_a_hundred_thousand() -> None:
    """999.6 rounds to 1000, not to 1e+03; numbers near 0 keep their exponent."""
    shown = [summary._digits(value) for value in (0.12345, 304.4, 999.4, 999.6, -1514.2, 2e5, 6.84e-14)]
    assert shown == ["0.123", "304", "999", "1000", "-1514", "2e+05", "6.84e-14"]
