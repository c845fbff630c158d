"""Laws of the run folder: what was written is read back to the bit; a killed or refused write leaves nothing half."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import math
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lab
from lab.files import TEMPORARY, atomic_folder
from lab.records import RecordError, RunFolder, atomic_write, manifest

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A fresh run folder with a config."""
    folder = RunFolder.create(tmp_path, "demo", "abc123", NOW)
    folder.write_config("name: demo\n")
    return folder


def test_the_folder_carries_utc_time_and_hash_and_a_taken_second_moves_on(tmp_path: Path) -> None:
    """Two runs of one config in one second get two folders, whatever the caller's time zone."""
    there = NOW.astimezone(timezone(timedelta(hours=9)))
    first, second = (RunFolder.create(tmp_path, "demo", "abc123", now) for now in (NOW, there))
    assert first.path == tmp_path / "demo" / "20260304T050607Z-abc123"
    assert second.path == tmp_path / "demo" / "20260304T050608Z-abc123"


@pytest.mark.parametrize(("name", "now"), [("../up", NOW), ("a/b", NOW), ("", NOW), ("demo", datetime(2026, 1, 1))])
def test_a_name_that_leaves_the_root_or_a_time_without_zone_is_refused(
    tmp_path: Path, name: str, now: datetime
) -> None:
    """A run folder is always directly under root/<name>, and its time is unambiguous."""
    with pytest.raises(ValueError, match="expected"):
        RunFolder.create(tmp_path, name, "abc123", now)


def test_a_process_that_dies_while_it_writes_is_no_disk_error(tmp_path: Path) -> None:
    """ChildProcessError of a checkpoint's writers comes as it is and leaves the former one; a disk's is RecordError."""
    run = RunFolder.create(tmp_path, "demo", "aaa", NOW)
    run.sharded_checkpoint(1, lambda folder: (folder / "part").write_bytes(b"1"))
    for error, expected in ((ChildProcessError("rank 1 died"), ChildProcessError), (OSError(28, "full"), RecordError)):

        def write(folder: Path, error: OSError = error) -> None:
            (folder / "part").write_bytes(b"2")
            raise error

        with pytest.raises(expected):
            run.sharded_checkpoint(2, write)
        assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-000001"]


def test_a_sealed_run_has_the_hashes_of_its_records(tmp_path: Path) -> None:
    """The manifest keeps what it had, and names config, metrics and checkpoint with the SHA-256 of their bytes."""
    run = RunFolder.create(tmp_path, "demo", "aaa", NOW)
    run.write_config("name: demo\n")
    run.write_manifest({"seed": 3})
    run.append_metrics(1, {"reward/mean": 0.5})
    run.save_checkpoint(1, {"w": torch.zeros(2)}, {})
    run.seal()
    names = ["checkpoints/step-000001/state.json", "config.yaml", "metrics.jsonl"]
    assert run.manifest()["seed"] == 3 and sorted(run.manifest()["sha256"]) == names
    for name, found in run.hashes().items():
        assert found == hashlib.sha256((run.path / name).read_bytes()).hexdigest() == run.manifest()["sha256"][name]


def test_only_the_newest_unfinished_run_of_the_same_config_is_resumed(tmp_path: Path) -> None:
    """A run is resumable until its page is there; another config's, or one that never began, is not."""
    hours = {"old": ("aaa", 0), "new": ("aaa", 1), "other": ("bbb", 2), "empty": ("aaa", 3)}
    found = {n: RunFolder.create(tmp_path, "demo", h, NOW + timedelta(hours=t)) for n, (h, t) in hours.items()}
    for name in ("old", "new", "other"):
        found[name].write_config(f"name: {name}")
    old, new = found["old"], found["new"]
    assert RunFolder.find_resumable(tmp_path, "demo", "aaa") == new != old
    new.write_verdict({"stable": True})
    assert new.is_finished and RunFolder.find_resumable(tmp_path, "demo", "aaa") == new
    new.write_report("<html>")
    assert RunFolder.find_resumable(tmp_path, "demo", "aaa") is None
    assert RunFolder.find_resumable(tmp_path, "other", "aaa") is None


