"""The study of drift (docs/decisions/0010-drift-study.md): its kept rows, its verdicts, its part of a page.

`python -m tests.pages.drift FOLDER ...` keeps the ends of the runs in these record folders of `firstorder flow`, cut
after the last whole problem if a folder is unfinished; without a folder it writes the page's part from the kept rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from lab.audit.table import distinct, numbers
from lab.flow.config import load_config
from lab.flow.table import MeanInterval, ends, interval, of_cell
from lab.markdown import markdown_table
from lab.report.style import number
from tests.pages.predictions import Prediction, counts, verdicts
from tests.pages.study import ROOT, TABLES, Part, Values, runs_in, update
from theory.streams import derive_seed

KEPT, PART = ROOT / "results/flow/drift.csv", Part(TABLES, "drift")
COLUMNS = [
    "length", "problem", "error", "kind", "level", "objective", "N", "B", "update", "optimum", "reward", "entropy",
    "entropy_lost",
]  # fmt: skip
FIXED, SHARPER = "fixed, KL 0.18", "sharper, scale 0.3"
LONG, SHORT = 4, 2
NONE, TOKEN, PREFIX, SEQUENCE, CENTRED = (
    "no weight", "token weight", "prefix weight", "sequence weight", "centred score",
)  # fmt: skip


# ---- rows ------------------------------------------------------------------------------------------------------------


def ends_in(folder: Path) -> pd.DataFrame:
    """The last row of every run in a record folder; of an unfinished one, those of its whole problems."""
    return pd.DataFrame(ends(runs_in(folder, load_config(folder / "config.yaml")))[COLUMNS])


def kept() -> pd.DataFrame:
    """The rows that the project keeps."""
    return pd.read_csv(KEPT)


# ---- predictions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Study:
    """The kept rows, asked by cell."""

    frame: pd.DataFrame

    def __call__(self, error: str, objective: str, name: str, length: int = LONG) -> Values:
        """A column at the end of a cell's runs, a value per problem in their order."""
        part = of_cell(self.frame, error=error, objective=objective, length=length)
        return numbers(part.sort_values("problem"), name)

    def harm(self, error: str, objective: str, length: int = LONG) -> Values:
        """The sequence weight's reward less this objective's."""
        return self(error, SEQUENCE, "reward", length) - self(error, objective, "reward", length)


def independent(first: Values, second: Values, *names: str) -> MeanInterval:
    """The difference of the means over unpaired problems, with its 95% percentile-bootstrap interval."""
    rng = np.random.default_rng(derive_seed(0, "flow", "bootstrap", *names))
    drawn = stats.bootstrap(
        (first, second), lambda a, b, axis=-1: a.mean(axis=axis) - b.mean(axis=axis), n_resamples=2000,
        method="percentile", vectorized=True, rng=rng,
    ).confidence_interval  # fmt: skip
    gap = float(first.mean() - second.mean())
    return MeanInterval(gap, float(drawn.low), float(drawn.high), len(first) + len(second))


def _higher(name: str, error: str, column: str, more: str, less: str) -> Callable[[Study], list[MeanInterval]]:
    return lambda of: [interval(of(error, more, column) - of(error, less, column), "drift", name)]


def _within_twice(of: Study) -> list[MeanInterval]:
    token, sequence = (of(FIXED, objective, "entropy") for objective in (TOKEN, SEQUENCE))
    return [interval(gap, "drift", "b2", i) for i, gap in enumerate((token - sequence / 2, 2 * sequence - token))]


