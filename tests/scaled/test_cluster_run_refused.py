"""A user's mistakes in a cluster run are one line each, before anything starts."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

import scaled.checks
import scaled.run
from lab.config.load import config_hash, to_yaml
from lab.records import RunFolder
from tests.scaled.cluster_run_world import config


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
        (["--rollout.max_model_len", "13", "--probe.num_tokens", "8"], "(the longest held-out prompt, 8, and"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], wanted: str, model: Path, tmp_path: Path) -> None:
    """A setting that does not fit is a ValueError of one line that names the field, and leaves no run folder."""
    with pytest.raises(ValueError, match=re.escape(wanted)) as caught:
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
    with pytest.raises(ValueError, match=r"backend: scaled needs vllm_is_not_here, .* '\.\[scaled\]' in the checkout"):
        scaled.run.run(config(model, tmp_path), progress="none")


def test_a_cluster_that_cannot_be_reached_leaves_no_folder(model: Path, tmp_path: Path) -> None:
    """Nothing was started, so there is nothing to resume; a folder that had begun before stays."""
    gone = config(model, tmp_path, "--cluster.address", "127.0.0.1:1")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^cluster.address: no Ray cluster at 127.0.0.1:1"):
            scaled.run.run(gone, progress="none")
        assert not [*(tmp_path / "runs").glob("*/*")]
    folder = RunFolder.create(tmp_path / "runs", gone.name, config_hash(gone), datetime.now(UTC))
    folder.write_config(to_yaml(gone))
    with pytest.raises(ValueError, match=r"no Ray cluster"):
        scaled.run.run(gone, folder=folder, progress="none")
    assert (folder.path / "config.yaml").is_file()
