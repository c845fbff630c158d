"""Laws of sandbox/ledger/verdicts.py and claim.py: from rows to one decision per claim."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.claims import REGIMES
from sandbox.ledger.cells import key
from sandbox.ledger.claim import FRESH, Arm, Claim, Measure, Prediction
from sandbox.ledger.course import COLLAPSED, LASTING
from sandbox.ledger.statistics import Expected
from sandbox.ledger.summary import waiting_text
from sandbox.ledger.verdicts import Finding, Outcome, among_ready, findings

REGIME, OTHER = REGIMES[:2]
OURS, THEIRS = Arm("ours", (("seed", "1"), ("num_steps", "40"))), Arm("theirs", (("num_steps", "80"),))
X = Measure("x", "a number", "1", lambda row: row["x"])
FIVE = {"num_seeds": 5, "first_seed": FRESH, "regimes": (REGIME.name,)}
CLEAR = [1.0, 1.1, 0.9, 1.05, 1.2], [0.0, 0.1, 0.0, 0.05, 0.1]


def _claim(*predictions: Prediction, number: int = 1, **fields: Any) -> Claim:
    return Claim(number, f"c{number}", "s", "here", predictions, home=REGIME.name, **({**FIVE, **fields}))


def _prediction(
    expected: Expected = "more", margin: float = 0.5, scale: Any = "difference", **fields: Any
) -> Prediction:
    given = {"treatment": OURS, "control": THEIRS, "measure": X} | fields
    return Prediction("w", expected=expected, margin=margin, scale=scale, **given)


def _rows(ours: Sequence[float], theirs: Sequence[float], first: int = FRESH, regime: Any = REGIME) -> dict[str, Any]:
    places = ((OURS, ours), (THEIRS, theirs))
    return {key(regime, arm, first + i): {"x": x} for arm, xs in places for i, x in enumerate(xs)}


def _finding(
    ours: Sequence[float], theirs: Sequence[float], expected: Expected, margin: float, scale: Any = "difference"
) -> Finding:
    claim = _claim(_prediction(expected, margin, scale), num_seeds=5)
    return findings([claim], [REGIME], _rows(ours, theirs))[0]


def _outcome(*args: Any) -> Outcome:
    return _finding(*args).outcomes[0]


def test_a_spread_that_seeds_share_is_taken_out() -> None:
    """Seeds that matter are paired: a spread over seeds that both arms share does not hide an effect."""
    base = [0.0, 10.0, -5.0, 3.0, 7.0]
    found = _outcome([x + 1 + 0.01 * i for i, x in enumerate(base)], base, "more", 0.5)
    assert found.effect is not None and found.effect.test == "paired"
    assert found.effect.mean == pytest.approx(1.02) and found.stand == "for"
    apart = _outcome(*CLEAR, "more", 0.5)
    assert apart.effect is not None and apart.effect.test == "Welch"


def test_an_event_has_the_exact_test_and_a_time_the_log_rank_test() -> None:
    """By the measure's kind and the margin; several arms on a side are counted together."""
    whole, fallen = [[i, 0.4] for i in range(9)], [[0, 0.4], *([i, 0.0] for i in range(1, 9))]
    rows = {
        key(REGIME, arm, FRESH + i): {"evaluations": found, "num_steps": 8}
        for arm, found in ((OURS, whole), (THEIRS, fallen))
        for i in range(5)
    }
    said = [
        _prediction("more", 0.25, treatment=THEIRS, control=OURS, measure=COLLAPSED),
        _prediction("more", 0.0, measure=LASTING),
        _prediction("more", 0.1, measure=LASTING),
        _prediction("more", 0.0, treatment=THEIRS, control=0.5, measure=COLLAPSED),
        _prediction("more", 0.0, treatment=(OURS, THEIRS), control=OURS, measure=COLLAPSED),
    ]
    (found,) = findings([_claim(*said)], [REGIME], rows)
    effects = [one.effect for one in found.outcomes]
    assert [one.test for one in effects if one] == ["exact", "log-rank", "paired", "exact", "exact"]
    assert [one.mean for one in effects if one] == pytest.approx([1.0, 0.75, 0.75, 0.5, 0.5], abs=0.2)
    with pytest.raises(ValueError, match="scale: expected difference for collapsed, got ratio"):
        _prediction("more", 1.5, "ratio", measure=COLLAPSED)


