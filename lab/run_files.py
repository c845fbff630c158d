"""Schemas of a run folder's files, checked on reading: an edited or torn file is a one-line error with its name.

Only the keys that readers rely on are required, and others are kept, so that runs of other versions stay readable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic

from lab.files import disk_errors
from lab.strict import validate_json

MOST_STEPS = 10**12
"""Largest valid number of a step; no figure could draw a larger one."""


class _Stored(pydantic.BaseModel):
    """A record that may hold more than this version knows."""

    model_config = pydantic.ConfigDict(strict=True, extra="allow")


class MetricsRow(_Stored):
    """One line of metrics.jsonl: the global step, and the metrics by name; null for one that was not finite."""

    __pydantic_extra__: dict[str, pydantic.FiniteFloat | None] = pydantic.Field(init=False)

    step: int = pydantic.Field(ge=0, le=MOST_STEPS)
    non_finite: list[str] = []


class StoredReason(_Stored):
    """One rule that fired (see `lab.verdict.Reason`)."""

    rule: str | None = None
    step: int = pydantic.Field(ge=0, le=MOST_STEPS)
    value: pydantic.FiniteFloat | None = None
    threshold: pydantic.FiniteFloat | None = None
    sentence: str
    recovered: bool | None = None


class StoredThresholds(_Stored):
    """The thresholds that a page mentions."""

    window: int | None = pydantic.Field(default=None, ge=1)
    reward_fall: pydantic.FiniteFloat | None = None


class StoredVerdict(_Stored):
    """verdict.json (see `lab.verdict.Verdict.to_json`)."""

    stable: bool | None = None
    verdict: Literal["stable", "collapsed", "undecided"] = "undecided"
    first_step: int | None = pydantic.Field(default=None, ge=0, le=MOST_STEPS)
    reasons: list[StoredReason] = []
    undecided: list[str] = []
    remarks: list[str] = []
    thresholds: StoredThresholds = StoredThresholds()
    rules: dict[str, str] = {}


class StoredManifest(_Stored):
    """manifest.json (see `lab.manifest`)."""

    seed: int | None = None
    commit: str | None = None
    has_local_changes: bool | None = None
    engine_kernels: str | None = None
    planned_bytes: dict[str, int] = {}


class StoredEvent(_Stored):
    """One line of events.jsonl: a process that ended, or did not answer, and was replaced.

    `process` is a rank, an engine, or the run itself, which was stopped and continued; `index` counts ranks or engines.
    `step` counts the global steps done; `resumed` those of the checkpoint from which it continued, equal where nothing
    was lost. `seconds` run from the loss until the run continued; for a run that was stopped, from its new start.
    """

    process: Literal["rank", "engine", "run"]
    step: int = pydantic.Field(ge=0, le=MOST_STEPS)
    resumed: int = pydantic.Field(ge=0, le=MOST_STEPS)
    seconds: pydantic.FiniteFloat = pydantic.Field(ge=0)
    reason: str
    index: int | None = pydantic.Field(default=None, ge=0)


class StoredEngine(_Stored):
    """The `engine:` block of a sandbox run: its defects; older runs have a name instead."""

    defects: list[dict[str, Any]] | None = None


class StoredConfig(_Stored):
    """The fields of a config that a page mentions, in this version or another."""

    name: str | None = None
    seed: int | None = None
    engine: StoredEngine | None = None


Stored = TypeVar("Stored", bound=_Stored)


def read_stored(path: Path, kind: type[Stored]) -> dict[str, Any] | None:
    """The file's JSON object as it stands, without defaults; None where there is no file, ConfigError for a misfit."""
    if not path.is_file():
        return None
    with disk_errors(path, "read"):
        data = path.read_bytes()
    return validate_json(kind, data, str(path)).model_dump(exclude_unset=True)


__all__ = ["MetricsRow", "StoredConfig", "StoredEvent", "StoredManifest", "StoredVerdict", "read_stored"]
