"""Laws of a cluster run around its engines: deaths, kills and restarts change no number; user errors are one line.

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
from collections.abc import Iterator
from pathlib import Path

import pytest

import scaled.checks
import scaled.run
import scaled.session
from lab.checkpoints import SHARDED
from lab.config.load import load
from lab.events import events
from lab.files import RecordError
from lab.ray_session import ray_session
from lab.records import RunFolder
from lab.report.run_page import write_report
from sandbox.config import SandboxRun
from scaled.cluster.probe import ProbeError
from scaled.cluster.rank_group import RankDied
from scaled.cluster.training_group import TrainingGroup
from scaled.config import ScaledRun
from tests.scaled.cluster_world import SandboxSession, save_model

pytestmark = [
    pytest.mark.slow,
    # Ray leaves its sockets and log files to the end of the process.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

ROOT = Path(__file__).parents[2]
CONFIG = """
name: cut
seed: 3
backend: scaled
num_steps: 6
task: {kind: arithmetic, min_digits: 2, max_digits: 3, num_held_out: 8}
model: {path: MODEL}
algorithm:
  objective: {preset: minirl}
  replay: {mode: Pr3, predictor: {num_positions: 4}}
  batch: {num_prompts: 4, num_responses: 2, num_minibatches: 2}
  sampling: {max_tokens: 12}
  optimizer: {learning_rate: 1e-3, warmup_steps: 3}
training: {num_ranks: 2, micro_batch_size: 2}
rollout: {num_engines: 1, timeout_s: 300.0}
evaluation: {every: 3, num_samples: 1, max_prompts: 4}
checkpoint: {every: 2}
traces: {every: 3}
cluster: {object_store_gib: 0.2}
logging: {loggers: [csv]}
"""
MEASURED = ("timing_s/", "rollout/", "transfer/")
"""Groups of metrics that say how a step ran, not what it computed."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


@pytest.fixture(scope="module")
def in_session() -> Iterator[None]:
    """Runs of this process hold the sandbox's engines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaled.session, "Session", SandboxSession)
        yield


def config(model: Path, folder: Path, *words: str) -> ScaledRun:
    path = folder / "config.yaml"
    path.write_text(CONFIG.replace("MODEL", str(model)))
    return load(path, ["--output", str(folder / "runs"), *words], {"scaled": ScaledRun})


@pytest.fixture(scope="module")
def whole(model: Path, in_session: None, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that nothing happened to."""
    return scaled.run.run(config(model, tmp_path_factory.mktemp("whole")), progress="none")


def computed(folder: RunFolder) -> list[dict]:
    """The rows of a run without what depends on the clock."""
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in folder.metrics()]


def test_the_record_of_a_run(whole: RunFolder) -> None:
    """A run leaves manifest, rows 0 to the last, traces, checkpoints, verdict, report and its actors' output."""
    rows = whole.metrics()
    assert [row["step"] for row in rows] == list(range(7))
    assert all(row["staleness/version_lag_max"] == 0.0 for row in rows[1:])
    assert all("probe/mean_abs_diff" in row for row in rows)
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


