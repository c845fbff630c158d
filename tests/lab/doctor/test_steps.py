"""Laws of the doctor over steps: what arrives, how a figure grows, where the gap sits, what a folder's steps are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from lab.doctor.causes import CAUSES
from lab.doctor.diagnosis import Diagnosis, weigh
from lab.doctor.importers import rows
from lab.doctor.steps.arrival import FEWEST_DRAWS, Arrivals, Slope
from lab.doctor.steps.course import Course, StepRecord, Watch, joint, pooled
from lab.doctor.steps.page import Ward, render
from lab.doctor.steps.shape import growth
from lab.doctor.steps.words import as_object, evidence, looks, verdict
from lab.doctor.view import View
from lab.traces import Trace
from tests.lab.doctor.patients import draw_rows
from theory.streams import stream

NUM_STEPS = 12
Policy = Callable[[int], Tensor]
"""From a step to the log-probabilities of all tokens of the trace."""


def drawn(step: int) -> Trace:
    """The tokens of a step: the prompts of all steps are the same, so that many draws come back."""
    return _drawn(step % 4)


@cache
def _drawn(seed: int) -> Trace:
    return rows.trace(draw_rows(num_prompts=12, num_responses=6, length=6, seed=seed))


def drift(trace: Trace, step: float) -> Tensor:
    """log old at a step: it moves by a fixed direction of each draw, as a function of its last tokens alone."""
    view = View.of(trace)
    direction_n = (7 * view.token_n + 3 * trace.tokens[view.place_n - 1] + 5 * view.position_n).double().sin()
    return view.old_n - 3 + 0.03 * step * direction_n


def taught(mu_of: Callable[[Trace, int], Tensor], num_steps: int = NUM_STEPS) -> Arrivals:
    """Steps whose log old drifts and whose log mu is given, as they are remembered."""
    arrivals = Arrivals()
    for step in range(1, num_steps + 1):
        trace = drawn(step)
        own = replace(trace, logp_old=drift(trace, step), logp_mu=mu_of(trace, step).clamp(max=0.0))
        arrivals.add(step, View.of(own))
    return arrivals


@pytest.mark.parametrize("since", [1, 5, 8])
def test_weights_that_stay_are_named_by_their_step(since: int) -> None:
    """If log mu is log old of step v at all steps after it, v is named and nothing of the gap is left."""
    found = taught(lambda trace, step: drift(trace, min(step, since))).version()
    assert found is not None and found.since == since and found.behind is None
    assert found.left == pytest.approx(0, abs=1e-9) and found.num_draws >= FEWEST_DRAWS


@pytest.mark.parametrize("lag", [1, 4])
def test_weights_that_lag_are_named_by_their_lag(lag: int) -> None:
    """If log mu is log old of k steps before, at all steps, k is named and nothing of the gap is left."""
    found = taught(lambda trace, step: drift(trace, max(step - lag, 1))).version()
    assert found is not None and found.behind == lag and found.since is None
    assert found.left == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("spacing", [1, 10])
def test_a_lag_is_told_in_global_steps(spacing: int) -> None:
    """An engine one trace behind, with a trace every 10 steps, has weights that are 10 steps old, not 1."""
    watch = Watch()
    for i in range(NUM_STEPS):
        trace = drawn(i)
        own = {"logp_old": drift(trace, i), "logp_mu": drift(trace, max(i - 1, 0))}
        watch.add(replace(trace, step=spacing * i, **own))
    course = watch.course()
    told = "1 step" if spacing == 1 else "10 steps"
    assert course.seen["steps_behind"] == spacing and looks(course) == f"weights that are {told} old"
    assert any(f"closest to log old of {told} earlier" in line for line in evidence(course, watch.num_shared))


def noise(trace: Trace, step: int, size: float) -> Tensor:
    """An engine's own gap: independent of everything."""
    return size * torch.randn(len(trace.logp_mu), generator=stream(step, "steps test", "noise"), dtype=torch.float64)


