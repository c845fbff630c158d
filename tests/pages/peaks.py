"""The tokens behind the gradient's peaks, in runs of claim 62's arms.

`python -m tests.pages.peaks SEED ...` trains R3 alone and R3 with a dual clip on each seed, never clipped, looks at the
largest token before every update, and keeps a row per update in results/peaks.csv, in place of the seed's old ones. Two
to four minutes a run. `python -m tests.pages.border` then writes them into docs/border.md.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from unittest.mock import patch

import pandas as pd

from sandbox.border.peaks import DUAL, PLAIN
from sandbox.claims import REGIMES
from sandbox.claims.border_arms import at, with_dual_clip, with_free_norm
from sandbox.ledger.cells import cell
from sandbox.ledger.claim import Arm
from sandbox.measure.largest_token import LargestToken, largest_token
from sandbox.run import run
from sandbox.training.engine import SandboxTrainingEngine
from tests.pages.study import ROOT
from theory.contracts import MiniBatch, UpdateStats
from theory.objectives.objective import Objective
from theory.routing.passes import RoutingPlan

KEPT = ROOT / "results/peaks.csv"
R3 = with_free_norm(at("r0.5", "R3", 8))
ARMS = {PLAIN: R3, DUAL: with_dual_clip(R3)}
(BORDER,) = (one for one in REGIMES if one.name == "border")


def largest_tokens(arm: Arm, seed: int) -> list[LargestToken]:
    """The largest token of each update of the arm's run."""
    found, update = list[LargestToken](), SandboxTrainingEngine.update

    def looked_at(
        engine: SandboxTrainingEngine, minibatch: MiniBatch, objective: Objective, plan: RoutingPlan
    ) -> UpdateStats:
        found.append(largest_token(engine, minibatch, objective, plan))
        return update(engine, minibatch, objective, plan)

    with tempfile.TemporaryDirectory() as output, patch.object(SandboxTrainingEngine, "update", looked_at):
        run(cell(BORDER, arm, seed).config.model_copy(update={"output": output}), progress="none")
    return found


def kept() -> pd.DataFrame:
    """The kept rows, by arm, seed and update."""
    return pd.read_csv(KEPT)


def keep(seed: int) -> None:
    """Trains both arms on the seed and keeps their rows."""
    rows = [
        {"arm": words, "seed": seed, "update": k} | asdict(one)
        for words, arm in ARMS.items()
        for k, one in enumerate(largest_tokens(arm, seed))
    ]
    old = [kept().query("seed != @seed")] if KEPT.exists() else []
    pd.concat([*old, pd.DataFrame(rows)]).to_csv(KEPT, index=False, float_format="%.4g")


if __name__ == "__main__":
    for word in sys.argv[1:]:
        keep(int(word))