def test_arms_evaluated_at_other_spacings_are_dated_on_the_wider_one() -> None:
    """Every run falls at once. With an evaluation each 0.04 of a run the fall is seen at 0.08, each 0.05 at 0.10: that
    is no earlier collapse. Arms of one spacing keep their dates."""

    def fallen(num_steps: int, every: int, after: int = 0) -> dict[str, Any]:
        steps = range(0, num_steps + 1, every)
        return {"evaluations": [[s, 0.4 if s <= after else 0.0] for s in steps], "num_steps": num_steps}

    def p(theirs: dict[str, Any]) -> tuple[float, float]:
        rows = {key(REGIME, arm, FRESH + i): row for arm, row in ((OURS, fallen(50, 2)), (THEIRS, theirs))
                for i in range(5)}  # fmt: skip
        (found,) = findings([_claim(_prediction("less", 0.0, measure=LASTING))], [REGIME], rows)
        assert found.outcomes[0].effect is not None and found.outcomes[0].effect.test == "log-rank"
        return found.outcomes[0].p or (math.nan, math.nan)

    # All at one date: the log-rank statistic has no variance, and nothing is decided.
    assert p(fallen(400, 20)) == p(fallen(400, 16)) == (1.0, 1.0)
    assert p(fallen(400, 20, after=100))[0] < 0.01 and p(fallen(400, 20, after=100))[1] > 0.99


@pytest.mark.parametrize("is_moot", [True, False])
def test_what_is_said_of_a_collapse_needs_one(is_moot: bool) -> None:
    """Where no run of the premise's arm collapsed, nothing was predicted: it counts neither for nor against."""
    said = replace(_prediction(), premise=THEIRS)
    whole, fallen = [[i, 0.4] for i in range(9)], [[0, 0.4], *([i, 0.0] for i in range(1, 9))]
    rows = {name: row | {"evaluations": whole, "num_steps": 8} for name, row in _rows(*CLEAR).items()}
    if not is_moot:
        rows[key(REGIME, THEIRS, FRESH + 3)]["evaluations"] = fallen
    (alone,) = findings([_claim(said)], [REGIME], rows)
    (both,) = findings([_claim(said, _prediction(margin=5.0))], [REGIME], rows)
    assert alone.word == ("not applicable" if is_moot else "reproduced")
    assert both.word == "not reproduced" and len(both.applicable) == (1 if is_moot else 2)
    assert both.joint is not None
    assert both.joint[1] == pytest.approx((1 if is_moot else 2) * both.outcomes[1].p[1])  # pyright: ignore


def test_a_claim_holds_with_its_largest_p_and_fails_with_its_least() -> None:
    """Intersection-union for all, Bonferroni for any; the word goes by the smaller, two-sided, after Holm."""
    weak, strong = _prediction(margin=0.8), _prediction(margin=0.2)
    (found,) = findings([_claim(weak, strong)], [REGIME], _rows(*CLEAR))
    ps = [one.p for one in found.outcomes]
    assert found.joint == pytest.approx((max(p[0] for p in ps if p), min(1.0, 2 * min(p[1] for p in ps if p))))  # pyright: ignore
    assert found.p == pytest.approx(2 * found.joint[0]) and found.word == "reproduced"  # pyright: ignore
    (failed,) = findings([_claim(_prediction(margin=3.0), strong)], [REGIME], _rows(*CLEAR))
    assert failed.joint is not None
    assert failed.word == "not reproduced" and failed.p == pytest.approx(2 * failed.joint[1])


def test_opposite_needs_an_arm_on_the_other_side_and_nothing_that_holds() -> None:
    """Beyond the margin on the other side; not where another prediction holds, nor against a number."""
    less = _prediction("less", 0.5)
    assert findings([_claim(less)], [REGIME], _rows(*CLEAR))[0].word == "opposite"
    assert findings([_claim(less, _prediction())], [REGIME], _rows(*CLEAR))[0].word == "not reproduced"
    number = _prediction(control=3.0)
    assert findings([_claim(number)], [REGIME], _rows(*CLEAR))[0].word == "not reproduced"


def test_opposite_stands_in_holms_correction_too() -> None:
    """Its p is 7.6e-5 one-sided: enough alone, not among 400 claims, where the 2e-7 of the claim failing still is."""
    absent = _prediction(treatment=Arm("absent", (("num_steps", "120"),)))
    others = [_claim(absent, number=number) for number in range(2, 401)]
    found = findings([_claim(_prediction("less", 0.5)), *others], [REGIME], _rows(*CLEAR))[0]
    assert found.word == "not reproduced" and found.p is not None and found.p < 0.05