def test_ranks_in_another_folder_write_the_runs_checkpoints(
    model: Path, in_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster that was started elsewhere, a relative `output` counts from the folder of the run."""
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
    monkeypatch.chdir(there)
    with ray_session(None, num_cpus=3, object_store_bytes=200 * 2**20):
        monkeypatch.chdir(here)
        words = ["--output", "runs", "--num_steps", "1", "--checkpoint.every", "1"]
        scaled.run.run(config(model, tmp_path, *words), progress="none")
    checkpoint = RunFolder.open(next((here / "runs" / "cut").iterdir())).latest_sharded_checkpoint()
    assert checkpoint is not None and not list(there.iterdir())
    assert {path.name for path in checkpoint.path.iterdir()} == {f"rank-{i}.safetensors" for i in (0, 1)} | {SHARDED}


def test_a_rank_that_dies_during_a_checkpoint(
    model: Path, whole: RunFolder, in_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is killed while it writes costs the steps since the last checkpoint, and changes no number."""
    save, killed = TrainingGroup.save, []

    def dying(self: TrainingGroup, folder: Path) -> None:
        if not killed and "step-000004" in folder.name:
            killed.append(self.pids()[1])
            (folder / "half").write_bytes(b"written before")
            os.kill(killed[0], signal.SIGKILL)
        save(self, folder)

    monkeypatch.setattr(TrainingGroup, "save", dying)
    folder = scaled.run.run(config(model, tmp_path), progress="none")
    assert len(killed) == 1 and computed(folder) == computed(whole)
    assert {p.name for p in (folder.path / "checkpoints").iterdir()} == {"step-000004", "step-000006"}
    (event,) = events(folder.path)
    assert (event.process, event.index, event.step, event.resumed) == ("rank", 1, 4, 2)
    assert event.seconds > 0.1 and "rank 1 of 2 died" in event.reason
    assert "rank 1 of 2 died" in (folder.path / "report.html").read_text()


def test_an_engine_that_is_killed_is_an_event(
    model: Path, whole: RunFolder, in_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that dies in the second step costs seconds, no step and no number, and the folder tells of it."""

    def step(self, number, schedule, probe, recorder, training, rollout, checkpoints):
        if number == 1:
            os.kill(rollout.pids()[0], signal.SIGKILL)
        real(self, number, schedule, probe, recorder, training, rollout, checkpoints)

    real = SandboxSession._step
    monkeypatch.setattr(SandboxSession, "_step", step)
    folder = scaled.run.run(config(model, tmp_path), progress="none")
    assert computed(folder) == computed(whole)
    (event,) = events(folder.path)
    assert (event.process, event.index, event.step, event.resumed) == ("engine", 0, 1, 1)
    assert event.seconds > 0.1 and event.reason == "its process ended"


def test_checkpoints_that_are_written_while_the_run_goes_on(
    model: Path, whole: RunFolder, in_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a checkpoint is being written none is there, and a rank's death loses it; afterwards it is whole, and
    metrics and the last checkpoint have the bits of the run that waited for its own."""
    slow, seen = tmp_path / "runs" / "slow", []
    slow.parent.mkdir()
    slow.touch()

    def step(self, number, schedule, probe, recorder, training, rollout, checkpoints):
        if number == 3 and slow.exists():
            seen.append(self.folder.latest_sharded_checkpoint())
            slow.unlink()
            os.kill(training.pids()[1], signal.SIGKILL)
        real(self, number, schedule, probe, recorder, training, rollout, checkpoints)

    real = SandboxSession._step
    monkeypatch.setattr(SandboxSession, "_step", step)
    folder = scaled.run.run(config(model, tmp_path, "--checkpoint.asynchronous", "true"), progress="none")
    assert seen == [None] and computed(folder) == computed(whole)
    (event,) = events(folder.path)
    assert (event.process, event.step, event.resumed) == ("rank", 3, 0)
    assert {p.name for p in (folder.path / "checkpoints").iterdir()} == {"step-000004", "step-000006"}
    for name in ("rank-0.safetensors", "rank-1.safetensors"):
        ours, theirs = (run.path / "checkpoints" / "step-000006" / name for run in (folder, whole))
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_full_disk_behind_a_step_is_one_line(model: Path, in_session: None, tmp_path: Path) -> None:
    """An error of the disk in a writing thread ends the run in the same line, and leaves no checkpoint."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "full").touch()
    words = ("--checkpoint.asynchronous", "true", "--num_steps", "3")
    with pytest.raises(RecordError, match=r"^cannot write .*/checkpoints/step-000002: No space left on device$"):
        scaled.run.run(config(model, tmp_path, *words), progress="none")
    (folder,) = (tmp_path / "runs" / "cut").iterdir()
    assert not list((folder / "checkpoints").iterdir())


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

    def step(self, number, schedule, probe, recorder, training, rollout, checkpoints):
        os.kill(training.pids()[0], signal.SIGKILL)
        real(self, number, schedule, probe, recorder, training, rollout, checkpoints)

    real = SandboxSession._step
    monkeypatch.setattr(SandboxSession, "_step", step)
    with pytest.raises(
        RankDied, match=r"cluster.max_rank_restarts: rank \d of 2 died.*; expected at most 0 restarts, got 1"
    ):
        scaled.run.run(config(model, tmp_path, "--cluster.max_rank_restarts", "0"), progress="none")
    folder = RunFolder.open(next((tmp_path / "runs" / "cut").iterdir()))
    assert [row["step"] for row in folder.metrics()] == [0] and not folder.is_finished


def start(folder: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.scaled.cluster_world", "train", str(folder / "config.yaml")]
    with open(folder / "log", "a") as log:  # a pipe would stay open in what a killed process leaves behind
        return subprocess.Popen(
            [*command, "--output", str(folder / "runs"), "--progress", "none", *words], cwd=ROOT, stdout=log, stderr=log
        )


def test_a_killed_run_goes_on_to_the_same_numbers(model: Path, whole: RunFolder, tmp_path: Path) -> None:
    """A run killed (-9) in the middle of a step resumes to the metrics and verdict of one never stopped."""
    config(model, tmp_path)
    process = start(tmp_path)
    end = time.monotonic() + 300
    while True:
        files = list((tmp_path / "runs").glob("cut/*/metrics.jsonl"))
        if files and len(files[0].read_text().splitlines()) >= 4:
            break
        assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    last = start(tmp_path, "--resume")
    assert last.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    folder = RunFolder.open(files[0].parent)
    assert computed(folder) == computed(whole)
    verdicts = [json.loads((run.path / "verdict.json").read_text()) for run in (folder, whole)]
    assert verdicts[0] == verdicts[1]
    (event,) = events(folder.path)
    assert (event.process, event.index) == ("run", None) and event.step >= 3 and event.resumed in (2, 4)


@pytest.mark.parametrize("steps_off", [1, 2])
def test_a_run_with_batches_in_flight_goes_on_to_the_same_numbers(
    model: Path, in_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps_off: int
) -> None:
    """Batch s is min(s, k) versions behind; a rank's death, after which the batches of the checkpoint are trained on,
    changes no row: under Pr3 they keep routes, features and the predictor of their own version."""
    lag = str(steps_off)
    words = ["--schedule.steps_off", lag, "--schedule.max_staleness", lag, "--num_steps", "5", "--traces.every", "4"]
    folders = [tmp_path / name for name in ("whole", "cut")]
    for folder in folders:
        folder.mkdir()
    whole = scaled.run.run(config(model, folders[0], *words), progress="none")
    assert [row["staleness/version_lag_max"] for row in whole.metrics()[1:]] == [min(s, steps_off) for s in range(5)]
    assert [row["step"] for row in whole.metrics() if "eval/accuracy" in row] == [0, 3, 5]

    def step(self, number, schedule, probe, recorder, training, rollout, checkpoints):
        if number == 3 and not killed:
            checkpoint = self.folder.latest_sharded_checkpoint()
            killed.append(sorted(path.name for path in checkpoint.path.glob("ahead-*")))
            os.kill(training.pids()[1], signal.SIGKILL)
        real(self, number, schedule, probe, recorder, training, rollout, checkpoints)

    real, killed = SandboxSession._step, []
    monkeypatch.setattr(SandboxSession, "_step", step)
    assert computed(scaled.run.run(config(model, folders[1], *words), progress="none")) == computed(whole)
    assert killed == [[f"ahead-{i}.safetensors" for i in range(steps_off)]]


PARTIAL = (
    "--algorithm.replay.mode", "R3", "--algorithm.sampling.max_tokens", "40", "--rollout.num_engines", "2",
    "--algorithm.oversampling.extra_prompts", "3", "--algorithm.oversampling.max_staleness", "2",
    "--schedule.max_staleness", "2", "--rollout.routes", "capture", "--checkpoint.every", "1",
)  # fmt: skip


def test_partial_rollouts_outlive_a_rank_and_a_kill(
    model: Path, in_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines, responses of several versions whose stored routes ranks replay: a run that goes on from the stored
    backlog, after a rank's death and after its own, has the rows of one that nothing happened to."""
    folders = [tmp_path / name for name in ("whole", "rank", "run")]
    for folder in folders:
        folder.mkdir()
    whole = scaled.run.run(config(model, folders[0], *PARTIAL), progress="none")
    rows = whole.metrics()[1:]
    assert all(row["sampling/kept_responses"] > 0 and row["staleness/token_lag_max"] <= 2 for row in rows)
    assert max(row["staleness/mixed_response_fraction"] for row in rows) > 0.1
    assert max(row["staleness/version_lag_max"] for row in rows) == 2

    def step(self, number, schedule, probe, recorder, training, rollout, checkpoints):
        if number == 3 and not killed:
            killed.append(number)
            os.kill(training.pids()[1], signal.SIGKILL)
        real(self, number, schedule, probe, recorder, training, rollout, checkpoints)

    real, killed = SandboxSession._step, []
    with monkeypatch.context() as patch:
        patch.setattr(SandboxSession, "_step", step)
        assert computed(scaled.run.run(config(model, folders[1], *PARTIAL), progress="none")) == computed(whole)
    assert killed == [3]

    def stop(self, number, schedule, probe, recorder, training, rollout, checkpoints):
        if number == 4:
            raise KeyboardInterrupt
        real(self, number, schedule, probe, recorder, training, rollout, checkpoints)

    with monkeypatch.context() as patch:
        patch.setattr(SandboxSession, "_step", stop)
        with pytest.raises(KeyboardInterrupt):
            scaled.run.run(config(model, folders[2], *PARTIAL), progress="none")
    half = RunFolder.open(next((folders[2] / "runs" / "cut").iterdir()))
    assert computed(scaled.run.run(config(model, folders[2], *PARTIAL), folder=half, progress="none")) == computed(
        whole
    )


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
    assert "vLLM bf16" in page and "weight precision" in page and "smoke" in page


# -- a user's mistakes, before anything starts


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--model.path", "nowhere"], "model.path: expected a Hugging Face folder with config.json, got nowhere"),
        (["--training.num_ranks", "4", "--training.tensor_parallel", "4"], "tensor_parallel"),
        (["--probe.num_tokens", "600"], "probe.num_tokens: expected less than rollout.max_model_len = 512, got 600"),
        (
            ["--schedule.steps_off", "1", "--cluster.placement", "colocated"],
            "schedule.steps_off: expected 0 where cluster.placement is colocated, got 1",
        ),
    ],
)
def test_a_mistake_is_one_line(words: list[str], wanted: str, model: Path, tmp_path: Path) -> None:
    """A setting that does not fit is a ValueError of one line that names the field, and leaves no run folder."""
    with pytest.raises(ValueError, match=wanted.replace(".", r"\.")) as caught:
        scaled.run.run(config(model, tmp_path, *words), progress="none")
    assert "\n" not in str(caught.value) and not (tmp_path / "runs").exists()


def test_a_model_of_other_tokens_is_refused(model: Path, tmp_path: Path) -> None:
    """The arithmetic task's characters must be the model's whole vocabulary."""
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    fields = json.loads((other / "config.json").read_text()) | {"vocab_size": 32}
    (other / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"model.path: expected a model of the task's 17 tokens, got 32"):
        scaled.run.run(config(other, tmp_path), progress="none")


def test_a_missing_package_is_one_line(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vLLM the run says what is missing and how to install it."""
    monkeypatch.setitem(scaled.checks.NEEDED, "vllm_is_not_here", ())
    with pytest.raises(ValueError, match=r"backend: scaled needs vllm_is_not_here, .* 'firstorder\[scaled\]'"):
        scaled.run.run(config(model, tmp_path), progress="none")
