"""Laws of *undecided*: two causes are named where one step does not tell them apart, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstorder.cli import main
from lab.doctor import dumps, undecided
from lab.doctor.causes import CAUSES, UNKNOWN, Cause
from lab.doctor.diagnosis import Diagnosis, diagnose
from lab.doctor.importers import load_dump, rows
from lab.doctor.reliability import BINS, bin_of, share_right
from lab.doctor.steps.course import Course, StepRecord
from lab.doctor.steps.page import Ward, render
from lab.doctor.undecided import (
    CHECKS,
    COARSE,
    DECIDED,
    LEAST_WHOLE,
    MOST_WHOLE,
    ROUTES_FIRST,
    TRY,
    between,
    candidates,
)
from lab.traces import Trace
from tests.lab.doctor.patients import draw_rows, with_experts
from theory.streams import stream

BARE = {"k3_kl": 1e-3, "size": 0.3, "num_tokens": 4000.0}
"""The clues of a dump without the experts of one side or both."""
SEEN = BARE | {"flips_per_size": 0.2, "router_disagreement": 0.06}
BY_NAME = {cause.name: cause for cause in (*CAUSES, UNKNOWN)}


def strengths(**given: float) -> dict[Cause, float]:
    """All causes by strength, the strongest first; those not given have none."""
    of = {cause: given.get(name, 0.0) for name, cause in BY_NAME.items()}
    return dict(sorted(of.items(), key=lambda item: -item[1]))


def names(seen: dict[str, float], **given: float) -> list[str]:
    """The names of the candidates."""
    return [cause.name for cause in candidates(seen, strengths(**given))]


@given(st.floats(0.4, 1.0))
def test_the_two_strongest_are_candidates_below_the_least_strength_that_decides(first: float) -> None:
    """Below DECIDED the two strongest in their order, from it on none."""
    found = names(SEEN, switched=first, stale=(1 - first) / 2)
    assert found == (["switched", "stale"] if first < DECIDED else [])


@pytest.mark.parametrize("name", ["stale", "wrong_weights"])
def test_other_weights_and_a_coarse_format_are_candidates_at_a_whole_unit(name: str) -> None:
    """A logit that is off by LEAST_WHOLE up to MOST_WHOLE, however strong the cause; other causes stand alone there."""
    for size, is_whole in ((0.99 * LEAST_WHOLE, False), (LEAST_WHOLE, True), (MOST_WHOLE, False)):
        assert names({**SEEN, "size": size}, **{name: 0.95}) == ([name, "precision"] if is_whole else [])
        assert names({**SEEN, "size": size}, routing=0.95) == []


def test_a_candidate_without_strength_has_no_number() -> None:
    """By the size of the gap alone a coarse format is possible; its strength of 0 would say that it is not."""
    found = Diagnosis(SEEN | {"size": LEAST_WHOLE}, strengths(stale=0.65))
    first, second = (BY_NAME[name].title for name in ("stale", "precision"))
    assert found.verdict == f"undecided: it looks like {first} (0.65) or {second}."


@pytest.mark.parametrize("seen", [{**SEEN, "k3_kl": 1e-7}, {**BARE, "k3_kl": 1e-7}, {**BARE, "is_dense": 1.0}])
def test_harmless_rounding_and_dense_models_are_not_undecided(seen: dict[str, float]) -> None:
    """The former needs no decision; the latter have no routers, and no strength was counted on them."""
    assert names(SEEN, precision=0.4, stale=0.3) == ["precision", "stale"]
    assert names(seen, precision=0.4, stale=0.3) == []


@pytest.mark.parametrize(("given", "size", "wanted"), [
    ({"precision": 0.99}, 0.3, ["precision", "routing"]),
    ({"precision": 0.65, "stale": 0.35}, 0.3, ["precision", "stale", "routing"]),
    ({"stale": 0.9}, 0.3, ["stale", "routing"]),
    ({"wrong_weights": 0.96}, 3.0, ["wrong_weights", "routing"]),
    ({"wrong_weights": 0.96}, 1.0, ["wrong_weights", "precision", "routing"]),
    ({"unknown": 0.5, "stale": 0.2, "precision": 0.1}, 0.3, ["stale", "routing"]),
    ({"switched": 0.5, "precision": 0.4}, 0.3, ["switched", "precision", "routing"]),
    ({"routing": 0.5, "precision": 0.4}, 0.3, ["routing", "precision"]),
    ({"routing": 0.8, "precision": 0.2}, 0.3, []),
    ({"temperature": 0.99}, 0.3, []),
])  # fmt: skip
def test_routers_are_a_candidate_where_the_experts_of_one_side_are_missing(
    given: dict[str, float], size: float, wanted: list[str]
) -> None:
    """Beside all that they look like, however strong; not beside a clear cause of another kind."""
    assert names(BARE | {"size": size}, **given) == wanted
    assert names(BARE | {"size": size, "is_dense": 1.0}, **given) == []


WIDE = Path(__file__).parents[3] / "results/on_gpu/wide_bf16.safetensors"
"""A trace of an H200, of whose KL R3 removes 95 % (docs/on-gpu.md)."""


@pytest.mark.parametrize("write", [dumps.verl_v1, dumps.nemo_rl, dumps.trl, dumps.skyrl])
def test_no_framework_hides_routers(write: Callable[[Path, dumps.Rows], Path], tmp_path: Path) -> None:
    """A real trace whose gap comes through the routers has them among its causes in every framework's format."""
    trace = Trace.load(WIDE)
    assert diagnose(trace).named[0].name == "routing"
    found = diagnose(load_dump(write(tmp_path, dumps.rows_of(trace))).trace)
    assert "routing" in {cause.name for cause in (*found.named, *found.candidates)} and found.share_right is None
    assert found.named[0].name in ("routing", "undecided")


