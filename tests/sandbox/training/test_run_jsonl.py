"""A user's own model folder and problem file: opened, trained for a few steps, and graded by Math-Verify."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import transformers

from firstorder.cli import main
from lab.records import RunFolder
from sandbox.engines.engine import SandboxEngine
from sandbox.model import ModelConfig, MoE, load
from sandbox.model.checkpoint import save
from tests.sandbox.tiny_hf import DIGITS, guesses, write, write_qwen3_moe
from theory.routing.gates import GATES
from theory.streams import stream

SHARPNESS = 10.0
"""Of a random model's logits: sure enough of some digits that a group of samples has right and wrong answers."""

CONFIG = """
name: own
backend: sandbox
num_steps: 2
task: {{kind: jsonl, path: {problems}, held_out_fraction: 0.25, max_response_tokens: 16}}
model: {{path: {model}}}
cold_start: null
engine: {{defects: [{{kind: weight_precision}}]}}
algorithm:
  objective: {{preset: minirl}}
  replay: {{mode: R3}}
  batch: {{num_prompts: 2, num_responses: 2, num_minibatches: 2}}
  sampling: {{max_tokens: 16}}
evaluation: {{every: 1, num_samples: 1}}
output: {output}
"""


def trained(tmp_path: Path, model: Path, problems: dict[str, str], *words: str) -> RunFolder:
    """A finished run of this model folder on these problems, by their answers."""
    file, path = tmp_path / "problems.jsonl", tmp_path / "config.yaml"
    lines = [{"problem": problem, "answer": answer} for problem, answer in problems.items()]
    file.write_text("\n".join(map(json.dumps, lines)))
    path.write_text(CONFIG.format(problems=file, model=model, output=tmp_path / "runs"))
    assert main(["train", str(path), "--progress", "none", *words]) == 0
    return RunFolder.open(next((tmp_path / "runs" / "own").iterdir()))


def test_own_model_and_file_train(tmp_path):
    """Two steps of a model with a byte-level tokenizer run; the record has finite metrics and a held-out accuracy."""
    model = write_qwen3_moe(tmp_path / "model")
    folder = trained(tmp_path, model, {f"What is {i} + {i}?": str(2 * i) for i in range(12)})
    rows = folder.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all("eval/accuracy" in row for row in rows)
    assert all(row["rollout_corr/k3_kl"] > 0 for row in rows[1:])
    assert (folder.path / "report.html").is_file()


def qwen3_moe(folder: Path) -> Path:
    """Gates renormalised over the chosen experts."""
    return write_qwen3_moe(folder, DIGITS, SHARPNESS)


def olmoe(folder: Path) -> Path:
    """Gates as they are, and normalisation of whole projections; no dense part."""
    config = transformers.OlmoeConfig(
        vocab_size=len(DIGITS) + 1, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_experts=6, num_experts_per_tok=3, max_position_embeddings=64, eos_token_id=0,
    )  # fmt: skip
    return write(folder, transformers.OlmoeForCausalLM, config, DIGITS, SHARPNESS)


def mixtral(folder: Path) -> Path:
    """Routers under another name than in the other architectures."""
    config = transformers.MixtralConfig(
        vocab_size=len(DIGITS) + 1, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_local_experts=6, num_experts_per_tok=2, max_position_embeddings=64,
        eos_token_id=0, sliding_window=None,
    )  # fmt: skip
    return write(folder, transformers.MixtralForCausalLM, config, DIGITS, SHARPNESS)


def sigmoid(folder: Path) -> Path:
    """Sigmoid scores in groups with a selection bias, a shared expert and a first dense layer, as DeepSeek-V3 has them:
    a shape that transformers writes under no class that opens here, so the sandbox writes it."""
    write_qwen3_moe(folder, DIGITS)
    config = ModelConfig(
        vocab_size=len(DIGITS) + 1, hidden_size=32, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=16,
        num_experts=16, experts_per_token=2, expert_size=16, dense_size=32, dense_layers=(0,), shared_expert_size=16,
        gate=GATES["deepseek_v3"],
    )  # fmt: skip
    model = MoE(config, stream(0, "sigmoid"))
    with torch.no_grad():
        model.head.mul_(SHARPNESS)
        model.layers[1].mlp.selection_bias.copy_(torch.linspace(-0.1, 0.1, 16))
    save(model, folder)
    return folder


