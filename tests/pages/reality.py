"""A check of the sandbox against published runs: one noise is fitted to a run's k3 KL alone, its other figures follow.

The sandbox's model is four orders of magnitude smaller and does sums. If its engine mismatch carries over, an engine
with the published k3 has about the published chi2, Pearson correlation, probability difference and F(2). `WITHIN` has
the factors expected before the first run. `python -m tests.pages.reality` runs the check again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch

from firstorder.worlds import Schemas
from lab.config.load import load
from lab.doctor.published import CHI2, EXTREME, K1, K3, LOGP_GAP, PEARSON, PROB_GAP, REPORTS, ROUTERS, Report
from lab.doctor.standing import figures_of
from lab.files import atomic_write
from lab.traces import Trace
from sandbox.config import SandboxRun
from sandbox.engines import LogitNoise, RouterNoise
from sandbox.engines.defect import Defect
from sandbox.measure.defect_table import Bench
from theory.routing.passes import RoutingPlan

CONFIG = "configs/arithmetic.yaml"
RESULTS = Path(__file__).with_suffix(".jsonl")
WITHIN: Mapping[str, float] = {
    K1: 1.5, CHI2: 1.5, EXTREME: 3.0, PROB_GAP: 2.0, LOGP_GAP: 2.0, PEARSON: 3.0, ROUTERS: 3.0,
}  # fmt: skip
"""The factor within which each figure was expected; for Pearson's r, 1 - r is compared."""
FAMILIES: Mapping[str, Callable[[float], Defect]] = {
    "noise on router logits": lambda std: RouterNoise(std=std),
    "noise on next-token logits": lambda std: LogitNoise(std=std),
}
FIT_DRAWS = 2
TEST_DRAWS = 12
CLOSE = 0.03
"""A fit stops once log(k3 / target) is this small."""
MAX_TRIALS = 10
LARGEST = 3.0


@dataclass(frozen=True)
class Prediction:
    """The fitted noise of one report and family of engines, and each figure as published and as found."""

    model: str
    source: str
    family: str
    std: float
    num_tokens: int
    published: Mapping[str, float]
    found: Mapping[str, float]

    def factor(self, name: str) -> float:
        """Found over published (1 - r for Pearson's r); inf or 0 if one of them is 0."""
        pair = [1 - x if name == PEARSON else x for x in (self.found[name], self.published[name])]
        return pair[0] / pair[1] if pair[1] else math.inf


def targets() -> list[Report]:
    """Reports of engines that replay nothing, with k3 and another figure, and no fault named."""
    return [r for r in REPORTS if K3 in r.figures and len(r.figures) > 1 and not r.replay and not r.fault]


def published(report: Report) -> dict[str, float]:
    """Each figure of a report: the mean where it has several values."""
    return {name: fmean(values) for name, values in report.figures.items()}


def measured(bench: Bench, defect: Defect, draws: Sequence[int]) -> tuple[dict[str, float], int]:
    """Means over the draws of every figure of the engine's samples under the trainer, and the number of tokens."""
    engine, found, num_tokens = bench.engine(defect), [], 0
    for draw in draws:
        rollouts = bench.sample(engine, draw)
        scores = bench.trainer.score(rollouts, RoutingPlan("natural"))
        trace = Trace.of(rollouts, scores, torch.zeros(len(rollouts.responses)), step=draw)
        found.append(figures_of(trace))
        num_tokens += int(trace.is_response.sum())
    return {name: fmean(row[name] for row in found) for name in found[0]}, num_tokens


def fitted(bench: Bench, family: Callable[[float], Defect], target: float) -> float:
    """The standard deviation at which k3 is the target: steps along k3 ~ std^2, each on the same draws."""
    log_std = 0.5 * math.log(target)
    best = (math.inf, log_std)
    for _ in range(MAX_TRIALS):
        k3 = measured(bench, family(math.exp(log_std)), range(FIT_DRAWS))[0][K3]
        off = math.log(target / k3)
        best = min(best, (abs(off), log_std))
        if abs(off) < CLOSE:
            break
        # A Newton step in logarithms: k3 ~ std^2 for small noise.
        log_std = min(log_std + 0.5 * off, math.log(LARGEST))
    return math.exp(best[1])


def predict(bench: Bench, report: Report, family: str) -> Prediction:
    """Fits the family's noise to the report's k3 alone, and measures every figure on other draws."""
    known = published(report)
    std = fitted(bench, FAMILIES[family], known[K3])
    found, num_tokens = measured(bench, FAMILIES[family](std), range(FIT_DRAWS, FIT_DRAWS + TEST_DRAWS))
    kept = {name: value for name, value in found.items() if name in known}
    return Prediction(report.model, report.source, family, std, num_tokens, known, kept)


def write(predictions: Sequence[Prediction], path: Path) -> None:
    """One JSON object per line."""
    atomic_write(path, "".join(json.dumps(asdict(p)) + "\n" for p in predictions))


def read(path: Path) -> list[Prediction]:
    """The inverse of `write`."""
    return [Prediction(**json.loads(line)) for line in path.read_text().splitlines()]


def main() -> None:
    """Runs every target in every family, and writes the results after each one."""
    config = load(CONFIG, [], Schemas())
    assert isinstance(config, SandboxRun)
    bench = Bench(config, num_steps=0)
    done: list[Prediction] = []
    for report in targets():
        for family in FAMILIES:
            done.append(predict(bench, report, family))
            write(done, RESULTS)


if __name__ == "__main__":
    main()
