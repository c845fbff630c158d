"""The work of `firstorder reproduce`: selects cells, runs those without a row, and writes the pages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from lab.files import atomic_write, disk_errors
from lab.markdown import markdown_table
from sandbox.ledger import html, page
from sandbox.ledger.cells import Cell, Cells, Changes, Regime, cell, key
from sandbox.ledger.claim import Arm, Claim, Row
from sandbox.ledger.power import MOST, Need, needs
from sandbox.ledger.summary import cost_text, states_of
from sandbox.ledger.verdicts import Finding, findings

SMOKE = (
    ("num_steps", "2"), ("algorithm.batch.num_responses", "4"), ("evaluation.max_prompts", "8"),
    ("evaluation.every", "1"), ("traces.every", "1"), ("checkpoint.every", "2"), ("cold_start.target_accuracy", "0.15"),
)  # fmt: skip
"""The changes of a smoke run to its arm: two global steps, small groups, few held-out problems, half a cold start."""


@dataclass(frozen=True)
class Wanted:
    """The selected claims, regimes and seeds; with `smoke`, short runs that only show that everything runs."""

    claims: tuple[Claim, ...]
    regimes: tuple[Regime, ...]
    seeds: int | None
    """The number of seeds of each cell; None: each claim's own."""
    smoke: bool

    @property
    def changes(self) -> Changes:
        """The changes of every cell after its arm's own."""
        return SMOKE if self.smoke else ()

    def seeds_of(self, claim: Claim, arm: Arm, regime: str) -> tuple[int, ...]:
        """The seeds of one arm of the claim; in a smoke ledger, an arm of the pictures alone has one."""
        found = claim.seeds_of(arm, regime, self.seeds)
        return found[:1] if self.smoke and claim.is_drawn_alone(arm) else found

    def runs(self, claim: Claim, regime: str) -> list[tuple[Arm, int]]:
        """Every arm of the claim with each of its seeds."""
        return [(arm, seed) for arm in claim.arms for seed in self.seeds_of(claim, arm, regime)]

    def cells(self) -> list[Cell]:
        """The cells in the order of their runs: predictions before figures, and within each all arms of one seed before
        the next seed, so that a stopped queue leaves complete seeds."""
        places = [(c, r) for c in self.claims for r in self.regimes if r.name in c.places]
        found = [(c.is_drawn_alone(arm), seed, cell(r, arm, seed, self.changes))
                 for c, r in places for arm, seed in self.runs(c, r.name)]  # fmt: skip
        # By the first two alone: cells have no order, and a stable sort leaves each seed's in the order of the claims.
        return list({one.key: one for *_, one in sorted(found, key=lambda item: item[:2])}.values())

    def findings(self, rows: Mapping[str, Row]) -> list[Finding]:
        """All findings from these rows."""
        return findings(self.claims, self.regimes, rows, self.seeds, changes=self.changes)


@dataclass(frozen=True)
class LedgerFolders:
    """The folder of rows and pages, and the folder of runs."""

    results: Path
    runs: Path

    @property
    def store(self) -> Cells:
        """The rows."""
        return Cells(self.results / "cells.jsonl")


def run(
    wanted: Wanted,
    place: LedgerFolders,
    *,
    address: str | None,
    jobs: int | None,
    compiled: bool,
    say: Callable[[str], None],
) -> int:
    """Runs the cells without a row, with a line as each ends; returns the number of failures.

    RecordError while another queue works on the same folder of results.
    """
    from lab.ray_session import reach  # here, so that only running cells needs Ray
    from sandbox.ledger.queue import missing, work

    if address is not None:
        reach(address, "--address")  # before anything is made or said

    with disk_errors(place.results, "make folder"):
        place.results.mkdir(parents=True, exist_ok=True)
    # Held from before the missing cells are listed: else another queue could make them meanwhile.
    with place.store.held():
        cells = wanted.cells()
        left = missing(cells, place.store)
        say(f"{len(cells)} runs, {len(cells) - len(left)} of them done before, {len(left)} to go")
        started, failures = time.monotonic(), 0
        root = str(place.runs.resolve())
        results = work(left, place.store, root=root, address=address, jobs=jobs, compiled=compiled)
        for done, (one, found) in enumerate(results, 1):
            spent = time.monotonic() - started
            rest = f"{_time(spent / done * (len(left) - done))} left"
            if isinstance(found, Exception):
                failures += 1
                say(f"[{done}/{len(left)}] {one.label}: failed: {_reason(found)}")
            else:
                say(f"[{done}/{len(left)}] {one.label}: {found['verdict']}, {found['seconds']:.0f} s; {rest}")
        return failures


