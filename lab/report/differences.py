"""The fields in which the configs of several runs differ, found by comparison, whatever the fields are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.config.load import NOT_HASHED
from lab.report.runs import ReportRun

UNSET = "not set"
"""The value of a field that a config lacks."""
PRESETS_OWN = "the preset's"
"""The value of a null field of the objective."""
OWN_COLUMN = {
    "seed": "label", "algorithm.objective.preset": "objective", "algorithm.replay.mode": "replay",
    "algorithm.batch.num_minibatches": "minibatches",
}  # fmt: skip
"""Fields with a column of their own in the table of runs; the column of the engine states several."""


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

    Omitted are the name, fields that cannot change a result, and a field whose own words in the table of runs already
    distinguish all of its values.
    """
    found: dict[str, tuple[str, ...]] = {}
    for path, values in leaves([run.config for run in runs]):
        if path[0] not in NOT_HASHED:
            # Null is not `none`: in the objective it keeps what the preset has.
            null = PRESETS_OWN if path[:2] == ("algorithm", "objective") else "null"
            found[".".join(path)] = tuple(_text(value, null) for value in values)
    stated = [_stated(run) for run in runs]
    kept = {field: values for field, values in found.items() if not _is_told(field, values, stated)}
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


def _stated(run: ReportRun) -> dict[str, str]:
    """The words in the table of runs that state a field, by the field."""
    columns = run.row() | {"label": run.label}
    return {field: columns[column] for field, column in OWN_COLUMN.items()} | run.engine_parts


def _is_told(field: str, values: Sequence[str], stated: Sequence[Mapping[str, str]]) -> bool:
    """Whether the words that state the field differ wherever it does; no, where a run has no such words."""
    if any(field not in words for words in stated):
        return False
    pairs = {(value, words[field]) for value, words in zip(values, stated, strict=True)}
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


def _text(value: Any, null: str) -> str:
    """A value on one line, distinct for distinct values: a block by its values, an empty one as none."""
    if isinstance(value, Mapping):
        named = [_text(v, null) if k in ("name", "kind") else f"{k} {_text(v, null)}" for k, v in value.items()]
        return ", ".join(named) or "none"
    if isinstance(value, list | tuple):
        return "; ".join(_text(item, null) for item in value) or "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return null if value is None else str(value)