def test_an_engine_of_its_own_gap_has_its_own_weights() -> None:
    """Noise of five sizes, up to ten times the trainer's movement a step, names no version in any of 20 runs."""
    for size in (0.0, 0.003, 0.03, 0.1, 0.3):
        for seed in range(4):
            found = taught(lambda t, s, size=size, seed=seed: drift(t, s) + noise(t, 100 * seed + s, size)).version()
            assert found is None, (size, seed, found)


def test_noise_does_not_hide_weights_that_stay() -> None:
    """With an engine's noise of one step's movement the step is still found, and a part of the gap is left."""
    found = taught(lambda trace, step: drift(trace, min(step, 4)) + noise(trace, step, 0.03)).version()
    assert found is not None and found.since == 4 and 0.05 < found.left < 0.5


@pytest.mark.parametrize("part", [0.0, 0.4, 1.0])
def test_the_slope_is_the_part_that_arrives(part: float) -> None:
    """If log mu moves by a part of log old's movement, the slope is that part."""
    found = taught(lambda trace, step: drift(trace, 1) + part * (drift(trace, step) - drift(trace, 1))).slope(1)
    assert found is not None and found.value == pytest.approx(part, abs=1e-9) and found.error < 1e-9
    assert (found.grown > 1.5) == (part < 1)


def test_memory_does_not_grow_with_steps() -> None:
    """However many steps are taken, draws and steps that are remembered are bounded; shared draws are kept first."""
    arrivals, sizes = Arrivals(most_draws=200, most_steps=4), []
    for step in range(1, 20):
        trace = drawn(step)
        arrivals.add(step, View.of(replace(trace, logp_old=drift(trace, step), logp_mu=drift(trace, 1))))
        sizes.append(arrivals._mu_ks.shape)
    assert max(n for n, _ in sizes) <= 200 and max(s for _, s in sizes) <= 4
    assert arrivals.steps == [1, 9, 17]
    assert arrivals.num_shared > 100


def series(kind: str, seed: int, n: int = 20, at: int = 8) -> list[float]:
    """A KL around 1e-3 with a noise of 20 %: level, jump to 4 times, a slope or a line up to 8 times."""
    base = 1e-3 * (0.2 * torch.randn(n, generator=stream(seed, "shape test", kind), dtype=torch.float64)).exp()
    t = torch.arange(n, dtype=torch.float64)
    factor = {
        "level": torch.ones(n), "jump": 1 + 3 * (t >= at), "line": (math.log(8) * t / (n - 1)).exp(),
        "slope": (math.log(8) * ((t - at + 1).clamp(min=0) / (n - at))).exp(),
    }[kind]  # fmt: skip
    return (base * factor).tolist()


@pytest.mark.parametrize(("kind", "right", "near"), [("jump", 0.9, 0), ("slope", 0.6, 2), ("line", 0.8, 0)])
def test_the_shape_and_its_step_are_found(kind: str, right: float, near: int) -> None:
    """Of 50 series the shape is named in most, and its step within a few; a slope may pass for a jump amid it."""
    found = [growth(series(kind, seed)) for seed in range(50)]
    assert sum(g is not None for g in found) >= 49
    named = [g for g in found if g is not None and g.kind == kind]
    assert len(named) >= right * 50
    at = 0 if kind == "line" else 8
    assert sum(abs(g.at - at) <= near for g in named) >= 0.9 * len(named)


def test_a_level_is_steady() -> None:
    """Of 200 series without a change at most 2 % are said to change: the rank tests' 1 % twice over."""
    assert sum(growth(series("level", seed)) is not None for seed in range(200)) <= 4


def test_small_changes_are_steady_and_zeros_are_no_error() -> None:
    """A clear change of a tenth is not told; an exact engine's zeros are a level below any other."""
    assert growth([1.0] * 10 + [1.1] * 10) is None
    found = growth([0.0] * 6 + [1e-3] * 6)
    assert found is not None and (found.kind, found.at, found.before, found.after) == ("jump", 6, 0.0, 1e-3)
    assert growth([0.0] * 12) is None and growth([1.0] * 5) is None


def course_of(traces: list[Trace]) -> Course:
    """The doctor's findings on these traces."""
    watch = Watch()
    for trace in traces:
        watch.add(trace)
    return watch.course()


