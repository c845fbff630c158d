"""The tokens behind the gradient's peaks, in runs of claim 62's arms: the tables of results/log/2026-11.md.

`python -m tests.pages.peaks SEED ...` trains R3 alone and R3 with a dual clip on each seed, never clipped, looks at the
largest token before every update, and prints the updates with the largest norms. Two to four minutes a run.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from statistics import median
from unittest.mock import patch

from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.claims.border_arms import at, with_dual_clip, with_free_norm
from sandbox.ledger.cells import cell
from sandbox.ledger.claim import Arm
from sandbox.measure.largest_token import LargestToken, largest_token
from sandbox.run import run
from sandbox.training.engine import SandboxTrainingEngine
from tests.pages.border import BORDER
from theory.contracts import MiniBatch, UpdateStats
from theory.objectives.objective import Objective
from theory.routing.passes import RoutingPlan

R3 = with_free_norm(at("r0.5", "R3", 8))
ARMS = {"R3": R3, "R3 and dual clip": with_dual_clip(R3)}
SHOWN = 5
"""Updates of a run that are shown."""


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


def table(found: Sequence[LargestToken]) -> str:
    """The SHOWN updates with the largest norms, and the median norm above it."""
    ranked = sorted(enumerate(found), key=lambda item: -item[1].norm)[:SHOWN]
    lines = [
        (str(k), number(one.norm), number(one.norm_without), number(one.advantage), number(math.exp(one.logp_mu)),
         number(math.exp(one.logp_old)), number(math.exp(one.logp_pi)), number(math.exp(one.logp_pi - one.logp_old)))
        for k, one in ranked
    ]  # fmt: skip
    titles = ("update", "norm", "without the token", "A", "mu", "old", "pi", "pi/old")
    said = f"The median of {len(found)} norms is {number(median(one.norm for one in found))}."
    return f"{said}\n\n{markdown_table(titles, lines)}"


if __name__ == "__main__":
    for seed in map(int, sys.argv[1:]):
        for words, arm in ARMS.items():
            print(f"{words}, seed {seed}. {table(largest_tokens(arm, seed))}", flush=True)
