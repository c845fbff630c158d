"""The study of remedies (docs/decisions/0012-remedies-study.md): its predictions, and its part of the tables' page.

`python -m tests.pages.remedies FOLDER ...` keeps the rows of the runs in these record folders of `firstorder flow`, cut
after the last whole problem if a folder is unfinished; without a folder it writes the page's part from the kept rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from lab.audit.table import distinct
from lab.flow.config import load_config
from lab.flow.table import MeanInterval, of_cell
from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.exact.flow import SandboxFlow
from tests.pages.predictions import Prediction, counts, verdicts
from tests.pages.remedies_rows import (
    CLIP,
    EXACT,
    FIXED,
    KEPT,
    LARGE,
    MASK,
    NATURAL,
    NONE,
    PR2,
    PREFIX,
    R2,
    R3,
    SMALL,
    STUDIES,
    TOKEN,
    Remedies,
    kept,
    mean,
    rank,
    resampled,
    rows_of,
    spearman,
)  # fmt: skip
from tests.pages.study import ROOT, TABLES, Part, of_mean, update

PART = Part(TABLES, "remedies")

# ---- predictions -----------------------------------------------------------------------------------------------------


_mean = partial(of_mean, "remedies")


def _rank(name: str, words: str, measured: str, pair: Callable[[Remedies], tuple[Any, Any]]) -> Prediction:
    return Prediction(name, words, measured, lambda of: [rank(*pair(of), name)])


def first(of: Remedies, name: str, objective: str = NONE) -> pd.Series:
    """A number at step 0 under the fixed error, N = 1."""
    return of.cell("remedies", objective, f"first_{name}")


def drift_share(of: Remedies) -> pd.Series:
    """The drift over the true gradient's length, without a weight."""
    return first(of, "drift_norm") / first(of, "true_norm")


def _drift_against_bias(of: Remedies) -> list[MeanInterval]:
    rows = pd.concat([drift_share(of), first(of, "bias"), of.harm("remedies", NONE)], axis=1).dropna().to_numpy()
    return [resampled(lambda p: spearman(p[..., 0], p[..., 2]) - spearman(p[..., 1], p[..., 2]), rows, "e2")]


