"""Dumps that the frameworks' own code wrote (written/README.md) come back as our trace, but for what they lack."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from firstorder.cli import main
from lab.doctor import dumps
from lab.doctor.importers import load_dump
from lab.doctor.importers.folders import step_files
from lab.doctor.replay_log import read
from tests.lab.doctor.test_formats import NO_ROUTES, WHOLE
from tests.lab.doctor.test_importers import ROWS, differing, write_jsonl

WRITTEN = Path(__file__).parent / "written"
EVERY: dict[str, tuple[str, set[str], int]] = {
    "miles/policy_loss_debug/rank_0_call_0.pt": (
        "miles, policy loss", {"tokens", "logp_pi", "entropy_old", "rewards", *NO_ROUTES}, 0,
    ),
    "miles/train_12_0.pt": ("slime, miles", {"experts_old", "entropy_old", "layer_numbers"}, 12),
    "prime-rl/token_exports/step_12/rank_0.jsonl": ("prime-rl", {"rewards", *NO_ROUTES}, 12),
    "rl/train_data_step12.jsonl": ("NeMo-RL", {"entropy_old", *NO_ROUTES}, 0),
    "skyrl/batch.pt": ("SkyRL", {"experts_old", "entropy_old", "rewards"}, 0),
    "slime/12.pt": ("slime, miles", {"experts_old", "entropy_old", "layer_numbers"}, 12),
}  # fmt: skip
"""Each file's format, the fields in which it differs from our trace (absent, or a dense layer), and its step."""
ENGINES: dict[str, tuple[str, set[str]]] = {
    "miles/dashboard_columns/rollout_12.parquet": ("miles, dashboard", {"rewards", "experts_mu"}),
    "open-instruct/grpo_rollouts_000000.jsonl": ("open-instruct", {"experts_mu"}),
}
"""Files of the engine alone."""


@pytest.mark.parametrize("file", EVERY)
def test_a_frameworks_own_file_is_our_trace(file: str, tmp_path: Path) -> None:
    """Every field that the file has is as it was, in the order of the rollout, to the bit where a token was sampled."""
    form, lacks, step = EVERY[file]
    ours = load_dump(write_jsonl(tmp_path / "ours.jsonl", ROWS)).trace
    dump = load_dump(WRITTEN / file)
    sampled = ours.is_response
    assert dump.format == form and dump.trace.step == step
    assert torch.equal(dump.trace.logp_mu[sampled], ours.logp_mu[sampled])
    assert differing(dump.trace, ours) - {"logp_mu", "step"} == lacks


@pytest.mark.parametrize("file", ENGINES)
def test_a_file_of_the_engine_is_our_trace_with_the_trainers_side(file: str, tmp_path: Path) -> None:
    """With `--old` nothing but what the file lacks differs."""
    form, lacks = ENGINES[file]
    ours = load_dump(write_jsonl(tmp_path / "ours.jsonl", WHOLE)).trace
    dump = load_dump(WRITTEN / file, old=dumps.old_side(tmp_path, WHOLE))
    assert dump.format == form and differing(dump.trace, ours) - {"step"} == lacks


@pytest.mark.parametrize("folder", ["miles", "prime-rl", "rl", "slime"])
def test_a_folder_of_a_framework_is_a_run(folder: str, tmp_path: Path) -> None:
    """The step stands in the name that the framework itself gives its file."""
    shutil.copytree(WRITTEN / folder, run := tmp_path / folder, ignore=shutil.ignore_patterns("policy_loss_debug"))
    (step,) = step_files(run)
    assert step.number == 12 and len(step.paths) == 1


def test_the_replay_log_of_nemo_rl_is_whole() -> None:
    """Payloads, fetches and the verified layer are all read, and nothing is said to be off."""
    log = read([WRITTEN / "rl-r3" / "r3_trace_host_pid1.jsonl"])
    assert log.fault is None
    assert len(log.sampled) == len(log.fetched) == len(ROWS) and sum(log.forwards.values()) == 1


def test_skyrls_own_pickle_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The command says in one line why, and which page has the lines that write tensors instead."""
    path = WRITTEN / "skyrl/dumped_data/global_step_12_training_input.pkl"
    assert main(["doctor", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}: a pickle can run any code") and "What to add to SkyRL" in line


def test_every_file_here_is_read_by_a_test() -> None:
    """A file that is written is one that is read."""
    files = {str(path.relative_to(WRITTEN)) for path in WRITTEN.rglob("*.*") if path.suffix != ".md"}
    assert files == {
        *EVERY, *ENGINES, "rl-r3/r3_trace_host_pid1.jsonl", "skyrl/dumped_data/global_step_12_training_input.pkl",
    }  # fmt: skip
