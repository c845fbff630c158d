"""Laws of sandbox/ledger/verdicts.py and measures.py: from rows to words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from sandbox.claims import REGIMES
from sandbox.ledger.cells import NUM_WINDOWS, key
from sandbox.ledger.claim import Arm, Claim, Measure, Prediction
from sandbox.ledger.measures import FINAL_REWARD, KL_RISE, STEP_SECONDS, SURVIVAL, between, probe
from sandbox.ledger.statistics import Expected
from sandbox.ledger.verdicts import Outcome, outcomes, together

REGIME, SEEDS = REGIMES[0], range(5)
OURS, THEIRS = Arm("ours", (("seed", "1"), ("num_steps", "40"))), Arm("theirs", (("num_steps", "80"),))
X = Measure("x", "a number", "1", lambda row: row["x"])


def _outcome(
    ours: list[float], theirs: list[float], expected: Expected, margin: float, scale: Any = "difference"
) -> Outcome:
    claim = Claim(1, "c", "s", "here", (Prediction("w", OURS, THEIRS, X, expected, margin, scale),))
    rows = {key(REGIME, arm, s): {"x": x} for arm, xs in ((OURS, ours), (THEIRS, theirs)) for s, x in enumerate(xs)}
    return outcomes([claim], [REGIME], rows)[0]


def test_effects_are_paired_by_seed() -> None:
    """Differences are within a seed: a spread over seeds that both arms share does not hide an effect."""
    base = [0.0, 10.0, -5.0, 3.0, 7.0]
    found = _outcome([x + 1 + 0.01 * i for i, x in enumerate(base)], base, "more", 0.5)
    assert found.effect is not None
    assert found.effect.mean == pytest.approx(1.02)
    assert found.word == "reproduced"


@pytest.mark.parametrize(("first_step", "word"), [(None, "not applicable"), (30, "not reproduced")])
def test_what_is_said_of_a_collapse_needs_one(first_step: int | None, word: str) -> None:
    """Where no run of the premise's arm collapsed, nothing was predicted, and Holm counts one test less."""
    said = Prediction("w", OURS, THEIRS, X, "more", 0.5, premise=THEIRS)
    claim = Claim(1, "c", "s", "here", (said, replace(said, premise=None)))
    rows = {
        key(REGIME, arm, seed): {"x": 0.01 * seed * (arm is OURS), "first_step": first_step if seed == 3 else None}
        for arm in (OURS, THEIRS)
        for seed in SEEDS
    }
    moot, plain = outcomes([claim], [REGIME], rows)
    alone = outcomes([replace(claim, predictions=claim.predictions[1:])], [REGIME], rows)[0].p
    assert alone is not None
    assert (moot.word, plain.word) == (word, "not reproduced")
    assert (moot.p, plain.p) == pytest.approx((None, alone) if first_step is None else (2 * alone, 2 * alone))


def test_a_ratio_is_a_factor() -> None:
    """On the scale `ratio` the effect is the mean logarithm, and the margin a factor."""
    theirs = [1.0, 2.0, 4.0, 8.0, 16.0]
    ours = [x / 3 * c for x, c in zip(theirs, (0.98, 0.99, 1.0, 1 / 0.99, 1 / 0.98), strict=True)]
    found = _outcome(ours, theirs, "less", 2.0, "ratio")
    assert found.effect is not None
    assert math.exp(found.effect.mean) == pytest.approx(1 / 3)
    assert found.word == "reproduced"
    assert _outcome(ours, theirs, "less", 4.0, "ratio").word == "not reproduced"


def test_a_zero_has_no_ratio() -> None:
    """A seed with a 0 on either side leaves the prediction undecided on the scale `ratio`."""
    assert _outcome([1.0] * 5, [0.0, 1.0, 1.0, 1.0, 1.0], "more", 2.0, "ratio").word is None


def test_a_ratio_of_means_takes_zeros() -> None:
    """On `ratio_of_means` single seeds may be 0; the effect is log of the means' ratio."""
    theirs, ours = [0.0, 1.0, 1.0, 1.5, 1.5], [4.9, 5.0, 5.0, 5.1, 5.0]
    found = _outcome(ours, theirs, "more", 2.0, "ratio_of_means")
    assert found.effect is not None
    assert math.exp(found.effect.mean) == pytest.approx(5.0)
    assert found.word == "reproduced"
    assert _outcome(theirs, ours, "less", 2.0, "ratio_of_means").word == "reproduced"
    assert _outcome(ours, [0.0] * 5, "more", 2.0, "ratio_of_means").word is None


