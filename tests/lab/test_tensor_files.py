"""Laws of tensor files: whole or absent, the same bytes in every process, one part of a tensor in memory at a time."""

from __future__ import annotations

import resource
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from lab.files import RecordError
from lab.tensor_files import Blocks, write_tensors

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


def test_of_a_tensor_in_blocks_one_is_there_at_a_time(tmp_path: Path) -> None:
    """Of a step's routes there is room for a part: each is asked for when the one before is in the file, and the file
    is that of the whole tensor, to the byte. Views of one another come back as they are."""
    path, rows, asked = tmp_path / "x.safetensors", torch.arange(12, dtype=torch.int16).view(6, 2), []
    others = {"first": rows[:3], "last": rows[3:], "wide": torch.ones(5), "none": torch.zeros(0, 3)}
    write_tensors(path, {"rows": rows, **others}, METADATA)

    def parts() -> Iterator[torch.Tensor]:
        for part in (rows[:0], rows[:4], rows[4:]):
            asked.append(weakref.ref(copy := part.clone()))
            yield copy
            del copy
            assert len(asked) == 1 or asked[-2]() is None, "two parts at once"

    write_tensors(tmp_path / "y.safetensors", {"rows": Blocks((6, 2), torch.int16, parts), **others}, METADATA)
    assert len(asked) == 3 and (tmp_path / "y.safetensors").read_bytes() == path.read_bytes()
    assert torch.equal(safetensors.torch.load_file(path)["last"], rows[3:])


def test_blocks_that_are_not_the_whole_tensor_leave_the_former_file(tmp_path: Path) -> None:
    """A row too few is an error, as the file's header would lie."""
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"x": torch.ones(3)})
    with pytest.raises(RecordError, match="expected 12 bytes of x, got 8"):
        write_tensors(path, {"x": Blocks((3,), torch.float32, lambda: [torch.zeros(2)])})
    assert torch.equal(safetensors.torch.load_file(path)["x"], torch.ones(3))


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
