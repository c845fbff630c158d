"""The fields in which the configs of several runs differ, found by comparison, whatever the fields are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.config.load import NOT_HASHED
from lab.report.runs import ReportRun

UNSET = "not set"
"""The value of a field that a config lacks."""
OWN_COLUMN = {
    "seed": "label", "engine": "engine", "rollout.precision": "engine", "training.precision": "engine",
    "algorithm.objective.preset": "objective", "algorithm.replay.mode": "replay",
    "algorithm.batch.num_minibatches": "minibatches",
}  # fmt: skip
"""Fields, or blocks of fields, with a column of their own in the table of runs."""


@dataclass(frozen=True)
class Difference:
    """A field by its dotted name, a shorter name that no other differing field has, and each run's value as text."""

    field: str
    name: str
    values: tuple[str, ...]

    @property
    def usual(self) -> str | None:
        """The value of more than half of the runs; None without one."""
        return next((v for v in self.values if 2 * self.values.count(v) > len(self.values)), None)


def differences(runs: Sequence[ReportRun]) -> list[Difference]:
    """Every field whose value differs between the runs' configs, in the order of the configs.

    Omitted are the name, fields that cannot change a result, and a field whose own column in the table of runs already
    distinguishes all of its values.
    """
    found: dict[str, tuple[str, ...]] = {}
    for path, values in leaves([run.config for run in runs]):
        if path[0] not in NOT_HASHED:
            found[".".join(path)] = tuple(map(_text, values))
    columns = [run.row() | {"label": run.label} for run in runs]
    kept = {field: values for field, values in found.items() if not _is_told(field, values, columns)}
    return [Difference(field, _short(field, list(kept)), values) for field, values in kept.items()]


def leaves(blocks: Sequence[Mapping[str, Any]], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], list[Any]]]:
    """Path and values of every difference; blocks are compared key by key only where every config has one."""
    found = []
    for key in dict.fromkeys(key for block in blocks for key in block):
        values = [block.get(key, UNSET) for block in blocks]
        if all(isinstance(value, Mapping) for value in values):
            found += leaves(values, (*path, str(key)))
        elif any(value != values[0] for value in values):
            found.append(((*path, str(key)), values))
    return found


def _is_told(field: str, values: Sequence[str], columns: Sequence[Mapping[str, str]]) -> bool:
    """Whether the text of the field's own column differs wherever the field does."""
    column = next((c for block, c in OWN_COLUMN.items() if field == block or field.startswith(f"{block}.")), None)
    if column is None:
        return False
    pairs = {(value, row[column]) for value, row in zip(values, columns, strict=True)}
    # Distinct pairs: if two values share a text, that text comes twice.
    texts = [text for _, text in pairs]
    return len(set(texts)) == len(texts)


def _short(field: str, fields: Sequence[str]) -> str:
    """The last names of the field, at least two, and as many as distinguish it from the other fields."""
    parts = field.split(".")
    for num in range(2, len(parts)):
        end = ".".join(parts[-num:])
        if sum(other == end or other.endswith(f".{end}") for other in fields) == 1:
            return end
    return field


def _text(value: Any) -> str:
    """A value on one line, distinct for distinct values: a block by its values, null as none."""
    if isinstance(value, Mapping):
        named = [_text(v) if k in ("name", "kind") else f"{k} {_text(v)}" for k, v in value.items()]
        return ", ".join(named) or "none"
    if isinstance(value, list | tuple):
        return "; ".join(map(_text, value)) or "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else str(value)
