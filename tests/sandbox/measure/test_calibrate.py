"""Laws of the calibration: a trace of one of our engines is matched in all its figures, an exact one by no defect."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from firstorder.worlds import Schemas
from lab.config.load import load
from lab.traces import Trace
from sandbox.config import SandboxRun
from sandbox.engines import ActivationPrecision, LogitNoise, RouterNoise, WeightPrecision
from sandbox.engines.defect import Defect
from sandbox.engines.engine import SandboxEngine
from sandbox.measure.calibrate import (
    FORMATS,
    TAUS,
    Calibration,
    CalibrationFit,
    FittedFigure,
    Format,
    Target,
    defects_of,
    loss,
    target_of,
)
from sandbox.measure.defect_table import Bench
from theory.contracts import Rollouts, TokenScores
from theory.routing.passes import RoutingPlan

# A fresh model of 32 units: a batch of some 1000 tokens in a tenth of a second, and routers near their margins.
OVERRIDES = ("--algorithm.batch.num_prompts", "32", "--algorithm.sampling.max_tokens", "8")


@pytest.fixture(scope="module")
def bench() -> Bench:
    """One model for all fits, which try the same engines on the same draws: each is sampled and scored once."""
    config = load("configs/smoke.yaml", OVERRIDES, Schemas())
    assert isinstance(config, SandboxRun)
    made = Bench(config, num_steps=0)
    sample, score = made.sample, made.trainer.score
    sampled: dict[tuple[str, int], Rollouts] = {}
    scored: dict[int, TokenScores] = {}

    def sample_once(engine: SandboxEngine, draw: int) -> Rollouts:
        key = repr(engine.defects), draw
        if key not in sampled:
            sampled[key] = sample(engine, draw)
        return sampled[key]

    def score_once(rollouts: Rollouts, routing: RoutingPlan) -> TokenScores:
        if id(rollouts) not in scored:
            scored[id(rollouts)] = score(rollouts, routing)
        return scored[id(rollouts)]

    vars(made)["sample"], vars(made.trainer)["score"] = sample_once, score_once
    return made


EVERY = dict.fromkeys(("k3 KL", "routers that differ", *(f"F({tau:g})" for tau in TAUS)), 0.0)
"""Every figure."""


def trace_of(bench: Bench, defects: tuple[Defect, ...], draw: int) -> Trace:
    """The traces of an engine with these defects, on problems that no trial sees."""
    rollouts = bench.sample(bench.engine(*defects), draw)
    scores = bench.trainer.score(rollouts, RoutingPlan("natural"))
    return Trace.of(rollouts, scores, torch.zeros(len(rollouts)), step=1)


def fitted(bench: Bench, *defects: Defect) -> CalibrationFit:
    trace = trace_of(bench, defects, draw=7)
    return Calibration(bench, target_of(trace)).fit(num_draws=2, num_trials=10, formats=())


def test_an_exact_pair_is_fitted_by_no_defect(bench: Bench) -> None:
    """Where the trace shows nothing the engine block is empty, and all figures are exact."""
    fit = fitted(bench)
    assert fit.defects == () and fit.yaml() == "engine:\n  defects: []\n"
    assert fit.residual < 1e-9 and fit.word.startswith("good")


def test_two_planted_noises_are_found_again(bench: Bench) -> None:
    """Noise on router and on next-token logits moves different figures: both dials come back, and the figures fit."""
    fit = fitted(bench, RouterNoise(std=0.05), LogitNoise(std=0.2))
    stds = {type(defect): defect.std for defect in fit.defects if isinstance(defect, RouterNoise | LogitNoise)}
    # Two batches of 1000 tokens, one fitted to the other: KL, with its heavy tail, scatters by a half and the noise by
    # the root of that; the routers, some 3000, by less.
    assert stds[LogitNoise] == pytest.approx(0.2, rel=0.4)
    assert stds[RouterNoise] == pytest.approx(0.05, rel=0.4)
    assert math.exp(fit.residual) < 1.5


@pytest.mark.parametrize(
    "planted", FORMATS[3:], ids=lambda d: "-".join(f"{x.model_dump()['kind']}-{x.format}" for x in d)
)
def test_a_planted_format_is_found_again(bench: Bench, planted: Format) -> None:
    """An engine that rounds, and does nothing else, is found among all formats by its figures over other batches."""
    # Eight batches of 1000 tokens, as the KL of one scatters by a half; formats differ by factors of two.
    found = Calibration(bench, Target(EVERY, EVERY, 10_000)).measured(planted, range(20, 28))
    figures = {f.name: f.fitted for f in found}
    counts = {name: 10_000 * value for name, value in figures.items()} | {"k3 KL": 50.0}
    fit = Calibration(bench, Target(figures, counts, 10_000)).fit(num_draws=4, num_trials=1)
    assert fit.defects == planted


def test_the_block_is_one_that_a_run_reads(bench: Bench, tmp_path: Path) -> None:
    """The printed YAML is the engine block of a config: loaded, it has the fitted defects."""
    fit = CalibrationFit(defects_of((WeightPrecision(), ActivationPrecision()), 0.01234, 0.5), ())
    lines = Path("configs/smoke.yaml").read_text().splitlines()
    (tmp_path / "c.yaml").write_text("\n".join(x for x in lines if not x.startswith("engine:")) + "\n" + fit.yaml())
    config = load(str(tmp_path / "c.yaml"), (), Schemas())
    assert isinstance(config, SandboxRun) and config.engine.defects == fit.defects
    assert RouterNoise(std=0.0123) in fit.defects


def test_figures_are_the_traces_own(bench: Bench) -> None:
    """The target of a trace is what the same rollouts measure; every tau and the routers are there."""
    trace = trace_of(bench, (RouterNoise(std=0.1),), draw=0)
    target = target_of(trace)
    measured = Calibration(bench, target).measured((RouterNoise(std=0.1),), (0,))
    assert {f.name: f.fitted for f in measured} == pytest.approx(
        target.figures, rel=1e-5
    )  # float32 against float64 sums
    assert (
        set(target.figures) == set(target.counts) == {"k3 KL", "routers that differ", *(f"F({tau:g})" for tau in TAUS)}
    )


def test_the_loss_weighs_kinds_alike() -> None:
    """Six figures of the tail weigh as much as one KL: the mean over kinds of mean squares, and its root."""
    off = FittedFigure("k3 KL", 1.0, math.e, 0.0)
    tail = [FittedFigure(f"F({tau:g})", 0.5, 0.5, 0.0) for tau in TAUS]
    assert off.residual == pytest.approx(1.0)
    assert loss([off, *tail]) == pytest.approx((1 / 2) ** 0.5)
    assert loss([off, *tail, FittedFigure("routers that differ", 0.1, 0.1, 0.0)]) == pytest.approx((1 / 3) ** 0.5)


def test_the_loss_weighs_figures_by_their_events() -> None:
    """A KL of five events, off by e, counts for little beside routers of 800, and for as much with as many events."""
    routes = FittedFigure("routers that differ", 0.1, 0.1, 0.0, count=800.0)
    weights = 1 / (1 / 6 + 0.01), 1 / (1 / 801 + 0.01)
    assert loss([FittedFigure("k3 KL", 1.0, math.e, 0.0, count=5.0), routes]) == pytest.approx(
        (weights[0] / sum(weights)) ** 0.5
    )
    assert loss([FittedFigure("k3 KL", 1.0, math.e, 0.0, count=800.0), routes]) == pytest.approx(0.5**0.5)


def test_a_target_counts_its_events(bench: Bench) -> None:
    """The routers that differ and the tokens beyond tau, one by one; a KL has fewer events than tokens."""
    trace = trace_of(bench, (RouterNoise(std=0.1),), draw=0)
    target, ratio = target_of(trace), (trace.logp_old - trace.logp_mu)[trace.is_response].abs()
    assert trace.experts_mu is not None and trace.experts_old is not None
    differ = (trace.experts_mu.sort(-1).values != trace.experts_old.sort(-1).values).any(-1)
    assert target.counts["routers that differ"] == pytest.approx(int(differ.sum())) and differ.sum() > 50
    assert target.counts["F(1.1)"] == pytest.approx(int((ratio > math.log(1.1)).sum()))
    assert target.num_tokens == int(trace.is_response.sum())
    assert 1 < target.counts["k3 KL"] < 0.1 * target.num_tokens
    twice = Target.pooled([target, target])
    assert twice.figures == pytest.approx(target.figures) and twice.num_tokens == 2 * target.num_tokens
    assert twice.counts == pytest.approx({name: 2 * count for name, count in target.counts.items()})


def test_noise_is_searched_on_every_draw(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search on one draw follows that draw's chance."""
    trace, sample, seen = trace_of(bench, (RouterNoise(std=0.1),), draw=7), bench.sample, set[int]()

    def sampled(engine: SandboxEngine, draw: int) -> Rollouts:
        seen.add(draw)
        return sample(engine, draw)

    calibration = Calibration(bench, target_of(trace))
    monkeypatch.setattr(bench, "sample", sampled)
    calibration.fitted_stds((), range(2), num_trials=2)
    assert seen == {0, 1}


def test_the_word_names_the_worst_figure() -> None:
    """A fit that is off by e in one of two kinds says by how much, and where."""
    fit = CalibrationFit((), (FittedFigure("k3 KL", 1.0, 1.0, 0.0), FittedFigure("F(2)", 0.1, 0.1 * math.exp(2), 0.0)))
    assert fit.word == "poor: the figures are off by a factor of 4.11 on average; F(2) is off most, by a factor of 7.39"


def test_log_probabilities_that_are_not_finite_are_refused(bench: Bench) -> None:
    """Nothing can be fitted to NaN: one line."""
    trace = trace_of(bench, (), draw=0)
    broken = Trace(**(vars(trace) | {"logp_mu": trace.logp_mu.where(torch.arange(len(trace.logp_mu)) > 0, math.nan)}))
    with pytest.raises(ValueError, match="expected finite log-probabilities"):
        target_of(broken)
