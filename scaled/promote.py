"""A validated algorithm from the sandbox into a cluster config: what may be promoted, what it becomes, and why.

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
from statistics import fmean, stdev
from typing import Any

from lab.config.algorithm import AlgorithmConfig
from lab.config.load import config_hash, load
from lab.config.run import RunConfig
from lab.levels import series
from lab.records import RunFolder
from lab.strict import ConfigError, validate
from lab.verdict import ENTROPY, KL, REWARD, Verdict, judge
from scaled.config import ModelBlock, ScaledRun
from scaled.evidence import Evidence, RunEvidence, Spread
from scaled.model_shape import SHAPES, load_shape
from scaled.promotion_checks import accuracy, reasons, require_kept_accuracy, require_same_config, require_stable, short
from scaled.promotion_rules import LEARNING_RATES, RULES, Move, value_of

FINAL_METRICS = (
    REWARD, "eval/accuracy", KL, "rollout_corr/extreme_frac_tau2", "rollout_corr/eff_sample_size", "staleness/k3_kl",
    ENTROPY, "routing/router_disagreement", "routing/topk_agreement",
)  # fmt: skip


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


@dataclass(frozen=True)
class Mapped:
    """One field of the algorithm block: the runs' value, the target's, the promoted one, what was done and why."""

    field: str
    action: str
    runs: Any
    target: Any
    promoted: Any
    source: str


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


def promote(
    runs: Sequence[Run], target: ScaledRun, allow_unstable: str | None = None
) -> tuple[ScaledRun, tuple[Mapped, ...]]:
    """The target with the runs' algorithm and evidence, and what became of each field of the algorithm.

    Raises ConfigError, in one line, where the runs differ in more than the seed, where they are not stable runs of
    several seeds or end with a lower accuracy than they began with (a text in `allow_unstable` lets that pass and is
    recorded; see `promotion_checks`), and where what comes out is no valid config.
    """
    if allow_unstable is not None and not allow_unstable.strip():
        raise ConfigError("--allow-unstable: expected a reason, got an empty text")
    if not runs:
        raise ConfigError("expected at least 1 run, got none")
    runs = sorted(runs, key=lambda run: run.config.seed)
    require_same_config(runs)
    if allow_unstable is None:
        require_stable(runs)
        require_kept_accuracy(runs)
    algorithm, mapped = promoted_algorithm(runs[0].config.algorithm, target.algorithm, _table_model(target.model))
    evidence = _evidence(runs, mapped, allow_unstable)
    raw = target.model_dump(mode="json")
    raw |= {"algorithm": algorithm.model_dump(mode="json"), "evidence": evidence.model_dump(mode="json")}
    return validate(ScaledRun, raw, "the promoted config"), mapped


def promoted_algorithm(
    runs: AlgorithmConfig, target: AlgorithmConfig, model: str | None
) -> tuple[AlgorithmConfig, tuple[Mapped, ...]]:
    """The runs' algorithm at the target's scale, by `promotion_rules.RULES`, and what became of each field."""
    move = Move(runs, target, model)
    raw = target.model_dump(mode="json")
    mapped = []
    for rule in RULES:
        value, source = rule.apply(move)
        *blocks, last = rule.field.split(".")
        block = raw
        for name in blocks:
            block = block[name]
        block[last] = value
        mine, theirs = value_of(runs, rule.field), value_of(target, rule.field)
        mapped.append(Mapped(rule.field, rule.action, mine, theirs, value, source))
    return validate(AlgorithmConfig, raw, "the promoted algorithm"), tuple(mapped)


def _table_model(model: ModelBlock) -> str | None:
    """The name under which the papers' tables know the target's model, or None."""
    shape = load_shape(model.path, model.shape)
    if model.shape is not None:
        return model.shape if model.shape in LEARNING_RATES else None
    named = (name for name in LEARNING_RATES if load_shape(SHAPES, name) == shape)
    return next(named, None)


def _evidence(runs: Sequence[Run], mapped: Sequence[Mapped], allow_unstable: str | None) -> Evidence:
    spreads = {name: _spread(runs, name) for name in FINAL_METRICS}
    return Evidence(
        runs=tuple(map(_run_evidence, runs)),
        engine=json.dumps(runs[0].config.model_dump(mode="json").get("engine")),
        verdict_rules=runs[0].config.verdict,
        final={name: spread for name, spread in spreads.items() if spread is not None},
        mapped={m.field: f"{short(m.runs)} -> {short(m.promoted)}: {m.source}" for m in mapped if m.runs != m.promoted},
        allowed_unstable=allow_unstable,
    )


def _run_evidence(run: Run) -> RunEvidence:
    held_out = accuracy(run)
    return RunEvidence(
        run=run.name,
        seed=run.config.seed,
        config_hash=run.hash,
        verdict=run.verdict.word,  # type: ignore[arg-type]
        reasons=reasons(run.verdict),
        remarks=run.verdict.remarks,
        accuracy_first=None if held_out is None else held_out.first,
        accuracy_final=None if held_out is None else held_out.final,
        num_samples=None if held_out is None else held_out.num_samples,
        num_steps=run.config.num_steps,
        started=run.started,
        commit=run.manifest.get("commit"),
        has_local_changes=run.manifest.get("has_local_changes"),
    )


def _spread(runs: Sequence[Run], name: str) -> Spread | None:
    """The metric's final values over the runs: each run's mean over its last `window` values, of accuracy the last."""
    window = 1 if name == "eval/accuracy" else runs[0].config.verdict.window
    recorded = [[value for _, value in series(run.metrics, name)] for run in runs]
    finals = [fmean(values[-window:]) for values in recorded if values]
    if not finals:
        return None
    return Spread(
        mean=fmean(finals),
        standard_deviation=stdev(finals) if len(finals) > 1 else None,
        lowest=min(finals),
        highest=max(finals),
        num_runs=len(finals),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: expected a JSON object, got invalid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