def test_a_claim_says_how_many_seeds_it_needs() -> None:
    """A claim of seven seeds is open with five; whoever asks for five has an answer."""
    prediction = Prediction("w", OURS, THEIRS, X, "more", 0.5)
    claim = Claim(1, "c", "s", "here", (prediction,), num_seeds=7)
    rows = {key(REGIME, arm, s): {"x": float(arm == OURS)} for arm in (OURS, THEIRS) for s in SEEDS}
    assert outcomes([claim], [REGIME], rows)[0].word is None
    assert outcomes([claim], [REGIME], rows, 5)[0].effect is not None


def test_a_regime_may_need_more_seeds() -> None:
    """With seven seeds in one regime a claim is open there with five and decided elsewhere; arms that only its pictures
    need have five in both."""
    alone = Arm("for pictures", (("seed", "2"),))
    prediction = Prediction("w", OURS, THEIRS, X, "more", 0.5)
    more, other = REGIMES[0].name, REGIMES[1].name
    claim = Claim(1, "c", "s", "here", (prediction,), seeds_in={more: 7}, also=(alone,))
    rows = {key(r, arm, s): {"x": float(arm == OURS)} for r in REGIMES[:2] for arm in (OURS, THEIRS) for s in SEEDS}
    assert [o.word is None for o in outcomes([claim], REGIMES[:2], rows)] == [True, False]
    for regime, number in ((more, 7), (other, 5)):
        runs = claim.runs(regime)
        assert [runs.count((arm, number - 1)) for arm in (OURS, THEIRS)] == [1, 1]
        assert [seed for arm, seed in runs if arm == alone] == list(range(5))
        assert len(runs) == 2 * number + 5
        assert len(claim.runs(regime, 3)) == 9
    for wrong in ({"warm": 7}, {more: 5}):
        with pytest.raises(ValueError, match="claim 1: seeds_in: expected one of"):
            replace(claim, seeds_in=wrong)


def test_spread_compares_deviations_from_the_median() -> None:
    """On the scale `spread` an arm's level does not matter, only how far its seeds lie from their median."""
    found = _outcome([5.0, 5.0, 5.0, 5.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0], "less", 0.0, "spread")
    assert found.effect is not None
    assert found.effect.mean == pytest.approx(-1.2)


def test_a_threshold_has_no_opposite() -> None:
    """Against a number an effect on the other side is not reproduced; against an arm it is the opposite."""
    ours = [0.0, 0.01, 0.02, 0.01, 0.0]
    assert _outcome(ours, [1.0] * 5, "more", 0.1).word == "opposite"
    claim = Claim(1, "c", "s", "here", (Prediction("w", OURS, 1.0, X, "more", 0.1),))
    rows = {key(REGIME, OURS, seed): {"x": x} for seed, x in enumerate(ours)}
    assert outcomes([claim], [REGIME], rows)[0].word == "not reproduced"


def test_a_missing_seed_leaves_it_open() -> None:
    """With a run missing, or its number, there is no effect and no word; the pairs that are there are shown."""
    found = _outcome([1.0] * 4, [0.0] * 5, "more", 0.5)
    assert (found.word, found.effect, len(found.values)) == (None, None, 4)
    assert _outcome([1.0, 1.0, 1.0, 1.0, math.nan], [0.0] * 5, "more", 0.5).word is None


def test_times_of_other_kernels_are_not_compared() -> None:
    """Where a measure asks for it, a seed whose two runs had not the same kernels counts as missing."""
    timed = Measure("t", "seconds", "s", lambda row: row["x"], same=("compiled",))
    claim = Claim(1, "c", "s", "here", (Prediction("w", OURS, THEIRS, timed, "at_most", 1.1, "ratio"),))
    rows = {key(REGIME, arm, s): {"x": 2.0 + s % 2, "compiled": True} for arm in (OURS, THEIRS) for s in SEEDS}
    assert len(outcomes([claim], [REGIME], rows)[0].values) == 5
    rows[key(REGIME, THEIRS, 3)]["compiled"] = False
    found = outcomes([claim], [REGIME], rows)[0]
    assert len(found.values) == 4 and found.word is None


def test_holm_runs_over_the_whole_ledger() -> None:
    """The p of one outcome grows with the number of outcomes that are decided with it, and no others."""
    ours, theirs = [1.0, 1.1, 0.9, 1.05, 1.2], [0.0, 0.1, 0.0, 0.05, 0.1]
    rows = {
        key(r, a, s): {"x": xs[s]} for r in REGIMES[:2] for a, xs in ((OURS, ours), (THEIRS, theirs)) for s in SEEDS
    }
    claims = [Claim(i, f"c{i}", "s", "here", (Prediction("w", OURS, THEIRS, X, "more", 0.5),)) for i in range(3)]
    alone = outcomes(claims[:1], REGIMES[:1], rows)[0].p
    for found in outcomes(claims, REGIMES[:2], rows):
        assert found.p == pytest.approx(6 * (alone or 0.0))
    undecided = outcomes(claims, REGIMES, rows)  # the third regime has no rows
    assert [o.p for o in undecided if o.regime == REGIMES[2].name] == [None] * 3
    assert undecided[0].p == pytest.approx(6 * (alone or 0.0))


