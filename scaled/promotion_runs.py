"""The finished sandbox runs that a promotion rests on, read from their folders.

A run folder is not trusted: its config must have the hash in the folder's name, its files the hashes in its manifest,
and its metrics must agree with its traces. The metrics are judged again, by rules that no config can relax.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lab.config.load import config_hash, load
from lab.config.run import RunConfig
from lab.records import RunFolder
from lab.strict import ConfigError
from lab.verdict import Verdict, VerdictRules, judge
from scaled.promotion_records import EDITED, check_checkpoint, check_hashes, check_traces

RULES = VerdictRules()
"""The rules of every promotion, whatever the runs' `verdict` block says; that block may only be stricter."""


@dataclass(frozen=True)
class TrialRun:
    """One finished sandbox run whose folder agrees with itself."""

    name: str
    path: Path
    config: RunConfig
    hash: str
    started: str
    manifest: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    verdict: Verdict
    is_sealed: bool
    num_traced: int


def read_run(path: Path, schemas: Mapping[str, type[RunConfig]]) -> TrialRun:
    """The run in the folder; ValueError, in one line, if it is unfinished, of another backend or edited."""
    folder = RunFolder.open(path)
    config = load(folder.path / "config.yaml", [], schemas)
    if config.backend != "sandbox":
        raise ConfigError(f"{path}: backend: expected runs of the sandbox, got {config.backend}")
    # Resolved, as a link to the folder has a name without the hash.
    found = re.fullmatch(r"(\d{8}T\d{6}Z)-(\w+)", folder.path.resolve().name)
    if found is None:
        raise ConfigError(f"{path}: expected a run folder <UTC time>-<config hash>, got {folder.path.resolve().name}")
    if config_hash(config) != found[2]:
        raise ConfigError(
            f"{path}: config.yaml: expected the config that ran, with the hash {found[2]} of the folder's name, "
            f"got one with {config_hash(config)}: it was edited after the run, or this is another version of firstorder"
        )
    manifest = _read_json(folder.path / "manifest.json")
    if manifest.get("seed") != config.seed:
        raise ConfigError(
            f"{path}: manifest.json: expected the config's seed {config.seed}, got {manifest.get('seed')}: {EDITED}"
        )
    # Hashes are written at the end of a run (`lab.ending`). `_verdict` refuses one that has not ended.
    is_sealed = folder.is_finished and check_hashes(folder)
    verdict = _verdict(folder, config)
    # A run that ends non-finite has no checkpoint of its last step.
    if not any(reason.rule == "non_finite" for reason in verdict.reasons):
        check_checkpoint(folder, config)
    return TrialRun(
        name=f"{config.name}/{folder.path.resolve().name}",
        path=folder.path.resolve(),
        config=config,
        hash=found[2],
        started=f"{datetime.strptime(found[1], '%Y%m%dT%H%M%SZ'):%Y-%m-%d %H:%M:%S}",
        manifest=manifest,
        metrics=folder.metrics(),
        verdict=verdict,
        is_sealed=is_sealed,
        num_traced=check_traces(folder, config, folder.metrics()),
    )


def _verdict(folder: RunFolder, config: RunConfig) -> Verdict:
    """The verdict on the folder's metrics by RULES, or by the run's own rules where only those call it unstable.

    ConfigError where the written verdict differs from that of the run's own rules in this version.
    """
    steps = [line["step"] for line in folder.metrics()]
    last = steps[-1] if steps else 0
    if not folder.is_finished:
        raise ConfigError(
            f"{folder.path}: expected a finished run, got one that stopped after step {last} of {config.num_steps}, "
            "without a verdict; `firstorder train CONFIG --resume` continues it"
        )
    own, ours = judge(folder.metrics(), config.verdict), judge(folder.metrics(), RULES)
    written = _read_json(folder.path / "verdict.json")
    is_cut_short = any(reason.rule == "non_finite" for reason in ours.reasons)
    # A verdict by older rules may differ. It is not compared, and it is no evidence either.
    if written.get("rules") == config.verdict.describe() and written.get("verdict") != own.word:
        raise ConfigError(
            f"{folder.path}: verdict.json: expected {own.word}, which is what metrics.jsonl gives, got "
            f"{written.get('verdict')}: {EDITED}"
        )
    # A non-finite step ends the run: the rows after it are missing for a reason.
    if not is_cut_short and [step for step in steps if step > 0] != list(range(1, config.num_steps + 1)):
        raise ConfigError(
            f"{folder.path}: metrics.jsonl: expected every step from 1 to {config.num_steps}, got {len(steps)} lines "
            f"up to step {last}: {EDITED}"
        )
    return own if ours.stable and not own.stable else ours


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: expected a JSON object, got invalid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
