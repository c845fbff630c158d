"""Laws of a checkpoint's pickles: what torch wrote passes, and what runs code is refused before anything runs it."""

from __future__ import annotations

import io
import pickle
import re
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from scaled.megatron_engine.checkpoint_index import COMMON, INDEX, check_pickles, read_common, read_index

pytestmark = pytest.mark.filterwarnings("ignore")


class Exploit:
    """A pickle of it makes the file `mark` when it is read."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def write(folder: Path, extra: object) -> Path:
    """A checkpoint by torch's own writer: tensors, and a value that is none."""
    state = {"weight": torch.arange(6.0).view(2, 3), "half": torch.ones(2, dtype=torch.bfloat16), "extra": extra}
    dcp.save(state, storage_writer=FileSystemWriter(folder, single_file_per_rank=True), no_dist=True)
    return folder


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "code ran"


def test_what_torch_wrote_passes(tmp_path: Path) -> None:
    """Tensors, plain values and the bytes that Megatron keeps as extra states."""
    for number, extra in enumerate(({"lr": 0.1, "step": 3}, io.BytesIO(b"state"), None)):
        check_pickles(write(tmp_path / str(number), extra))


def test_paths_as_python_3_13_names_them_pass(tmp_path: Path) -> None:
    """There the class of a path is pickled as one of `pathlib._local`, which earlier versions lack."""
    folder = write(tmp_path / "ckpt", 1)
    whole = (folder / INDEX).read_bytes()
    # Protocol 4: after two bytes a frame with its length, which grows with the name.
    assert whole[:3] == b"\x80\x04\x95" and whole.count(b"\x07pathlib") == 1
    (length,) = struct.unpack("<Q", whole[3:11])
    body = whole[11:].replace(b"\x07pathlib", b"\x0epathlib._local")
    (folder / INDEX).write_bytes(whole[:3] + struct.pack("<Q", length + len("._local")) + body)
    assert read_index(folder / INDEX).storage_data
    check_pickles(folder)


def test_an_index_that_runs_code_is_refused(tmp_path: Path, mark: Path) -> None:
    """torch's reader runs it; the check names it and does not."""
    folder = write(tmp_path / "ckpt", 1)
    (folder / INDEX).write_bytes(pickle.dumps(Exploit(mark)))
    with pytest.raises(ValueError, match=r"\.metadata: expected the index of a checkpoint, got one that names"):
        check_pickles(folder)
    assert not mark.exists()
    with pytest.raises(AttributeError):  # what the code returned is no index
        FileSystemReader(folder).read_metadata()
    assert mark.exists()


def test_a_value_that_runs_code_is_refused(tmp_path: Path, mark: Path) -> None:
    """The same inside the files of the tensors, whose index is as it should be."""
    folder = write(tmp_path / "ckpt", Exploit(mark))
    with pytest.raises(ValueError, match=r"\.distcp: expected plain values, got extra, which names [\w.]+$"):
        check_pickles(folder)
    assert not mark.exists()


def test_a_damaged_index_is_one_line(tmp_path: Path) -> None:
    """A cut file, one of another kind of value, and none."""
    folder = write(tmp_path / "ckpt", 1)
    whole = (folder / INDEX).read_bytes()
    for content in (whole[: len(whole) // 2], b"", pickle.dumps({"a": 1})):
        (folder / INDEX).write_bytes(content)
        with pytest.raises(ValueError, match=r"^\S*\.metadata: expected the index of a checkpoint, got"):
            check_pickles(folder)
    (folder / INDEX).unlink()
    with pytest.raises(ValueError, match="No such file"):
        check_pickles(folder)


def test_common_values_that_run_code_are_refused(tmp_path: Path, mark: Path) -> None:
    """common.pt is read as plain values: an exploit in it is one line that names the file, and runs nothing."""
    torch.save({"about": {"shape": "MoE"}, "num_updates": 3}, tmp_path / COMMON)
    assert read_common(tmp_path) == {"about": {"shape": "MoE"}, "num_updates": 3}
    torch.save({"about": {"shape": "MoE"}, "num_updates": Exploit(mark)}, tmp_path / COMMON)
    wanted = f"{tmp_path / COMMON}: expected the description of a checkpoint, got one that names "
    with pytest.raises(ValueError, match=rf"^{re.escape(wanted)}[\w.]+$"):
        read_common(tmp_path)
    assert not mark.exists()