def test_routes_that_were_replayed_are_no_cause(tmp_path: Path) -> None:
    """The same trace, scored by a trainer that replays: its own choices had no part, and a caveat says so."""
    replace(Trace.load(WIDE), old_pass="replay_rollout").save(tmp_path / "replayed.safetensors")
    dump = load_dump(tmp_path / "replayed.safetensors")
    found = diagnose(dump.trace)
    assert found.seen["router_disagreement"] == 0 and "routing" not in {cause.name for cause in found.named}
    assert "both sides ran the same routes" in dump.caveat and load_dump(WIDE).caveat == ""
    assert "The trainer replayed mu's experts: no route differs." in " ".join(found.lines())


def test_the_first_line_says_that_the_dump_cannot_tell_and_the_second_which_experiment_can() -> None:
    """Both titles without a strength, as none was counted; then replay, or old's experts; --model for a dense model."""
    found = Diagnosis(BARE, strengths(precision=0.99))
    first, second, *rest = found.lines()
    titles = f"{BY_NAME['precision'].title} or {BY_NAME['routing'].title}"
    assert first == f"undecided: it looks like {titles} (without the experts of both sides this dump cannot tell)."
    assert second == f"Do first: {ROUTES_FIRST} {CHECKS['precision']}" and second.startswith(
        "Do first: Replay mu's experts"
    )
    assert any("Without the experts of both sides" in line for line in rest) and found.share_right is None


@pytest.mark.parametrize(("strength", "wanted"), [
    (0.9, ["sampler_mask", "undecided"]), (0.5, ["undecided", "sampler_mask"]), (0.1, ["undecided"]),
])  # fmt: skip
def test_a_fault_of_the_sampler_is_named_beside_the_candidates(strength: float, wanted: list[str]) -> None:
    """First if it is sure, as it competes with no cause of a gap; and its clues are in the report."""
    given = strengths(precision=0.99, sampler_mask=strength)
    order = sorted(given, key=lambda cause: (cause.explains or given[cause] < DECIDED, -given[cause]))
    found = Diagnosis(BARE | {"surprise_gap": -0.1}, {cause: given[cause] for cause in order})
    assert [cause.name for cause in found.named] == wanted
    assert sum("undecided: " in line for line in found.lines()) == 1
    assert any("Tokens are by 0.1 nats" in line for line in found.lines()) == (len(wanted) == 2)