def test_opening_something_else_says_what_was_there(tmp_path: Path, run: RunFolder) -> None:
    """A folder without config.yaml, a file and nothing at all are each named."""
    assert RunFolder.open(run.path) == run
    for path, got in (
        (tmp_path, "a folder without it"),
        (run.path / "config.yaml", "a file"),
        (tmp_path / "x", "nothing"),
    ):
        with pytest.raises(ValueError, match=got):
            RunFolder.open(path)


NUMBERS = st.floats() | st.integers(-(2**53), 2**53)


@settings(deadline=None, max_examples=30)
@given(lines=st.lists(st.dictionaries(st.sampled_from(["reward/mean", "actor/entropy", "routing/noop"]), NUMBERS)))
def test_metrics_come_back_to_the_bit(tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, float]]) -> None:
    """Every finite number is read as written; the others are null and listed, so that every line is JSON."""
    run = RunFolder(tmp_path_factory.mktemp("run"))
    for step, metrics in enumerate(lines):
        run.append_metrics(step, metrics)
    read = run.metrics()
    assert [record.pop("step") for record in read] == list(range(len(lines)))
    for record, metrics in zip(read, lines, strict=True):
        lost = [name for name, value in metrics.items() if not math.isfinite(value)]
        assert record.pop("non_finite", []) == lost
        assert record == {name: None if name in lost else value for name, value in metrics.items()}


def test_a_torn_last_line_is_left_out_and_overwritten(run: RunFolder) -> None:
    """The remains of a killed writer are neither read nor glued to the next line, however long it is."""
    run.append_metrics(0, {"reward/mean": 0.5})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "reward/me' + "x" * 200_000)
    assert [r["step"] for r in run.metrics()] == [0]
    run.append_metrics(1, {"reward/mean": 0.75})
    assert [(r["step"], r["reward/mean"]) for r in run.metrics()] == [(0, 0.5), (1, 0.75)]


def test_damage_before_the_last_line_is_an_error_with_its_line_number(run: RunFolder) -> None:
    """Only the last line can be torn by a kill; any other bad line is somebody's damage and is reported."""
    (run.path / "metrics.jsonl").write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        run.metrics()


def test_truncation_keeps_exactly_the_steps_up_to_the_checkpoint(run: RunFolder) -> None:
    """A resumed run repeats no step and loses none."""
    for step in range(6):
        run.append_metrics(step, {"reward/mean": step / 3})
    before = run.metrics()
    run.truncate_metrics(3)
    assert run.metrics() == before[:4]


@pytest.mark.parametrize(("name", "value"), [("step", 1.0), ("non_finite", 1.0), ("reward/mean", "high")])
def test_what_is_no_metric_is_refused(run: RunFolder, name: str, value: object) -> None:
    """A reserved name or a value that is no number never reaches the file."""
    # TypeError where the type checks of the test run refuse the text before our own ValueError does.
    with pytest.raises((ValueError, TypeError), match=name):
        run.append_metrics(0, {name: value})  # pyright: ignore[reportArgumentType]
    assert run.metrics() == []


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


def test_a_sharded_checkpoint_that_left_no_files_is_refused(run: RunFolder) -> None:
    """Writers that wrote elsewhere leave no checkpoint, and the former one stays the newest."""
    run.sharded_checkpoint(1, lambda folder: (folder / "part").write_bytes(b"w"), keep=1)
    with pytest.raises(RecordError, match=r"^cannot write .*step-000002: expected files .* share, got none$"):
        run.sharded_checkpoint(2, lambda folder: None, keep=1)
    found = run.latest_sharded_checkpoint()
    assert found is not None and found.step == 1
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-000001"]


