"""docs/border.md from the ledger's rows: every number is computed. The longer tables are in docs/border-tables.md."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.border import branches, controls, coverage, dual_clip, longer, objectives, one_number
from sandbox.border.alarms import said as alarm_said
from sandbox.border.lengths import said as longer_responses
from sandbox.border.partial_rollouts import markdown as partial_rollouts
from sandbox.border.pictures import FULL, welch
from sandbox.border.study import BorderStudy, paragraph
from sandbox.border.table import STORY, ended, story, summary, where
from sandbox.claims.border_arms import DEGREES, REMEDY_WORDS
from sandbox.ledger.claim import FRESH
from sandbox.ledger.verdicts import Finding

ENDS = (
    ("exact", "none", "an exact engine"), ("r0.5", "none", "no remedy"), ("r0.5", "R2", "R2"),
    ("r0.5", "tis", "token TIS"), ("r0.5", "R3", "R3"), ("r0.5", "tis-R3", "token TIS and R3"),
)  # fmt: skip
"""The places of the page's first table, at N = 8: gap, remedy and words."""

DECIDED = ("reproduced", "not reproduced", "opposite")


def markdown(study: BorderStudy, found: Sequence[Finding], looked_at: pd.DataFrame) -> str:
    """The page; `found` are the findings of the study's claims, `looked_at` the updates of peaks.py."""
    parts = [
        INTRO.format(num_runs=len(study.table), num_seeds=study.table["seed"].nunique()),
        _ends(study.grpo), dual_clip.beside(study), _demo(study.table), PICTURE,
        coverage.markdown(study.grpo), _claims(found),
        _sign(study.grpo), one_number.markdown(study), longer.markdown(study), dual_clip.markdown(study, looked_at),
        controls.markdown(study.grpo),
        partial_rollouts(study.rows, study.regime), longer_responses(study.rows, study.regime),
        branches.markdown(study.rows, study.regime), objectives.sides(study.table),
        objectives.clipping_said(study), alarm_said(study), _limits(study),
    ]  # fmt: skip
    return "\n".join(part for part in parts if part)


INTRO = """# Where training breaks

<!-- Written by `python -m tests.pages.border` from results/claims/cells.jsonl. -->

One engine samples the responses, another trains on them. How far apart may the two be before training breaks, and
on what does that depend? This page answers with {num_runs} runs of a small Mixture of Experts on Countdown, over
{num_seeds} seeds, each with its own initial model. A run makes 400 updates on 64 responses each. Some sections have
others (rate, clipping, task, updates).
The *gap* is the k3 estimate of KL(mu ‖ old) between the engines before training. The *staleness* is N, the number of
updates per rollout. The remedies are token TIS (a truncated token weight) and the modes of
[routing replay](concepts.md#routing-replay). Design and predictions were written before the deciding runs
([decision 8](decisions/0008-border-study.md)). More numbers are in [tables](border-tables.md).
"""

PICTURE = """[![Accuracy over gap and staleness, a panel per remedy](images/border.svg)](images/border.svg)

*Mean held-out accuracy of pi over the run, sampled by an exact engine. A run has collapsed if its last quarter is below
half of its highest level, the one before training included; the number of collapsed runs is below the accuracy, unless
it is 0 of 8 or more. Dashed: half of the runs without a remedy collapse there (`KL x N = x*`, below). Pale: another
panel's runs. Grey: not in the design. On the site, [every run](border-map.html) is a curve to click, with its command.*
"""

SIGN = """## The sign of the weight

Does the token weight help or hurt? That depends on N (claims 37 and 46).
"""

GAINS = """![The gain of each remedy, by N](images/border-gains.svg)

*At router noise 0.5: the difference in mean accuracy from no remedy, with Welch's 95% interval over seeds.*
"""

CLAIMS = """## The claims

A claim stands on all its predictions together ([each of them](border-tables.md#predictions-and-results)). Other
claims of this regime are in the [ledger](ledger.md).
"""

