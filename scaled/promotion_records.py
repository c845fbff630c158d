"""Checks of a promotion in the folder of a run: files against their hashes, metrics against traces, the checkpoint.

No check of a folder detects a record that is made up whole and consistent: see `promotion_checks.unknown`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lab.config.run import RunConfig
from lab.records import RunFolder
from lab.strict import ConfigError
from lab.traces import Trace
from lab.verdict import ENTROPY, KL, REWARD
from theory.divergences import k3_kl_mu_old, masked_mean

RELATIVE, ABSOLUTE = 1e-4, 1e-7
"""Allowed difference of a metric from its trace: float32 sums in another order, measured below 1e-6."""

EDITED = "the folder was edited after the run"


def check_hashes(folder: RunFolder) -> bool:
    """Whether manifest.json has the files' SHA-256; ConfigError for the first file that is changed, new or gone."""
    written = folder.manifest().get("sha256")
    if not isinstance(written, dict) or not written:
        return False
    found = folder.hashes()
    for name in sorted({*written, *found}):
        if name not in found or written.get(name) != found[name]:
            got = "no such file" if name not in found else f"{found[name][:12]}..."
            wanted = (
                "no such file" if name not in written else f"SHA-256 {written[name][:12]}..., as manifest.json has it"
            )
            raise ConfigError(f"{folder.path}: {name}: expected {wanted}, got {got}: {EDITED}")
    return True


def check_traces(folder: RunFolder, config: RunConfig, metrics: Sequence[dict[str, Any]]) -> int:
    """The number of steps whose metrics agree with their trace; ConfigError for one that does not, or has no trace."""
    rows = {int(row["step"]): row for row in metrics}
    # Row 0 was measured before training: it has no trace.
    due = [n for n in rows if n > 0 and (n % config.traces.every == 0 or n == config.num_steps)]
    traces = {int(path.stem.removeprefix("step-")): path for path in folder.traces()}
    for number in due:
        # A number that is not finite may end a step before it has a trace to write (`lab.recording`).
        if number not in traces and "non_finite" not in rows[number]:
            raise ConfigError(f"{folder.path}: rollouts: expected a trace of step {number}, got none: {EDITED}")
    for number, path in traces.items():
        for name, value in trace_metrics(Trace.load(path)).items():
            row = rows.get(number, {})
            recorded = row.get(name)
            if recorded is None and "non_finite" in row:
                continue  # the row of a step that ended the run lacks it
            if recorded is None or not math.isclose(recorded, value, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
                raise ConfigError(
                    f"{folder.path}: metrics.jsonl: {name}: expected {value:.6g} at step {number}, which is what the "
                    f"trace {path.name} gives, got {recorded}: {EDITED}"
                )
    return len(traces)


def trace_metrics(trace: Trace) -> dict[str, float]:
    """The metrics of the verdict, computed again from the step's samples and scores; entropy where it is kept."""
    mask = trace.is_response
    k3 = k3_kl_mu_old(trace.logp_old[None].float(), trace.logp_mu[None].float())
    found = {REWARD: trace.rewards.mean().item(), KL: float(masked_mean(k3, mask[None]))}
    if trace.entropy_old is not None:
        found[ENTROPY] = float(masked_mean(trace.entropy_old[None].float(), mask[None]))
    return found


def check_checkpoint(folder: RunFolder, config: RunConfig) -> None:
    """ConfigError where the newest checkpoint is not of the last step; ValueError where it is damaged."""
    checkpoint = folder.latest_checkpoint()
    step = None if checkpoint is None else checkpoint.step
    if step != config.num_steps:
        got = "none" if step is None else f"one of step {step}"
        raise ConfigError(f"{folder.path}: checkpoints: expected one of step {config.num_steps}, got {got}: {EDITED}")


__all__ = ["check_checkpoint", "check_hashes", "check_traces", "trace_metrics"]
