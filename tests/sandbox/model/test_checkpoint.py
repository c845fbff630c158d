"""Folders written by transformers open here with equal logits and experts, and folders written here open there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lab.hf.shards import write_weights
from sandbox.model import MoE, load
from sandbox.model.checkpoint import load_hf, save, to_hf
from tests.sandbox.model.hf_shapes import SHAPES
from tests.sandbox.model.test_model import CONFIGS, Recorder
from theory.routing.gates import GATES
from theory.streams import stream


def theirs(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tokens(vocab_size: int = 40) -> torch.Tensor:
    return torch.randint(vocab_size, (5, 23), generator=stream(0, "tokens"))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_experts_equal_transformers(folders, shape):
    """Float32 logits agree to 1e-5 (rounding of sums in another order), the routed experts exactly."""
    model, reference, routing = load(str(folders[shape])), theirs(folders[shape]), Recorder()
    chosen: list[torch.Tensor] = []
    for name, module in reference.named_modules():
        if name.endswith(".mlp.gate"):
            module.register_forward_hook(lambda *call: chosen.append(call[-1][2]))  # (logits, weights, experts)
    with torch.no_grad():
        ours, wanted = model(tokens(), routing), reference(tokens()).logits
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    assert ours.std() > 0.5  # the comparison would mean little between two zeros
    assert len(routing.calls) == len(chosen) == len(model.config.moe_layers)
    for (_, _, _, experts, _), indices in zip(routing.calls, chosen, strict=True):
        assert torch.equal(experts, indices.sort(dim=-1).values)


@pytest.mark.parametrize("shape", SHAPES)
def test_written_folder_opens_in_transformers(folders, shape, tmp_path):
    """load, save, then transformers: the same logits to 1e-5 and the same weights to the bit, under the same names."""
    model = load(folders[shape])
    save(model, tmp_path)
    before, after = load_file(folders[shape] / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tmp_path)(tokens()).logits, model(tokens()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_keeps_every_bit(name, tmp_path):
    """save then load gives the same logits and weights to the bit, for every convention, also those of our own."""
    model = MoE(CONFIGS[name], stream(2, "round trip", name))
    if name == "sigmoid":
        model.layers[0].mlp.selection_bias.copy_(torch.arange(8.0))
    save(model, tmp_path)
    again = load(tmp_path)
    t = tokens(41)
    with torch.no_grad():
        assert torch.equal(again(t), model(t))
    assert again.config.moe_layers == model.config.moe_layers
    for (a, x), (b, y) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert a == b and torch.equal(x, y)


def test_families():
    """A config is written under the public class that computes exactly it, else under our own name."""
    expected = {
        "qwen3": "qwen3_moe", "dense": "qwen3", "olmoe": "olmoe", "mixtral": "mixtral", "shared": "firstorder_moe",
        "groups": "firstorder_moe", "sigmoid": "firstorder_moe", "wide": "qwen3_moe",
    }  # fmt: skip
    assert {name: config.shape().family for name, config in CONFIGS.items()} == expected
    assert replace(CONFIGS["wide"], gate=GATES["softmax_after"]).shape().family == "qwen3_moe"
    assert replace(CONFIGS["mixtral"], gate=GATES["olmoe"]).shape().family == "firstorder_moe"
    dots1 = replace(CONFIGS["sigmoid"], shared_expert_size=2 * CONFIGS["sigmoid"].expert_size, dense_layers=(0,))
    assert dots1.shape().family == "dots1"
    for other in (
        {"shared_expert_size": 0}, {"shared_expert_size": dots1.expert_size + 1}, {"shared_expert_gate": True},
        {"dense_layers": (1,)}, {"qk_norm": "none"}, {"gate": replace(dots1.gate, group_score="max")},
    ):  # fmt: skip
        assert replace(dots1, **other).shape().family == "firstorder_moe", other


def test_softmax_after_opens_in_transformers(tmp_path):
    """A softmax over the chosen experts is the renormalised softmax over all: transformers' Qwen3-MoE computes it."""
    model = MoE(replace(CONFIGS["wide"], gate=GATES["softmax_after"]), stream(0, "after"))
    save(model, tmp_path)
    assert load(tmp_path).config.gate == GATES["softmax_after"]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tmp_path)(tokens()).logits, model(tokens()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", ["qwen3_moe", "qwen3_moe, one dense layer", "olmoe", "mixtral"])
def test_stacked_experts_are_taken(folders, shape):
    """The stacked experts that transformers holds in memory load to the same bits as the per-expert files."""
    model, other = load(folders[shape]), MoE(load(folders[shape]).config)
    memory = theirs(folders[shape]).state_dict()
    assert any(name.endswith("experts.gate_up_proj") for name in memory)
    load_hf(other, memory.items())
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), other.parameters(), strict=True))


def test_weights_that_have_moved_are_found():
    """to_hf and load_hf remember where weights lie; they see those of a model whose memory is another since."""
    model, other = (MoE(CONFIGS["wide"], stream(seed, "moved")) for seed in (0, 1))
    first = dict(to_hf(model))
    for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data = value.data.clone()
    assert all(torch.equal(tensor, dict(to_hf(other))[name]) for name, tensor in to_hf(model))
    model.to(torch.float64).to(torch.float32)
    load_hf(model, first.items())
    assert all(torch.equal(tensor, first[name]) for name, tensor in to_hf(model))
    original = MoE(CONFIGS["wide"], stream(0, "moved"))
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), original.parameters(), strict=True))


