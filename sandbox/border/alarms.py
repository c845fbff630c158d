"""The alarm of the border study: a paragraph for docs/border.md and the table of the best limits."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lab.markdown import markdown_table
from sandbox.border.alarm import Trial, by_updates, mean_score, shares, tried
from sandbox.border.lengths import alarm_elsewhere
from sandbox.border.study import BorderStudy, paragraph
from sandbox.ledger.claim import FRESH
from sandbox.ledger.course import SMOOTHED, collapse_step, fall_step

WORDS = """## Alarms

A limit is on the metric itself, from the first twentieth of a run on, or on its ratio to its mean over the first tenth,
and then after that tenth. For each metric the best limit was chosen on the {num_chosen} runs of seeds up to {last} (all
gaps, N and remedies), and tried on the {num_others} runs of seeds from {fresh} on that have the same rate, batch and
clipping, the controls included. The score is the share of collapses
with an alarm in time minus the share of false alarms, averaged over N: some metrics separate values of N rather than
runs that collapse. The intervals allow for runs of one seed, which share an initial model. Exploratory: this score and
the early limits were chosen after other alarms had been tried on the same runs.
"""

WEAK = 0.5
"""A mean score below this is called weak."""

NUM_ALARMS = 5
"""Number of alarms in the table: those with the best scores where they were chosen."""


def said(study: BorderStudy) -> str:
    """The section of docs/border.md, on the best alarm alone; empty without one."""
    if not study.alarms:
        return ""
    rule = study.alarms[0][0]
    by_n = {n: tried(rule, some) for n, some in by_updates(study.fresh).items()}
    (told, false), (early, _) = (shares(rule, study.fresh, date) for date in (collapse_step, fall_step))
    words = paragraph(
        f"The best alarm on exploratory seeds, {rule.words}, warns in time of {told} collapses on fresh seeds, and "
        f"goes off in {false} runs that do not collapse.",
        # "n of m (low to high)": the number alone, since m is the same.
        f"Before the first low evaluation, up to {SMOOTHED - 1} earlier, it warns of {early.split()[0]}.",
        "One limit is a weak alarm." if mean_score([*by_n.values()]) < WEAK else "",
        alarm_elsewhere(study.alarms, study.rows, study.regime).strip(),
        "([Other alarms](border-tables.md#alarms).)",
    )
    return f"## An alarm\n\n{words}"


def table(study: BorderStudy) -> str:
    """The best alarms on the exploratory seeds, and their trials on the deciding ones; empty without any."""
    lines, by_first = [], ""
    for rule, score in study.alarms[:NUM_ALARMS]:
        then, by_n = tried(rule, study.fresh), {n: tried(rule, some) for n, some in by_updates(study.fresh).items()}
        told, false = shares(rule, study.fresh)
        lead = "–" if math.isnan(then.lead) else f"{then.lead:.0%} of the run"
        lines.append((rule.words, f"{score:.2f}", f"{mean_score([*by_n.values()]):.2f}", told, false, lead))
        # Of the first rule alone: the best on the runs on which the rules were chosen.
        by_first = by_first or _by_n(by_n)
    if not lines:
        return ""
    titles = ("alarm", "score where chosen", "score where tried", "alarms in time", "false alarms", "median lead")
    words = WORDS.format(num_chosen=len(study.explored), num_others=len(study.fresh), last=FRESH - 1, fresh=FRESH)
    first = paragraph(f"The first by N, alarms in time and false alarms: {by_first}.")
    return f"{words}\n{markdown_table(titles, lines)}\n{first}"


def _by_n(trials: Mapping[int, Trial]) -> str:
    return "; ".join(
        f"N = {n}: {one.in_time} of {one.num_collapsed} and {one.false} of {one.num_others}"
        for n, one in trials.items()
    )


__all__ = ["said", "table"]