def _reason(error: Exception) -> str:
    """The first line of the error's message that has words; its kind if none has, as of a MemoryError."""
    return next((words for line in str(error).splitlines() if (words := line.strip())), type(error).__name__)


def _time(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def listing(wanted: Wanted, place: LedgerFolders, ledger: Wanted) -> str:
    """The wanted claims as a table: number, name, home, runs done out of those needed, and verdict.

    Verdicts are corrected over the whole `ledger`, as on its pages, even if few of its claims are listed.
    """
    rows = place.store.rows()
    return _listed(wanted, rows, ledger.findings(rows), ledger.claims)


def _listed(wanted: Wanted, done: Mapping[str, Row], found: Sequence[Finding], ledger: Sequence[Claim]) -> str:
    words = states_of(ledger, found)
    made = {seed for row in done.values() if isinstance(seed := row.get("seed"), int)}
    rows = [(str(one.number), one.name, one.home, _progress(wanted, one, done, made), words[one.number])
            for one in wanted.claims]  # fmt: skip
    return markdown_table(("claim", "name", "home", "runs", "verdict"), rows)


def _progress(wanted: Wanted, claim: Claim, done: Mapping[str, Row], made: Set[int]) -> str:
    """The claim's runs done out of those needed; only the seeds in `made`, which have rows, are looked up in `done`."""
    needed: dict[str, set[int]] = {}
    deciding: dict[str, set[int]] = {}
    keys: dict[tuple[str, int], str] = {}
    fresh = claim.deciding(wanted.seeds)
    for regime in (regime for regime in wanted.regimes if regime.name in claim.places):
        for arm in claim.arms:
            seeds = wanted.seeds_of(claim, arm, regime.name)
            # Arms, or regimes, whose keys agree in one seed agree in all: they share their runs.
            same = key(regime, arm, 0, wanted.changes)
            needed.setdefault(same, set()).update(seeds)
            # The rest is for pictures and exploratory seeds: what decides the claim is there.
            if regime.name == claim.home and not claim.is_drawn_alone(arm):
                deciding.setdefault(same, set()).update(fresh)
            keys |= {(same, seed): key(regime, arm, seed, wanted.changes) for seed in seeds if seed in made}
    there = {place for place, name in keys.items() if name in done}
    total, decisive = (sum(map(len, places.values())) for places in (needed, deciding))
    are_decided = 0 < decisive == sum(seed in deciding.get(same, ()) for same, seed in there)
    return f"{len(there)}/{total}" + (f" (all {decisive} that decide)" if are_decided and len(there) < total else "")


def power(wanted: Wanted, place: LedgerFolders, ledger: Wanted) -> str:
    """The wanted claims' table of needed seeds, at the level for the whole `ledger`, with the hours below it."""
    found = needs(ledger.claims, ledger.regimes, place.store.rows())
    own = [found[claim.number] for claim in wanted.claims]
    return f"{markdown_table(page.POWER_TITLES, [page.power_row(need) for need in own])}\n{_hours(own)}\n"


def _hours(needed: Sequence[Need]) -> str:
    """The hours of the claims within reach and of all deciding seeds; a dash where no run's time is known."""
    within = [need for need in needed if need.seeds is not None and need.seeds <= MOST]
    # The sum of no claims is 0 h only where hours are known.
    is_known = not any(math.isnan(need.hours_per_seed) for need in needed)
    hours = math.fsum(need.hours for need in within) if is_known else math.nan
    asked = math.fsum(len(need.claim.deciding()) * need.hours_per_seed for need in needed)
    return (
        f"Within {MOST} seeds: {len(within)} of {len(needed)} claims, {cost_text(hours)}; "
        f"asked for: {cost_text(asked)}."
    )


def write_pages(wanted: Wanted, place: LedgerFolders) -> str:
    """Writes ledger.md and ledger.html from the rows; returns the table of verdicts."""
    with disk_errors(place.results, "make folder"):
        place.results.mkdir(parents=True, exist_ok=True)
    rows = place.store.rows()
    found = wanted.findings(rows)
    atomic_write(place.results / "ledger.md", page.markdown(wanted.claims, wanted.regimes, found, rows))
    atomic_write(place.results / "ledger.html", html.render(wanted.claims, wanted.regimes, found, rows, wanted.seeds))
    return _listed(wanted, rows, found, wanted.claims)


__all__ = ["LedgerFolders", "Wanted", "listing", "power", "run", "write_pages"]
