"""A folder of dumps as steps, by the file names of each format.

Files of one step (a file per rank) become one trace, whose `engines` number the file of each response.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lab.doctor.importers import FORMATS, MAPPED, Dump, load_dump
from lab.traces import Trace

ROUTES = ("experts_mu", "experts_old")
COLUMNS = (
    "tokens", "num_prompt", "is_response", "rewards", "logp_mu", "logp_old", "logp_pi", "entropy_old", "engines",
    *ROUTES,
)  # fmt: skip
"""Columns that are joined by concatenation."""
EXAMPLES = "step-000001.safetensors, train_data_step1.jsonl, step_1/rank_0.jsonl, 1.engines.jsonl, 1_0.pt, 1.pt"
"""File names of steps, for the message where a folder has none."""


@dataclass(frozen=True)
class StepFiles:
    """The files of one step, in the order of their ranks."""

    number: int
    paths: tuple[Path, ...]


def step_files(folder: Path, columns: Mapping[str, str] | None = None) -> list[StepFiles]:
    """The steps in a folder and its subfolders, in ascending order; ValueError if there is none, or one twice.

    With `columns` (columns.py) a file's last number is its step. Patterns are tried in the order of FORMATS; the first
    one that matches some file decides for the folder.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    known = [MAPPED] if columns is not None else [about for about in FORMATS if about is not MAPPED]
    for pattern in (pattern for about in known for pattern in about.steps):
        matches = [(path, match) for path in files if (match := re.search(f"(?:^|/){pattern}$", path.as_posix()))]
        if matches:
            return _by_step(folder, matches)
    raise ValueError(f"{folder}: expected files of steps ({EXAMPLES}), got none of them in {len(files)} files")


def _by_step(folder: Path, matches: Sequence[tuple[Path, re.Match[str]]]) -> list[StepFiles]:
    found: dict[int, dict[int, Path]] = defaultdict(dict)
    for path, match in matches:
        number, part = int(match["step"]), int(match.groupdict().get("part") or 0)
        if part in found[number]:
            raise ValueError(f"{folder}: expected one run, got step {number} twice: {found[number][part]} and {path}")
        found[number][part] = path
    # By part number, not by name: as text rank_10 sorts before rank_2.
    return [StepFiles(number, tuple(found[number][part] for part in sorted(found[number]))) for number in sorted(found)]


def load_steps(steps: Sequence[StepFiles], columns: Mapping[str, str] | None = None) -> Iterator[Dump]:
    """Each step as one dump, lazily; raises as `load_dump` does, and ValueError for files that do not fit together."""
    for step in steps:
        dumps = [load_dump(path, columns) for path in step.paths]
        try:
            trace = joined([dump.trace for dump in dumps])
        except ValueError as error:
            raise ValueError(f"{step.paths[0]}: {error}") from error
        first = dumps[0]
        # The number in the file's name: several formats have no column for the step, and their rows would all say 0.
        yield Dump(replace(trace, step=step.number), first.format, first.caveat, first.unused, first.is_pi)


def joined(traces: Sequence[Trace]) -> Trace:
    """The responses of several traces as one trace; if none has engines, a trace's index is its engine.

    ValueError if one has a column, or layers, that another lacks.
    """
    first = traces[0]
    if len(traces) == 1:
        return first
    if all(trace.engines is None for trace in traces):
        traces = [replace(trace, engines=torch.full((len(trace),), i)) for i, trace in enumerate(traces)]
    of: dict[str, list[Tensor]] = {}
    for name in COLUMNS:
        values = [value for trace in traces if (value := getattr(trace, name)) is not None]
        if 0 < len(values) < len(traces):
            raise ValueError(f"{name}: expected in all {len(traces)} files of the step, got it in {len(values)}")
        if values:
            of[name] = values
    # Before torch.cat, whose RuntimeError would be a traceback.
    if any(trace.layer_numbers != first.layer_numbers for trace in traces):
        raise ValueError(f"experts: expected layers {first.layer_numbers} in all files of the step, got others")
    for name in ROUTES:
        slots = {value.shape[2] for value in of.get(name, ())}
        if len(slots) > 1:
            raise ValueError(f"{name}: expected as many slots in all files of the step, got {sorted(slots)}")
    temperatures = {trace.temperature for trace in traces}
    if len(temperatures) > 1:
        raise ValueError(f"temperature: expected one in all files of the step, got {sorted(map(str, temperatures))}")
    return Trace(
        step=first.step,
        # Lengths concatenate, offsets do not.
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), *(t.offsets.diff() for t in traces)]).cumsum(0),
        layer_numbers=first.layer_numbers,
        num_experts=max(trace.num_experts for trace in traces),
        texts=first.texts,
        temperature=first.temperature,
        **{name: torch.cat(values) for name, values in of.items()},
    )
