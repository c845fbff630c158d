"""A user's own model folder and problem file: opened, trained for two steps, and graded by Math-Verify."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from firstorder.cli import main
from lab.records import RunFolder
from sandbox.model import load

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
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=256, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


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
