"""Laws of sandbox/border/table.py, on rows made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from scipy import stats

from sandbox.border.table import STORY, by_staleness, ended, places, runs, same_as, slower_runs, story, summary
from sandbox.claims import REGIMES
from sandbox.claims.arms import arm
from sandbox.claims.border_arms import DEGREES, REMEDIES, ROUTER_GAPS, at, remedies_at, slower, with_dual_clip
from sandbox.ledger.cells import cell, key
from theory.objectives.presets.dual_clip import DualClip

(BORDER,) = (regime for regime in REGIMES if regime.name == "border")


def row(place: tuple[str, str, str], seed: int, accuracies: list[float], n: int = 8) -> tuple[str, dict]:
    """Key and row of a run of the border study whose evaluations, step 0 first, are these."""
    preset, gap, remedy = place
    one = at(gap, remedy, n, preset)
    return key(BORDER, one, seed), {
        "regime": "border", "arm": one.name, "seed": seed, "num_steps": len(accuracies) - 1,
        "evaluations": [[i, value] for i, value in enumerate(accuracies)],
        "first": {"rollout_corr/k3_kl": 0.3}, "series": {"rollout_corr/k3_kl": [0.3, 0.5]},
    }  # fmt: skip


def test_a_run_has_its_place_and_course() -> None:
    """Gap, N and remedy come from the arm; a collapse is told in updates, N per global step."""
    found = runs(dict([row(("grpo", "r0.5", "R2"), 100, [0.3, *[0.0] * 8])]), BORDER)
    (one,) = found.to_dict("records")
    assert (one["preset"], one["gap"], one["N"], one["remedy"], one["seed"]) == ("grpo", "r0.5", 8, "R2", 100)
    assert (one["area"], one["initial"], one["collapsed"], one["collapse"], one["kl"]) == (0.0, 0.3, 1.0, 2 * 8, 0.3)


def test_a_row_of_another_config_is_left_out() -> None:
    """A row whose key is not that of its arm and seed was made from another config."""
    name, found = row(("grpo", "r0.5", "none"), 100, [0.3, 0.3])
    assert len(runs({name: found}, BORDER)) == 1
    assert runs({"0123456789ab": found}, BORDER).empty and runs({name: found | {"regime": "hot"}}, BORDER).empty


def test_a_run_whose_end_is_unknown_is_left_out() -> None:
    """Of a run that was never right, or never evaluated, nobody can say that it collapsed: places count the others."""
    given = [row(("grpo", "r0.5", "none"), seed, [0.3, *[0.0] * 8]) for seed in (100, 101, 102, 103)]
    for name, found in given[2:]:
        found["evaluations"] = [[i, 0.0] for i in range(9)] if found["seed"] == 102 else []
        assert runs({name: found}, BORDER).empty
    one = summary(runs(dict(given), BORDER), remedy="none")
    assert one is not None and ended(one) == "2 of 2"


def test_a_run_of_another_claims_arm_has_the_place_of_its_config() -> None:
    """`minirl-N8` of the papers' claims is the map's MiniRL at router noise 0.5: one config, one key, one run."""
    name, found = row(("minirl", "r0.5", "none"), 119, [0.3, 0.3])
    other = arm("minirl", n=8)
    assert other.name != found["arm"] and key(BORDER, other, 119) == name
    (one,) = runs({name: found | {"arm": other.name}}, BORDER).to_dict("records")
    assert (one["preset"], one["gap"], one["N"], one["remedy"]) == ("minirl", "r0.5", 8, "none")
    unlike = arm("minirl", n=4)
    assert runs({name: found | {"arm": unlike.name}}, BORDER).empty


def test_runs_at_half_the_rate_are_apart() -> None:
    """The map has none of them, and their table none of the map's; each has the rate of its config."""
    name, found = row(("grpo", "r0.5", "none"), 104, [0.3, *[0.0] * 8])
    arm_ = slower(at("r0.5", "none", 8))
    rows = {
        name: found,
        key(BORDER, arm_, 104): found | {"arm": arm_.name, "evaluations": [[i, 0.3] for i in range(9)]},
    }
    (fast,), (slow,) = (table(rows, BORDER).to_dict("records") for table in (runs, slower_runs))
    assert (fast["rate"], fast["collapsed"], fast["cell"]) == (2e-3, 1.0, name)
    assert (slow["rate"], slow["collapsed"], slow["N"], slow["gap"]) == (1e-3, 0.0, 8, "r0.5")
    # A row whose key is not that of the slower arm was made from another config.
    assert slower_runs({name: found | {"arm": arm_.name}}, BORDER).empty