SHAPES = [qwen3_moe, olmoe, mixtral, sigmoid]


@pytest.mark.parametrize("mode", ["R3", "Pr3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_trains_on_a_file(shape, mode, tmp_path):
    """Four steps on the exact engine: four rows of finite metrics, k3 of exactly 0 under R3, rewards above 0, gradients
    that are not 0, and weights that have moved. Under Pr3 mu's gates are found by their names and hold the predictor,
    so that from the second hand-over on mu is not old."""
    model = shape(tmp_path / "model")
    # The model's first or second guess is right, so that groups are mixed.
    problems = {f"{i}+{i % 4}": guesses(model, f"{i}+{i % 4}")[i % 2] for i in range(16)}
    changes = {
        "num_steps": "4", "engine.defects": "[]", "task.prompt_template": "'{problem}'", "evaluation.every": "2",
        "algorithm.batch": "{num_prompts: 4, num_responses: 8, num_minibatches: 2}", "logging.loggers": "[]",
        "algorithm.sampling.max_tokens": "1", "algorithm.optimizer.learning_rate": "1e-3",
        "algorithm.replay.mode": mode,
    }  # fmt: skip
    words = [word for key, value in changes.items() for word in (f"--{key}", value)]
    folder = trained(tmp_path, model, problems, *words)
    first, *rows = folder.metrics()
    assert first["step"] == 0 and [row["step"] for row in rows] == list(range(1, 5))
    assert all(math.isfinite(value) for row in rows for value in row.values())
    gaps = [row["rollout_corr/k3_kl"] for row in rows]
    assert gaps[0] == 0.0 and (max(gaps) > 0) == (mode == "Pr3")
    assert max(row["reward/mean"] for row in rows) > 0 and sum(row["actor/grad_norm"] > 0 for row in rows) >= 2
    before, after = load(model).state_dict(), folder.latest_checkpoint().tensors
    moved = [name for name, tensor in before.items() if not torch.equal(tensor, after[f"model.{name}"])]
    assert {name for name, tensor in before.items() if tensor.dtype.is_floating_point} - set(moved) <= {
        name for name in before if "selection_bias" in name
    }


def dense(folder: Path) -> Path:
    """A model without experts."""
    config = transformers.Qwen3Config(
        vocab_size=len(DIGITS) + 1, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, eos_token_id=0,
    )  # fmt: skip
    return write(folder, transformers.Qwen3ForCausalLM, config, DIGITS)


@pytest.mark.parametrize(
    ("shape", "words", "message"),
    [
        (dense, [], "algorithm.replay.mode: expected none for a model without routers, got R3"),
        (
            dense,
            ["--algorithm.replay.mode", "none", "--algorithm.objective", "{preset: grpo, router_shift_floor: 0.5}"],
            "algorithm.objective.router_shift_floor: expected 1 for a model without routers, got 0.5",
        ),
        (
            olmoe,
            ["--algorithm.sampling.max_tokens", "63"],
            "algorithm.sampling.max_tokens: expected at most 62 (the model's 64 positions + 1, less the 3 tokens",
        ),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_at_once(shape, words, message, tmp_path, capsys):
    """A model without routers, or with too few positions for a prompt and its response, is read before the run is."""
    problems = {f"{i}+{i}": str(2 * i) for i in range(8)}
    fits = ["--task.prompt_template", "'{problem}'", "--num_steps", "1", "--algorithm.sampling.max_tokens", "62"]
    model = shape(tmp_path / "model")
    with pytest.raises(AssertionError, match="assert 2 == 0"):
        trained(tmp_path, model, problems, *fits, *words)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_last_position_is_used(tmp_path, monkeypatch):
    """The longest response that is not refused fits: 64 positions, a prompt of 3 tokens, 62 sampled."""
    real = SandboxEngine._sample
    # Never the end token.
    monkeypatch.setattr(SandboxEngine, "_sample", staticmethod(lambda *args: real(*args).clamp(min=1)))
    problems = {f"{i}+{i}": str(2 * i) for i in range(8)}
    words = ["--task.prompt_template", "'{problem}'", "--num_steps", "1", "--algorithm.sampling.max_tokens", "62"]
    folder = trained(tmp_path, olmoe(tmp_path / "model"), problems, *words)
    assert folder.metrics()[-1]["response_length/max"] == 62