PREDICTIONS = (
    _mean("c1", "Exact engine, N = 16: no weight does harm.", "harm", lambda of: of.stale(NONE, EXACT)),
    _mean(
        "c2", "Exact engine: no weight does more harm at N = 16 than at N = 4.", "harm at 16 less harm at 4",
        lambda of: of.stale(NONE, EXACT) - of.stale(NONE, EXACT, 4),
    ),
    _mean(
        "c3", "Exact engine, N = 16: the clip does less harm than no weight.", "harm of no weight less the clip's",
        lambda of: of.stale(NONE, EXACT) - of.stale(CLIP, EXACT),
    ),
    _mean(
        "c4", "Exact engine, N = 16: the mask does less harm than the clip.", "harm of the clip less the mask's",
        lambda of: of.stale(CLIP, EXACT) - of.stale(MASK, EXACT),
    ),
    _mean(
        "c5", "Fixed error, N = 16: the mask does less harm than the clip.", "harm of the clip less the mask's",
        lambda of: of.stale(CLIP, FIXED) - of.stale(MASK, FIXED),
    ),
    _mean(
        "c6", "Fixed error, N = 16: the token weight alone does less harm than the clip.",
        "harm of the clip less the token weight's", lambda of: of.stale(CLIP, FIXED) - of.stale(TOKEN, FIXED),
    ),
    _rank(
        "e1", "No weight: bias at step 0 and harm are correlated, positively.", "rank correlation",
        lambda of: (first(of, "bias"), of.harm("remedies", NONE)),
    ),
    Prediction(
        "e2", "No weight: the drift's share correlates with harm more than bias does.",
        "difference of the rank correlations", _drift_against_bias,
    ),
    _rank(
        "e3", "No weight: the true gradient's length correlates with harm, negatively.",
        "rank correlation, its sign changed", lambda of: (-first(of, "true_norm"), of.harm("remedies", NONE)),
    ),
    _mean(
        "f1", "Exact engine: noise of B = 8 ends lower than no noise.", "harm at B = 8 less harm without noise",
        lambda of: of.noisy(8) - of.noisy(np.inf),
    ),
    _mean(
        "f2", "Noise of B = 8 under the exact engine costs more than the fixed error costs without noise.",
        "harm that noise adds less harm that the error adds",
        lambda of: of.noisy(8) - of.noisy(np.inf, FIXED),
    ),
    _mean(
        "f3", "Noise of B = 512 costs less than a tenth of what that of B = 8 costs (exact engine).",
        "a tenth of what B = 8 adds less what B = 512 adds",
        lambda of: (of.noisy(8) - of.noisy(np.inf)) / 10 - (of.noisy(512) - of.noisy(np.inf)),
    ),
    _rank(
        "g1", "Token weight: its bound and its harm are correlated over problems, positively.", "rank correlation",
        lambda of: (of.cell("remedies", TOKEN, "bound"), of.harm("remedies", TOKEN)),
    ),
    _rank(
        "g2", "Prefix weight: the same.", "rank correlation",
        lambda of: (of.cell("remedies", PREFIX, "bound"), of.harm("remedies", PREFIX)),
    ),
    Prediction(
        "g3",
        "The prefix weight's bound is the smaller one in every problem, and its harm the larger one.",
        "least difference of the bounds; harm of the prefix weight less the token weight's",
        lambda of: [
            _single(of.cell("remedies", TOKEN, "bound") - of.cell("remedies", PREFIX, "bound")),
            mean(of.harm("remedies", PREFIX) - of.harm("remedies", TOKEN), "g3"),
        ],
    ),
    _mean(
        "d1", "Noise 2, N = 8: R2 ends with less reward than no replay.", "no replay less R2",
        lambda of: of.replayed(NATURAL) - of.replayed(R2),
    ),
    _mean(
        "d2", "Noise 2: bias at step 0 is larger under R3 than without replay.", "R3 less no replay",
        lambda of: of.replayed(R3, name="first_bias") - of.replayed(NATURAL, name="first_bias"),
    ),
    _mean(
        "d3", "Noise 2, N = 8: R3 ends with less reward than no replay.", "no replay less R3",
        lambda of: of.replayed(NATURAL) - of.replayed(R3),
    ),
    _mean(
        "d4", "Noise 2, N = 8: Pr2 ends with more reward than R2.", "Pr2 less R2",
        lambda of: of.replayed(PR2) - of.replayed(R2),
    ),
    _mean(
        "d5", "R3 loses less against no replay at noise 0.5 than at noise 2 (N = 8).", "loss at 2 less loss at 0.5",
        lambda of: _loss(of, R3, LARGE) - _loss(of, R3, SMALL),
    ),
    _mean(
        "d6", "R2 loses less against no replay at N = 2 than at N = 8 (noise 2).", "loss at N = 8 less loss at N = 2",
        lambda of: _loss(of, R2, LARGE) - _loss(of, R2, LARGE, 2),
    ),
)  # fmt: skip


def _loss(of: Remedies, mode: str, error: str, N: int = 8) -> pd.Series:
    return of.replayed(NATURAL, error, N) - of.replayed(mode, error, N)


def _single(values: pd.Series) -> MeanInterval:
    least = float(values.min())
    return MeanInterval(least, least, least, len(values))


# ---- words -----------------------------------------------------------------------------------------------------------


