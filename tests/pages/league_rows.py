"""The rows of the league table, which `python -m tests.pages.league` enumerates and keeps in results/audit/."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lab.audit.config import AuditConfig, load_config
from lab.audit.run import audit
from lab.audit.table import medians, numbers

ROOT = Path(__file__).parents[2]
CONFIGS = {name: ROOT / f"configs/audit/{name}.yaml" for name in ("league", "league_tokens", "league_moe")}
KEPT = {name: ROOT / f"results/audit/{name}.csv" for name in CONFIGS}
KEYS = ("policy", "engine", "mode", "reward", "asked_discrepancy", "asked_staleness", "objective")
MEASURES = (
    "kl_mu_old", "bias", "direction_bias", "scale", "cosine", "variance", "error_64", "error_1024", "drift",
    "drift_along", "drift_tokens",
)  # fmt: skip
SIZES = (64, 1024)


def sandbox_schema() -> type[AuditConfig]:
    """The schema of audits with a MoE."""
    from sandbox.exact.cases import SandboxAudit

    return SandboxAudit


def enumerated(name: str) -> pd.DataFrame:
    """The medians of an audit over its policies, six digits of each."""
    from sandbox.exact.cases import moe_cases

    config = load_config(CONFIGS[name], sandbox=sandbox_schema)
    frame = audit(config, {"moe": moe_cases}, report=lambda done, all_, words: print(f"{done}/{all_} {words}"))
    return kept_rows(frame)


def kept_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The medians over policies that the project keeps of an audit."""
    return pd.DataFrame(medians(frame)[[*KEYS, *MEASURES]])


def keep(name: str, frame: pd.DataFrame) -> None:
    """Writes the rows of an audit."""
    KEPT[name].parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(KEPT[name], index=False, float_format="%.6g")


def kept(name: str) -> pd.DataFrame:
    """The kept rows of an audit, with the computed columns `best_<n>` and `times_<n>`."""
    frame = pd.read_csv(KEPT[name])
    for n in SIZES:
        frame[f"best_{n}"] = best_step_error(frame, n)
    cells = frame.groupby([key for key in KEYS if key != "objective"], dropna=False, sort=False)
    for n in SIZES:
        frame[f"times_{n}"] = frame[f"best_{n}"] / cells[f"best_{n}"].transform("min")
    return frame


def best_step_error(frame: pd.DataFrame, n: int) -> NDArray[np.float64]:
    """Root mean squared error of n responses' gradient over ||grad J||, in [0, 1], at its best step
    length: sqrt(1 - <m, t>^2 / (||t||^2 (||m||^2 + variance / n))) with mean m and truth t; 1 where <m, t> <= 0.
    """
    scale, cosine = numbers(frame, "scale"), numbers(frame, "cosine")
    with np.errstate(divide="ignore", invalid="ignore"):
        squared = np.where(scale == 0, 0.0, (scale / cosine) ** 2)
        share = np.where(scale > 0, scale**2 / (squared + numbers(frame, "variance") / n), 0.0)
    # If every response of a policy is rejected, there is no gradient and the error is 1.
    return np.sqrt(np.clip(1 - np.nan_to_num(share, nan=0.0), 0.0, 1.0))
