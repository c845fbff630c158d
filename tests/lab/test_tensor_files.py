"""Laws of tensor files: whole or absent, the same bytes whatever the order of the metadata, and no copy on the way."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from lab.files import RecordError
from lab.tensor_files import write_tensors

METADATA = {"b": "2", "a": 'a "quoted" é', "c": "3"}


def test_what_is_written_comes_back_to_the_bit(tmp_path: Path) -> None:
    """Narrow integers, booleans, tensors in another order of strides and empty ones; metadata by name."""
    tensors = {
        "ids": torch.arange(24, dtype=torch.int16).view(2, 3, 4).transpose(0, 2), "none": torch.zeros(0, 3),
        "mask": torch.tensor([True, False]), "logp": torch.tensor([-torch.inf, -0.0, float("nan")]),
    }  # fmt: skip
    path = tmp_path / "x.safetensors"
    write_tensors(path, tensors, METADATA)
    found = safetensors.torch.load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name].nan_to_num(), tensors[name].nan_to_num()) for name in tensors)
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == METADATA
    write_tensors(tmp_path / "y.safetensors", tensors, dict(reversed(METADATA.items())))
    assert (tmp_path / "y.safetensors").read_bytes() == path.read_bytes()
    header = path.read_bytes()
    assert header.index(b'"a":') < header.index(b'"b":') < header.index(b'"c":')


def test_nothing_is_copied_but_what_shares_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step's routes there is no room for a second copy; views of one another are refused by the format."""
    written: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(safetensors.torch, "save_file", lambda given, path, metadata: written.update(given))
    own, rows = torch.ones(5), torch.ones(6)
    write_tensors(tmp_path / "x.safetensors", {"own": own, "first": rows[:3], "last": rows[3:]})
    assert written["own"].data_ptr() == own.data_ptr()
    assert written["first"].data_ptr() != rows.data_ptr()
    monkeypatch.undo()
    write_tensors(tmp_path / "x.safetensors", {"own": own, "first": rows[:3], "again": rows[:3]})
    assert torch.equal(safetensors.torch.load_file(tmp_path / "x.safetensors")["again"], rows[:3])


def test_a_disk_that_takes_no_more_leaves_the_former_file(tmp_path: Path) -> None:
    """The error is a line with the file's name, and no part of the new file stays."""
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"x": torch.zeros(3)}, METADATA)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(RecordError, match=f"^cannot write {path}: "):
            write_tensors(path, {"x": torch.zeros(10_000)}, METADATA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert torch.equal(safetensors.torch.load_file(path)["x"], torch.zeros(3))
    assert [each.name for each in tmp_path.iterdir()] == ["x.safetensors"]
