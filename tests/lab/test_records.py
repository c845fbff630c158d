"""Laws of the run folder: what was written is read back to the bit, and what was edited is named.

Those of its checkpoints are in `test_checkpoint_files.py`, those of interrupted writes in `test_whole_files.py`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.records import RecordError, RunFolder, manifest

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)


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


def test_a_checkpoint_after_the_missing_row_is_not_offered(tmp_path: Path) -> None:
    """Without row 2 the run continues from step 1, if its checkpoint is there; from step 3 it would lack that row."""
    run = RunFolder.create(tmp_path, "demo", "aaa", NOW)
    for step in (0, 1, 3, 4):
        run.append_metrics(step, {"reward/mean": 0.5})
    for step in (3, 4):
        run.save_checkpoint(step, {"w": torch.zeros(2)}, {}, keep=3)
    with pytest.raises(ValueError, match=r"got none of step 2; without them .* start again with --fresh$"):
        run.truncate_metrics(4)
    run.save_checkpoint(1, {"w": torch.zeros(2)}, {}, keep=3)
    with pytest.raises(ValueError, match=r"got none of step 2; that of step 1 is whole: remove .*3 and .*4 to"):
        run.truncate_metrics(4)


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


def test_records_that_are_gone_are_not_continued(run: RunFolder) -> None:
    """A checkpoint without each of the rows up to it: the file, the step and the way on; the file stays as it is."""
    gone = {"none at all": [], "none of step 3": [0, 1, 2], "none of step 1": [0, 2, 3, 4], "none of step 0": [1, 2, 3]}
    for got, kept in gone.items():
        (run.path / "metrics.jsonl").unlink(missing_ok=True)
        for step in kept:
            run.append_metrics(step, {"reward/mean": 0.5})
        with pytest.raises(
            ValueError, match=rf"metrics\.jsonl: expected the rows up to step 3, .* got {got}; .*--fresh$"
        ):
            run.truncate_metrics(3)
        assert [row["step"] for row in run.metrics()] == kept
    run.truncate_metrics(0)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_lost_rows_offer_the_newest_whole_checkpoint_before_them(run: RunFolder, is_sharded: bool) -> None:
    """It and those to remove are named; without one the run starts again."""
    paths = [run.path / "checkpoints" / f"step-{step:06d}" for step in (1, 2, 3, 4)]
    for step, path in enumerate(paths, start=1):
        run.append_metrics(step - 1, {"reward/mean": 0.5})
        if is_sharded:
            with run.sharded(step, keep=4) as folder:
                (folder / "part").write_bytes(b"abc")
        else:
            run.save_checkpoint(step, {"w": torch.zeros(1)}, {}, keep=4)
        assert path.is_dir()

    def advice() -> str:
        with pytest.raises(ValueError, match=r"up to step 4, .* got none of step 4; ") as caught:
            run.truncate_metrics(4)
        return str(caught.value).partition("; ")[2]

    assert advice() == f"that of step 3 is whole: remove {paths[3]} to continue from it"
    (paths[2] / ("part" if is_sharded else "tensors.safetensors")).write_bytes(b"")
    assert advice() == f"that of step 2 is whole: remove {paths[2]} and {paths[3]} to continue from it"
    for path in paths[:2]:
        (path / ("sharded.json" if is_sharded else "state.json")).write_text("{}")
    assert advice() == "without them it has no verdict: start again with --fresh"


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
