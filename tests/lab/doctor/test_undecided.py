"""Laws of *undecided*: two causes are named where one step does not tell them apart, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firstorder.cli import main
from lab.doctor import undecided
from lab.doctor.causes import CAUSES, UNKNOWN, Cause
from lab.doctor.diagnosis import Diagnosis
from lab.doctor.importers import rows
from lab.doctor.reliability import BINS, bin_of, share_right
from lab.doctor.steps.course import Course, StepRecord
from lab.doctor.steps.page import Ward, render
from lab.doctor.undecided import CHECKS, COARSE, DECIDED, LEAST_WHOLE, MOST_WHOLE, TRY, between, candidates
from lab.traces import Trace
from tests.lab.doctor.patients import draw_rows, with_experts
from theory.streams import stream

SEEN = {"flips_per_size": 0.2, "k3_kl": 1e-3, "size": 0.3, "num_tokens": 4000.0}
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


@pytest.mark.parametrize("seen", [{**SEEN, "k3_kl": 1e-7}, {k: v for k, v in SEEN.items() if k != "flips_per_size"}])
def test_harmless_rounding_and_traces_without_experts_are_not_undecided(seen: dict[str, float]) -> None:
    """No strength was counted on the latter, and the former needs no decision."""
    assert names(SEEN, precision=0.4, stale=0.3) == ["precision", "stale"]
    assert names(seen, precision=0.4, stale=0.3) == []


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
    cause = between(*pair)
    told = cause.words(SEEN)
    assert all(one.title in told and CHECKS.get(one.name, one.fix) in cause.fix for one in pair)
    assert told.endswith(COARSE) == is_coarse
    assert cause.fix.endswith(TRY) and TRY not in between(*pair, is_tried=True).fix
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
