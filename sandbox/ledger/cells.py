"""Cells: the runs that decide claims. A cell is an arm of a regime with a seed; it has one row once it has run.

A cell's key is the hash of its config as stated (the regime's file, the arm's changes, the seed), before defaults: a
new field of the schema invalidates no row. A regime's file states all that matters.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.config.load import NOT_HASHED, apply, read
from lab.files import append_line, exclusive, whole_lines
from lab.manifest import manifest
from lab.strict import ConfigError, validate
from sandbox.config import SandboxRun
from sandbox.ledger.claim import Arm, Row

Changes = Sequence[tuple[str, str]]
"""Dotted keys and YAML values, in order of application."""

ACCURACY = "eval/accuracy"
MAX_GRAD_NORM = "algorithm.optimizer.max_grad_norm"
SEED = "<the cell's seed>"

NUM_WINDOWS = 20
"""Number of equal windows of a run's planned global steps; a row keeps each metric's mean over each."""

KEPT = (
    "reward/mean", "eval/accuracy", "response_length/mean", "rollout_corr/k3_kl", "rollout_corr/extreme_frac_tau2",
    "rollout_corr/chi2_token", "rollout_corr/eff_sample_size", "rollout_corr/log_ppl_diff", "staleness/k3_kl",
    "staleness/extreme_frac_tau2", "actor/entropy", "actor/grad_norm", "actor/pg_clipfrac", "actor/ratio_mean",
    "actor/negative_ratio_max", "actor/k3_kl_mu_pi", "routing/router_disagreement", "routing/token_disagreement",
    "routing/topk_agreement", "routing/zero_deviation", "routing/route_kl", "routing/route_tv", "routing/staleness_tv",
)  # fmt: skip
"""The metrics that a row keeps, for measures and figures."""


@dataclass(frozen=True)
class Regime:
    """A setting in which all claims are tried: an on-policy config, in words and as JSON text."""

    name: str
    words: str
    stated: str
    norms: tuple[tuple[str, str], ...] = ()
    """Pairs of an objective's preset and the gradient clipping of its arms; an arm that states its own keeps it."""
    own_cold_starts: bool = False
    """Whether every arm has one initial model per seed, whatever the arm states."""

    @staticmethod
    def open(path: Path, norms: Mapping[str, str] | None = None, own_cold_starts: bool = False) -> Regime:
        """The regime in a file like those in configs/claims/; its words are the comment at the top."""
        lines = path.read_text(encoding="utf-8").splitlines()
        comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
        words, stated = " ".join(line.lstrip("# ") for line in comment), json.dumps(read(path))
        return Regime(path.stem, words, stated, tuple((norms or {}).items()), own_cold_starts)


@dataclass(frozen=True)
class Cell:
    """One run: its place in the ledger, its complete config and its key of 12 hex digits."""

    regime: str
    arm: str
    seed: int
    config: SandboxRun
    key: str
    made_by: str = "training"
    start: SandboxRun | None = None
    """The config of the run that a branch starts from."""

    @property
    def label(self) -> str:
        return f"{self.regime}/{self.arm}/{self.seed}"


def key(regime: Regime, arm: Arm, seed: int, changes: Changes = ()) -> str:
    """The key of an arm's cell; `changes` come after the arm's own."""
    return _key(regime, arm, seed, tuple(changes))


@functools.cache
def _key(regime: Regime, arm: Arm, seed: int, changes: tuple[tuple[str, str], ...]) -> str:
    text = _stated(regime, arm, seed, changes)
    if arm.start is not None:
        text += f" {arm.made_by} {_stated(regime, arm.start, seed, changes)}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cell(regime: Regime, arm: Arm, seed: int, changes: Changes = ()) -> Cell:
    """The cell of an arm; `changes` come after the arm's own. ConfigError if the config is invalid."""
    stated = _stated(regime, arm, seed, tuple(changes))
    # The name is not part of what is hashed: a renamed arm keeps its rows.
    named = json.loads(stated) | {"name": f"{regime.name}-{arm.name}-{seed}"}
    config = validate(SandboxRun, named, f"regime {regime.name}, arm {arm.name}")
    start = None if arm.start is None else cell(regime, arm.start, seed, changes).config
    return Cell(regime.name, arm.name, seed, config, key(regime, arm, seed, changes), arm.made_by, start)


def finished(regime: Regime, arm: Arm, seeds: Iterable[int], rows: Mapping[str, Row]) -> list[Row]:
    """The rows of an arm's cells that have run, by key, so that a renamed arm keeps them."""
    return [rows[name] for seed in seeds if (name := key(regime, arm, seed)) in rows]


def _stated(regime: Regime, arm: Arm, seed: int, changes: tuple[tuple[str, str], ...]) -> str:
    return _unseeded(regime, arm, changes).replace(json.dumps(SEED), str(seed))


@functools.cache
def _unseeded(regime: Regime, arm: Arm, changes: tuple[tuple[str, str], ...]) -> str:
    """The text of an arm's cells with SEED for their seeds, made once: a page asks for thousands of keys."""
    raw = json.loads(regime.stated)
    apply(raw, arm.changes)
    norm = dict(regime.norms).get(raw["algorithm"].get("objective", {}).get("preset"))
    if norm is not None and all(name != MAX_GRAD_NORM for name, _ in arm.changes):
        apply(raw, ((MAX_GRAD_NORM, norm),))
    _spread(raw, arm.num_minibatches, f"regime {regime.name}, arm {arm.name}")
    # After `_spread`: a smoke run's numbers of steps are those that it states, for every N.
    apply(raw, changes)
    hashed = {name: value for name, value in raw.items() if name not in NOT_HASHED}
    hashed["seed"] = SEED
    if arm.own_cold_start or regime.own_cold_starts:
        hashed["cold_start"]["seed"] = SEED
    return json.dumps(hashed, sort_keys=True)  # sorted: a key does not depend on the order of fields


