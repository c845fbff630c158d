"""Laws of `firstorder ladder`: real vLLM engines beside a Megatron-core rank that only scores."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firstorder.cli import main
from lab.config.load import load
from lab.tasks.arithmetic import ALPHABET
from sandbox.model import MoE
from sandbox.model.checkpoint import save
from scaled.cluster import ray_cluster
from scaled.config import ScaledRun
from scaled.ladder import REPLAYED, Missing, Rung, climb, markdown
from tests.scaled import vllm_world
from tests.scaled.ray_marks import RAY
from theory.streams import stream

pytestmark = RAY

CONFIG = """
name: ladder
seed: 1
backend: scaled
num_steps: 1
task: {kind: arithmetic, min_digits: 2, max_digits: 2, num_held_out: 8}
model: {path: MODEL}
algorithm:
  objective: {preset: minirl}
  batch: {num_prompts: 8, num_responses: 8, num_minibatches: 1}
  sampling: {max_tokens: 12}
  optimizer: {learning_rate: 1e-3}
training: {num_ranks: 1, micro_batch_size: 8, precision: fp32}
rollout: {num_engines: 1, max_model_len: 64, max_num_seqs: 64, max_num_batched_tokens: 256, kv_cache_gib: 0.05}
cluster: {object_store_gib: 0.2, bucket_mib: 1}
"""
FP8 = "bf16, fp8 weights"


@pytest.fixture(scope="module")
def rungs(tmp_path_factory: pytest.TempPathFactory) -> list[Rung | Missing]:
    """Three rungs of a fresh model, two draws each; the KV cache in FP8 is missing on most CPUs."""
    root = tmp_path_factory.mktemp("ladder")
    save(MoE(replace(vllm_world.model_config(()), vocab_size=len(ALPHABET) + 2), stream(0, "ladder")), root / "model")
    path = root / "ladder.yaml"
    path.write_text(CONFIG.replace("MODEL", str(root / "model")) + f"output: {root / 'runs'}\n", encoding="utf-8")
    return list(
        climb(load(path, [], {"scaled": ScaledRun}), 2, ("fp32", FP8, "bf16, batch-invariant"), root / "traces")
    )


def test_an_error_before_the_first_engine_names_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    """The model's folder is opened only as an engine would start."""
    config = str(Path(__file__).parents[2] / "configs" / "scaled" / "minirl" / "n1.yaml")
    assert main(["ladder", config, "--model.path", "nowhere"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {config}: model.path: ")


def test_the_trainer_scores_each_draw_twice(rungs: list[Rung | Missing]) -> None:
    """In fp32 both passes agree with the engine to rounding, and no router differs; with FP8 weights some do, and the
    engine's routes (R3) take a part of the KL away."""
    exact, rounded, _ = rungs
    assert isinstance(exact, Rung) and isinstance(rounded, Rung)
    # 1e-13 (docs/mismatch-ladder.md); float32 sums differ by some 1e-7 nats per token, and k3 is their square.
    assert all(mean.mean < 1e-11 for name, mean in exact.metrics.items() if name in ("rollout_corr/k3_kl", REPLAYED))
    assert exact.metrics["routing/router_disagreement"].mean == 0
    for draw in rounded.draws:
        assert draw.replayed_kl is not None
        assert 0 < draw.replayed_kl < draw.metrics["rollout_corr/k3_kl"]


def test_layers_differ_as_the_whole_does(rungs: list[Rung | Missing]) -> None:
    """The share of routers that differ is the mean over layers, since each has as many rows; a draw has its own."""
    exact, rounded, _ = rungs
    assert isinstance(exact, Rung) and isinstance(rounded, Rung)
    for draw in (*exact.draws, *rounded.draws):
        layers = draw.differing_routers.values()
        assert len(layers) == vllm_world.model_config(()).num_layers
        assert sum(layers) / len(layers) == pytest.approx(draw.metrics["routing/router_disagreement"], rel=1e-6)
    first, second = rounded.draws
    assert first.metrics != second.metrics


def test_the_table_has_every_rung(rungs: list[Rung | Missing]) -> None:
    """A row per engine with the KL under R3 last, a line for the engine that needs a GPU; plain values as JSON."""
    text = markdown(rungs)
    header, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert header.endswith(f"| {REPLAYED} |") and len(rows) == 2
    assert "Not on this machine: bf16, batch-invariant" in text
    _, rounded, missing = rungs
    assert isinstance(rounded, Rung) and isinstance(missing, Missing)
    assert rows[1].startswith(f"| {FP8} | {rounded.kernels} |") and rows[1].endswith(f"| {rounded.metrics[REPLAYED]} |")
    assert json.loads(json.dumps(rounded.to_json()))["draws"][0]["num_tokens"] == rounded.draws[0].num_tokens


def started(path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of a climb, whose cluster cannot start."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the cluster was started")

    monkeypatch.setattr(ray_cluster, "cluster", refuse)
    next(climb(load(path, words, {"scaled": ScaledRun}), 2))


def test_a_ladder_checks_what_a_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages, vocabulary and the held-out prompts' room are refused before anything starts, in a run's words."""
    for name, size in (("model", len(ALPHABET) + 2), ("other", len(ALPHABET) + 3)):
        save(MoE(replace(vllm_world.model_config(()), vocab_size=size), stream(0, "ladder")), tmp_path / name)
    path = tmp_path / "ladder.yaml"
    path.write_text(CONFIG.replace("MODEL", str(tmp_path / "model")) + f"output: {tmp_path}\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="the cluster was started"):
        started(path, [], monkeypatch)
    with pytest.raises(ValueError, match=r"^model\.path: expected a model of the task's \d+ tokens, got \d+$"):
        started(path, ["--model.path", str(tmp_path / "other")], monkeypatch)
    with pytest.raises(ValueError, match=r"^rollout\.max_model_len: expected at least \d+ \(the longest held-out"):
        started(path, ["--rollout.max_model_len", "13", "--probe.num_tokens", "8"], monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^backend: scaled needs ray, which is not installed \(pip install "):
        started(path, [], monkeypatch)
