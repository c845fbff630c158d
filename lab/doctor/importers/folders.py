"""A folder of dumps as steps, by the file names of each format.

Files of one step (a file per rank) become one trace, whose `engines` are the ranks in the files' names. Files that
repeat another's rows, or lack old where another has it, are left out, with a caveat.
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
from lab.doctor.importers.format import NoOldError
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
    """The files of one step with the ranks in their names (0 where there is none), in the order of the ranks."""

    number: int
    files: tuple[tuple[int, Path], ...]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files alone."""
        return tuple(path for _, path in self.files)


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
    return [StepFiles(number, tuple(sorted(found[number].items()))) for number in sorted(found)]


def load_steps(steps: Sequence[StepFiles], columns: Mapping[str, str] | None = None) -> Iterator[Dump]:
    """Each step as one dump, lazily; raises as `load_dump` does, and ValueError for files that do not fit together."""
    # By all steps: a rank keeps its number where the others have no file, and a run of one rank has no numbers.
    is_ranked, num_responses = len({part for step in steps for part, _ in step.files}) > 1, 0
    for step in steps:
        dumps, left_out = _of_ranks(step, columns)
        traces = [dump.trace for dump in dumps.values()]
        if is_ranked and all(trace.engines is None for trace in traces):
            traces = [replace(t, engines=torch.full((len(t),), part)) for part, t in zip(dumps, traces, strict=True)]
        try:
            trace = joined(traces)
        except ValueError as error:
            raise ValueError(f"{step.paths[0]}: {error}") from error
        first = next(iter(dumps.values()))
        if not first.has_tokens:
            trace = _apart(trace, num_responses)
        num_responses += len(trace)
        # The number in the file's name: several formats have no column for the step, and their rows would all say 0.
        yield replace(first, trace=replace(trace, step=step.number), left_out=left_out)


def _of_ranks(step: StepFiles, columns: Mapping[str, str] | None) -> tuple[dict[int, Dump], tuple[str, ...]]:
    """The dumps of a step by rank that are needed, and a sentence for each kind of file that is left out.

    Raises as `load_dump` does; files without old only if the step has no other.
    """
    dumps: dict[int, Dump] = {}
    without: list[NoOldError] = []
    num_repeated = 0
    for part, path in step.files:
        try:
            dump = load_dump(path, columns)
        except NoOldError as error:
            without.append(error)
            continue
        if any(_is_same(dump.trace, other.trace) for other in dumps.values()):
            num_repeated += 1
        else:
            dumps[part] = dump
    if not dumps:
        raise without[0]
    told = (
        (num_repeated, "repeat", "the rows of another, as tensor-parallel ranks do"),
        (len(without), "lack", "log-probabilities of old, as ranks before the last pipeline stage do"),
    )
    return dumps, tuple(_left_out(num, len(step.files), verb, rest) for num, verb, rest in told if num)


def _left_out(num: int, of: int, verb: str, rest: str) -> str:
    s, are = ("", "are") if num > 1 else ("s", "is")
    return f"{num} of a step's {of} files {verb}{s} {rest}, and {are} left out."


def _is_same(one: Trace, other: Trace) -> bool:
    """Whether two traces have the same tokens and log-probabilities, to the bit."""
    # As integers, since a missing value is not equal to itself.
    return all(
        getattr(one, name).view(torch.int32).equal(getattr(other, name).view(torch.int32))
        for name in ("tokens", "offsets", "num_prompt", "logp_mu", "logp_old")
    )


def _apart(trace: Trace, start: int) -> Trace:
    """The trace with the numbers from `start` on as the first tokens of its responses: no prefix is in another step."""
    tokens = trace.tokens.clone()
    # A prompt's token, which no clue but the contexts looks at; the tokens after it may be as in another file.
    tokens[trace.offsets[:-1]] = torch.arange(start, start + len(trace), dtype=tokens.dtype)
    return replace(trace, tokens=tokens)


def joined(traces: Sequence[Trace]) -> Trace:
    """The responses of several traces as one trace.

    ValueError if one has a column, or layers, that another lacks.
    """
    first = traces[0]
    if len(traces) == 1:
        return first
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
        old_pass=first.old_pass,
        **{name: torch.cat(values) for name, values in of.items()},
    )
