"""Calibration: the sandbox engine's dials fitted to a real engine's trace, by its KL, tail of ratios and routes.

The target is three kinds of figures of a trace: k3 KL(mu, old), F(tau) at several tau, and the share of routers that
differ. The dials are the formats in which engines compute (of weights, activations and cache) and the noise on router
logits and on next-token logits. Each trial samples one fixed batch of problems, with the same random numbers, and the
trainer scores it. (Re-scoring the trainer's own tokens instead would cost half but miss half of the tail: the tokens
that only mu finds likely.) Figures weigh by their precision: of 6,000 tokens some
800 routers differ while a KL is that of five tokens or so, and a fit that trusts both alike is led by chance.
Papers: R3 (arXiv 2510.11370) Eq. 2 and 3, sec. 3.2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from scipy.optimize import minimize

from lab.doctor.evidence import gather
from lab.traces import Trace
from sandbox.engines import ActivationPrecision, KVPrecision, LogitNoise, RouterNoise, WeightPrecision
from sandbox.engines.defect import Defect
from sandbox.measure.defect_table import Bench
from theory.contracts import Rollouts, TokenScores
from theory.divergences import extreme_fraction, k3_kl_mu_old
from theory.routing.measures import router_disagreement
from theory.routing.passes import RoutingPlan

TAUS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0)
Format = tuple[Defect, ...]

_FP8, _INT8 = WeightPrecision(), WeightPrecision(format="int8")
FORMATS: tuple[Format, ...] = (
    (WeightPrecision(format="bf16"),),
    (WeightPrecision(format="bf16"), ActivationPrecision(format="bf16")),
    (_FP8,),
    (_FP8, ActivationPrecision()),
    (_FP8, ActivationPrecision(), KVPrecision()),
    (_INT8, ActivationPrecision(format="int8")),
)
"""The number formats in which engines compute, each tried by itself."""
NUM_SEARCHED = 2
"""Number of best-fitting formats with which noise is combined; it is also tried without a format."""
GRID = (1e-4, 0.02, 0.2)
"""Standard deviations from which a search starts."""
LARGEST = 3.0
"""Largest standard deviation that a search may reach."""
SIMPLER = 1.05
"""A dial is omitted if the loss without it is at most this factor larger."""
ALIKE = 0.01
"""Losses that differ by less than a percent of the figures are considered equal."""
LIKENESS = 0.1
"""Standard deviation of the logarithm of every figure that no number of tokens removes: the model is not the trace's,
and its dials are not that engine's faults. Without it, routers would decide alone."""
GOOD = math.log(1.25)
"""Residual up to which a fit is called good, and noise is not searched."""


@dataclass(frozen=True)
class FittedFigure:
    """One figure of the target and of the fit; `floor` is about the chance error of either, e.g. two tokens' share.

    `count` is the number of events behind the target (see `Target`).
    """

    name: str
    target: float
    fitted: float
    floor: float
    count: float = math.inf

    @property
    def residual(self) -> float:
        """log((fitted + floor) / (target + floor)): 0 for a perfect fit, and small for a tail of few tokens."""
        return math.log((self.fitted + self.floor) / (self.target + self.floor))

    @property
    def weight(self) -> float:
        """The inverse of the variance that its logarithm has by chance, as a Poisson count has, and by LIKENESS."""
        # One more, so that a figure without an event has a variance of 1, not an infinite one.
        return 1.0 / (1.0 / (self.count + 1.0) + LIKENESS**2)


@dataclass(frozen=True)
class CalibrationFit:
    """The fitted defects, and every figure."""

    defects: tuple[Defect, ...]
    figures: tuple[FittedFigure, ...]

    @property
    def residual(self) -> float:
        """The root mean square of log(fitted / target) over the kinds of figures (KL, tail, routes), all alike."""
        return loss([replace(figure, count=math.inf) for figure in self.figures])

    @property
    def word(self) -> str:
        """The quality of the fit, in a plain sentence."""
        factor = math.exp(self.residual)
        worst = max(self.figures, key=lambda figure: abs(figure.residual))
        grade = "good" if self.residual < GOOD else "fair" if factor < 2 else "poor"
        off = f"{worst.name} is off most, by a factor of {math.exp(abs(worst.residual)):.2f}"
        return f"{grade}: the figures are off by a factor of {factor:.2f} on average; {off}"

    def yaml(self) -> str:
        """The engine block of a sandbox config."""
        rows = [{"kind": d.model_dump()["kind"]} | d.model_dump(exclude_defaults=True) for d in self.defects]
        flow = ["{" + ", ".join(f"{key}: {_yaml(value)}" for key, value in row.items()) + "}" for row in rows]
        return "engine:\n" + ("  defects: []\n" if not rows else "  defects:\n" + "".join(f"    - {r}\n" for r in flow))


