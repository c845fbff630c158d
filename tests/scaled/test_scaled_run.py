"""The cluster run itself: Ray, two Megatron-core ranks and a vLLM engine, from config to verdict, killed on the way."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import scaled.run
from lab.records import RunFolder
from lab.tasks.arithmetic import ALPHABET
from lab.traces import Trace
from sandbox.model import MoE
from sandbox.model.checkpoint import save
from tests.scaled import vllm_world
from tests.scaled.cluster_run_world import before_each_step, computed, config
from tests.scaled.ray_marks import RAY
from theory.streams import stream

pytestmark = RAY

CONFIG = """
name: real
seed: 1
backend: scaled
num_steps: 4
task: {kind: arithmetic, min_digits: 2, max_digits: 2, num_held_out: 8}
model: {path: MODEL}
algorithm:
  objective: {preset: minirl, centering: top_k, centering_k: 4}
  replay: {mode: Pr3, predictor: {num_positions: 4, learning_rate_multiplier: 10.0}}
  batch: {num_prompts: 4, num_responses: 4, num_minibatches: 2}
  sampling: {max_tokens: 12}
  optimizer: {learning_rate: 1e-3}
training: {num_ranks: 2, expert_parallel: 2, micro_batch_size: 2, precision: fp32, timeout_s: 120.0}
rollout:
  {num_engines: 1, max_model_len: 64, max_num_seqs: 32, max_num_batched_tokens: 256, kv_cache_gib: 0.05,
   timeout_s: 600.0, precision: {compute: fp32}}
evaluation: {every: 2, num_samples: 1, max_prompts: 4}
checkpoint: {every: 2}
traces: {every: 2}
cluster: {object_store_gib: 0.2, bucket_mib: 1}
logging: {loggers: []}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh Qwen3-MoE of sizes that vLLM's kernels take, over the characters of the arithmetic task."""
    folder = tmp_path_factory.mktemp("model")
    save(MoE(replace(vllm_world.model_config(()), vocab_size=len(ALPHABET) + 2), stream(0, "real-model")), folder)
    return folder


def carry_out(model: Path, folder: Path) -> RunFolder:
    return scaled.run.run(config(model, folder, text=CONFIG), progress="none")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that nothing happened to."""
    return carry_out(model, tmp_path_factory.mktemp("whole"))


def test_both_engines_hold_one_policy(whole: RunFolder) -> None:
    """In float32 vLLM and Megatron compute one policy: after every push the probe agrees to rounding, and so do KL and
    routes of the first batch, before Pr3's predictor (which mu's gates hold, and old's do not) has learned anything.

    Measured: probe 4e-7, k3 1e-13, no router that differs; the bounds leave room for other kernels' rounding.
    """
    rows = whole.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert max(row["probe/mean_abs_diff"] for row in rows) < 1e-5
    assert rows[1]["rollout_corr/k3_kl"] < 1e-9
    assert rows[1]["routing/router_disagreement"] == 0.0
    assert max(row["rollout_corr/k3_kl"] for row in rows[2:]) > 1e-6


def test_the_predictor_reaches_the_engine(whole: RunFolder) -> None:
    """Under Pr3 the predictor learns, and it is part of the weights that the probe compares."""
    rows = whole.metrics()[1:]
    norms = [row["predictor/weight_norm"] for row in rows]
    assert min(norms) > 0.1 and len(set(norms)) == len(norms)
    assert all(row["predictor/loss"] >= 0 for row in rows)


def test_bytes_that_travel(whole: RunFolder, model: Path) -> None:
    """A push moves the bytes of the weights once; rollouts cost bytes per token, not kilobytes."""
    weights = (model / "model.safetensors").stat().st_size
    for row in whole.metrics()[1:]:
        assert 0.95 * weights < row["transfer/weights_bytes"] < 1.05 * weights
        # Features dominate: at most 4 rows per response of hidden (128) and logits (8) in float32, for 3 layers.
        assert row["transfer/rollout_bytes"] < 16 * 4 * 3 * 136 * 4 * 1.2 + row["progress/num_tokens"] * 64


def test_mus_likeliest_tokens_come_from_vllm(whole: RunFolder) -> None:
    """The run trains on the four likeliest tokens of every position: the bytes of the record are counted, traces hold
    it, and in the first batch, before anything was learned, it is Megatron's own distribution to float32 rounding."""
    for row in whole.metrics()[1:]:
        assert row["rollout/top_tokens_bytes"] == row["progress/num_tokens"] * 4 * (2 + 4)
        assert row["transfer/rollout_bytes"] > row["rollout/top_tokens_bytes"]
        assert row["rollout_corr/drift"] >= 0.0
    trace = Trace.load(sorted((whole.path / "rollouts").glob("*.safetensors"))[0])
    assert trace.top_ids is not None and trace.top_logp_mu is not None and trace.top_logp_old is not None
    assert trace.top_ids.shape == (len(trace.logp_mu), 4)
    assert (trace.top_logp_old - trace.top_logp_mu).abs().max() < (1e-5 if trace.step == 0 else 1.0)
    sampled = torch.cat([trace.tokens[s + p : e] for s, p, e in zip(
        trace.offsets[:-1].tolist(), trace.num_prompt.tolist(), trace.offsets[1:].tolist(), strict=True
    )])  # fmt: skip
    is_sampled = trace.top_ids == sampled[:, None]
    assert is_sampled.any() and torch.equal(trace.top_logp_mu[is_sampled], trace.logp_mu[is_sampled.any(1)])


def test_traces_and_verdict(whole: RunFolder) -> None:
    """A trace holds mu's and old's experts of real engines; the verdict says that five steps are too few."""
    trace = Trace.load(whole.traces()[-1])
    assert trace.record_mu is not None and trace.record_old is not None
    assert trace.record_mu.num_missing_rows == 0
    assert torch.isfinite(trace.logp_mu).all() and torch.isfinite(trace.logp_old).all()
    assert json.loads((whole.path / "verdict.json").read_text())["verdict"] == "undecided"


def test_dead_ranks_and_engines_change_no_number(
    model: Path, whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Megatron rank and a vLLM engine, both killed (-9) before step 4, change no bit of any metric."""
    killed: list[int] = []

    def kill(session, number, training, rollout):
        if number == 3 and not killed:
            killed.extend([training.pids()[1], rollout.pids()[0]])
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    before_each_step(monkeypatch, kill)
    folder = carry_out(model, tmp_path)
    assert len(killed) == 2 and computed(folder) == computed(whole)
