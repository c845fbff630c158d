"""Schemas of a run folder's files, checked on reading: an edited or torn file is a one-line error with its name.

Only the keys that readers rely on are required, and others are kept, so that runs of other versions stay readable.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic

from lab.files import disk_errors, whole_lines
from lab.strict import validate_json

RESERVED = ("step", "non_finite")
"""The names in a line of metrics.jsonl that are no metrics."""

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
    reward_held: bool | None = None


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
    """manifest.json (see `lab.manifest` and `lab.beginning`)."""

    seed: int | None = None
    commit: str | None = None
    has_local_changes: bool | None = None
    engine_kernels: str | None = None
    planned_bytes: dict[str, int] = {}
    inputs: dict[str, str] = {}
    resumed: list[dict[str, Any]] = []


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


class StoredConfig(_Stored):
    """The fields of a config that a page mentions, in this version or another."""

    name: str | None = None
    seed: int | None = None


Stored = TypeVar("Stored", bound=_Stored)


def metrics_line(step: int, metrics: Mapping[str, float | int]) -> bytes:
    """One line of metrics.jsonl; ValueError for a reserved name and for a value that is no number."""
    values = {name: _number(name, value) for name, value in metrics.items()}
    non_finite = [name for name, value in values.items() if not math.isfinite(value)]
    # The later key wins, so a value that is not finite becomes null in its own place.
    line: dict[str, Any] = {"step": step, **values, **dict.fromkeys(non_finite)}
    if non_finite:
        line["non_finite"] = non_finite
    return json.dumps(line, allow_nan=False).encode()


def _number(name: str, value: object) -> float | int:
    if name in RESERVED:
        raise ValueError(f"metric name {name!r} is reserved")
    if not isinstance(value, numbers.Real):
        raise ValueError(f"{name}: expected a number, got {type(value).__name__}")
    # numpy's scalars are numbers, too, but json.dumps refuses most of them.
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The checked lines of metrics.jsonl or timing.jsonl, each with its place for an error; without a torn last one."""
    for number, line in enumerate(whole_lines(path), start=1):
        where = f"{path}, line {number}"
        validate_json(MetricsRow, line, where)
        yield where, json.loads(line)  # plain values: the model would turn integers into floats


def read_stored(path: Path, kind: type[Stored]) -> dict[str, Any] | None:
    """The file's JSON object as it stands, without defaults; None where there is no file, ConfigError for a misfit."""
    if not path.is_file():
        return None
    with disk_errors(path, "read"):
        data = path.read_bytes()
    return validate_json(kind, data, str(path)).model_dump(exclude_unset=True)
