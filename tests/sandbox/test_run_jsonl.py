"""A user's own model folder and problem file: opened, trained for two steps, and graded by Math-Verify."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from firstorder.cli import main
from lab.records import RunFolder
from sandbox.model import load
from tests.sandbox.tiny_hf import write_qwen3_moe

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