def test_pooled_clues_are_medians_and_standard_errors_add_up() -> None:
    """Of n steps a clue is the median; a clue in standard errors is the sum over root n, normal if each is."""
    good = draw_rows(num_prompts=12)
    found = [Watch().add(rows.trace(good)) for _ in range(3)]
    changed = [
        replace(step, diagnosis=replace(step.diagnosis, seen={**step.diagnosis.seen, "size": size, "rho_z": 2.0}))
        for step, size in zip(found, (0.1, 0.2, 7.0), strict=True)
    ]
    seen = pooled(changed)
    assert seen["size"] == 0.2 and seen["rho_z"] == pytest.approx(6 / 3**0.5)


def test_steps_that_are_not_finite_are_the_verdict() -> None:
    """One step with a NaN after healthy ones is in the steps, and pooled alone it is the cause."""
    good = drawn(1)
    bad = replace(good, step=9, logp_mu=torch.where(torch.arange(len(good.logp_mu)) == 3, math.nan, good.logp_mu))
    course = course_of([*(replace(good, step=step) for step in range(9)), bad])
    assert course.steps[-1].diagnosis.named[0].name == "not_finite" and course.named.name == "not_finite"
    assert course.steps[-1].figure("k3_kl") is None


def endless(step: int, at: int = 4) -> Trace:
    """A trace whose gap grows with the step; from step `at` on, one token has a filler in place of log mu."""
    trace = drawn(step)
    logp_mu = (drift(trace, step) - 0.01 * step).clamp(max=0.0)
    if step >= at:
        logp_mu[3] = -1e4
    return replace(trace, step=step, logp_old=drift(trace, step), logp_mu=logp_mu, engines=torch.arange(len(trace)) % 4)


def test_a_step_with_an_infinite_ratio_is_left_out_of_its_series_and_said() -> None:
    """exp(1e4) is beyond float64: that step has no k3 KL, the others are read, and JSON and page have no infinity."""
    traces = [endless(step) if step in (4, 6) else endless(step, at=99) for step in range(1, 13)]
    course = course_of(traces)
    assert [step.number for step in course.steps if step.is_endless] == [4, 6]
    assert [step for step, _ in course.series("k3_kl")] == [1, 2, 3, 5, *range(7, 13)]
    assert len(course.series("mean_gap")) == 12 and course.growths["k3_kl"] is not None
    assert any(line.startswith("The k3 KL of 2 steps, first step 4, is infinite") for line in evidence(course, 0))
    told = json.loads(json.dumps(as_object(course, 0), allow_nan=False))
    assert told["steps"][3]["k3_kl"] is None and told["steps"][4]["k3_kl"] > 0
    assert "Every step" in render(Ward("run", course, 0, traces[-1], "rows"))
    # Of infinite steps alone there is no share: no engine and no place of the batch has a multiple that is no number.
    assert not course_of([endless(step, at=1) for step in range(1, 13)]).places


def test_a_cause_that_no_step_shows_alone_is_told_of_all_together() -> None:
    """Where pooled clues name a cause whose strength is 0 at every step, its words are of the pooled clues."""
    watch = Watch()
    for step in range(3):
        watch.add(replace(drawn(step), step=step))
    bare = [replace(s, diagnosis=replace(s.diagnosis, strengths=dict.fromkeys(s.diagnosis.strengths, 0.0)))
            for s in watch.steps]  # fmt: skip
    course = replace(watch.course(), steps=tuple(bare))
    assert course.named.name == "nothing"
    assert evidence(course, 0)[0] == f"All steps together: {course.named.words(pooled(bare))}"


def weighed(seen: dict[str, float], num: int = 5) -> Course:
    """Steps with these clues, without shared draws."""
    seen = {"num_tokens": 5000.0, "extreme_frac_tau2": 0.1, **seen}
    steps = [StepRecord(step, 64, Diagnosis(seen, weigh(seen)), 0.4) for step in range(num)]
    return Course(tuple(steps), None, None, None, ())


