"""A disk that is full, a folder that cannot be written, a checkpoint that is damaged: one clear line, and nothing
half-written."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from firstorder.cli import main
from lab.config.load import load
from lab.files import TEMPORARY
from lab.records import RunFolder
from sandbox.config import SandboxRun
from sandbox.model import MoE
from sandbox.model.checkpoint import save
from sandbox.run import open_task
from theory.streams import stream

CONFIG = """
name: failing
backend: sandbox
num_steps: 3
task: {kind: arithmetic, min_digits: 2, max_digits: 2, num_held_out: 4}
model: {num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 1, num_experts: 4, expert_size: 16}
engine: {defects: [{kind: weight_precision}]}
cold_start: null
algorithm:
  objective: {preset: minirl}
  replay: {mode: R3}
  batch: {num_prompts: 4, num_responses: 2, num_minibatches: 2}
  sampling: {max_tokens: 8}
evaluation: {every: 3, num_samples: 1, max_prompts: 4}
checkpoint: {every: 1}
traces: {every: 1}
logging: {loggers: []}
"""


@pytest.fixture(autouse=True)
def _config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("config.yaml").write_text(CONFIG)
        assert train() == 0
        (found,) = folders()
    return RunFolder(folder / found)


@pytest.fixture
def killed(whole: RunFolder) -> RunFolder:
    """Its copy here, as of a run that was killed before its end."""
    path = Path("runs/failing") / whole.path.name
    shutil.copytree(whole.path, path)
    (path / "verdict.json").unlink()
    return RunFolder(path)


def train(*words: str) -> int:
    return main(["train", "config.yaml", "--progress", "none", *words])


def fails(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    """The one line on stderr with which the command ends."""
    capsys.readouterr()
    assert train(*words) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ")


def folders() -> list[Path]:
    return sorted(Path("runs/failing").glob("*Z-*")) if Path("runs").is_dir() else []


def check_whole(folder: Path) -> None:
    """Every file in the folder reads, and there is no temporary one."""
    assert not [p for p in folder.rglob("*") if TEMPORARY in p.name]
    assert [row["step"] for row in RunFolder(folder).metrics()] == list(range(len(RunFolder(folder).metrics())))
    for path in folder.rglob("*.json"):
        json.loads(path.read_text())
    for path in folder.rglob("*.safetensors"):
        safetensors.torch.load_file(path)


@contextlib.contextmanager
def largest_file(num_bytes: int):
    """The system refuses to write any file past this size, as it would on a disk that has no room for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_stops_the_run_and_it_goes_on_later(whole: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever file the disk has no room for (config, checkpoint, report), the run ends in one line that names it;
    what is there is whole, and with room again the run continues to the bits of one that was never stopped."""
    sizes = {p.name: p.stat().st_size for p in whole.path.rglob("*") if p.is_file()}
    # A report's size differs by some digits from run to run: its panel of stages holds times.
    report = sizes["report.html"] - 10_000
    limits = {"config.yaml": 500, "step-": sizes["tensors.safetensors"] - 1, "report.html": report}
    assert max(size for size in sizes.values() if size < 20_000) < limits["step-"] < limits["report.html"]
    for name, limit in limits.items():
        with largest_file(limit):
            message = fails(capsys, "--output", f"runs-{name}")
        assert re.fullmatch(rf"cannot write \S*{re.escape(name)}\S*: File too large\n", message), message
        for folder in Path(f"runs-{name}").glob("failing/*Z-*"):
            check_whole(folder)
        assert train("--output", f"runs-{name}", *([] if name == "config.yaml" else ["--resume"])) == 0
        folder = RunFolder(sorted(Path(f"runs-{name}").glob("failing/*Z-*"))[-1])
        assert (folder.path / "report.html").stat().st_size > limits["step-"]
        check_whole(folder.path)
        assert folder.metrics() == whole.metrics()
        a, b = whole.latest_checkpoint(), folder.latest_checkpoint()
        assert a is not None and b is not None
        assert all(torch.equal(tensor, b.tensors[name]) for name, tensor in a.tensors.items())


def test_a_folder_that_cannot_be_made_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A file where the output folder should be is named, with the system's reason, and stays as it is."""
    Path("taken").write_text("mine")
    message = fails(capsys, "--output", "taken")
    assert message.startswith("cannot make folder taken/failing/") and message.endswith(": Not a directory\n")
    assert Path("taken").read_text() == "mine"


def test_a_damaged_checkpoint_stops_a_resume(killed: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """One changed byte of either part of the newest checkpoint: its file is named, and the record stays as it was."""
    folder = killed.path
    for part in ("tensors.safetensors", "state.json"):
        path = folder / "checkpoints" / "step-000003" / part
        good = path.read_bytes()
        path.write_bytes(good[:-20] + bytes([good[-20] ^ 1]) + good[-19:])
        before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json"}
        offer = r"that of step 2 is whole: remove runs/\S+/step-000003 to continue from it\n"
        assert re.search(rf"step-000003/{part}: damaged checkpoint \(.*\); {offer}", fails(capsys, "--resume"))
        assert {p: p.read_bytes() for p in before} == before and folders() == [folder]
        path.write_bytes(good)
    assert train("--resume") == 0


def test_a_run_is_not_resumed_on_other_inputs(killed: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """An input that is not as it was when the run began is named; a run that continues keeps its first manifest."""
    first = killed.manifest()
    assert first["inputs"] == {} and "resumed" not in first
    killed.write_manifest(first | {"inputs": {"problems.jsonl": "0" * 64}})
    assert fails(capsys, "--resume").startswith("problems.jsonl: expected the file with which the run in runs/failing/")
    killed.write_manifest(first | {"num_cpus": 12345})
    assert train("--resume") == 0
    assert "continues with another num_cpus" in capsys.readouterr().err
    found = killed.manifest()
    assert found["num_cpus"] == 12345 and [entry["num_cpus"] for entry in found["resumed"]] == [first["num_cpus"]]


def test_a_run_that_lost_its_records_is_not_resumed(killed: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor that is gone from a checkpoint is named; a run without metrics.jsonl is refused, and stays as it is."""
    folder, checkpoint = killed, killed.latest_checkpoint()
    assert checkpoint is not None
    for name in ("num_updates", next(name for name in checkpoint.tensors if name.startswith("optimizer.exp_avg_sq."))):
        rest = {key: tensor for key, tensor in checkpoint.tensors.items() if key != name}
        folder.save_checkpoint(3, rest, {})
        assert fails(capsys, "--resume") == f"checkpoint does not fit the config: it has no tensor {name}\n"
    folder.save_checkpoint(3, checkpoint.tensors, {})
    (folder.path / "metrics.jsonl").unlink()
    assert "metrics.jsonl: expected the rows up to step 3" in fails(capsys, "--resume")
    assert folder.latest_checkpoint() is not None and not folder.is_finished


def test_a_run_without_some_rows_continues_as_its_line_says(
    whole: RunFolder, killed: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """A torn last row: from the checkpoint before it the run has the same rows; a row lost before both is named."""
    path, newest = killed.path / "metrics.jsonl", killed.checkpoint()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], *lines[3:]]))
    message = fails(capsys, "--resume")
    assert "metrics.jsonl: expected the rows up to step 3" in message and message.endswith("with --fresh\n")
    assert "got none of step 2; " in message
    path.write_text("".join(lines)[:-20])
    offer = f"got none of step 3; that of step 2 is whole: remove {newest} to continue from it\n"
    assert fails(capsys, "--resume").endswith(offer)
    shutil.rmtree(newest)
    assert train("--resume") == 0
    assert killed.metrics() == whole.metrics()


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (["--model.path", "nowhere"], "nowhere: no such folder", 2),
        (
            ["--task", "{kind: jsonl, path: none.jsonl}", "--model.path", "nowhere"],
            "model.path: expected a model's folder", 2,
        ),
        (
            ["--cold_start", "{learning_rate: 1e30, warmup_updates: 0}", "--algorithm.sampling.max_tokens", "40"],
            "cold start: the loss of update 1 is ", 1,
        ),
    ],
)  # fmt: skip
def test_a_run_that_cannot_start_leaves_no_folder(
    words: list[str], message: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault found only when the run is made ready is one line, and there is nothing to resume."""
    assert message in fails(capsys, *words, code=code)
    assert folders() == []


@pytest.mark.parametrize("more", [-1, 4])
def test_a_model_of_other_tokens_than_the_task_is_refused(more: int, capsys: pytest.CaptureFixture[str]) -> None:
    """With more tokens than the task has characters mu could sample one that no text has, in the middle of the run."""
    config = load("config.yaml", (), {"sandbox": SandboxRun})
    assert isinstance(config, SandboxRun)
    needed = open_task(config).tokenizer.vocab_size
    save(MoE(config.model.build(needed + more), stream(0, "wide")), Path("other"))
    said = f"config.yaml: model.path: expected a model of the task's {needed} tokens, got {needed + more}\n"
    assert fails(capsys, "--model.path", "other") == said
    assert folders() == []
