"""Pages, and parts of pages, are what their modules make of the kept rows: to the letter, and without a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from sandbox.claims import CLAIMS, REGIMES, RESULTS
from sandbox.ledger.exact import KEPT as VERDICTS
from sandbox.ledger.power import MOST, MOST_HOURS, needs
from tests.pages import (
    border,
    deep_ladder,
    drift,
    exact_answers,
    findings,
    in_trl,
    kinds,
    league,
    ledger,
    on_gpu,
    partial_rollouts,
    reference_ranges,
    remedies,
    replay_trials,
    simulation,
    verdicts,
)
from tests.pages.study import ROOT

pytestmark = pytest.mark.unchecked

Text = Callable[[], str]


def file(name: str) -> Text:
    """Reads a file of the checkout."""
    return (ROOT / name).read_text


PAGES: dict[str, tuple[Text, Text]] = {
    "README, ledger": (ledger.PART.read, ledger.block),
    "docs/ledger.md, counts": (ledger.COUNTS.read, ledger.counts),
    "ledger": ((RESULTS / "ledger.md").read_text, ledger.page),
    **{f"findings, {part.name}": (part.read, partial(findings.text, part)) for part in findings.PARTS},
    "border": (file("docs/border.md"), border.page),
    "league": (league.PAGE.read_text, league.page),
    "drift": (drift.PART.read, drift.block),
    "kinds": (kinds.PART.read, kinds.block),
    "remedies": (remedies.PART.read, remedies.block),
    "exact training, answers": (exact_answers.ANSWERS.read, exact_answers.block),
    "exact training, summary": (exact_answers.SUMMARY.read, exact_answers.summary),
    "exact training, verdicts": (VERDICTS.read_text, verdicts.table),
    "partial rollouts": (partial_rollouts.TABLE.read, partial_rollouts.table),
    "replay trials": (replay_trials.TABLE.read, replay_trials.table),
    "replay trial of the demo": (replay_trials.DEMO.read, replay_trials.demo),
    "simulation": (simulation.PART.read, simulation.page),
    "in TRL, runs": (in_trl.TABLE.read, in_trl.table),
    "in TRL, predictions": (in_trl.OUTCOME.read, in_trl.outcome),
    "in TRL, difference": (in_trl.DIFFERENCE.read, in_trl.difference),
    "on GPU, runs": (on_gpu.RUNS.read, on_gpu.runs),
    "on GPU, ladder": (on_gpu.LADDER.read, on_gpu.ladder),
    "on GPU, deep ladder": (deep_ladder.LADDER.read, deep_ladder.ladder),
    "on GPU, deep predictions": (deep_ladder.OUTCOME.read, deep_ladder.outcome),
    "reference ranges": (file("docs/reference-ranges.md"), reference_ranges.page),
}
"""Each page as it stands, and as it is computed."""


@pytest.mark.parametrize(("stands", "computed"), PAGES.values(), ids=PAGES)
def test_a_page_is_computed_from_the_kept_rows(stands: Text, computed: Text) -> None:
    assert stands() == computed()


def test_no_claim_has_more_than_its_trial_allows() -> None:
    """Decision 7: 40 seeds for a first trial, 3 hours of one thread for a second one, as planned from earlier runs."""
    # Those of second trials have seeds from 300 on: a slow machine that makes them does not change the plan.
    needed = needs(CLAIMS, REGIMES, {cell: row for cell, row in ledger.kept().items() if row["seed"] < 300})
    for claim in CLAIMS:
        seeds = len(claim.deciding())
        if claim.repeats is None:
            assert seeds <= MOST
        else:
            assert 0.0 < seeds * needed[claim.number].hours_per_seed <= MOST_HOURS


def test_every_prediction_is_told_under_its_question() -> None:
    """The answers of docs/exact-training.md name every prediction of the three studies beside its verdict."""
    bullets = {line[3]: line for line in exact_answers.block().splitlines() if line.startswith("- (")}
    for one in (*drift.PREDICTIONS, *remedies.PREDICTIONS, *kinds.PREDICTIONS):
        words = bullets[one.name[0]].rpartition(" *")[2]
        assert one.name in words.strip("*.").replace(";", ",").replace(": ", ", ").split(", ")