def scope(study: Remedies) -> str:
    """The number of problems of each part, and the number planned."""
    said = []
    for name in STUDIES:
        num = len(distinct(of_cell(study.frame, study=name), "problem"))
        file = ROOT / f"configs/flow/{name.replace('-', '_')}.yaml"
        planned = load_config(file, sandbox=lambda: SandboxFlow).problems.count
        said.append(f"`{name}` {num}" + (f" of {planned}" if num < planned else ""))
    cut = "; machine time ran out" if any(" of " in words for words in said) else ""
    return f"Problems: {', '.join(said)}{cut}."


def harms(study: Remedies) -> str:
    """The harm of each remedy by engine, N and B."""
    cells: list[tuple[str, dict[str, pd.Series]]] = [
        ("fixed, N = 1", {name: study.harm("remedies", name) for name in (NONE, TOKEN, MASK)}),
        *(
            (f"{error.split(',')[0]}, N = {n}", {o: study.stale(o, error, n) for o in (NONE, TOKEN, CLIP, MASK)})
            for error in (EXACT, FIXED)
            for n in (4, 16)
        ),
        *(
            (f"{e.split(',')[0]}, N = 16, B = {B}", {CLIP: study.noisy(B, e)})
            for e in (EXACT, FIXED)
            for B in (8, 64, 512)
        ),
    ]
    heads = (NONE, TOKEN, CLIP, MASK)
    rows = [
        (label, *(mean(found[head], f"{label} {head}") if head in found else "" for head in heads))
        for label, found in cells
    ]
    return markdown_table(("harm at the end", *heads), rows).strip()


def replays(study: Remedies) -> str:
    """Reward at the end of each replay mode."""
    modes = (NATURAL, R2, R3, PR2)
    rows = []
    for error, n in ((SMALL, 8), (LARGE, 8), (LARGE, 2)):
        found = {mode: study.replayed(mode, error, n) for mode in modes}
        shown = [mean(x, f"{error} {n} {mode}") if len(x) else "" for mode, x in found.items()]
        rows.append((f"{error.replace(', scale', '')}, N = {n}", *shown))
    return markdown_table(("reward at the end", *modes), rows).strip()


def ranks(study: Remedies) -> dict[str, MeanInterval]:
    """The rank correlations of the harm of no weight (N = 1, fixed error) with numbers at step 0."""
    harm = study.harm("remedies", NONE)
    asked = {
        "bias": first(study, "bias"),
        "1 - cosine": 1 - first(study, "cosine"),
        "the drift's share": drift_share(study),
        "the true gradient's length": first(study, "true_norm"),
        "the variance": first(study, "variance"),
    }
    # The same resampling streams as e1 and e3, so that a number has one interval on the page.
    streams = {"bias": "e1", "the true gradient's length": "e3"}
    return {name: rank(values, harm, streams.get(name, f"predictor {name}")) for name, values in asked.items()}


def predictors(study: Remedies) -> str:
    """A sentence on the numbers at step 0 that correlate with the harm of no weight."""
    found = [f"{name} {one}" for name, one in ranks(study).items()]
    return (
        f"Rank correlations of the harm of no weight (N = 1, fixed error) with numbers at step 0: {'; '.join(found)}."
    )


def block() -> str:
    """The page's part on the study, between its two marks."""
    study = Remedies(kept())
    error = number(float(study.replayed(NATURAL, name="first_draw_error").mean()))
    parts = [
        "Design and predictions were committed before the runs: [decision 12](decisions/0012-remedies-study.md);\n"
        f"rows are in `results/flow/remedies.csv`. {scope(study)} {counts(PREDICTIONS, study)}",
        verdicts(PREDICTIONS, study),
        "Harm is the reward of the sequence weight's run, which follows the true gradient, minus a run's own. Brackets "
        "are 95% intervals over problems.",
        harms(study),
        predictors(study),
        replays(study),
        f"Under replay the largest reward is 0.5. At noise 2, averaging over 8 draws leaves an error of {error} of the "
        "first gradient's norm.",
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    update(sys.argv[1:], rows_of, KEPT, PART, block)