LIKE_DEMO = {
    "k3_kl": 0.43, "size": 0.93, "sure_ratio": 0.7, "noise_share": 0.049, "unrepeated_tail": 28.8, "num_flips": 1e4,
    "router_disagreement": 0.48, "flips_per_size": 0.51, "kl_per_flip": 0.7, "flip_share_of_kl": 0.9,
}  # fmt: skip
"""The clues of router noise of 0.5 beside FP8 (configs/demo/none.yaml, step 50)."""


@pytest.mark.parametrize("has_routes", [True, False])
def test_a_run_is_undecided_where_its_steps_are(has_routes: bool) -> None:
    """By the rules of one step: the verdict has the same candidates, and --json lists them."""
    seen = LIKE_DEMO if has_routes else {
        name: LIKE_DEMO[name] for name in ("k3_kl", "size", "sure_ratio", "noise_share", "unrepeated_tail")
    }  # fmt: skip
    course = weighed(seen)
    (alone,) = {step.diagnosis.named[0].name for step in course.steps}
    assert alone == course.named.name == "undecided" and course.fault is not None
    both = course.steps[0].diagnosis.strength_words
    assert verdict(course).endswith(f"; undecided: it looks like {both}.")
    told = as_object(course, 0)
    assert told["fault"] == "undecided" and "routing" in told["candidates"]
    # A folder takes no model with experts.
    fix = told["do_first"]
    assert fix.count("--model FOLDER") == fix.count("firstorder doctor FILE --model FOLDER") == 1
    if not has_routes:
        stale = weighed(seen | {"size": 0.3, "unrepeated_tail": 4.0}).named
        assert stale.fix.endswith("Read the version of the engine's weights.")  # not: of dumps of several steps
    assert evidence(course, 0)[0].startswith("All steps together: ")
    assert "Every step" in render(Ward("run", course, 0, None, "rows"))


@pytest.mark.parametrize(("num_stale", "is_partly"), [(4, True), (2, False)])
def test_weights_arrive_in_part_only_where_most_steps_look_like_other_weights(num_stale: int, is_partly: bool) -> None:
    """A slope of 0.3 and a gap that grows also come from routers that err: then the steps alone name those."""
    stale = {**LIKE_DEMO, "size": 0.3, "unrepeated_tail": 4.0, "noise_share": 0.0}
    routed = {**LIKE_DEMO, "noise_share": 0.8, "flips_per_size": 2.0, "size": 0.3}
    course = weighed(stale)
    others = weighed(routed)
    steps = (*course.steps[:num_stale], *others.steps[num_stale:])
    slope = Slope(0.3, 0.05, 200, grown=2.0)
    assert {step.diagnosis.named[0].name for step in steps} == {"stale", "routing"}
    found = replace(course, steps=steps, slope=slope, late_slope=slope)
    assert ([cause.name for cause in found.spanning] == ["partly"]) == is_partly


def test_a_refuted_cause_leaves_what_it_took_to_the_next_one() -> None:
    """If old weights have strength 1 and are refuted, the gap is weighed without them."""
    found = Watch().add(drawn(1))
    # Values of which no other rule has any: one token with an infinite ratio, all others as they should be.
    seen = {
        "num_tokens": 5000.0, "k3_kl": math.inf, "kl_per_flip": math.inf, "num_flips": 1e6, "size": 1e-7,
        "flips_per_size": 1e-12, "noise_share": 0.0, "router_disagreement": 1e-9,
    }  # fmt: skip
    step = replace(found, diagnosis=replace(found.diagnosis, seen=seen))
    assert joint([step]).named[0].name == "stale" and joint([step], {"stale"}).named[0].name == "precision"


def test_an_engine_below_0_is_one_line() -> None:
    """-1, as for an unknown engine, is refused by the trace: the field, the least number that fits, and what came."""
    with pytest.raises(ValueError, match=r"^engines: expected numbers from 0 on, got -1$"):
        replace(drawn(1), engines=torch.arange(len(drawn(1))) - 1)


def test_shares_of_a_step_are_of_what_explains_the_gap() -> None:
    """The parts of a bar add up to its height, and a sampler's fault, which explains no gap, has none."""
    step: StepRecord = Watch().add(drawn(1))
    assert sum(step.shares.values()) == pytest.approx(1)
    assert not {cause.name for cause in CAUSES if not cause.explains} & set(step.shares)
