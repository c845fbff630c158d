"""Partial rollouts under an exact engine (claim 50), as a table of docs/border.md: age alone, without any error."""

from __future__ import annotations

from collections.abc import Mapping

from lab.markdown import markdown_table
from sandbox.border.study import interval
from sandbox.claims.c50_partial_rollouts_do_harm_too import DROP, NONE, R3, TIS
from sandbox.ledger.cells import Regime, key
from sandbox.ledger.claim import Row
from sandbox.ledger.course import area, collapsed

ARMS = {
    "kept, no remedy": NONE,
    "kept, R3": R3,
    "kept, token TIS": TIS,
    "tail dropped": DROP,
}
"""The arms, by their names in the table."""

PARTIAL = """## Partial rollouts

Here the engine is exact and always has the newest weights, but a step's rollout ends once 64 of the 192 prompts in
progress are complete. The others are dropped, or continued by the next weights, so that a batch has tokens of several
versions (claim 50; [how to](how-to/study-partial-rollouts.md)).
"""


def markdown(rows: Mapping[str, Row], regime: Regime) -> str:
    """The section, with collapsed runs and the mean accuracy with its 95% Student interval; empty without runs."""
    lines = []
    for name, arm in ARMS.items():
        # By key, which covers the regime: rows of other regimes and of an arm's former config drop out.
        own = [row for cell, row in rows.items() if row["arm"] == arm.name and cell == key(regime, arm, row["seed"])]
        if len(own) < 2:
            continue
        ended = f"{sum(collapsed(row) for row in own):.0f} of {len(own)}"
        lines.append((name, ended, interval([area(row) for row in own], 3)))
    titles = ("GRPO, N = 8, 128 extra prompts", "collapsed", "accuracy over the run")
    return f"{PARTIAL}\n{markdown_table(titles, lines)}\n" if lines else ""
