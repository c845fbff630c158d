"""The rows of the study of remedies (docs/decisions/0012-remedies-study.md), by cell, and its statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from lab.audit.table import distinct, numbers
from lab.flow.config import FlowConfig, load_config
from lab.flow.run import engine_of, problem_of
from lab.flow.table import MeanInterval, ends, of_cell
from sandbox.exact.flow import SandboxFlow
from tests.pages.study import ROOT, Values, runs_in
from tests.pages.study import mean as mean_of
from theory.bounds.conditional import gap_conditional, gap_prefix
from theory.exact.problem import Problem
from theory.streams import derive_seed

KEPT = ROOT / "results/flow/remedies.csv"
STUDIES = ("remedies", "remedies-stale", "remedies-noise", "replay", "replay-near")
FIRST = ("bias", "cosine", "drift_norm", "true_norm", "variance", "draw_error")
"""Columns of step 0 that are kept, as `first_<name>`."""
KEYS = ["study", "problem", "error", "objective", "N", "B"]
BOUNDS = {"token weight": gap_conditional, "prefix weight": gap_prefix}
EXACT, FIXED = "exact", "fixed, KL 0.18"
SMALL, LARGE = "router noise, scale 0.5", "router noise, scale 2"
NONE, TOKEN, PREFIX, SEQUENCE, CLIP, MASK = (
    "no weight", "token weight", "prefix weight", "sequence weight", "clip", "mask",
)  # fmt: skip
NATURAL, R2, R3, PR2 = "no replay", "R2", "R3", "Pr2"


# ---- rows ------------------------------------------------------------------------------------------------------------


def rows_of(folder: Path) -> pd.DataFrame:
    """One row per run: its end and its numbers at step 0; of an unfinished folder, only whole problems."""
    config = load_config(folder / "config.yaml", sandbox=lambda: SandboxFlow)
    frame = runs_in(folder, config).assign(study=config.name)
    first = frame[frame["update"] == 0].set_index(KEYS)[list(FIRST)].add_prefix("first_")
    last = pd.DataFrame(ends(frame)).set_index(KEYS)[["optimum", "reward", "entropy"]]
    found = last.join(first).reset_index()
    return found.join(_bounds(config, found), on=["problem", "objective"]) if config.name == "remedies" else found


def _bounds(config: FlowConfig, found: pd.DataFrame) -> pd.DataFrame:
    """The right side of each objective's bound at the first policy, by problem."""
    made = []
    # The study has one engine error, and all objectives of a problem start from one policy.
    for problem in distinct(found, "problem"):
        task, policy = problem_of(config, int(problem))
        own = engine_of(config, int(problem), config.errors[0], config.objectives[0], policy)
        at = Problem(policy, own.samplers(policy)[0], policy.logp(), task.reward_Y)
        made += [(problem, name, float(bound(at).rhs)) for name, bound in BOUNDS.items()]
    return pd.DataFrame(made, columns=["problem", "objective", "bound"]).set_index(["problem", "objective"])


def kept() -> pd.DataFrame:
    """The rows that the project keeps."""
    return pd.read_csv(KEPT)


# ---- measures --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remedies:
    """The kept rows by cell; values are per problem, for the problems of each study."""

    frame: pd.DataFrame

    def cell(
        self, study: str, objective: str, name: str, error: str = FIXED, N: int = 1, B: float = np.inf
    ) -> pd.Series:
        """A column of a cell's runs, by problem."""
        found = of_cell(self.frame, study=study, objective=objective, error=error, N=N, B=B)
        return pd.Series(numbers(found, name), index=found["problem"].to_numpy())

    def harm(self, study: str, objective: str, error: str = FIXED, N: int = 1, B: float = np.inf) -> pd.Series:
        """The sequence weight's reward minus that of a cell, per problem."""
        return self.cell("remedies", SEQUENCE, "reward") - self.cell(study, objective, "reward", error, N, B)

    def stale(self, objective: str, error: str, N: int = 16) -> pd.Series:
        """Harm at N > 1."""
        return self.harm("remedies-stale", objective, error, N)

    def noisy(self, B: float, error: str = EXACT) -> pd.Series:
        """Harm of the clip at N = 16 under the noise of B responses; inf: no noise."""
        return self.stale(CLIP, error) if np.isinf(B) else self.harm("remedies-noise", CLIP, error, 16, B)

    def replayed(self, mode: str, error: str = LARGE, N: int = 8, name: str = "reward") -> pd.Series:
        """A column of a replay mode's runs."""
        return self.cell("replay" if N == 8 else "replay-near", mode, name, error, N)


mean = partial(mean_of, "remedies")


def rank(first: pd.Series, second: pd.Series, name: str) -> MeanInterval:
    """Spearman's correlation over problems with its 95% percentile-bootstrap interval."""
    pair = pd.concat([first, second], axis=1).dropna().to_numpy()
    return resampled(lambda p: spearman(p[..., 0], p[..., 1]), pair, name)


def spearman(first: Values, second: Values) -> Values:
    """Rank correlation along the last axis; 0 where either side is constant."""
    a, b = (stats.rankdata(x, axis=-1) - (x.shape[-1] + 1) / 2 for x in (first, second))
    scale = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    return np.where(scale > 0, (a * b).sum(-1) / np.maximum(scale, 1e-300), 0.0)


def resampled(measure: Callable[[Values], Values], rows: Values, name: str) -> MeanInterval:
    """The measure of the rows, one per problem, with its interval over 2,000 resamplings of them."""
    rng = np.random.default_rng(derive_seed(0, "flow", "bootstrap", "remedies", name))
    drawn = measure(rows[rng.integers(len(rows), size=(2000, len(rows)))])
    low, high = np.percentile(drawn, [2.5, 97.5])
    return MeanInterval(float(measure(rows)), float(low), float(high), len(rows))