@pytest.mark.parametrize("part", ["tensors.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named_and_never_loaded(run: RunFolder, part: str) -> None:
    """One flipped bit in either part is an error with the file's name."""
    path = run.save_checkpoint(3, {"w": torch.arange(8.0)}, {"rate": 0.25}) / part
    data = bytearray(path.read_bytes())
    position = len(data) - 1 if part.startswith("tensors") else data.index(b"0.25")
    data[position] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=f"{part}: damaged"):
        run.latest_checkpoint()


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
    with pytest.raises(ValueError, match=rf"^{third}/tensors.*that of step 5 is whole: remove {third} to continue"):
        run.latest_checkpoint()
    (second / "state.json").write_text("[]")
    with pytest.raises(ValueError, match=rf"^{third}/tensors.*that of step 3 is whole: remove {third} to continue"):
        run.latest_checkpoint()
    (first / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no other one is whole: start again with --fresh$"):
        run.latest_checkpoint()


def test_a_damaged_sharded_checkpoint_offers_the_older_one(run: RunFolder) -> None:
    """The same where many processes wrote it."""
    paths = [run.sharded_checkpoint(s, lambda folder: (folder / "rank-0").write_bytes(b"abc")) for s in (3, 5)]
    (paths[1] / "rank-0").write_bytes(b"ab")
    with pytest.raises(
        ValueError, match=r"rank-0: damaged .* 3 bytes, got 2\); that of step 3 is whole: remove .*5 to"
    ):
        run.latest_sharded_checkpoint()


def test_records_that_are_gone_are_not_continued(run: RunFolder) -> None:
    """A checkpoint without the rows up to it: the file, the step and the way on; the file stays as it is."""
    for kept, got in (([], "none at all"), ([0, 1, 2], "none after step 2")):
        (run.path / "metrics.jsonl").unlink(missing_ok=True)
        for step in kept:
            run.append_metrics(step, {"reward/mean": 0.5})
        with pytest.raises(
            ValueError, match=rf"metrics\.jsonl: expected the rows up to step 3, .* got {got}; .*--fresh$"
        ):
            run.truncate_metrics(3)
        assert len(run.metrics()) == len(kept)
    run.truncate_metrics(0)


@pytest.mark.parametrize("steps", [[0, 2, 1], [0, 1, 1, 2]])
def test_rows_out_of_order_are_named(run: RunFolder, steps: list[int]) -> None:
    """A shuffled or doubled row is an error with the file, the line and both steps."""
    (run.path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    with pytest.raises(ValueError, match=rf"metrics\.jsonl, line 3: step: expected one above {steps[1]} .*, got 1$"):
        run.metrics()


STORED = [
    (
        "metrics.jsonl",
        '{"step": 1, "reward/mean": "high"}\n',
        'line 1: reward/mean: expected a valid number, got "high"',
    ),
    ("metrics.jsonl", '{"step": 1, "reward/mean": NaN}\n', "line 1: reward/mean: expected a finite number, got NaN"),
    ("metrics.jsonl", '{"step": true}\n', "line 1: step: expected a valid integer, got true"),
    ("metrics.jsonl", "[1]\n", "line 1: expected an object, got [1]"),
    ("verdict.json", "[]", "verdict.json: expected an object, got []"),
    ("verdict.json", '{"reasons": [1]}', "verdict.json: reasons.0: expected an object, got 1"),
    (
        "verdict.json",
        '{"verdict": "fine"}',
        "verdict.json: verdict: expected 'stable', 'collapsed' or 'undecided', got",
    ),
    ("manifest.json", "[]", "manifest.json: expected an object, got []"),
    ("manifest.json", '{"seed', "manifest.json: not valid JSON (EOF while parsing a string at column 6): {"),
]


@pytest.mark.parametrize(("name", "text", "wanted"), STORED, ids=[text.strip() for _, text, _ in STORED])
def test_an_edited_file_is_one_line(run: RunFolder, name: str, text: str, wanted: str) -> None:
    """File, line and field, what was expected and what came."""
    (run.path / name).write_text(text)
    readers = {"metrics.jsonl": run.metrics, "verdict.json": run.verdict, "manifest.json": run.manifest}
    with pytest.raises(ValueError) as caught:
        readers[name]()
    assert wanted in str(caught.value) and str(run.path / name) in str(caught.value)


KILLED = """
import sys
from pathlib import Path
import torch
from lab.records import RunFolder
run = RunFolder(Path(sys.argv[1]))
step = 0
while True:
    step += 1
    run.append_metrics(step, {"reward/mean": float(step)})
    run.save_checkpoint(step, {"w": torch.full((50_000,), float(step))}, {"step": step})
    run.write_manifest({"step": step, "text": "x" * 100_000})
    print(step, flush=True)
"""


@pytest.mark.parametrize("wait", [0.0, 0.007])
def test_a_process_killed_while_writing_leaves_whole_records(run: RunFolder, wait: float) -> None:
    """After kill -9 at any moment every file reads, the last checkpoint is the step's or the next, writing goes on."""
    command = [sys.executable, "-c", KILLED, str(run.path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(lab.__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        done = [int(process.stdout.readline()) for _ in range(3)][-1]
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        done = int((process.stdout.read().split("\n")[:-1] or [done])[-1])
    found = run.latest_checkpoint()
    assert found is not None and done <= found.step <= done + 1
    assert torch.equal(found.tensors["w"], torch.full((50_000,), float(found.step))) and found.state == {
        "step": found.step
    }
    steps = [record["step"] for record in run.metrics()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) in (done, done + 1)
    assert json.loads((run.path / "manifest.json").read_text())["step"] in (done, done + 1)
    run.truncate_metrics(found.step)
    run.append_metrics(found.step + 1, {"reward/mean": 0.0})
    assert [r["step"] for r in run.metrics()] == list(range(1, found.step + 2))


def full(*_: object) -> int:
    """The system's error on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_line_and_changes_nothing(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every writer names the path and the reason, leaves the former content, and leaves no temporary file."""
    run.append_metrics(0, {"reward/mean": 0.5})
    run.save_checkpoint(0, {"w": torch.zeros(2)}, {})
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    monkeypatch.setattr(os, "fsync", full)
    writers = {
        "config.yaml": lambda: run.write_config("other"),
        "metrics.jsonl": lambda: run.append_metrics(1, {"reward/mean": 0.6}),
        "step-000001": lambda: run.save_checkpoint(1, {"w": torch.ones(2)}, {}),
        "report.html": lambda: run.write_report("<html>"),
    }
    for name, write in writers.items():
        with pytest.raises(RecordError, match=rf"^cannot write .*{name}: No space left on device$"):
            write()
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before


def test_a_reader_sees_the_former_file_or_the_new_one(run: RunFolder) -> None:
    """Writing never touches the former bytes: a reader that opened them before reads them to the end."""
    with open(run.path / "config.yaml") as reader:
        run.write_config("name: other\n")
        assert reader.read() == "name: demo\n"
    assert (run.path / "config.yaml").read_text() == "name: other\n"


def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the new folder cannot take its place, the former one is there again and nothing else is left."""
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "weights").write_text("former")
    replace = os.replace

    def refuse(source: Path, target: Path) -> None:
        if Path(target).name == "step" and not Path(source).name.endswith("-former"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RecordError, match="Input/output error"), atomic_folder(tmp_path / "step") as new:
        (new / "weights").write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["step"]
    assert (tmp_path / "step" / "weights").read_text() == "former"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """A root below a file, and a run folder that was removed, give the path and the system's reason."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match=r"cannot make folder .*: Not a directory$"):
        RunFolder.create(tmp_path / "file", "demo", "abc", NOW)
    with pytest.raises(RecordError, match=r"cannot write .*gone.x: No such file or directory$"):
        atomic_write(tmp_path / "gone" / "x", "text")


def test_one_process_at_a_time_holds_a_run(run: RunFolder) -> None:
    """A second holder is refused while the first holds the run, and not after it."""
    with run.hold(), pytest.raises(RecordError, match="another process"), RunFolder(run.path).hold():
        pass
    with run.hold():
        pass


def test_the_manifest_names_what_the_run_ran_on(run: RunFolder) -> None:
    """Seed, torch's version and Python are in it, and it is JSON."""
    run.write_manifest(manifest(seed=5))
    found = json.loads((run.path / "manifest.json").read_text())
    assert found["seed"] == 5 and found["versions"]["torch"] == importlib.metadata.version("torch")
    assert found["python"] == ".".join(str(n) for n in sys.version_info[:3]) and found["cpu"]