def _yaml(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def kind_of(name: str) -> str:
    """The kind of a figure: KL, tail or routes."""
    return "tail" if name.startswith("F(") else name


def loss(figures: Sequence[FittedFigure]) -> float:
    """The root of the weighted mean over kinds of the weighted mean squared residual of each.

    A kind has the weight of its most precise figure: six thresholds of one tail are not six measurements.
    """
    kinds: dict[str, list[FittedFigure]] = {}
    for figure in figures:
        kinds.setdefault(kind_of(figure.name), []).append(figure)
    squares = [fmean((one.residual**2 for one in own), weights=[one.weight for one in own]) for own in kinds.values()]
    return fmean(squares, weights=[max(one.weight for one in own) for own in kinds.values()]) ** 0.5


@dataclass(frozen=True)
class Target:
    """The figures to be matched, the number of events behind each, and that of sampled tokens.

    Events are tokens beyond tau, or routers that differ. For the KL they are (sum k)^2 / sum k^2, k the k3 of a token:
    a few, where few tokens make up most of it.
    """

    figures: Mapping[str, float]
    counts: Mapping[str, float]
    num_tokens: int

    @staticmethod
    def pooled(targets: Sequence[Target]) -> Target:
        """The means over targets of one engine, by the events of all."""
        names = targets[0].figures
        return Target(
            {name: fmean(one.figures[name] for one in targets) for name in names},
            {name: math.fsum(one.counts[name] for one in targets) for name in names},
            sum(one.num_tokens for one in targets),
        )


def target_of(trace: Trace) -> Target:
    """The figures of a trace and their counts; ValueError if log-probabilities are not finite."""
    seen, mask = gather(trace), trace.is_response
    if "nonfinite_share" in seen:
        raise ValueError("logp_mu, logp_old: expected finite log-probabilities, got some that are not")
    old_n, mu_n = trace.logp_old[mask], trace.logp_mu[mask]
    tail, k3_n = _tail(old_n, mu_n), k3_kl_mu_old(old_n.double(), mu_n.double())
    figures = {"k3 KL": seen["k3_kl"]} | tail
    total = k3_n.sum().item()
    counts = {"k3 KL": total**2 / max(k3_n.square().sum().item(), 1e-300)} if total > 0 else {"k3 KL": 0.0}
    counts |= {name: share * len(mu_n) for name, share in tail.items()}
    if trace.experts_mu is not None and "router_disagreement" in seen:
        figures["routers that differ"] = share = seen["router_disagreement"]
        counts["routers that differ"] = share * trace.experts_mu[..., 0].numel()
    return Target(figures, counts, len(mu_n))


def _tail(logp_old_n: torch.Tensor, logp_mu_n: torch.Tensor) -> dict[str, float]:
    every = torch.ones(len(logp_mu_n), dtype=torch.bool)
    return {f"F({tau:g})": extreme_fraction(logp_old_n, logp_mu_n, every, tau=tau).item() for tau in TAUS}


class Calibration:
    """A model on which engines are tried, and the figures that they should match."""

    def __init__(self, bench: Bench, target: Target):
        self.bench, self.target, self.counts = bench, dict(target.figures), target.counts
        if not bench.trainer.model.config.moe_layers:
            self.target.pop("routers that differ", None)
        ours = sum(int(r.is_response.sum()) for r in bench.sample(bench.engine(), draw=0).responses)
        # Two tokens of the side with fewer; for the KL, the rounding error of float32 between equal engines.
        self.floors = {kind: 2 / min(ours, target.num_tokens) for kind in ("tail", "routers that differ")} | {
            "k3 KL": 1e-9
        }

    def figures(self, rollouts: Rollouts, scores: TokenScores) -> tuple[FittedFigure, ...]:
        """The target's figures beside those of these rollouts."""
        batch = rollouts.padded()
        mask_BT = batch.is_response_BT
        mu_n, old_n = batch.logp_mu_BT[mask_BT].double(), scores.logp_BT[mask_BT].double()
        found = {"k3 KL": k3_kl_mu_old(old_n, mu_n).mean().item()} | _tail(old_n, mu_n)
        if rollouts.experts is not None and scores.natural is not None:
            found["routers that differ"] = router_disagreement(rollouts.experts, scores.natural)
        return tuple(
            FittedFigure(name, t, found[name], self.floors[kind_of(name)], self.counts[name])
            for name, t in self.target.items()
        )

    def measured(self, defects: Sequence[Defect], draws: Sequence[int]) -> tuple[FittedFigure, ...]:
        """The figures of an engine with these defects: means over these draws of the batch."""
        engine, found = self.bench.engine(*defects), []
        for draw in draws:
            rollouts = self.bench.sample(engine, draw)
            found.append(self.figures(rollouts, self.bench.trainer.score(rollouts, RoutingPlan("natural"))))
        return tuple(replace(f[0], fitted=fmean(g.fitted for g in f)) for f in zip(*found, strict=True))

    def fitted_stds(self, formats: Format, draws: Sequence[int], num_trials: int) -> tuple[float, float]:
        """The best noise of router and next-token logits beside this format: a grid, then Nelder-Mead from its best."""
        has_routers = bool(self.bench.trainer.model.config.moe_layers)

        # In logarithms, so that a step is a factor; clamped, as Nelder-Mead knows no bounds.
        def trial(logs: Iterable[float]) -> float:
            stds = [min(math.exp(x), LARGEST) for x in logs]
            # The same draws in every trial: with the same random numbers the loss is a function, which a simplex can
            # follow. Several, as one may have a KL of twice the mean.
            # Without routers the search has one dial, `stds[-1]`, and `stds[0]` is the same number.
            return loss(self.measured(defects_of(formats, stds[0] if has_routers else 0.0, stds[-1]), draws))

        axes = [[math.log(std) for std in GRID]] * (2 if has_routers else 1)
        start = min(itertools.product(*axes), key=trial)
        # Steps of a factor of 2: scipy's default is 5% of a coordinate, here of a logarithm.
        simplex = [list(start)] + [
            [x + (0.7 if i == j else 0.0) for j, x in enumerate(start)] for i in range(len(start))
        ]
        options = {"maxfev": num_trials, "initial_simplex": simplex, "xatol": 0.02, "fatol": 1e-3}
        best = [min(math.exp(x), LARGEST) for x in minimize(trial, start, method="Nelder-Mead", options=options).x]
        return (best[0] if has_routers else 0.0), best[-1]

    def fit(self, num_draws: int = 4, num_trials: int = 30, formats: Sequence[Format] = FORMATS) -> CalibrationFit:
        """The best engine, without superfluous dials, and its figures on other draws.

        It has no defect, or only a format, if that fits well: engines round, while noise only models effects without a
        dial. Otherwise noise is added to the best formats; `num_trials` bounds the simplex search of each.
        """
        # The reported figures are of draws that chose nothing: those that did would flatter the fit.
        tried, others = range(num_draws), range(num_draws, 2 * num_draws)

        def loss_of(defects: tuple[Defect, ...]) -> tuple[float, tuple[Defect, ...]]:
            return loss(self.measured(defects, tried)), defects

        candidates = [loss_of(()), *(loss_of(defects) for defects in formats)]
        value, defects = min(candidates, key=lambda item: item[0])
        if value <= GOOD:
            return CalibrationFit(defects, self.measured(defects, others))
        for searched in [(), *(d for _, d in sorted(candidates[1:], key=lambda item: item[0])[:NUM_SEARCHED])]:
            router, logit = self.fitted_stds(searched, tried, num_trials)
            # Each noise by itself as well: one that the fit can do without is dropped below.
            noises = [(router, 0.0), (0.0, logit), (router, logit)]
            candidates += [loss_of(defects_of(searched, *noise)) for noise in noises]
        # Among fits that are about as good, the one with the fewest defects.
        least = min(value for value, _ in candidates)
        close = [(len(defects), value, defects) for value, defects in candidates if value <= least * SIMPLER + ALIKE]
        defects = min(close, key=lambda item: item[:2])[2]
        return CalibrationFit(defects, self.measured(defects, others))


def defects_of(formats: Format, router_std: float, logit_std: float) -> tuple[Defect, ...]:
    """The defects of these dials, rounded to three digits as in `CalibrationFit.yaml`; a dial at 0 is omitted."""
    out: list[Defect] = list(formats)
    out += [RouterNoise(std=float(f"{router_std:.3g}"))] if router_std > 0 else []
    out += [LogitNoise(std=float(f"{logit_std:.3g}"))] if logit_std > 0 else []
    return tuple(out)
