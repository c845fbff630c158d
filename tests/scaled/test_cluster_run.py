"""Laws of a cluster run around its engines: deaths, kills and restarts change no number.

Ray, processes, checkpoints and records are real; the engines inside are the sandbox's, which start in seconds. The run
with Megatron-core and vLLM is in test_scaled_run.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import scaled.checks
import scaled.run
import scaled.session
from lab.checkpoints import SHARDED
from lab.config.load import load
from lab.events import events
from lab.files import RecordError
from lab.records import RunFolder
from lab.report.run_page import write_report
from sandbox.config import SandboxRun
from scaled.cluster.probe import ProbeError
from scaled.cluster.rank_group import RankDied
from scaled.cluster.training_group import TrainingGroup
from tests.scaled.cluster_run_world import before_each_step, computed, config
from tests.scaled.ray_marks import RAY

pytestmark = RAY

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(model: Path, in_session: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that nothing happened to, started in a folder that is not that of Ray, with a relative `output`."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run = scaled.run.run(config(model, folder, "--output", "runs"), progress="none")
        return RunFolder.open(run.path.resolve())


def test_the_record_of_a_run(whole: RunFolder) -> None:
    """A run leaves manifest, rows 0 to the last, traces, checkpoints, verdict, report and its actors' output."""
    rows = whole.metrics()
    assert [row["step"] for row in rows] == list(range(7))
    assert all(row["staleness/version_lag_max"] == 0.0 for row in rows[1:])
    assert all("probe/mean_abs_diff" in row and "timing_s/turn" not in row for row in rows)
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 3, 6]
    assert [path.stem for path in whole.traces()] == ["step-000003", "step-000006"]
    manifest = json.loads((whole.path / "manifest.json").read_text())
    assert {"ray", "megatron-core"} <= manifest["versions"].keys() and manifest["layout"]["training"]["num_ranks"] == 2
    assert manifest["engine_kernels"] == "native"
    checkpoint = whole.latest_sharded_checkpoint()
    assert checkpoint is not None and checkpoint.step == 6
    assert {p.name for p in (whole.path / "checkpoints").iterdir()} == {"step-000004", "step-000006"}
    assert {p.name for p in (whole.path / "logs").iterdir()} == {"rank-0.log", "rank-1.log", "engine-0.log"}
    assert (whole.path / "verdict.json").is_file() and (whole.path / "report.html").is_file()
    for name in ("gen", "old_log_prob", "update_actor", "push"):
        assert all(0 < row[f"timing_s/{name}"] < row["timing_s/step"] for row in rows[1:]), name
    for name in ("timing_s/cpu_ranks", "timing_s/cpu_engines"):  # a step is shorter than 64 processors' time of it
        assert all(0 < row[name] < 64 * row["timing_s/step"] for row in rows[1:]), name
    # With the step after it: the last save is in no row.
    assert [row["step"] for row in rows if row.get("timing_s/save_checkpoint", 0.0) > 0] == [3, 5]
    assert events(whole.path) == []


def test_payloads_are_those_that_plan_counts(whole: RunFolder) -> None:
    """Weights to the buckets' padding; routes and features at most as planned, for responses of full length."""
    planned = whole.manifest()["planned_bytes"]
    weights = 2 * planned["transfer/weights_bytes"]  # the sandbox's ranks hold fp32 where the config says bf16
    for row in whole.metrics()[1:]:
        assert weights <= row["transfer/weights_bytes"] < 1.01 * weights
        for name in ("transfer/routes_bytes", "transfer/features_bytes"):
            assert 0 < row[name] <= planned[name] * (2 if "features" in name else 1)
        assert row["transfer/routes_bytes"] + row["transfer/features_bytes"] < row["transfer/rollout_bytes"]