def test_a_ratio_is_a_factor() -> None:
    """On the scale `ratio` the effect is the mean logarithm, and the margin a factor; several arms count as their
    mean."""
    theirs = [1.0, 2.0, 4.0, 8.0, 16.0]
    ours = [x / 3 * c for x, c in zip(theirs, (0.98, 0.99, 1.0, 1 / 0.99, 1 / 0.98), strict=True)]
    found = _outcome(ours, theirs, "less", 2.0, "ratio")
    assert found.effect is not None
    assert math.exp(found.effect.mean) == pytest.approx(1 / 3) and found.stand == "for"
    assert _outcome(ours, theirs, "less", 4.0, "ratio").stand == "against"
    joined = replace(_prediction("less", 1.1, "ratio"), control=(OURS, THEIRS))
    (both,) = findings([_claim(joined)], [REGIME], _rows(ours, theirs))
    mean = math.fsum(math.log(a / ((a + b) / 2)) for a, b in zip(ours, theirs, strict=True)) / 5
    assert both.outcomes[0].effect.mean == pytest.approx(mean)  # pyright: ignore


def test_a_zero_has_no_ratio() -> None:
    """A seed with a 0 on either side leaves the prediction undecided on the scale `ratio`."""
    assert _finding([1.0] * 5, [0.0, 1.0, 1.0, 1.0, 1.0], "more", 2.0, "ratio").word is None


def test_a_ratio_of_means_takes_zeros() -> None:
    """On `ratio_of_means` single seeds may be 0; the effect is log of the means' ratio."""
    theirs, ours = [0.0, 1.0, 1.0, 1.5, 1.5], [4.9, 5.0, 5.0, 5.1, 5.0]
    found = _outcome(ours, theirs, "more", 2.0, "ratio_of_means")
    assert found.effect is not None
    assert math.exp(found.effect.mean) == pytest.approx(5.0) and found.stand == "for"
    assert _outcome(theirs, ours, "less", 2.0, "ratio_of_means").stand == "for"
    assert _outcome(ours, [0.0] * 5, "more", 2.0, "ratio_of_means").stand is None


def test_spread_compares_deviations_from_the_median() -> None:
    """On the scale `spread` an arm's level does not matter, only how far its seeds lie from their median."""
    found = _outcome([5.0, 5.0, 5.0, 5.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0], "less", 0.0, "spread")
    assert found.effect is not None
    assert found.effect.mean == pytest.approx(-1.2)


def test_old_seeds_and_other_regimes_explore() -> None:
    """Only seeds from FRESH on, at home, have a word and a place in Holm's family; the rest say for, against, open."""
    claim = _claim(_prediction(), num_seeds=5, first_seed=0, fresh_seeds=5, regimes=(REGIME.name, OTHER.name))
    rows = _rows(*CLEAR, first=0) | _rows(*CLEAR, first=0, regime=OTHER) | _rows(*CLEAR)
    found = findings([claim], REGIMES, rows)
    assert [(one.regime, one.decides, one.seeds) for one in found] == [
        (REGIME.name, True, range(FRESH, FRESH + 5)), (REGIME.name, False, range(5)), (OTHER.name, False, range(5)),
    ]  # fmt: skip
    assert [one.word for one in found] == ["reproduced", None, None] and {one.stand for one in found} == {"for"}
    assert found[0].p == pytest.approx(found[1].p)  # three findings, one test
    assert [one.word for one in findings([claim], REGIMES, _rows(*CLEAR, first=0))] == [None, None, None]


def test_holm_runs_over_all_claims_whether_or_not_they_have_runs() -> None:
    """A claim's p grows with the number of claims that are to be decided; one without runs has no p and no word."""
    claims = [_claim(_prediction(), number=i) for i in range(3)]
    alone = findings(claims[:1], [REGIME], _rows(*CLEAR))[0].p or 0.0
    assert [one.p for one in findings(claims, [REGIME], _rows(*CLEAR))] == pytest.approx([3 * alone] * 3)
    waiting = _claim(_prediction(), number=9, num_seeds=7)
    found = findings([*claims, waiting], [REGIME], _rows(*CLEAR))
    assert found[0].p == pytest.approx(4 * alone) and (found[3].p, found[3].word) == (None, None)
    assert [one.p for one in among_ready(found)] == pytest.approx([3 * alone] * 3)


def test_the_page_names_what_waits_for_other_claims_alone() -> None:
    """A claim that its own p decides, and that is lost among ten without runs, is named with the word it would have."""
    claims = [_claim(_prediction(), number=i, num_seeds=5 if i == 0 else 7) for i in range(11)]
    found = findings(claims, [REGIME], _rows([1.0, 1.6, 0.4, 1.1, 0.9], [0.0, 0.3, -0.3, 0.1, 0.1]))
    assert found[0].word == "inconclusive" and "decided too: 0 (reproduced)." in waiting_text(found)
    assert waiting_text(findings(claims, [REGIME], _rows(*CLEAR))) == ""


