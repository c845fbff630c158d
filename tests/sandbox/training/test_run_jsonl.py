"""A user's own model folder and problem file: opened, trained for two steps, and graded by Math-Verify."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import transformers

from firstorder.cli import main
from lab.records import RunFolder
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


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny random Qwen3-MoE as transformers writes it, with a byte-level tokenizer."""
    return write_qwen3_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(tmp_path, model_folder):
    problems = tmp_path / "problems.jsonl"
    lines = [{"problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(12)]
    problems.write_text("\n".join(map(json.dumps, lines)))
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(problems=problems, model=model_folder, output=tmp_path / "runs"))
    return path


def test_own_model_and_file_train(config, tmp_path, capsys):
    """Two steps run; the record has finite metrics, a held-out accuracy and prompts in the papers' template."""
    assert main(["train", str(config), "--progress", "none"]) == 0
    folder = RunFolder.open(next((tmp_path / "runs" / "own").iterdir()))
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


@pytest.mark.parametrize("shape", [qwen3_moe, olmoe, sigmoid])
def test_every_shape_trains_on_a_file(shape, tmp_path, capsys):
    """Ten steps under R3 on the exact engine: ten rows of finite metrics, k3 of exactly 0, rewards above 0, gradients
    that are not 0, and weights that have moved."""
    model = shape(tmp_path / "model")
    problems = tmp_path / "problems.jsonl"
    # The model's first or second guess is right, so that groups are mixed.
    lines = [{"problem": f"{i}+{i % 4}", "answer": guesses(model, f"{i}+{i % 4}")[i % 2]} for i in range(16)]
    problems.write_text("\n".join(map(json.dumps, lines)))
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(problems=problems, model=model, output=tmp_path / "runs"))
    changes = {
        "num_steps": "10", "engine.defects": "[]", "task.prompt_template": "'{problem}'", "evaluation.every": "5",
        "algorithm.batch": "{num_prompts: 4, num_responses: 8, num_minibatches: 2}", "logging.loggers": "[]",
        "algorithm.sampling.max_tokens": "1", "algorithm.optimizer.learning_rate": "1e-3",
    }  # fmt: skip
    words = [word for key, value in changes.items() for word in (f"--{key}", value)]
    assert main(["train", str(path), "--progress", "none", *words]) == 0
    folder = RunFolder.open(next((tmp_path / "runs" / "own").iterdir()))
    first, *rows = folder.metrics()
    assert first["step"] == 0 and [row["step"] for row in rows] == list(range(1, 11))
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(row["rollout_corr/k3_kl"] == 0.0 for row in rows)
    assert max(row["reward/mean"] for row in rows) > 0 and sum(row["actor/grad_norm"] > 0 for row in rows) >= 5
    before, after = load(model).state_dict(), folder.latest_checkpoint().tensors
    moved = [name for name, tensor in before.items() if not torch.equal(tensor, after[f"model.{name}"])]
    assert {name for name, tensor in before.items() if tensor.dtype.is_floating_point} - set(moved) <= {
        name for name in before if "selection_bias" in name
    }


def test_a_bad_line_is_named(config, tmp_path, capsys):
    """A problem without an answer is one line with file and line number, exit code 2."""
    problems = tmp_path / "problems.jsonl"
    problems.write_text(problems.read_text() + '\n{"problem": "What is 1 + 1?"}\n')
    assert main(["train", str(config), "--progress", "none"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "problems.jsonl:13" in error
    assert "answer" in error


def test_a_folder_without_a_model_is_refused(config, tmp_path, capsys):
    """A model path that does not exist is one line that names it, exit code 2."""
    assert main(["train", str(config), "--progress", "none", "--model.path", str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "nowhere" in error


def test_the_opened_model_is_transformers_model(model_folder):
    """`load(folder)(tokens)` gives transformers' logits to 1e-5."""
    tokens = torch.arange(1, 21).view(2, 10)
    theirs = transformers.Qwen3MoeForCausalLM.from_pretrained(model_folder)(tokens).logits
    assert torch.allclose(load(model_folder)(tokens), theirs, atol=1e-5, rtol=0)
