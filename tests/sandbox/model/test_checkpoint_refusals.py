"""A model that does not open here is refused in one line that names the file, the field and what came."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from sandbox.model.checkpoint import load, load_hf, to_hf

LATENT = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 8}


def test_weights_that_do_not_fit_are_named_and_nothing_is_loaded(folders):
    """Missing, unexpected, repeated and misshapen weights: one ValueError names them, the model stays as it was."""
    model = load(folders["olmoe"])
    weights = dict(to_hf(model))
    before = [p.clone() for p in model.parameters()]
    changed = {name: tensor + 1 for name, tensor in weights.items()}
    del changed["model.norm.weight"]
    changed["model.layers.0.mlp.gate.weight"] = torch.zeros(7, 32)
    changed["model.layers.9.mlp.gate.weight"] = torch.zeros(6, 32)
    changed["model.layers.0.mlp.experts.down_proj"] = torch.zeros(6, 32, 24)
    with pytest.raises(ValueError) as caught:
        load_hf(model, changed.items())
    message = str(caught.value)
    assert "missing model.norm.weight" in message and "\n" not in message
    assert "unexpected model.layers.9.mlp.gate.weight" in message
    assert "repeated model.layers.0.mlp.experts.down_proj" in message
    assert "model.layers.0.mlp.gate.weight (expected (6, 32), got (7, 32) float32)" in message
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    with pytest.raises(ValueError, match=r"missing .* and \d+ more"):
        load_hf(model, [])


def test_a_tied_head_may_come_twice_but_not_differ(folders):
    """A redundant lm_head.weight is taken where the config ties it and it equals the embeddings, else refused."""
    model = load(folders["qwen3, tied"])
    weights = dict(to_hf(model))
    assert "lm_head.weight" not in weights
    load_hf(model, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}.items())
    with pytest.raises(ValueError, match=r"lm_head\.weight.*embeddings"):
        load_hf(model, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1}.items())


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ("qwen3_moe", {"architectures": ["LlamaForCausalLM"]}, "architectures.*Qwen3MoeForCausalLM.*LlamaForCausalLM"),
        ("qwen3_moe", {"architectures": None, "model_type": None}, r"architectures.*\[\]"),
        ("qwen3_moe", {"hidden_act": "gelu"}, 'hidden_act.*"silu".*"gelu"'),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope_param.*yarn"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "experts_per_token.*6.*7"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "layer_types.*sliding_attention"),
        ("mixtral", {"sliding_window": 128}, "sliding_window.*null.*128"),
        ("dots1", {"layer_types": None, "sliding_window": 8, "max_window_layers": 2}, "layer_types.*sliding_attention"),
        ("dots1", {"n_group": 3}, "divisible into 3 groups, got 8"),
        ("dots1", {"n_shared_experts": None}, "n_shared_experts: expected"),
        ("dots1", LATENT, "kv_lora_rank: expected none .*grouped-query.*Dots1.*got 8.*DeepseekV3"),
        ("mixtral", {"num_key_value_heads": 3}, "num_heads.*3.*4"),
        ("mixtral", {"vocab_size": "many"}, "many"),
        ("mixtral", {"vocab_size": 48}, r"embed_tokens\.weight \(expected \(48, 32\), got \(40, 32\)"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(folders, tmp_path, shape, changes, message):
    """A config feature outside the decoder is one ValueError line with the field, what is possible and what came."""
    fields = json.loads((folders[shape] / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "model.safetensors").write_bytes((folders[shape] / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_missing_field_is_named(folders, tmp_path):
    """A config.json without a size that the model needs says which."""
    fields = json.loads((folders["olmoe"] / "config.json").read_text())
    del fields["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"hidden_size.*missing"):
        load(tmp_path)


def test_bad_folders_are_one_clear_line(folders, tmp_path):
    """No folder, no config, broken JSON, no weights, pickles, a torn safetensors file: each says which file and why."""
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="JSON object, got list"):
        load(tmp_path)
    (tmp_path / "config.json").write_text((folders["olmoe"] / "config.json").read_text())
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*never opened"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folders["olmoe"] / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a valid safetensors"):
        load(tmp_path)
