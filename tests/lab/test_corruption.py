"""Files that were cut or changed on the disk: one line names each, or it reads as it was; no other step is lost."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lab import casebook
from lab.checkpoints import SHARDED, STATE, read_checkpoint, read_shards
from lab.filtering import ProblemFile, _rates_there
from lab.hf.reader import read_json
from lab.records import RunFolder
from lab.tasks.readers import read_lines
from lab.tasks.tokenizers import CharTokenizer
from lab.traces import Trace
from tests.lab.synthetic_runs import DEMO, made_up_trace
from theory.streams import stream

NUM_STEPS = 4
TOKENIZER = CharTokenizer("0123")
Damage = Callable[[bytes], bytes]


@st.composite
def damages(draw: st.DrawFn, header: int | None = None) -> Damage:
    """One byte changed, anywhere or among the first `header`, or all from some byte on cut off."""
    share, mask = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(0, 255))

    def damage(data: bytes) -> bytes:
        place = int(share * (len(data) if header is None else min(header, len(data))))
        if mask == 0:
            return data[:place]
        return data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :]

    return damage


@pytest.fixture(scope="module")
def run() -> RunFolder:
    """Four steps with a row, a checkpoint and a trace each."""
    folder = RunFolder(Path(tempfile.mkdtemp()))
    for step in range(1, NUM_STEPS + 1):
        generator = stream(step, "corruption")
        folder.append_metrics(step, {"reward/mean": step / 8, "actor/entropy": 0.5 + 1 / step})
        tensors = {"weight": torch.randn(3, 5, generator=generator), "bias": torch.arange(4)}
        folder.save_checkpoint(step, tensors, {"seen": step, "name": "run é"}, keep=2)
        folder.save_trace(step, made_up_trace(DEMO[1], step, generator))
    return folder


class Damaged:
    """The file with its damage inside the block, and as it was after it."""

    def __init__(self, path: Path, damage: Damage):
        self.path, self.good, self.damage = path, path.read_bytes(), damage

    def __enter__(self) -> None:
        self.path.write_bytes(self.damage(self.good))

    def __exit__(self, *_: object) -> None:
        self.path.write_bytes(self.good)


def refused(read: Callable[[], object], *names: object) -> bool:
    """Whether reading ends in one line with these names; any other error is a failure."""
    try:
        read()
    except ValueError as error:
        message = str(error)
    else:
        return False
    assert "\n" not in message and all(str(name) in message for name in names), message
    return True


@given(damages())
def test_a_damaged_row_of_metrics_costs_no_other_row(run: RunFolder, damage: Damage) -> None:
    """A cut file has every row before the cut; a changed byte is refused with the line's number, or changes at most two
    rows (a line end is part of both); what a resumed run adds stands behind whole rows."""
    path, wanted = run.path / "metrics.jsonl", run.metrics()
    with Damaged(path, damage):
        data, found = path.read_bytes(), []
        if not refused(lambda: found.extend(run.metrics()), path):
            if len(data) < len(b"".join(json.dumps(row).encode() + b"\n" for row in wanted)):
                assert found == wanted[: data.count(b"\n")]
            else:
                others = [row for row in wanted if row not in found]
                assert len(others) <= 1 or (len(others) <= 2 and len(found) < len(wanted))


@pytest.mark.parametrize("part", ["state.json", "tensors.safetensors"])
@given(damage=damages())
@example(damage=lambda data: data.replace(b"tensors_sha256", b"tensors_sha257"))
@example(damage=lambda data: data.replace(b'"seen": 4', b'"seen": 5'))
def test_a_damaged_checkpoint_is_never_gone_on_from(run: RunFolder, part: str, damage: Damage) -> None:
    """The newest checkpoint is refused with the part's name or is what it was; the one before it is still there."""
    wanted = run.latest_checkpoint()
    assert wanted is not None and wanted.step == NUM_STEPS
    newest = run.path / "checkpoints" / f"step-{NUM_STEPS:06d}"
    found = []
    with Damaged(newest / part, damage):
        if not refused(lambda: found.append(run.latest_checkpoint()), newest, part):
            (checkpoint,) = found
            assert (checkpoint.step, checkpoint.state) == (wanted.step, wanted.state)
            assert all(torch.equal(tensor, checkpoint.tensors[name]) for name, tensor in wanted.tensors.items())
        aside = newest.rename(run.path / "aside")
        before = run.latest_checkpoint()
        aside.rename(newest)
    assert before is not None and before.step == NUM_STEPS - 1


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("name", "read"),
    [
        (STATE, lambda path: read_checkpoint(path.parent)),
        (SHARDED, lambda path: read_shards(path.parent)),
        ("audit.json", lambda path: casebook.read(path, "an audit")),
        (casebook.CASES, lambda path: casebook.kept_cases(RunFolder(path.parent))),
        ("p.pass_rates.jsonl", lambda path: _rates_there(path, ProblemFile(path, (), (), TOKENIZER), "0")),
        ("config.json", read_json),
        ("p.jsonl", lambda path: list(read_lines(str(path), example="{}"))),
    ],
)
def test_nesting_without_end_is_one_line(name: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    """JSON nested beyond what Python can follow is refused like any other damage, with the file's name."""
    (tmp_path / name).write_bytes(DEEP + b"\n")
    with pytest.raises(ValueError, match=f"^{tmp_path / name}") as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_texts_nested_without_end_are_one_line(tmp_path: Path) -> None:
    """The same in the metadata of a trace."""
    made_up_trace(DEMO[1], 1, stream(0, "corruption")).save(path := tmp_path / "t.safetensors")
    with safetensors.safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    path.write_bytes(safetensors.torch.save(tensors, metadata | {"texts": DEEP.decode()}))
    with pytest.raises(ValueError, match=rf"^{path}: texts: expected a JSON object .*, got '\[+'$"):
        Trace.load(path)


@given(st.one_of(damages(), damages(header=1400)))
def test_a_damaged_trace_is_refused_or_fits_its_schema(run: RunFolder, damage: Damage) -> None:
    """A cut trace is refused by name; one with a changed byte is refused by name or is a trace of the same sizes, since
    it has no checksum. The other steps' traces open."""
    path = run.traces()[1]
    wanted, found = Trace.load(path), []
    with Damaged(path, damage):
        size = path.stat().st_size
        is_refused = refused(lambda: found.append(Trace.load(path)), path)
        assert [Trace.load(other).step for other in run.traces() if other != path] == [1, 3, 4]
    if not is_refused:
        assert size == path.stat().st_size
        assert len(found[0].tokens) == len(wanted.tokens) and len(found[0]) == len(wanted)
