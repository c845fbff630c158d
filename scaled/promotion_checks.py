"""The conditions under which an algorithm is promoted: one config, several stable seeds, no accuracy lost,
records of their own."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.beginning import other_file
from lab.config.load import NOT_HASHED
from lab.config.run import RunConfig
from lab.levels import series
from lab.records import RunFolder
from lab.report.differences import leaves
from lab.strict import ConfigError, short
from lab.traces import Trace
from lab.verdict import Verdict
from scaled.promotion_runs import TrialRun

MIN_SEEDS = 2

STANDARD_ERRORS = 2.0
"""A fall of the accuracy by more than this is a loss: of runs that keep theirs, at most one in 44 falls so far."""

WAY_OUT = 'or --allow-unstable "why" to put the reason on record'


def require_same_config(runs: Sequence[TrialRun]) -> None:
    """ConfigError, naming the first field or file, where two runs differ in more than the seed, or share one."""
    first = runs[0]
    for other in runs[1:]:
        if other.name == first.name:
            raise ConfigError(f"{other.name}: expected each run once, got it twice")
        for field, mine, theirs in _differences(first.config, other.config):
            raise ConfigError(
                f"{field}: expected runs of one config that differ in the seed alone, got {short(mine)} in "
                f"{first.name} and {short(theirs)} in {other.name}"
            )
    seeds = [run.config.seed for run in runs]
    twice = next((seed for seed in seeds if seeds.count(seed) > 1), None)
    if twice is not None:
        raise ConfigError(f"seed: expected runs of different seeds, got {seeds.count(twice)} runs of seed {twice}")
    _require_same_inputs(runs)


def _require_same_inputs(runs: Sequence[TrialRun]) -> None:
    """ConfigError, naming the first path, where runs read other files: a config only names its model and problems."""
    # Without a record nothing can be compared; `unknown` says so.
    recorded = [(run.name, run.manifest["inputs"]) for run in runs if run.manifest.get("inputs") is not None]
    for (first, mine), (other, theirs) in itertools.pairwise(recorded):
        if (found := other_file(mine, theirs)) is not None:
            path, one, another = found
            raise ConfigError(
                f"{path}: expected runs that read the same file, got {one} in {first} and {another} in {other}"
            )


def _differences(a: RunConfig, b: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """The fields in which two configs differ, in their order: dotted name and both values."""
    for path, (mine, theirs) in leaves([one.model_dump(mode="json") for one in (a, b)]):
        # NOT_HASHED changes no number, so that runs may differ in their folders and threads.
        if path[0] not in ("seed", *NOT_HASHED):
            yield ".".join(path), mine, theirs


def require_stable(runs: Sequence[TrialRun]) -> None:
    """ConfigError where a run is not stable, or where there are fewer than MIN_SEEDS."""
    for run in runs:
        if run.verdict.word != "stable":
            why = " ".join(reasons(run.verdict))
            raise ConfigError(
                f"{run.name}: expected a stable run, got {run.verdict.word}: {why.rstrip('.')}; {WAY_OUT}"
            )
    if len(runs) < MIN_SEEDS:
        raise ConfigError(
            f"seed: expected runs of at least {MIN_SEEDS} seeds, got 1 (seed {runs[0].config.seed}), and one seed is "
            f"no evidence of stability; train another one, {WAY_OUT}"
        )


def require_own_records(runs: Sequence[TrialRun]) -> None:
    """ConfigError where two runs of different seeds sampled the same tokens, or ended with the same weights."""
    for one, other in itertools.combinations(runs, 2):
        for what in ("rollouts", "checkpoints"):
            theirs = _contents(other.path, what)
            for name, content in _contents(one.path, what).items():
                if content == theirs.get(name):
                    raise ConfigError(
                        f"seed: expected runs of their own, got the same {name} in {one.name} (seed "
                        f"{one.config.seed}) and {other.name} (seed {other.config.seed}): one is "
                        "a copy, or neither learned anything"
                    )


def _contents(path: Path, what: str) -> dict[str, Any]:
    """The records that differ between seeds, by file: the tokens of each trace, the checksum of each checkpoint.

    Not log-probs, a copy of which can be moved by less than any check sees.
    """
    if what == "checkpoints":
        states = sorted((path / what).glob("step-*/state.json"))
        return {str(s.relative_to(path)): json.loads(s.read_bytes())["tensors_sha256"] for s in states}
    traces = RunFolder(path).traces()
    return {str(p.relative_to(path)): Trace.load(p).tokens.tolist() for p in traces}  # == of tensors gives no bool


def unknown(runs: Sequence[TrialRun]) -> tuple[str, ...]:
    """Facts that the records cannot show, a sentence each."""
    lines = [
        "Records that agree with each other and with their hashes can still be made up by whoever writes all of them: "
        "training the same config and seed again, on the same commit and kind of machine, gives the same bits."
    ]
    for run in runs:
        steps = run.config.num_steps
        if run.num_traced < steps:
            lines.append(
                f"{run.name}: {steps - run.num_traced} of {steps} steps have metrics but no trace behind them."
            )
        if not run.is_sealed:
            lines.append(f"{run.name}: manifest.json has no hashes: changes to single files would go unnoticed.")
        if run.manifest.get("commit") is None or run.manifest.get("has_local_changes") is not False:
            lines.append(f"{run.name}: the code that ran is not known to be a commit that can be looked up.")
        if run.manifest.get("inputs") is None:
            lines.append(
                f"{run.name}: manifest.json has no hashes of the files that its config names: the model and the "
                "problems may be others than those of the other runs."
            )
        others = sorted({name for process in run.manifest.get("resumed", ()) for name in process} - {"time"})
        if others:
            lines.append(f"{run.name}: it was continued with another {', '.join(others)} than it began with.")
    commits = {run.name: run.manifest["commit"] for run in runs if run.manifest.get("commit") is not None}
    if len(set(commits.values())) > 1:
        listed = ", ".join(f"{commit[:12]} in {name}" for name, commit in commits.items())
        lines.append(f"The runs began on different commits ({listed}): more than the seed may differ between them.")
    lines.append("eval/accuracy has no trace.")
    return tuple(lines)


def require_sealed(runs: Sequence[TrialRun]) -> None:
    """ConfigError where a run's manifest has no hashes of its files."""
    for run in runs:
        if not run.is_sealed:
            raise ConfigError(
                f"{run.name}: manifest.json: expected the SHA-256 of the run's files, got none: it was edited after "
                f"the run, or it is a run of an older version of firstorder; {WAY_OUT}"
            )