@given(st.lists(st.floats(-3.0, 3.0), min_size=4, max_size=4), st.floats(0.0, 3.0))
def test_no_verdict_is_lost_when_another_claims_runs_come(others: list[float], own: float) -> None:
    """Whatever the rows of other claims say, a claim's p is at most what it was while they were missing."""
    noise = [0.1, -0.1, 0.3, -0.3, 0.0]
    arms = [
        (Arm(f"a{i}", (("num_steps", str(50 + i)),)), Arm(f"b{i}", (("num_steps", str(60 + i)),))) for i in range(5)
    ]
    claims = [_claim(replace(_prediction(), treatment=a, control=b), number=i) for i, (a, b) in enumerate(arms)]
    rows, seen = {}, []
    for (ours, theirs), mean in zip(arms, [own, *others], strict=True):
        for i, (up, down) in enumerate(zip(noise, reversed(noise), strict=True)):
            rows[key(REGIME, ours, FRESH + i)] = {"x": mean + up}
            rows[key(REGIME, theirs, FRESH + i)] = {"x": down}
        seen.append(findings(claims, [REGIME], rows)[0].p)
    assert all(later <= before + 1e-15 for before, later in itertools.pairwise(seen))


def test_a_claim_says_how_many_seeds_it_needs() -> None:
    """A claim of seven seeds is open with five; whoever asks for five has an answer, on fresh seeds at home."""
    claim = _claim(_prediction(), num_seeds=7)
    assert findings([claim], [REGIME], _rows(*CLEAR))[0].word is None
    assert findings([claim], [REGIME], _rows(*CLEAR), 5)[0].outcomes[0].effect is not None
    assert list(claim.deciding(2)) == [FRESH, FRESH + 1] and list(claim.seen(REGIME.name)) == []
    later = replace(claim, first_seed=FRESH + 7)
    assert list(later.deciding()) == [FRESH + 7 + i for i in range(len(claim.deciding()))]


def test_which_runs_are_asked_for() -> None:
    """Seen seeds where it was tried, more in `seeds_in`; fresh ones at home; those of pictures alone have few."""
    alone = Arm("for pictures", (("seed", "2"),))
    fields = {"first_seed": 0, "regimes": (OTHER.name,), "seeds_in": {OTHER.name: 7}, "also": (alone,)}
    claim = _claim(_prediction(), **fields, fresh_seeds=4)
    home, other = claim.runs(REGIME.name), claim.runs(OTHER.name)
    assert claim.places == (REGIME.name, OTHER.name)
    assert sorted(seed for arm, seed in home if arm == OURS) == list(range(FRESH, FRESH + 4)) and len(home) == 8
    assert [seed for arm, seed in other if arm == alone] == list(range(5)) and len(other) == 2 * 7 + 5
    assert len(claim.runs(OTHER.name, 3)) == 9
    assert list(replace(claim, fresh_from=FRESH + 9).deciding()) == list(range(FRESH + 9, FRESH + 13))
    with pytest.raises(ValueError, match=f"claim 1: fresh_from: expected at least {FRESH}, got 99"):
        replace(claim, fresh_from=99)
    with pytest.raises(ValueError, match="claim 1: seeds_in: expected one of"):
        replace(claim, seeds_in={"warm": 7})
    with pytest.raises(ValueError, match="claim 1: home: expected a claim on fresh seeds to be tried there alone"):
        replace(claim, first_seed=FRESH)


def test_a_missing_seed_leaves_it_open() -> None:
    """With a run missing, or its number, there is no effect and no word; the pairs that are there are shown."""
    found = _finding([1.0] * 4, [0.0] * 5, "more", 0.5)
    assert (found.word, found.outcomes[0].effect, len(found.outcomes[0].values)) == (None, None, 4)
    assert _finding([1.0, 1.0, 1.0, 1.0, math.nan], [0.0] * 5, "more", 0.5).word is None


def test_times_of_other_kernels_are_not_compared() -> None:
    """Where a measure asks for it, a seed whose two runs had not the same kernels counts as missing; others are
    paired."""
    timed = Measure("t", "seconds", "s", lambda row: row["x"], same=("compiled",))
    claim = _claim(_prediction("at_most", 1.1, "ratio", measure=timed))
    rows = {
        key(REGIME, arm, FRESH + s): {"x": 2.0 + s % 2 + 0.1 * (arm is OURS) * s, "compiled": True}
        for arm in (OURS, THEIRS)
        for s in range(5)
    }
    (found,) = findings([claim], [REGIME], rows)
    assert found.outcomes[0].effect is not None and found.outcomes[0].effect.test == "paired"
    rows[key(REGIME, THEIRS, FRESH + 3)]["compiled"] = False
    (found,) = findings([claim], [REGIME], rows)
    assert len(found.outcomes[0].values) == 4 and found.word is None