def test_an_undecided_diagnosis_names_both_in_its_first_line() -> None:
    """The verdict has both titles with their strengths, then a trial of each; no share is said of *undecided*."""
    found = Diagnosis(SEEN, strengths(precision=0.4, stale=0.3))
    assert [cause.name for cause in found.named] == ["undecided"] and found.fault and found.share_right is None
    both = f"{BY_NAME['precision'].title} (0.40) or {BY_NAME['stale'].title} (0.30)"
    trials = f"{CHECKS['precision']} {CHECKS['stale']}{TRY}"
    assert found.lines()[:2] == [f"undecided: it looks like {both}.", f"Do first: {trials}"]
    sure = Diagnosis(SEEN, strengths(precision=0.9, stale=0.1))
    assert sure.named[0].name == "precision" and sure.share_right == share_right(0.9)


def test_a_run_with_an_undecided_step_has_its_page() -> None:
    """The row of the step names both causes with their strengths, as the step's own verdict does."""
    found = Diagnosis({**SEEN, "kl_per_flip": 0.01}, strengths(stale=0.5, precision=0.3, routing=0.01))
    course = Course((StepRecord(7, 4, found, 0.1),), None, None, None, ())
    both = f"{BY_NAME['stale'].title} (0.50) or {BY_NAME['precision'].title} (0.30)"
    assert f"<small>{both}</small>" in render(Ward("run", course, 0, None, "rows")) and both in found.verdict


@pytest.mark.parametrize(
    ("first", "second", "is_coarse"),
    [("routing", "precision", False), ("stale", "precision", True), ("shifted", "stale", False)],
)
def test_what_is_said_is_of_the_two(first: str, second: str, is_coarse: bool) -> None:
    """Both titles, the clues of both once each, a trial of each or its fix; coarse formats where they may be meant."""
    pair = BY_NAME[first], BY_NAME[second]
    cause = between(pair, SEEN)
    told = cause.words(SEEN)
    assert all(one.title in told and CHECKS.get(one.name, one.fix) in cause.fix for one in pair)
    assert told.endswith(COARSE) == is_coarse
    assert cause.fix.endswith(TRY) and TRY not in between(pair, SEEN | {"replay_removes": 0.5}).fix
    assert set(cause.shows) == {*pair[0].shows, *pair[1].shows} and len(set(cause.shows)) == len(cause.shows)


@given(st.floats(0, 1), st.floats(0, 1))
def test_the_share_of_right_ones_grows_with_the_strength(low: float, high: float) -> None:
    """Each strength has a bin whose least strength it reaches, and a stronger one has no smaller share."""
    low, high = sorted((low, high))
    assert 0 < share_right(low) <= share_right(high) < 1
    assert BINS[bin_of(low)][0] <= low and BINS[0][0] == 0


def routed() -> Trace:
    """Deviations of a tenth of a logit, and a tenth of the routers with another expert."""
    generator, out = stream(0, "undecided"), []
    for row in draw_rows():
        S = len(row["tokens"])
        old = torch.rand(S - 1, 2, 8, generator=generator).topk(2).indices.sort(-1).values
        other = torch.rand(S - 1, 2, 8, generator=generator).topk(2).indices.sort(-1).values
        mu = torch.where(torch.rand(S - 1, 2, 1, generator=generator) < 0.1, other, old)
        noise = 0.1 * torch.randn(len(row["logp_old"]), generator=generator)
        logp_mu = [min(x + y, 0.0) for x, y in zip(row["logp_old"], noise.tolist(), strict=True)]
        out.append(with_experts(row | {"logp_mu": logp_mu}, mu, old))
    return rows.trace(out)


def test_a_pipeline_can_fail_on_it_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--fail-on undecided and any exit with 3, another cause's name with 0; --json lists the candidates."""
    routed().save(path := tmp_path / "trace.safetensors")
    monkeypatch.setattr(undecided, "DECIDED", 1.1)
    codes = [main(["doctor", str(path), "--fail-on", name]) for name in ("undecided", "any", "routing", "none")]
    assert codes == [3, 3, 0, 0]
    capsys.readouterr()
    main(["doctor", str(path), "--json"])
    (told,) = json.loads(capsys.readouterr().out)["traces"]
    assert told["fault"] == "undecided" and told["share_right"] is None
    assert told["candidates"] == list(told["strengths"])[:2]
    monkeypatch.setattr(undecided, "DECIDED", 0.0)
    main(["doctor", str(path), "--json"])
    (told,) = json.loads(capsys.readouterr().out)["traces"]
    assert told["candidates"] == [] and told["share_right"] == share_right(max(told["strengths"].values()))
