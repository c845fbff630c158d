"""The finished sandbox runs that a promotion stands on, read from their folders.

Nothing a run folder says is taken on trust: its config must have the hash in the folder's name, and its metrics must
give the verdict that stands beside them.
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
from lab.verdict import Verdict, judge


@dataclass(frozen=True)
class Run:
    """One finished sandbox run whose folder agrees with itself."""

    name: str
    config: RunConfig
    hash: str
    started: str
    manifest: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    verdict: Verdict


def read_run(path: Path, schemas: Mapping[str, type[RunConfig]]) -> Run:
    """The run in the folder; ValueError, in one line, if it is unfinished, of another backend or edited."""
    folder = RunFolder.open(path)
    config = load(folder.path / "config.yaml", [], schemas)
    if config.backend != "sandbox":
        raise ConfigError(f"{path}: backend: expected runs of the sandbox, got {config.backend}")
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
            f"{path}: manifest.json: expected the config's seed {config.seed}, got {manifest.get('seed')}: "
            "the folder was edited after the run"
        )
    return Run(
        name=f"{config.name}/{folder.path.resolve().name}",
        config=config,
        hash=found[2],
        started=f"{datetime.strptime(found[1], '%Y%m%dT%H%M%SZ'):%Y-%m-%d %H:%M:%S}",
        manifest=manifest,
        metrics=folder.metrics(),
        verdict=_verdict(folder, config),
    )


def _verdict(folder: RunFolder, config: RunConfig) -> Verdict:
    """The verdict on the folder's metrics, by the rules of now; where the run was given its own by them, it is that."""
    steps = [line["step"] for line in folder.metrics()]
    last = steps[-1] if steps else 0
    if not folder.is_finished:
        raise ConfigError(
            f"{folder.path}: expected a finished run, got one that stopped after step {last} of {config.num_steps}, "
            "without a verdict; `firstorder train CONFIG --resume` goes on with it"
        )
    verdict = judge(folder.metrics(), config.verdict)
    written = _read_json(folder.path / "verdict.json")
    is_cut_short = any(reason.rule == "non_finite" for reason in verdict.reasons)
    # A folder of former rules may have another word; what it says is no evidence of anything.
    if written.get("rules") == config.verdict.describe() and written.get("verdict") != verdict.word:
        raise ConfigError(
            f"{folder.path}: verdict.json: expected {verdict.word}, which is what metrics.jsonl gives, got "
            f"{written.get('verdict')}: the folder was edited after the run"
        )
    if not is_cut_short and [step for step in steps if step > 0] != list(range(1, config.num_steps + 1)):
        raise ConfigError(
            f"{folder.path}: metrics.jsonl: expected every step from 1 to {config.num_steps}, got {len(steps)} lines "
            f"up to step {last}: the folder was edited after the run"
        )
    return verdict


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: expected a JSON object, got invalid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
