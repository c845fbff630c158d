"""A trace that was edited or torn, in any format: it is diagnosed, or refused in one line with the file's name."""

from __future__ import annotations

import json
import math
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.doctor import dumps
from lab.doctor.diagnosis import diagnose
from lab.doctor.importers import load_trace
from lab.traces import Trace
from tests.fuzz.mutations import misfit, num_cases, spoil, torn
from tests.lab.doctor.test_importers import ROWS, slime_data, write_jsonl, write_parquet, write_slime, write_verl

ODD: tuple[Any, ...] = (
    torch.empty(0), torch.tensor(3.0), torch.tensor([1, 2], dtype=torch.uint64), torch.zeros(2, 2),
    torch.tensor(math.nan)
)  # fmt: skip
"""Values that a torch file may hold and JSON may not."""


def spoiled_lines(write: Callable[[Path, list[dict[str, Any]]], Path]) -> Callable[[Path, random.Random], Path]:
    """JSON Lines after an accident."""

    def make(folder: Path, rng: random.Random) -> Path:
        path = write(folder / "12.jsonl", ROWS)
        path.write_bytes(spoil(path.read_bytes(), rng, is_lines=True))
        return path

    return make


def spoiled_parquet(folder: Path, rng: random.Random) -> Path:
    """A Parquet file of rows that do not fit, where Parquet can hold them, or with its bytes torn."""
    rows = json.loads(json.dumps(ROWS))
    row = rng.choice(rows)
    changed = misfit(row, rng)
    rows = [{**each} if each is not row else changed for each in rows]
    try:
        path = write_parquet(folder / "t.parquet", rows)
    except (AttributeError, TypeError, ValueError, OverflowError, NotImplementedError):  # no such rows in Parquet
        path = write_parquet(folder / "t.parquet", ROWS)
    if rng.random() < 0.3:
        path.write_bytes(torn(path.read_bytes(), rng))
    return path


def spoiled_slime(folder: Path, rng: random.Random) -> Path:
    """A training dump with a field that is gone, of another kind, short, or with such a value in one response."""
    data, path = slime_data(ROWS), folder / "t.pt"
    name = rng.choice(sorted(data))
    plain = [value.tolist() if hasattr(value, "tolist") else value for value in data[name]]
    how = rng.randrange(5)
    if how == 0:
        data[name] = rng.choice(ODD) if rng.random() < 0.2 else misfit(plain, rng)
    elif how == 1:
        data[name] = data[name][: rng.randrange(len(plain))]
    elif how == 2:
        data[name][rng.randrange(len(plain))] = rng.choice(ODD)
    elif how == 3:
        data = misfit(dict(data), rng)
    if not isinstance(data, dict):
        torch.save({"rollout_id": 1, "rank": 0, "rollout_data": data}, path)
    else:
        write_slime(path, ROWS)
        kept = {key: value for key, value in data.items() if value is not None}
        step = rng.choice([12, None, "x", -1, 2**80]) if how == 4 else 12
        torch.save({"rollout_id": step, "rank": 0, "rollout_data": kept}, path)
    if rng.random() < 0.15:
        path.write_bytes(torn(path.read_bytes(), rng))
    return path


def spoiled_trace(folder: Path, rng: random.Random) -> Path:
    """Our own file with bytes torn, or with its header edited."""
    path = folder / "t.safetensors"
    load_trace(write_jsonl(folder / "ours.jsonl", ROWS)).save(path)
    data = path.read_bytes()
    if rng.random() < 0.3:
        path.write_bytes(torn(data, rng))
        return path
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(misfit(json.loads(data[8 : 8 + size]), rng)).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    return path


def spoiled_tensors(write: Callable[[Path, list[dict[str, Any]]], Path], key: str | None) -> Any:
    """Another framework's torch file with a field that is gone or of another kind, in one sample where it has some."""

    def make(folder: Path, rng: random.Random) -> Path:
        path = write(folder, ROWS)
        content = torch.load(path, weights_only=True)
        target = content if key is None else rng.choice(content[key])
        name = rng.choice(sorted(target))
        how = rng.randrange(4)
        if how == 0:
            del target[name]
        elif how == 1:
            target[name] = (
                target[name][:-1] if isinstance(target[name], torch.Tensor) else rng.choice([None, "x", -1, 2**70])
            )
        else:
            target[name] = rng.choice([*ODD, None, "x", -1, 2**70])
        if key is not None and rng.random() < 0.1:
            content[key] = rng.choice([None, [], [1], {}, "x"])
        torch.save(content, path)
        return path

    return make


def in_folder(write: Callable[[Path, list[dict[str, Any]]], Path]) -> Callable[[Path, list[dict[str, Any]]], Path]:
    """A writer that is given its folder, as one that is given its file."""
    return lambda path, rows: write(path.parent, rows)


FORMATS = {
    "rows": spoiled_lines(write_jsonl),
    "nemo_rl": spoiled_lines(in_folder(dumps.nemo_rl)),
    "prime_rl": spoiled_lines(in_folder(dumps.prime_rl)),
    "verl_v1": spoiled_lines(in_folder(dumps.verl_v1)),
    "miles": spoiled_tensors(dumps.miles, "samples"),
    "skyrl": spoiled_tensors(dumps.skyrl, None),
    "verl": spoiled_lines(write_verl),
    "parquet": spoiled_parquet,
    "slime": spoiled_slime,
    "ours": spoiled_trace,
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_spoiled_trace_is_a_trace_or_one_line(name: str, tmp_path: Path, record_property: Any) -> None:
    """Loading ends with a trace that fits its schema, or with an error whose lines, one per bad row, name the file."""
    refused = 0
    for case in range(num_cases(50)):
        path = spoiled(name, case, tmp_path)
        trace, said = loaded(path)
        if trace is None:
            refused += 1
            lines = said.split("\n")
            # Bad rows are a line each, the first ten of them; then their number.
            named = lines[:-1] if len(lines) > 1 and lines[-1].startswith("and ") else lines
            assert len(named) <= 10, f"{name}, case {case}: {said}"
            assert all(line.startswith(f"{path}") for line in named), f"{name}, case {case}: {said}"
        else:
            assert isinstance(trace, Trace) and len(trace) >= 1, f"{name}, case {case}"
            diagnose(trace)
    record_property("cases", num_cases(50))
    record_property("refused", refused)
    assert refused > 0.3 * num_cases(50)


def loaded(path: Path) -> tuple[Trace | None, str]:
    """The trace, or what is said of it."""
    try:
        with warnings.catch_warnings(action="ignore"):  # a routing row too many is said in one
            return load_trace(path), ""
    except ValueError as error:
        return None, str(error)


def spoiled(name: str, case: int, folder: Path) -> Path:
    """The file of one case."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return FORMATS[name](folder, random.Random(f"{name} {case}"))