@pytest.mark.parametrize(("preset", "norms", "share"), [
    ("grpo", [1.1, 0.9, *[9.0] * 18], 0.5), ("grpo", [None, 1.1, *[0.0] * 18], 1.0), ("gspo", [0.8, 0.8], 1.0),
    ("minirl", [6.9, 6.9, *[9.0] * 18], 0.0), ("grpo", [], math.nan),
])  # fmt: skip
def test_clipping_is_counted_in_the_first_tenth(preset: str, norms: list, share: float) -> None:
    """The share of its windows, two of twenty, whose mean norm is above the threshold of the run's preset."""
    name, found = row((preset, "r0.5", "none"), 104, [0.3] * 9)
    series = found["series"] | ({"actor/grad_norm": norms} if norms else {})
    (one,) = runs({name: found | {"series": series}}, BORDER).to_dict("records")
    assert one["clipped"] == pytest.approx(share, nan_ok=True)


def test_the_entropy_at_the_end_is_of_the_last_quarter() -> None:
    """The median over a place's runs of the mean over the last five windows of twenty."""
    rows = {}
    for seed, end in ((104, 0.1), (105, 0.2), (106, 0.9)):
        name, found = row(("grpo", "r0.5", "R3"), seed, [0.3] * 9)
        rows[name] = found | {"series": {"actor/entropy": [0.5] * 15 + [end] * 5}}
    one = summary(runs(rows, BORDER), N=8, remedy="R3")
    assert one is not None and one["entropy_final"] == pytest.approx(0.2)
    assert summary(runs(rows, BORDER), N=4) is None


def test_places_are_means_over_seeds() -> None:
    """Mean, Student interval and share of collapses over the seeds of a place."""
    given = [
        row(("grpo", "r0.5", "none"), seed, [0.3, *[level] * 8])
        for seed, level in ((100, 0.4), (101, 0.3), (102, 0.05))
    ]
    (one,) = places(runs(dict(given), BORDER)).to_dict("records")
    assert one["n"] == 3 and one["area"] == pytest.approx(0.25) and one["collapsed"] == pytest.approx(1 / 3)
    half = stats.t.ppf(0.975, 2) * math.sqrt((0.15**2 + 0.05**2 + 0.2**2) / 2) / math.sqrt(3)
    assert (one["low"], one["high"]) == (pytest.approx(0.25 - half), pytest.approx(0.25 + half))


def test_the_story_is_told_by_seeds_that_have_it_all() -> None:
    """A seed without one of the six runs does not count; one whose R2 holds has not the whole story."""
    fell, held = [0.3, *[0.0] * 8], [0.3, *[0.4] * 8]
    given = [row(place, seed, fell if falls else held) for seed in (100, 101, 102) for place, falls in STORY.items()]
    del given[-1]
    given[6 + 2] = row(("grpo", "r0.5", "R2"), 101, held)
    found = story(runs(dict(given), BORDER))
    assert found["seed"].tolist() == [100, 101] and found["all"].tolist() == [True, False]
    assert found["grpo r0.5 R2"].tolist() == [True, False] and found["grpo r0.5 none"].all()


def test_what_is_not_run_stands_for_what_is() -> None:
    """Every place of the map is run, or equals one that is; only Pr3 under an exact engine and N > 1 is neither."""
    missing = {
        (gap, n, remedy)
        for gap in ROUTER_GAPS
        for n in DEGREES
        for remedy in REMEDIES
        if same_as(gap, n, remedy) not in remedies_at(gap, n)
    }
    assert missing == {("exact", n, "Pr3") for n in DEGREES if n > 1}


def test_lines_by_staleness_ascend_in_n() -> None:
    """A line per remedy, N ascending whatever the order of the rows, each point the mean over its seeds."""
    given = [
        row(("grpo", "r0.5", "R3"), seed, [0.3, *[level] * 4], n)
        for n, seed, level in ((8, 100, 0.2), (8, 101, 0.4), (1, 100, 0.1))
    ]
    found = by_staleness(runs(dict(given), BORDER), "r0.5", "area")
    assert list(found) == ["R3"] and list(found["R3"].items()) == [(1, pytest.approx(0.1)), (8, pytest.approx(0.3))]


@pytest.mark.parametrize("remedy", ["none", "R3", "tis-R3"])
def test_the_second_clip_is_all_in_which_its_arm_differs(remedy: str) -> None:
    """The trust region has GRPO's two bounds and c = 3; advantage, ratio, weight, aggregation and all else are equal
    to GRPO's."""
    plain = at("r0.5", remedy, 8)
    own, other = (cell(BORDER, arm, 104).config for arm in (plain, with_dual_clip(plain)))
    grpo, dual = (config.algorithm.build() for config in (own, other))
    assert isinstance(dual.objective.trust_region, DualClip) and not isinstance(grpo.objective.trust_region, DualClip)
    assert dual.objective.trust_region.clip_ratio_c == 3.0
    same = {"name": "", "title": "", "trust_region": grpo.objective.trust_region}
    assert replace(dual.objective, **same) == replace(grpo.objective, **same)
    for bound in ("eps_low", "eps_high"):
        assert getattr(dual.objective.trust_region, bound) == getattr(grpo.objective.trust_region, bound)
    assert replace(dual, objective=grpo.objective) == grpo
    named = {"name": "", "algorithm": own.algorithm}
    assert other.model_copy(update=named) == own.model_copy(update=named)
