"""Promotion of a validated algorithm from the sandbox into a cluster config: conditions, result and reasons."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from lab.config.algorithm import AlgorithmConfig
from lab.levels import series
from lab.strict import ConfigError, short, validate
from lab.verdict import ENTROPY, KL, REWARD
from scaled import promotion_runs
from scaled.config import ModelBlock, ScaledRun
from scaled.evidence import Evidence, MetricSpread, RunEvidence
from scaled.model_shape import SHAPES, load_shape
from scaled.promotion_checks import (
    accuracy,
    reasons,
    require_kept_accuracy,
    require_own_records,
    require_same_config,
    require_sealed,
    require_stable,
    unknown,
)
from scaled.promotion_rules import LEARNING_RATES, RULES, Move, value_of
from scaled.promotion_runs import TrialRun

FINAL_METRICS = (
    REWARD, "eval/accuracy", KL, "rollout_corr/extreme_frac_tau2", "rollout_corr/eff_sample_size", "staleness/k3_kl",
    ENTROPY, "routing/router_disagreement", "routing/topk_agreement",
)  # fmt: skip


@dataclass(frozen=True)
class Mapped:
    """One field of the algorithm block: the runs' value, the target's, the promoted one, the action and the reason."""

    field: str
    action: str
    runs: Any
    target: Any
    promoted: Any
    source: str


def promote(
    runs: Sequence[TrialRun], target: ScaledRun, allow_unstable: str | None = None
) -> tuple[ScaledRun, tuple[Mapped, ...]]:
    """The target with the runs' algorithm and evidence, and the mapping of each field of the algorithm.

    Raises ConfigError, in one line, where the runs differ in more than the seed or share records; where they are not
    stable over several seeds, lose accuracy or lack hashes of their files (a text in `allow_unstable` waives these
    three and is recorded; see `promotion_checks`); and where the result is no valid config.
    """
    if allow_unstable is not None and not allow_unstable.strip():
        raise ConfigError("--allow-unstable: expected a reason, got an empty text")
    if not runs:
        raise ConfigError("expected at least 1 run, got none")
    # The result then does not depend on the order in which the runs were named.
    runs = sorted(runs, key=lambda run: run.config.seed)
    require_same_config(runs)
    require_own_records(runs)
    if allow_unstable is None:
        require_stable(runs)
        require_kept_accuracy(runs)
        require_sealed(runs)
    algorithm, mapped = promoted_algorithm(runs[0].config.algorithm, target.algorithm, _table_model(target.model))
    evidence = _evidence(runs, mapped, allow_unstable)
    raw = target.model_dump(mode="json")
    raw |= {"algorithm": algorithm.model_dump(mode="json"), "evidence": evidence.model_dump(mode="json")}
    return validate(ScaledRun, raw, "the promoted config"), mapped


def promoted_algorithm(
    runs: AlgorithmConfig, target: AlgorithmConfig, model: str | None
) -> tuple[AlgorithmConfig, tuple[Mapped, ...]]:
    """The runs' algorithm at the target's scale, by `promotion_rules.RULES`, and the mapping of each field."""
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
    # Only now: halfway through, N may not divide the batch.
    return validate(AlgorithmConfig, raw, "the promoted algorithm"), tuple(mapped)


def _table_model(model: ModelBlock) -> str | None:
    """The target model's name in the papers' tables, or None."""
    shape = load_shape(model.path, model.shape)
    if model.shape is not None:
        return model.shape if model.shape in LEARNING_RATES else None
    # Compared by shape, because a folder may have any name.
    # SHAPES itself has no config.json, so `load_shape` goes by the name.
    named = (name for name in LEARNING_RATES if load_shape(SHAPES, name) == shape)
    return next(named, None)


def _evidence(runs: Sequence[TrialRun], mapped: Sequence[Mapped], allow_unstable: str | None) -> Evidence:
    spreads = {name: _spread(runs, name) for name in FINAL_METRICS}
    return Evidence(
        runs=tuple(map(_run_evidence, runs)),
        engine=json.dumps(runs[0].config.model_dump(mode="json").get("engine")),
        verdict_rules=promotion_runs.RULES,
        final={name: spread for name, spread in spreads.items() if spread is not None},
        mapped={m.field: f"{short(m.runs)} -> {short(m.promoted)}: {m.source}" for m in mapped if m.runs != m.promoted},
        allowed_unstable=allow_unstable,
        unknown=unknown(runs),
    )


def _run_evidence(run: TrialRun) -> RunEvidence:
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


def _spread(runs: Sequence[TrialRun], name: str) -> MetricSpread | None:
    """The metric's final values over the runs: each run's mean over its last `window` values; for accuracy the last."""
    window = 1 if name == "eval/accuracy" else promotion_runs.RULES.window
    recorded = [[value for _, value in series(run.metrics, name)] for run in runs]
    finals = [fmean(values[-window:]) for values in recorded if values]
    if not finals:
        return None
    return MetricSpread(
        mean=fmean(finals),
        standard_deviation=stdev(finals) if len(finals) > 1 else None,
        lowest=min(finals),
        highest=max(finals),
        num_runs=len(finals),
    )