def test_sharded_folder_opens(folders, tmp_path):
    """A folder of several safetensors files with an index gives the same weights as the single file."""
    whole = load_file(folders["mixtral"] / "model.safetensors")
    names = sorted(whole)
    index = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        save_file({name: whole[name] for name in names[number::3]}, tmp_path / file)
        index |= dict.fromkeys(names[number::3], file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (tmp_path / "config.json").write_text((folders["mixtral"] / "config.json").read_text())
    assert all(torch.equal(t, whole[name]) for name, t in to_hf(load(tmp_path)))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003"):
        load(tmp_path)
    outside = json.dumps({"weight_map": {names[0]: "../other.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(outside)
    with pytest.raises(ValueError, match=r"same folder, got \.\./other"):
        load(tmp_path)


def test_hand_over_copies(folders):
    """to_hf gives copies: what the trainer does afterwards does not reach the engine that took them."""
    model = load(folders["qwen3_moe"])
    other = MoE(model.config)
    given = dict(to_hf(model))
    load_hf(other, given.items())
    with torch.no_grad():
        before = other(tokens())
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(other(tokens()), before)
    load_hf(other, given.items())
    with torch.no_grad():
        assert torch.equal(other(tokens()), before)
    assert all(t.is_contiguous() and not t.requires_grad for t in given.values())
    assert given["model.layers.0.mlp.experts.0.gate_proj.weight"].shape == (24, 32)


@pytest.mark.parametrize("shape", ["qwen3_moe", "olmoe", "mixtral", "qwen3", "dots1"])
def test_silent_fields_mean_what_transformers_assumes(folders, tmp_path, shape):
    """Where config.json is silent on epsilon, rotation and tying, both sides assume the same and the logits agree."""
    fields = json.loads((folders[shape] / "config.json").read_text())
    for name in ("rms_norm_eps", "rope_parameters", "tie_word_embeddings", "hidden_act", "norm_topk_prob"):
        fields.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "model.safetensors").write_bytes((folders[shape] / "model.safetensors").read_bytes())
    model, reference = load(tmp_path), theirs(tmp_path)
    assert model.config.norm_eps == reference.config.rms_norm_eps
    assert model.config.rope_theta == reference.config.rope_parameters["rope_theta"]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), reference(tokens()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("style", ["rope_theta alone", "rope_scaling null"])
def test_config_files_of_transformers_4_open(folders, tmp_path, style):
    """Older files carry rope_theta at the top and rope_scaling null; they mean the same model."""
    shape = "qwen3_moe, every second layer"
    fields = json.loads((folders[shape] / "config.json").read_text())
    fields["rope_theta"] = fields.pop("rope_parameters")["rope_theta"]
    fields["num_experts"] = fields.pop("num_local_experts", fields.get("num_experts"))
    if style == "rope_scaling null":
        fields["rope_scaling"] = None
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "model.safetensors").write_bytes((folders[shape] / "model.safetensors").read_bytes())
    assert load(tmp_path).config == load(folders[shape]).config
    assert load(tmp_path).config.rope_theta == 5e5


def test_bfloat16_files_open_in_float32(folders, tmp_path):
    """A checkpoint kept in bfloat16 becomes float32 parameters of exactly those values."""
    weights = {name: t.bfloat16() for name, t in load_file(folders["qwen3"] / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["qwen3"] / "config.json").read_text())
    for name, tensor in to_hf(load(tmp_path)):
        assert tensor.dtype == torch.float32 and torch.equal(tensor, weights[name].float())


def sharded(model: MoE, folder: Path) -> None:
    """The model as two files and their index."""
    save(model, folder)
    whole = load_file(folder / "model.safetensors")
    write_weights(folder, {n: (tuple(t.shape), t.dtype) for n, t in whole.items()}, whole.__getitem__, 20_000)
    (folder / "model.safetensors").unlink()


def test_a_saved_model_is_the_one_that_opens(tmp_path):
    """save over a folder of several files takes them and their index away: all readers open what was saved last."""
    older, newer = (MoE(CONFIGS["qwen3"], stream(seed, "over")) for seed in (0, 1))
    sharded(older, tmp_path)
    assert torch.equal(load(tmp_path).embedding, older.embedding)
    save(newer, tmp_path)
    assert torch.equal(load(tmp_path).embedding, newer.embedding)
    assert torch.equal(theirs(tmp_path).model.embed_tokens.weight, newer.embedding)
    assert {path.name for path in tmp_path.glob("*.safetensors*")} == {"model.safetensors"}


def test_one_file_and_the_index_of_others_are_refused(tmp_path):
    """transformers would open the one file, vLLM all: such a folder is no model; an index of that one file is."""
    model = MoE(CONFIGS["qwen3"], stream(0, "both"))
    sharded(model, tmp_path)
    one = dict(to_hf(model))
    save_file(one, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected model.safetensors or .*index.json, got both") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    index = {"weight_map": dict.fromkeys(one, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(load(tmp_path).embedding, model.embedding)