PREDICTIONS = (
    Prediction(
        "a1", "Fixed: entropy ends lower without a weight than with the score centred.", "centred score less no weight",
        _higher("a1", FIXED, "entropy", CENTRED, NONE),
    ),
    Prediction(
        "a2", "Sharper: entropy ends higher without a weight than with the score centred.",
        "no weight less centred score", _higher("a2", SHARPER, "entropy", NONE, CENTRED),
    ),
    Prediction(
        "a3", "Fixed: no weight does harm.", "sequence weight less no weight",
        _higher("a3", FIXED, "reward", SEQUENCE, NONE),
    ),
    Prediction(
        "a4", "Fixed: centring gives back a part of it.", "centred score less no weight",
        _higher("a4", FIXED, "reward", CENTRED, NONE),
    ),
    Prediction(
        "a5", "Fixed: not all of it.", "sequence weight less centred score",
        _higher("a5", FIXED, "reward", SEQUENCE, CENTRED),
    ),
    Prediction(
        "a6", "Sharper: no weight ends with more reward than the token weight.", "no weight less token weight",
        _higher("a6", SHARPER, "reward", NONE, TOKEN),
    ),
    Prediction(
        "b1", "Fixed: the token weight does not suffice for reward.", "sequence weight less token weight",
        _higher("b1", FIXED, "reward", SEQUENCE, TOKEN),
    ),
    Prediction(
        "b2", "Fixed: it does for entropy, which ends between half and twice that of the sequence weight.",
        "token weight less half of the sequence weight; twice the sequence weight less token weight", _within_twice,
    ),
    Prediction(
        "b3", "Sharper: the token weight's harm is smaller than under the fixed error.", "harm fixed less harm sharper",
        lambda of: [interval(of.harm(FIXED, TOKEN) - of.harm(SHARPER, TOKEN), "drift", "b3")],
    ),
    Prediction(
        "b4", "Fixed: the prefix weight does less harm than the token weight.", "prefix weight less token weight",
        _higher("b4", FIXED, "reward", PREFIX, TOKEN),
    ),
    Prediction(
        "b5", "Fixed: the token weight's harm is smaller at T = 2 than at T = 4.", "harm at T = 4 less harm at T = 2",
        lambda of: [independent(of.harm(FIXED, TOKEN), of.harm(FIXED, TOKEN, SHORT), "drift", "b5")],
    ),
)  # fmt: skip


# ---- words -----------------------------------------------------------------------------------------------------------


def table(study: Study, name: str, head: str) -> str:
    """Means with intervals: engine errors and lengths by remedies."""
    objectives = (NONE, TOKEN, PREFIX, SEQUENCE, CENTRED)
    rows = []
    for error, length in ((FIXED, LONG), (SHARPER, LONG), (FIXED, SHORT)):
        cells = []
        for objective in objectives:
            values = study(error, objective, name, length)
            cells.append(str(interval(values, "drift", name, error, objective, length)) if len(values) else "")
        rows.append((f"{error}, T = {length}", *cells))
    return markdown_table((head, *objectives), rows)


def share(study: Study) -> str:
    """A sentence on the share of the harm without a weight that is due to drift."""
    harm = interval(study.harm(FIXED, NONE), "drift", "harm")
    back = interval(study(FIXED, CENTRED, "reward") - study(FIXED, NONE, "reward"), "drift", "back")
    words = f"Under the fixed error no weight costs {harm} of reward, and centring the score recovers {back}"
    return f"{words}, {back.mean / harm.mean:.0%} of it." if harm.low > 0 else f"{words}."


def scope(study: Study) -> str:
    """The number of problems, and the number planned."""
    said = []
    for length, name in ((LONG, "drift"), (SHORT, "drift_short")):
        num = len(distinct(of_cell(study.frame, length=length), "problem"))
        planned = load_config(ROOT / f"configs/flow/{name}.yaml").problems.count
        said.append(f"{num} problems at T = {length}" + (f" (of {planned} planned)" if num < planned else ""))
    cut = "; machine time ran out" if any("planned" in words for words in said) else ""
    return f"{' and '.join(said)}{cut}"


def block() -> str:
    """The page's part on the study, between its two marks."""
    study = Study(kept())
    lost = [number(float(study(error, NONE, "entropy_lost").mean())) for error in (FIXED, SHARPER)]
    best = number(float(numbers(study.frame, "optimum").max()))
    parts = [
        f"{scope(study)}. Design and predictions were committed before the runs: [decision 10]"
        "(decisions/0010-drift-study.md), `configs/flow/drift.yaml`; the rows are in `results/flow/drift.csv`.\n"
        f"{counts(PREDICTIONS, study)} Brackets are 95% intervals over problems.",
        verdicts(PREDICTIONS, study),
        f"{share(study)}\nIn contexts that never pay, entropy without a weight ends at {lost[0]} under the fixed error "
        f"and at {lost[1]} under the sharper engine.",
        table(study, "reward", "reward at the end"),
        table(study, "entropy", "entropy at the end"),
        f"One response of {3**LONG} is right at T = {LONG}, one of {3**SHORT} at T = {SHORT}; the largest reward is "
        f"{best}.",
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    update(sys.argv[1:], ends_in, KEPT, PART, block)
