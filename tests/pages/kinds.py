"""Drift by kind of engine error (docs/decisions/0010-drift-study.md, last section): its rows, verdicts, part of a page.

`python -m tests.pages.kinds FOLDER ...` keeps the ends of the runs in these record folders of `firstorder flow`;
without a folder it writes the page's part from the kept rows.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd

from lab.audit.table import numbers
from lab.flow.table import of_cell
from lab.markdown import markdown_table
from lab.report.style import number
from tests.pages.drift import CENTRED, FIXED, NONE, SEQUENCE, TOKEN, ends_in
from tests.pages.predictions import counts, verdicts
from tests.pages.study import ROOT, TABLES, Part, mean, of_mean, update

KEPT, PART = ROOT / "results/flow/kinds.csv", Part(TABLES, "kinds")
LOW_RANK, WEIGHTS, FRESH = "low_rank, KL 0.18", "weights, KL 0.18", "fresh, KL 0.18"
FLATTER, TOP_P, ROUNDED = "flatter, scale 0.3", "top_p, scale 0.1", "rounded, scale 0.143"
BARE = "fixed, KL 0.18, no baseline"
ERRORS = {
    FIXED: "fixed, KL 0.18",
    LOW_RANK: "low rank, KL 0.18",
    WEIGHTS: "weights, KL 0.18",
    FRESH: "fresh in every pass, KL 0.18",
    FLATTER: "flatter, logits / 1.3",
    TOP_P: "top-p 0.9",
    ROUNDED: "weights rounded to INT4",
    BARE: BARE,
}
"""Engine errors by their label in rows, as the page names them."""
REMEDIES = (NONE, TOKEN, SEQUENCE, CENTRED)


@dataclass(frozen=True)
class Kinds:
    """The kept rows, asked by cell."""

    frame: pd.DataFrame

    def __call__(self, error: str, objective: str, name: str = "reward") -> pd.Series:
        """A column at the end of a cell's runs, by problem."""
        found = of_cell(self.frame, error=error, objective=objective)
        return pd.Series(numbers(found, name), index=found["problem"].to_numpy())

    def harm(self, error: str) -> pd.Series:
        """The reward that no weight loses against the sequence weight, whose expected update is the true gradient."""
        return self(error, SEQUENCE) - self(error, NONE)

    def gain(self, error: str) -> pd.Series:
        """The reward that the token weight earns beyond no weight."""
        return self(error, TOKEN) - self(error, NONE)


def kept() -> pd.DataFrame:
    """The rows that the project keeps."""
    return pd.read_csv(KEPT)


_mean = partial(of_mean, "kinds")

PREDICTIONS = (
    _mean("k1", "Low rank: no weight does harm.", "harm", lambda of: of.harm(LOW_RANK)),
    _mean(
        "k2", "Low rank: centring gives back a part of it.", "centred score less no weight",
        lambda of: of(LOW_RANK, CENTRED) - of(LOW_RANK, NONE),
    ),
    _mean("k3", "Weights: no weight does harm.", "harm", lambda of: of.harm(WEIGHTS)),
    _mean(
        "k4", "Weights: centring gives back a part of it.", "centred score less no weight",
        lambda of: of(WEIGHTS, CENTRED) - of(WEIGHTS, NONE),
    ),
    _mean(
        "k5", "Fresh: no weight does less harm than under the fixed error.", "harm fixed less harm fresh",
        lambda of: of.harm(FIXED) - of.harm(FRESH),
    ),
    _mean(
        "k6", "Rounded: no weight does less harm than under the fixed error.", "harm fixed less harm rounded",
        lambda of: of.harm(FIXED) - of.harm(ROUNDED),
    ),
    _mean(
        "k7", "Flatter: where nothing is earned entropy ends lower without a weight than with the score centred.",
        "centred score less no weight",
        lambda of: of(FLATTER, CENTRED, "entropy_lost") - of(FLATTER, NONE, "entropy_lost"),
    ),
    _mean(
        "k8", "Top-p: entropy ends higher under the token weight than with the score centred.",
        "token weight less centred score", lambda of: of(TOP_P, TOKEN, "entropy") - of(TOP_P, CENTRED, "entropy"),
    ),
    _mean(
        "k9", "Top-p: centring costs reward, beside the token weight.", "token weight less centred score",
        lambda of: of(TOP_P, TOKEN) - of(TOP_P, CENTRED),
    ),
    _mean(
        "k10", "Fixed: no weight earns more without a baseline than with it.", "without less with",
        lambda of: of(BARE, NONE) - of(FIXED, NONE),
    ),
    _mean(
        "k11", "Fixed: the token weight gains less on no weight without a baseline than with it.",
        "gain with less gain without", lambda of: of.gain(FIXED) - of.gain(BARE),
    ),
)  # fmt: skip


def table(study: Kinds, name: str, head: str) -> str:
    """Means with intervals: engine errors by remedies."""
    rows = []
    for error, title in ERRORS.items():
        found = [study(error, remedy, name) for remedy in REMEDIES]
        rows.append((title, *(str(mean("kinds", x, name, error)) if len(x) else "" for x in found)))
    return markdown_table((head, *REMEDIES), rows)


def block() -> str:
    """The page's part on the study, between its two marks."""
    study = Kinds(kept())
    exact = number(float(study(FIXED, SEQUENCE, "entropy_lost").mean()))
    num = {error: len(study(error, NONE)) for error in ERRORS}
    few = "; ".join(f"{ERRORS[error]}: {n}" for error, n in num.items() if n < num[FIXED])
    parts = [
        f"{num[FIXED]} problems{f' ({few})' if few else ''}, different from those above; design and predictions "
        "were committed before the runs: the last section of\n[decision 10](decisions/0010-drift-study.md), "
        "`configs/flow/kinds.yaml`; the rows are in `results/flow/kinds.csv`.\n"
        f"{counts(PREDICTIONS, study)} Harm is the sequence weight's reward minus that of no weight.",
        verdicts(PREDICTIONS, study),
        table(study, "reward", "reward at the end"),
        table(study, "entropy_lost", "entropy at the end in contexts that never pay"),
        f"Under the true gradient it ends at {exact}. Under top-p no weight follows the true gradient: a token that mu "
        "never samples\nhas no weight.",
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def rows_of(folder: Path) -> pd.DataFrame:
    """The ends of a folder's runs; those without a baseline get their own error label."""
    rows = ends_in(folder)
    is_bare = folder.parent.name == "kinds-bare"
    return rows.assign(error=BARE) if is_bare else rows


if __name__ == "__main__":
    update(sys.argv[1:], rows_of, KEPT, PART, block)