def reasons(verdict: Verdict) -> tuple[str, ...]:
    """The reasons why a run is not stable: rules that fired, or those that kept its verdict open; none if stable."""
    return tuple(reason.sentence for reason in verdict.reasons) or verdict.undecided


@dataclass(frozen=True)
class Accuracy:
    """Held-out accuracy (avg@k, in [0, 1]) before training and at the end, each over `num_samples` responses."""

    first: float
    final: float
    num_samples: int

    @property
    def noise(self) -> float:
        """Largest difference of the two by chance: STANDARD_ERRORS sqrt(2 p (1 - p) / n), p their mean.

        The pooled test of two proportions. It is an upper bound, as the problems are the same both times and only the
        responses are drawn again.
        """
        p = (self.first + self.final) / 2
        return STANDARD_ERRORS * math.sqrt(2 * max(0.0, p * (1 - p)) / self.num_samples)


def accuracy(run: TrialRun) -> Accuracy | None:
    """The first and the last accuracy of the run, over num_samples x max_prompts responses; None for fewer than two."""
    values = [value for _, value in series(run.metrics, "eval/accuracy")]
    if len(values) < 2:
        return None
    block = run.config.evaluation
    num_prompts = block.num_problems(run.config.task.count_held_out())
    return Accuracy(values[0], values[-1], block.num_samples * num_prompts)


def require_kept_accuracy(runs: Sequence[TrialRun]) -> None:
    """ConfigError, with both numbers, where a run's held-out accuracy ends lower than it began, beyond noise."""
    for run in runs:
        found = accuracy(run)
        if found is not None and found.first - found.final > found.noise:
            raise ConfigError(
                f"{run.name}: eval/accuracy: expected a run that ends as high as it began, got {found.final:.3f} after "
                f"{found.first:.3f}, which is more than {STANDARD_ERRORS:g} standard errors ({found.noise:.3f} at "
                f"{found.num_samples} samples) lower; {WAY_OUT}"
            )
