"""docs/border.md from the ledger's rows: every number is computed, and missing runs are named."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.border.alarm import Trial, by_updates, choose, mean_score, share_text, tried
from sandbox.border.lengths import alarm_elsewhere, is_branch, is_on_sums
from sandbox.border.lengths import markdown as longer_responses
from sandbox.border.one_number import markdown as one_number
from sandbox.border.partial_rollouts import markdown as partial_rollouts
from sandbox.border.table import FIRST, places, runs, story, where
from sandbox.claims.border_arms import ROUTER_GAPS
from sandbox.ledger.cells import Regime
from sandbox.ledger.claim import FRESH, Row
from sandbox.ledger.summary import effect_text, word_text
from sandbox.ledger.verdicts import Finding

STORY = (
    ("exact", "none", "an exact engine"), ("r0.5", "none", "no remedy"), ("r0.5", "R2", "R2"),
    ("r0.5", "tis", "token TIS"), ("r0.5", "R3", "R3"), ("r0.5", "tis-R3", "token TIS and R3"),
)  # fmt: skip
"""The places of the page's first table, at N = 8: gap, remedy and words."""

STALE = (("stale", "none", "no remedy"), ("stale", "R3", "R3"), ("stale", "tis", "token TIS"))
"""The places of the control with stale weights."""


def markdown(rows: Mapping[str, Row], regime: Regime, found: Sequence[Finding], waiting: str) -> str:
    """The page; `found` are the findings of the study's claims, `waiting` is the ledger's `waiting_text`."""
    table = runs(rows, regime)
    grpo = where(table, preset="grpo")
    parts = [
        INTRO.format(num_runs=len(table), num_seeds=table["seed"].nunique()),
        _said(grpo), _ends(grpo, STORY, "GRPO, N = 8, router noise 0.5"), _demo(table), PICTURE,
        _predictions(found, waiting), SIGN, _gap(grpo),
        one_number(grpo, rows), _stale(grpo), partial_rollouts(rows, regime), longer_responses(rows, regime),
        _alarm(rows, regime), LIMITS,
    ]  # fmt: skip
    return "\n".join(part for part in parts if part)


INTRO = """# Where training breaks

<!-- Written by `python -m tests.pages.border` from results/claims/cells.jsonl. -->

One engine samples the responses, another trains on them. How far apart may the two be before training breaks, and
on what does that depend? This page answers with {num_runs} runs of a small Mixture of Experts on Countdown, over
{num_seeds} seeds, each with its own initial model. A run makes 400 updates on 64 responses each. Two dials are varied.
The *gap* is the k3 estimate of KL(mu ‖ old) between the engines before training. The *staleness* is N, the number of
updates per rollout. The remedies are token TIS (a truncated token weight) and the modes of
[routing replay](concepts.md#routing-replay). The design and its predictions were written before the runs that decide
them ([decision 8](decisions/0008-border-study.md)).
"""

PICTURE = """![Accuracy over gap and staleness, a panel per remedy](images/border.svg)

*Mean held-out accuracy of pi over the run, sampled by an exact engine. A run has collapsed if its last quarter is below
half of its highest level, the one before training included; the number of collapsed runs is below the accuracy, unless
it is 0. Grey: not run yet. On the site, [every run of it](border-map.html) is a curve to click, with the command that
makes it again.*
"""

STALE_WEIGHTS = """## A gap without an error

Is it routing errors that end training, or any gap? Here the engine computes exactly, but with the weights of the
previous rollout. It makes no numerical error, and its KL is 0 until the second rollout (claim 49).
"""

SIGN = """## The sign of the weight

Does the token weight help or hurt? That depends on N (claims 37 and 46).

![The gain of each remedy, by N](images/border-gains.svg)

*At router noise 0.5: the difference in mean accuracy from no remedy, with Welch's 95% interval over seeds.*
"""

GAP_WORDS = """## The gaps

The engines of the map, at the first global step of the runs without a remedy. `r0.1` to `r0.5` have FP8 weights and
activations, and router noise of that standard deviation. [F(2)](glossary.md) is a share of tokens, chi2 the estimate of
chi2(old ‖ mu) per token, and the length is in tokens.
"""

PREDICTED = """## Predictions and results

A claim stands on all its predictions together ([how](decisions/0007-claims-ledger.md)). The table has each prediction's
own test: *for*, *against* or *open* at 5%, without correction for their number.
"""

ALARM = """## An alarm

Which metric, with which limit, warns of a collapse in time? A limit is on the metric itself, from the first twentieth
of a run on, or on its ratio to its mean over the first tenth, and then after that tenth. For each metric the best limit
was chosen on the {num_chosen} runs of seeds up to {last} (all gaps, N and remedies), and tried on the {num_others} runs
of seeds from {fresh} on. The score is the share of collapses with an alarm in time minus the share of false alarms,
averaged over N: some metrics separate values of N rather than runs that collapse. Exploratory: this score and the early
limits were chosen after other alarms had been tried on the same runs.
"""

SAID = """The alarm with the best score where it was chosen, {metric}, warns in time of
{told} collapses on the other runs, and goes off in {false} runs that do not collapse.
Alarms in time and false alarms, by N:
{by_n}.{weak}
"""

WEAK = 0.5
"""A mean score below this is called weak."""

NUM_ALARMS = 5
"""Number of alarms on the page: those with the best scores where they were chosen."""

LIMITS = """## What this does not say

- One shape of model. The map is one task, responses of some 21 tokens, one learning rate (2e-3).
- A longer sum is also harder, as each of its tokens must be right.
- The fits and the map are exploratory; the table of predictions has the decisions.
- 400 updates say nothing about a gap that needs thousands of updates to do harm.
"""