def _spread(raw: dict[str, Any], n: int, where: str) -> None:
    """Sets N mini-batches per global step with N times the prompts, and divides all numbers of steps by N.

    The run's updates are the same for every N. Other numbers of steps are rounded down: where N divides them, the
    verdict's rules and the evaluations come after as many responses; at N = 16, 40 steps become 2, or 32 updates.
    """
    batch, rules = raw["algorithm"]["batch"], raw.get("verdict", {})
    if raw["num_steps"] % n or batch.get("num_minibatches", 1) != 1:
        raise ConfigError(f"{where}: num_steps: expected a multiple of N = {n} and a config with N = 1")
    batch["num_prompts"] *= n
    batch["num_minibatches"] = n
    raw["num_steps"] //= n
    for block in ("evaluation", "checkpoint", "traces"):
        raw[block]["every"] = max(1, raw[block]["every"] // n)
    for name in {"min_steps", "window", "patience", "early_steps"} & rules.keys():
        rules[name] = max(1, rules[name] // n)


def row_of(
    cell: Cell, metrics: Sequence[Mapping[str, Any]], verdict: Mapping[str, Any], probes: Mapping[str, float]
) -> dict[str, Any]:
    """The row of these records: identity, verdict, means of the KEPT metrics over NUM_WINDOWS windows, probes.

    `evaluations` has each held-out accuracy with its global step; step 0 is before training. `first` has the metrics of
    the first global step, sampled before any update: the engine gap of the initial model. A window without a value is
    null, such as those after an early stop.
    """
    found, planned = manifest(cell.seed), cell.config.num_steps
    names = [name for name in KEPT if any(_is_number(record.get(name)) for record in metrics)]
    return {
        "cell": cell.key, "regime": cell.regime, "arm": cell.arm, "seed": cell.seed, "num_steps": planned,
        "last_step": int(metrics[-1]["step"]) if metrics else 0,
        "verdict": verdict["verdict"], "first_step": verdict["first_step"],
        "rules": [reason["rule"] for reason in verdict["reasons"]],
        "series": {name: windows(metrics, name, planned) for name in names},
        "first": _first(metrics),
        "evaluations": [[m["step"], _plain(m[ACCURACY])] for m in metrics if _is_number(m.get(ACCURACY))],
        "probes": {name: _plain(value) for name, value in probes.items()},
        "commit": found.get("commit"), "has_local_changes": found.get("has_local_changes"),
        "machine": found["cpu"], "torch": found["versions"].get("torch"),
    }  # fmt: skip


def _first(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    found = next((record for record in metrics if record["step"] == 1), {})
    return {name: _plain(found[name]) for name in KEPT if _is_number(found.get(name))}


def windows(metrics: Sequence[Mapping[str, Any]], name: str, num_steps: int) -> list[float | None]:
    """The mean of the metric over each of NUM_WINDOWS equal windows of steps 1 to `num_steps`, to 4 digits.

    Step s is in window floor((s - 1) NUM_WINDOWS / num_steps); step 0, the evaluation before training, in the first.
    """
    kept: list[list[float]] = [[] for _ in range(NUM_WINDOWS)]
    for record in metrics:
        if _is_number(record.get(name)):
            kept[max(0, record["step"] - 1) * NUM_WINDOWS // num_steps].append(record[name])
    return [float(f"{math.fsum(values) / len(values):.4g}") if values else None for values in kept]


def last_step(window: int, num_steps: int, num_windows: int = NUM_WINDOWS) -> int:
    """The last step of a window, counted from 0: ceil((window + 1) num_steps / num_windows)."""
    return -((window + 1) * num_steps // -num_windows)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _plain(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


@dataclass(frozen=True)
class Cells:
    """The rows on disk, a JSON line per cell; a process killed while adding a row loses no other."""

    path: Path

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps other queues from the folder of the rows, which must exist; RecordError if one is at work there.

        Two would make the same runs, and each could cut off a row that the other is adding.
        """
        folder = self.path.parent
        with exclusive(folder / ".lock", f"cannot add rows in {folder}: another queue is making runs for this folder"):
            yield

    def rows(self) -> dict[str, Row]:
        """The rows by key, the first of equal keys; ValueError with the line number of a damaged row."""
        rows: dict[str, Row] = {}
        for number, line in enumerate(whole_lines(self.path), start=1):
            try:
                found = json.loads(line)
                # The first row of a cell counts: a later one, of another machine, changes no verdict that was read.
                rows.setdefault(found["cell"], found)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}:{number}: expected the row of a cell, got {line[:60]!r}") from error
        return rows

    def add(self, row: Row) -> None:
        """Appends the row, and waits until it is on disk; the caller holds the rows (`held`)."""
        append_line(self.path, json.dumps(row, allow_nan=False).encode())


__all__ = [
    "KEPT", "NUM_WINDOWS", "Cell", "Cells", "Changes", "Regime", "cell", "finished", "key", "last_step", "row_of",
    "windows",
]  # fmt: skip