LIMITS = """## What this does not say

- One shape of model. The map is one task, responses of some {length} tokens, one learning rate ({rate}).
- Longer sums are also harder.
- Fits and map are exploratory; the claims are not.
- The map's runs make 400 updates. A gap that needs thousands to do harm was tried at one place.
"""


def _limits(study: BorderStudy) -> str:
    """The limits of the study, with the length and the learning rate of its map."""
    if study.unaided.empty:
        return ""
    (rate,) = study.unaided["rate"].unique()
    return LIMITS.format(length=f"{study.unaided['length'].to_numpy(dtype=float).mean():.0f}", rate=number(rate))


def _ends(grpo: pd.DataFrame) -> str:
    """The outcomes of runs at N = 8 and the largest gap, a line for each remedy that has any."""
    lines = []
    for gap, remedy, words in ENDS:
        one = summary(grpo, N=8, gap=gap, remedy=remedy)
        if one is not None:
            mean = f"{one['area']:.3f} ({one['low']:.3f} to {one['high']:.3f})"
            last = (number(one[name]) for name in ("kl", "kl_final", "entropy_final"))
            lines.append((words, ended(one), mean, *last))
    titles = ("GRPO, N = 8, router noise 0.5", "collapsed", "accuracy over the run", "KL before", "KL at the end",
              "entropy at the end")  # fmt: skip
    return (
        f"{markdown_table(titles, lines)}\n*At the end: medians of the last quarter, in nats per token.*\n"
        if lines
        else ""
    )


def _demo(table: pd.DataFrame) -> str:
    """The number of seeds that reproduce the demo's story, of the fresh ones that have its six runs."""
    found = story(table)
    fresh = where(found.assign(is_fresh=found["seed"] >= FRESH), is_fresh=True)
    if fresh.empty:
        return ""
    names = {" ".join(place): _story_words(*place) for place in STORY}
    parts = ", ".join(f"{words} {fresh[name].sum()}" for name, words in names.items())
    return paragraph(
        "`make demo` has six such runs from one initial model. Its story, in which no remedy and R2 collapse and the "
        f"others hold, came out in full on {fresh['all'].sum()} of {len(fresh)} fresh seeds with a model each "
        f"({parts}).",
    )


def _story_words(preset: str, gap: str, remedy: str) -> str:
    if preset == "minirl":
        return "MiniRL"
    return "an exact engine" if gap == "exact" else REMEDY_WORDS[remedy]


def _claims(found: Sequence[Finding]) -> str:
    """The decided claims in full, the others by number."""
    decided, open_ = [], {}
    again = {one.claim.repeats for one in found}
    for finding in (one for one in found if one.decides):
        claim, word = finding.claim, finding.word or "runs are missing"
        if word in DECIDED:
            # A remark says where the sentence means less than it seems to.
            remark = "".join(f" *{words}*" for words in claim.remarks.values())
            decided.append((str(claim.number), f"{claim.sentence}{remark}", word))
        else:
            word = f"{word}, tried again" if claim.number in again else word
            open_.setdefault(word, []).append(str(claim.number))
    if not decided and not open_:
        return ""
    others = "; ".join(f"{word}: {', '.join(numbers)}" for word, numbers in open_.items())
    table = markdown_table(("claim", "finding", "verdict"), decided) if decided else ""
    last = paragraph(f"The others, by number: {others}.") if others else ""
    return "\n".join(part for part in (CLAIMS, table, last) if part)


def _sign(grpo: pd.DataFrame) -> str:
    """The gain by the weight at each N whose arms have FULL runs, and the picture of the gains."""
    parts = []
    for n in DEGREES:
        one, none = (
            where(grpo, gap="r0.5", N=n, remedy=name)["area"].to_numpy(dtype=np.float64) for name in ("tis", "none")
        )
        if min(len(one), len(none)) >= FULL:
            mean, low, high = welch(one, none)
            parts.append(f"{mean:+.3f} ({low:.3f} to {high:.3f}) at N = {n}")
    said = paragraph(f"It changes the accuracy by {', '.join(parts)}.") if parts else ""
    return "\n".join(part for part in (SIGN, said, GAINS) if part)


__all__ = ["markdown"]