def _said(table: pd.DataFrame) -> str:
    """The collapses at N = 8 and the largest gap, in a sentence."""
    parts = []
    for gap, remedy, name in STORY:
        for place in places(where(table, N=8, gap=gap, remedy=remedy)).to_dict("records"):
            parts.append(f"{round(place['collapsed'] * place['n'])} of {place['n']} with {name}")
    start = "With eight updates per rollout and a router noise of 0.5, these runs collapsed:"
    return f"{start} {', '.join(parts)}.\n" if parts else ""


def _ends(table: pd.DataFrame, wanted: Sequence[tuple[str, str, str]], head: str) -> str:
    """The outcomes of runs at N = 8, a line for each gap and remedy that has any."""
    lines = []
    for gap, remedy, name in wanted:
        for place in places(where(table, N=8, gap=gap, remedy=remedy)).to_dict("records"):
            fell = f"{round(place['collapsed'] * place['n'])} of {place['n']}"
            mean = f"{place['area']:.3f} ({place['low']:.3f} to {place['high']:.3f})"
            lines.append((name, fell, mean, number(place["kl"]), number(place["kl_final"])))
    titles = (head, "collapsed", "accuracy over the run", "KL before", "KL at the end, median")
    return f"{markdown_table(titles, lines)}\n" if lines else ""


def _stale(table: pd.DataFrame) -> str:
    """The outcomes of runs whose engine has the previous rollout's weights: a gap without an error."""
    found = _ends(table, STALE, "GRPO, N = 8, weights one rollout old")
    return f"{STALE_WEIGHTS}\n{found}" if found else ""


def _demo(table: pd.DataFrame) -> str:
    """The number of seeds that reproduce the demo's story, among those that have its six runs."""
    found = story(table)
    if found.empty:
        return ""
    parts = ", ".join(f"{name} {found[name].sum()}" for name in found.columns[1:-1]).replace(" none", "")
    return (
        "`make demo` has these runs with one initial model. Its story, in which no remedy and R2 collapse and the\n"
        f"others hold, came out in full on {found['all'].sum()} of {len(found)} seeds; run by run: {parts}.\n"
    )


def _predictions(found: Sequence[Finding], waiting: str) -> str:
    """Every prediction of the study with its effect, the claim's verdict, and its number of seeds."""
    lines, said = [], []
    again = {one.claim.repeats: one.claim.number for one in found}
    for finding in (one for one in found if one.decides):
        claim, has_runs = finding.claim, finding.word is not None
        word = finding.word or "Runs are missing"
        if word == "inconclusive" and claim.number in again:
            word = f"{word}; tried again as claim {again[claim.number]}"
        said.append(f"- Claim {claim.number}: {claim.sentence} **{word}.**")
        for one in (one for one in finding.outcomes if one.values):
            stand = word_text(one) if has_runs else f"– ({len(one.values)} of {len(finding.seeds)} seeds)"
            lines.append((str(claim.number), one.prediction.words, effect_text(one), stand))
    table = markdown_table(("claim", "prediction", "effect, 95%", "by its own test"), lines)
    return "\n".join([PREDICTED, *said, *([f"\n{waiting}"] if waiting else []), f"\n{table}"])


def _gap(table: pd.DataFrame) -> str:
    """The gap of each engine before training, from the first global step of its runs without a remedy.

    Under R3 the trainer replays mu's experts, which makes the gap of its first step smaller.
    """
    lines = []
    for gap in ROUTER_GAPS:
        own = where(table, gap=gap, remedy="none")
        if len(own):
            lines.append(
                (gap, *(number(float(own[name].to_numpy(dtype=float).mean())) for name in FIRST), str(len(own)))
            )
    titles = ("engine", "k3 KL", "F(2)", "chi2", "routers that differ", "length", "runs")
    return f"{GAP_WORDS}\n{markdown_table(titles, lines)}"


def _alarm(rows: Mapping[str, Row], regime: Regime) -> str:
    """The best alarms on the exploratory seeds, and their trials on the deciding ones."""
    of_map = (row for row in rows.values() if row["regime"] == regime.name)
    own = [row for row in of_map if not is_on_sums(row) and not is_branch(row)]
    chosen_on, others = ([row for row in own if (row["seed"] >= FRESH) == is_fresh] for is_fresh in (False, True))
    lines, said = [], ""
    for rule, score in choose(chosen_on)[:NUM_ALARMS]:
        then, by_n = tried(rule, others), {n: tried(rule, some) for n, some in by_updates(others).items()}
        told, false = share_text(then.in_time, then.num_collapsed), share_text(then.false, then.num_others)
        lead = "–" if math.isnan(then.lead) else f"{then.lead:.0%} of the run"
        fresh = mean_score([*by_n.values()])
        lines.append((rule.words, f"{score:.2f}", f"{fresh:.2f}", told, false, lead))
        weak = " One limit is a weak alarm." if fresh < WEAK else ""
        # Of the first rule alone: the best on the runs on which the rules were chosen.
        said = said or SAID.format(metric=rule.words, told=told, false=false, by_n=_by_n(by_n), weak=weak)
    if not lines:
        return ""
    titles = ("alarm", "score where chosen", "score where tried", "alarms in time", "false alarms", "median lead")
    words = ALARM.format(num_chosen=len(chosen_on), num_others=len(others), last=FRESH - 1, fresh=FRESH)
    elsewhere = alarm_elsewhere(rows, regime)
    return f"{words}\n{said}\n{markdown_table(titles, lines)}" + (f"\n{elsewhere}" if elsewhere else "")


def _by_n(trials: Mapping[int, Trial]) -> str:
    return "; ".join(
        f"N = {n}: {one.in_time} of {one.num_collapsed} and {one.false} of {one.num_others}"
        for n, one in trials.items()
    )


__all__ = ["markdown"]
