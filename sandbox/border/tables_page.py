"""docs/border-tables.md: the longer tables behind docs/border.md, from the same rows."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.border import objectives, one_number, rates
from sandbox.border.alarms import table as alarms
from sandbox.border.lengths import markdown as longer_responses
from sandbox.border.study import BorderStudy
from sandbox.border.table import FIRST, where
from sandbox.claims.border_arms import ROUTER_GAPS
from sandbox.ledger.summary import effect_text, word_text
from sandbox.ledger.verdicts import Finding

INTRO = """# Where training breaks, in tables

<!-- Written by `python -m tests.pages.border` from results/claims/cells.jsonl. -->

The numbers behind [where training breaks](border.md), from the same runs.
"""

GAP_WORDS = """## The gaps

The engines of the map, at the first global step of the runs without a remedy. `r0.1` to `r0.5` have FP8 weights and
activations, and router noise of that standard deviation. [F(2)](glossary.md) is a share of tokens, chi2 the estimate of
chi2(old ‖ mu) per token, and the length is in tokens.
"""

ENTROPY = """## Entropy

![Median entropy over the updates, by remedy and by objective](images/border-entropy.svg)

*The median over the runs at router noise 0.5 and N = 8, in nats per token; "an exact engine" has no gap.*
"""

PREDICTED = """## Predictions and results

A claim stands on all its predictions together ([how](decisions/0007-claims-ledger.md)). The table has each prediction's
own test: *for*, *against* or *open* at 5%, without correction for their number.
"""
MEASURES = """
An effect is the difference between a measure's means in two arms, or between its mean and the number that the
prediction names; × marks a factor instead. The measures:
"""


def markdown(study: BorderStudy, found: Sequence[Finding], waiting: str) -> str:
    """The page; `found` are the findings of the study's claims, `waiting` is the ledger's `waiting_text`."""
    parts = [
        INTRO, _gap(study.grpo), one_number.tables(study), rates.remedies(study.grpo, study.slowed),
        longer_responses(study.rows, study.regime), objectives.clipping(study),
        ENTROPY if len(study.table) else "", alarms(study), _predictions(found, waiting),
    ]  # fmt: skip
    return "\n".join(part for part in parts if part)


def _gap(grpo: pd.DataFrame) -> str:
    """The gap of each engine before training, from the first global step of its runs without a remedy.

    Under R3 the trainer replays mu's experts, which makes the gap of its first step smaller.
    """
    lines = []
    for gap in ROUTER_GAPS:
        own = where(grpo, gap=gap, remedy="none")
        if len(own):
            means = (number(float(own[name].to_numpy(dtype=float).mean())) for name in FIRST)
            lines.append((gap, *means, str(len(own))))
    titles = ("engine", "k3 KL", "F(2)", "chi2", "routers that differ", "length", "runs")
    return f"{GAP_WORDS}\n{markdown_table(titles, lines)}"


def _predictions(found: Sequence[Finding], waiting: str) -> str:
    """Every prediction of the study with its effect, the claim's verdict, and its number of seeds."""
    lines, said, measures = [], [], {}
    again = {one.claim.repeats: one.claim.number for one in found}
    for finding in (one for one in found if one.decides):
        claim, has_runs = finding.claim, finding.word is not None
        word = finding.word or "Runs are missing"
        if word == "inconclusive" and claim.number in again:
            word = f"{word}; tried again as claim {again[claim.number]}"
        said.append(f"- Claim {claim.number}: {claim.sentence} **{word}.**")
        for one in (one for one in finding.outcomes if one.values):
            stand = word_text(one) if has_runs else f"– ({len(one.values)} of {len(finding.seeds)} seeds)"
            measure = one.prediction.measure
            unit = "" if measure.unit in ("1", "accuracy") else f", {measure.unit}"
            measures[measure.name] = f"- `{measure.name}`: {measure.words}{unit}"
            lines.append((str(claim.number), one.prediction.words, f"`{measure.name}`", effect_text(one), stand))
    titles = ("claim", "prediction", "measure", "effect, 95%", "by its own test")
    parts = [PREDICTED, *said, *([f"\n{waiting}"] if waiting else []), MEASURES, *measures.values()]
    return "\n".join([*parts, f"\n{markdown_table(titles, lines)}"])


__all__ = ["markdown"]
