"""Laws of checkpoints: each comes back to the bit, and one that is half or damaged is named and never loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from lab.files import TEMPORARY
from lab.records import RecordError, RunFolder


def save(run: RunFolder, step: int, part: bytes, error: Exception | None = None) -> None:
    """A sharded checkpoint of one file, whose writer ends with that error if there is one."""
    with run.sharded(step) as folder:
        (folder / "part").write_bytes(part)
        if error is not None:
            raise error


def test_a_process_that_dies_while_it_writes_is_no_disk_error(run: RunFolder) -> None:
    """ChildProcessError of a checkpoint's writers comes as it is and leaves the former one; a disk's is RecordError."""
    save(run, 1, b"1")
    for error, expected in ((ChildProcessError("rank 1 died"), ChildProcessError), (OSError(28, "full"), RecordError)):
        with pytest.raises(expected):
            save(run, 2, b"2", error)
        assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-000001"]


def test_a_checkpoint_comes_back_to_the_bit(run: RunFolder) -> None:
    """Every tensor type and every float64 in the state is what it was, tied tensors included."""
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    tensors = {"a": weight, "tied": weight, "t": weight.T, "bf16": weight.bfloat16(), "rng": torch.arange(5).byte()}
    state = {"rate": 0.1 + 0.2, "step": 7, "nested": {"list": [1, None, "x"]}}
    assert run.latest_checkpoint() is None
    run.save_checkpoint(10, tensors, state)
    found = run.latest_checkpoint()
    assert found is not None and found.step == 10 and found.state == state and found.tensors.keys() == tensors.keys()
    assert all(found.tensors[n].dtype == t.dtype and torch.equal(found.tensors[n], t) for n, t in tensors.items())


def test_the_newest_checkpoints_are_kept(run: RunFolder) -> None:
    """Exactly `keep` remain, the newest by step and not by name; saving a step again replaces it."""
    for step in (9, 999_999, 1_000_000, 1_000_000):
        run.save_checkpoint(step, {"w": torch.tensor([float(step)])}, {}, keep=2)
    names = sorted(p.name for p in (run.path / "checkpoints").iterdir())
    assert names == ["step-1000000", "step-999999"]
    found = run.latest_checkpoint()
    assert found is not None and found.step == 1_000_000


def test_a_kill_while_old_checkpoints_go_leaves_nothing_for_good(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed after it removed a part of an old checkpoint: the next one in the run removes the rest."""
    run.save_checkpoint(1, {"w": torch.zeros(1)}, {}, keep=1)
    remove = shutil.rmtree

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if ignore_errors:  # the writer's own temporary folders
            return remove(path, ignore_errors=True)
        (path / "state.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        run.save_checkpoint(2, {"w": torch.ones(1)}, {}, keep=1)
    monkeypatch.undo()
    with run.hold():
        assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-000002"]


def test_a_sharded_checkpoint_that_left_no_files_is_refused(run: RunFolder) -> None:
    """Writers that wrote elsewhere leave no checkpoint, and the former one stays the newest."""
    save(run, 1, b"w")
    message = r"^cannot write .*step-000002: expected files .* share, got none$"
    with pytest.raises(RecordError, match=message), run.sharded(2, keep=1):
        pass
    found = run.latest_sharded_checkpoint()
    assert found is not None and found.step == 1
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-000001"]


def test_a_half_written_checkpoint_is_passed_over_and_cleared(run: RunFolder) -> None:
    """A folder without its last-written part, or one that never got its name, does not count; the next to write in the
    run removes what is temporary, wherever it lies."""
    run.save_checkpoint(3, {"w": torch.zeros(1)}, {})
    for name in ("step-000005", f"{TEMPORARY}step-000006-x", "step-old"):
        (run.path / "checkpoints" / name).mkdir()
    (run.path / "checkpoints" / f"{TEMPORARY}step-000006-x" / "tensors.safetensors").write_bytes(b"half")
    (run.path / "rollouts").mkdir()
    for path in (run.path / f"{TEMPORARY}report.html-x", run.path / "rollouts" / f"{TEMPORARY}step-000006-x"):
        path.write_text("half")
    found = run.latest_checkpoint()
    assert found is not None and found.step == 3
    with run.hold():
        assert not list(run.path.rglob(f"{TEMPORARY}*"))
    assert {path.name for path in (run.path / "checkpoints").iterdir()} == {"step-000003", "step-000005", "step-old"}


def test_a_damaged_checkpoint_offers_the_older_one(run: RunFolder) -> None:
    """The line names the damaged file, and the folder to remove for the newest whole one; without any it says so."""
    first, second, third = (run.save_checkpoint(step, {"w": torch.zeros(1)}, {}, keep=3) for step in (3, 5, 7))
    (third / "tensors.safetensors").write_bytes(b"")
    damaged = rf"^{third}/tensors\.safetensors: damaged .*"
    with pytest.raises(ValueError, match=rf"{damaged}that of step 5 is whole: remove {third} to continue"):
        run.latest_checkpoint()
    (second / "state.json").write_text("[]")
    with pytest.raises(ValueError, match=rf"{damaged}that of step 3 is whole: remove {second} and {third} to"):
        run.latest_checkpoint()
    for path in (first, third):
        (path / "state.json").write_text("{}")
    lost = "no other one is whole: start again with --fresh"
    with pytest.raises(ValueError, match=rf"^{third}/state\.json: damaged checkpoint \(step: missing\); {lost}$"):
        run.latest_checkpoint()


def test_a_damaged_sharded_checkpoint_offers_the_older_one(run: RunFolder) -> None:
    """The same where many processes wrote it."""
    for step in (3, 5):
        save(run, step, b"abc")
    (run.path / "checkpoints" / "step-000005" / "part").write_bytes(b"ab")
    with pytest.raises(ValueError, match=r"part: damaged .* 3 bytes, got 2\); that of step 3 is whole: remove .*5 to"):
        run.latest_sharded_checkpoint()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("[1]", "expected an object, got [1]"), ("{}", "step: missing"), ('{"step": 3}', "{next}: missing")],
)
def test_a_checkpoint_without_its_keys_names_the_first(run: RunFolder, text: str, wanted: str) -> None:
    """Whole JSON that is no record of a checkpoint, in both kinds of it."""
    state = run.save_checkpoint(3, {"w": torch.zeros(1)}, {}) / "state.json"
    save(run, 4, b"abc")
    sharded = run.path / "checkpoints" / "step-000004" / "sharded.json"
    for path, after, load in (
        (state, "state", run.latest_checkpoint), (sharded, "bytes", run.latest_sharded_checkpoint),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ValueError) as caught:
            load()
        assert str(caught.value).startswith(f"{path}: damaged checkpoint ({wanted.format(next=after)}); ")