def test_an_undecided_outcome_leans_where_its_own_test_points() -> None:
    """Holm's correction over 40 outcomes takes the word; its own p says for, against, or neither, and so it leans."""
    xs = {"for": [1.0, 1.2, 0.9, 1.3, 1.1], "against": [0.1, 0.3, -0.2, 0.2, 0.0], None: [0.0, 1.0, 0.3, 0.9, 0.2]}
    for side, ours in xs.items():
        claims = [Claim(i, f"c{i}", "s", "here", (Prediction("w", OURS, 0.0, X, "more", 0.6),)) for i in range(40)]
        found = outcomes(claims, [REGIME], {key(REGIME, OURS, s): {"x": x} for s, x in enumerate(ours)})[0]
        assert (found.word, found.leans) == ("inconclusive", side)
    decided = _outcome([1.0, 1.1, 0.9, 1.0, 1.05], [0.0] * 5, "more", 0.5)
    assert (decided.word, decided.alone, decided.leans) == ("reproduced", "reproduced", None)
    assert _outcome([1.0] * 4, [0.0] * 5, "more", 0.5).leans is None


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["reproduced", "reproduced"], "reproduced"), (["reproduced", "not reproduced"], "not reproduced"),
        (["reproduced", "opposite"], "not reproduced"), (["opposite", "not reproduced"], "opposite"),
        (["reproduced", "inconclusive"], "inconclusive"), (["inconclusive", "not reproduced"], "not reproduced"),
        (["reproduced", None], None), ([], None), (["not applicable"], "not applicable"),
        (["not applicable", "reproduced"], "reproduced"), (["not applicable", None], None),
    ],
)  # fmt: skip
def test_a_claim_is_reproduced_where_all_of_it_is(words: list[Any], word: str | None) -> None:
    """The claim's word is the weakest of its predictions'."""
    assert together(words) == word


def _row(**series: Sequence[float]) -> dict[str, Any]:
    full = {name: [*values, *[None] * (NUM_WINDOWS - len(values))] for name, values in series.items()}
    return {"series": full, "first_step": None, "num_steps": 100, "probes": {}}


def test_survival_is_the_part_of_the_run_before_its_first_reason() -> None:
    """1 where no rule fired; (first step - 1) / steps where one did."""
    assert SURVIVAL.of(_row()) == 1.0
    assert SURVIVAL.of(_row() | {"first_step": 51}) == 0.5
    assert SURVIVAL.of(_row() | {"first_step": 1}) == 0.0


def test_a_run_that_stopped_keeps_its_last_value() -> None:
    """Where the asked windows are empty, the last value before them stands; without any, there is no number."""
    name = "reward/mean"
    whole = _row(**{name: [0.1] * 15 + [0.5] * 5})
    assert FINAL_REWARD.of(whole) == pytest.approx(0.5)
    assert FINAL_REWARD.of(_row(**{name: [0.1, 0.2, 0.3]})) == 0.3
    assert math.isnan(FINAL_REWARD.of(_row()))
    assert between(name, 0.0, 0.1, "w", "1").of(whole) == pytest.approx(0.1)


def test_the_rise_of_the_kl_is_over_its_beginning() -> None:
    """The largest window over the mean of the first two; no number where it begins at 0."""
    name = "rollout_corr/k3_kl"
    assert KL_RISE.of(_row(**{name: [1.0, 3.0, 20.0, 4.0]})) == 10.0
    assert math.isnan(KL_RISE.of(_row(**{name: [0.0, 0.0, 20.0]})))


def test_the_time_of_a_step_is_the_processors() -> None:
    """CPU seconds over the steps that were taken; none for a run that was resumed, or that has no such field."""
    assert STEP_SECONDS.of(_row() | {"cpu_seconds": 50.0, "last_step": 25}) == 2.0
    assert math.isnan(STEP_SECONDS.of(_row() | {"cpu_seconds": None, "last_step": 25}))
    assert math.isnan(STEP_SECONDS.of(_row() | {"last_step": 25}))


def test_a_probe_that_found_nothing_is_no_number() -> None:
    """null in a row is nan; what was found is itself."""
    measure = probe("p", "words", "1")
    assert math.isnan(measure.of(_row()))
    assert measure.of(_row() | {"probes": {"p": 0.25}}) == 0.25


@pytest.mark.parametrize(("start", "stop"), [(0.5, 0.5), (-0.1, 1.0), (0.5, 1.1), (0.51, 0.52)])
def test_windows_that_hold_nothing_are_refused(start: float, stop: float) -> None:
    """A measure over no window is a ValueError."""
    with pytest.raises(ValueError, match="start, stop"):
        between("x", start, stop, "w", "1")