def test_ranks_in_another_folder_write_the_runs_checkpoints(whole: RunFolder) -> None:
    """On a cluster that was started elsewhere, a relative `output` counts from the folder of the run."""
    checkpoint = whole.latest_sharded_checkpoint()
    assert checkpoint is not None and checkpoint.path.is_relative_to(whole.path.parents[2])
    started = Path.cwd()  # where this process's Ray was started
    assert not (started / "runs" / whole.path.relative_to(whole.path.parents[1])).exists()
    assert {path.name for path in checkpoint.path.iterdir()} == {f"rank-{i}.safetensors" for i in (0, 1)} | {SHARDED}


def test_an_engine_and_a_rank_that_are_killed_are_events(
    model: Path, whole: RunFolder, in_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that dies in the second step costs seconds and no step; a rank that is killed while it writes a
    checkpoint costs the steps since the last one. Neither changes a number, and the folder tells of both."""
    save, killed = TrainingGroup.save, []

    def kill(session, number, training, rollout):
        if number == 1:
            os.kill(rollout.pids()[0], signal.SIGKILL)

    def dying(self: TrainingGroup, folder: Path) -> None:
        if not killed and "step-000004" in folder.name:
            killed.append(self.pids()[1])
            (folder / "half").write_bytes(b"written before")
            os.kill(killed[0], signal.SIGKILL)
        save(self, folder)

    before_each_step(monkeypatch, kill)
    monkeypatch.setattr(TrainingGroup, "save", dying)
    folder = scaled.run.run(config(model, tmp_path), progress="none")
    assert len(killed) == 1 and computed(folder) == computed(whole)
    assert {p.name for p in (folder.path / "checkpoints").iterdir()} == {"step-000004", "step-000006"}
    engine, rank = events(folder.path)
    assert (engine.process, engine.index, engine.step, engine.resumed) == ("engine", 0, 1, 1)
    assert engine.seconds > 0.1 and engine.reason == "its process ended"
    assert (rank.process, rank.index, rank.step, rank.resumed) == ("rank", 1, 4, 2)
    assert rank.seconds > 0.1 and "rank 1 of 2 died" in rank.reason
    assert "rank 1 of 2 died" in (folder.path / "report.html").read_text()


def test_checkpoints_that_are_written_while_the_run_goes_on(
    model: Path, whole: RunFolder, in_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a checkpoint is being written none is there, and a rank's death loses it; afterwards it is whole, and
    metrics and the last checkpoint have the bits of the run that waited for its own."""
    slow, seen = tmp_path / "runs" / "slow", []
    slow.parent.mkdir()
    slow.touch()

    def kill(session, number, training, rollout):
        if number == 3 and slow.exists():
            seen.append(session.folder.latest_sharded_checkpoint())
            slow.unlink()
            os.kill(training.pids()[1], signal.SIGKILL)

    before_each_step(monkeypatch, kill)
    folder = scaled.run.run(config(model, tmp_path, "--checkpoint.asynchronous", "true"), progress="none")
    assert seen == [None] and computed(folder) == computed(whole)
    (event,) = events(folder.path)
    assert (event.process, event.step, event.resumed) == ("rank", 3, 0)
    assert {p.name for p in (folder.path / "checkpoints").iterdir()} == {"step-000004", "step-000006"}
    for name in ("rank-0.safetensors", "rank-1.safetensors"):
        ours, theirs = (run.path / "checkpoints" / "step-000006" / name for run in (folder, whole))
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_full_disk_in_a_rank_is_one_line(model: Path, whole: RunFolder, in_session: None, tmp_path: Path) -> None:
    """A rank without room for its part of a checkpoint ends the run with what the system said, costs no restart, and
    leaves a run that continues to the same numbers."""
    full = tmp_path / "runs" / "full"
    full.parent.mkdir()
    full.touch()
    with pytest.raises(RecordError, match=r"^cannot write .*/checkpoints/step-000002: No space left on device$"):
        scaled.run.run(config(model, tmp_path), progress="none")
    full.unlink()
    (folder,) = (tmp_path / "runs" / "cut").iterdir()
    assert [row["step"] for row in RunFolder.open(folder).metrics()] == [0, 1, 2]
    resumed = scaled.run.run(config(model, tmp_path), folder=RunFolder.open(folder), progress="none")
    assert computed(resumed) == computed(whole)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-000004", "step-000006"}


def test_too_many_dead_ranks_are_one_clear_error(
    model: Path, in_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond cluster.max_rank_restarts a death is RankDied with the field and both numbers; the record stays."""

    def kill(session, number, training, rollout):
        os.kill(training.pids()[0], signal.SIGKILL)

    before_each_step(monkeypatch, kill)
    with pytest.raises(
        RankDied, match=r"cluster.max_rank_restarts: rank \d of 2 died.*; expected at most 0 restarts, got 1"
    ):
        scaled.run.run(config(model, tmp_path, "--cluster.max_rank_restarts", "0"), progress="none")
    folder = RunFolder.open(next((tmp_path / "runs" / "cut").iterdir()))
    assert [row["step"] for row in folder.metrics()] == [0] and not folder.is_finished


def start(folder: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.scaled.cluster_run_world", "train", str(folder / "config.yaml")]
    with open(folder / "log", "a") as log:  # a pipe would stay open in what a killed process leaves behind
        return subprocess.Popen(
            [*command, "--output", str(folder / "runs"), "--progress", "none", *words], cwd=ROOT, stdout=log, stderr=log
        )


def wait_for_rows(process: subprocess.Popen, folder: Path, num_rows: int) -> Path:
    """The metrics of the process's run, once they have that many rows."""
    end = time.monotonic() + 300
    while True:
        files = list((folder / "runs").glob("cut/*/metrics.jsonl"))
        if files and len(files[0].read_text().splitlines()) >= num_rows:
            return files[0]
        assert process.poll() is None and time.monotonic() < end, (folder / "log").read_text()
        time.sleep(0.01)


def test_a_stopped_or_killed_run_goes_on_to_the_same_numbers(model: Path, whole: RunFolder, tmp_path: Path) -> None:
    """A run that a signal stops, and then one that is killed (-9), each in the middle of a step, resume to the metrics
    and verdict of one never stopped."""
    config(model, tmp_path)
    process = start(tmp_path)
    wait_for_rows(process, tmp_path, 3)
    process.terminate()
    assert process.wait(timeout=300) == 143, (tmp_path / "log").read_text()
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.startswith("interrupted by SIGTERM after step ") and "; continue with: firstorder train " in line
    process = start(tmp_path, "--resume")
    metrics = wait_for_rows(process, tmp_path, 4)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    last = start(tmp_path, "--resume")
    assert last.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    folder = RunFolder.open(metrics.parent)
    assert computed(folder) == computed(whole)
    verdicts = [json.loads((run.path / "verdict.json").read_text()) for run in (folder, whole)]
    assert verdicts[0] == verdicts[1]
    stopped, killed = events(folder.path)
    for event, resumed in ((stopped, (0, 2)), (killed, (2, 4))):
        assert (event.process, event.index) == ("run", None) and event.step >= 2 and event.resumed in resumed


def test_a_disagreeing_engine_stops_the_run(model: Path, in_session: None, tmp_path: Path) -> None:
    """A probe beyond its limit is a ProbeError before the first step; nothing is recorded, nothing is finished."""
    with pytest.raises(ProbeError, match=r"engine 0 \(bf16\) disagrees .* version 0.* allowed 1e-09"):
        scaled.run.run(config(model, tmp_path, "--probe.max_mean_abs_diff", "1e-9"), progress="none")
    folder = RunFolder.open(next((tmp_path / "runs" / "cut").iterdir()))
    assert folder.metrics() == [] and not folder.is_finished


def test_a_report_shows_both_worlds(whole: RunFolder, tmp_path: Path) -> None:
    """One page has a sandbox run and a cluster run on the same axes, each with its engine in words."""
    from sandbox.run import run as run_sandbox

    words = ["--output", str(tmp_path), "--num_steps", "2"]
    sandbox = run_sandbox(load("configs/smoke.yaml", words, {"sandbox": SandboxRun}), progress="none")
    write_report([sandbox, whole], tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert "vLLM bf16" in page and "FP8 weights, scaled per channel" in page and "smoke" in page
