"""Folders written by transformers open here with equal logits and experts, and folders written here open there."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import sandbox.model
from sandbox.checkpoint import load, load_hf, save, to_hf
from sandbox.hf_config import family
from sandbox.model import ModelConfig, MoE
from tests.sandbox.test_model import CONFIGS, Recorder
from theory.routing.gates import GATES
from theory.streams import stream

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 3, "num_experts": 6}
QWEN = SIZES | EXPERTS | {"intermediate_size": 48, "moe_intermediate_size": 24}
# DeepSeek-V3's experts under grouped-query attention: sigmoid gate, groups, a bias of the choice, shared experts.
DOTS1 = SIZES | {
    "num_experts_per_tok": 3, "n_routed_experts": 8, "intermediate_size": 48, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "head_dim": 8,
}  # fmt: skip
T = transformers
SHAPES = {
    "qwen3_moe": lambda: T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(**QWEN, norm_topk_prob=True, head_dim=16)),
    "qwen3_moe, weights as they are": lambda: T.Qwen3MoeForCausalLM(
        T.Qwen3MoeConfig(**QWEN, norm_topk_prob=False, head_dim=8, tie_word_embeddings=True)
    ),
    "qwen3_moe, every second layer": lambda: T.Qwen3MoeForCausalLM(
        T.Qwen3MoeConfig(**QWEN, decoder_sparse_step=2, head_dim=8, rope_parameters=rope(5e5))
    ),
    "qwen3_moe, one dense layer": lambda: T.Qwen3MoeForCausalLM(
        T.Qwen3MoeConfig(**QWEN, mlp_only_layers=[1], norm_topk_prob=True, head_dim=8)
    ),
    "olmoe": lambda: T.OlmoeForCausalLM(T.OlmoeConfig(**SIZES, **EXPERTS, intermediate_size=24)),
    "olmoe, renormalised": lambda: T.OlmoeForCausalLM(
        T.OlmoeConfig(**SIZES | {"num_key_value_heads": 4}, **EXPERTS, intermediate_size=24, norm_topk_prob=True)
    ),
    "mixtral": lambda: T.MixtralForCausalLM(
        T.MixtralConfig(**SIZES, intermediate_size=24, num_local_experts=6, num_experts_per_tok=2)
    ),
    "dots1": lambda: T.Dots1ForCausalLM(T.Dots1Config(**DOTS1, n_group=4, topk_group=2, n_shared_experts=2)),
    "dots1, no groups": lambda: T.Dots1ForCausalLM(
        T.Dots1Config(**DOTS1 | {"norm_topk_prob": False, "first_k_dense_replace": 0}, n_shared_experts=1)
    ),
    "qwen3": lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**SIZES, intermediate_size=48, head_dim=16)),
    "qwen3, tied": lambda: T.Qwen3ForCausalLM(
        T.Qwen3Config(**SIZES, intermediate_size=48, head_dim=8, tie_word_embeddings=True)
    ),
}


def rope(theta: float) -> dict:
    return {"rope_type": "default", "rope_theta": theta}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """One folder a shape, written by transformers, with weights large enough for every part to matter."""
    root = tmp_path_factory.mktemp("hf")
    for number, make in enumerate(SHAPES.values()):
        with torch.random.fork_rng():
            torch.manual_seed(number)
            model = make().float().eval()
        generator = stream(number, "hf")
        for key, parameter in model.named_parameters():
            with torch.no_grad():
                if parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5, generator=generator)
                else:
                    # Router rows near 1 keep the top-k clear of ties.
                    std = 1.0 if "embed" in key else parameter.shape[-1] ** -0.5
                    parameter.normal_(0, std, generator=generator)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3, generator=generator)
        model.save_pretrained(root / str(number))
    return {name: root / str(number) for number, name in enumerate(SHAPES)}


def theirs(folder: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tokens(vocab_size: int = 40) -> torch.Tensor:
    return torch.randint(vocab_size, (5, 23), generator=stream(0, "tokens"))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_experts_equal_transformers(folders, shape):
    """Float32 logits agree to 1e-5 (rounding of sums in another order), the routed experts exactly."""
    model, reference, routing = load(folders[shape]), theirs(folders[shape]), Recorder()
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
    assert {name: family(config) for name, config in CONFIGS.items()} == expected
    assert family(replace(CONFIGS["wide"], gate=GATES["softmax_after"])) == "qwen3_moe"
    assert family(replace(CONFIGS["mixtral"], gate=GATES["olmoe"])) == "firstorder_moe"
    dots1 = replace(CONFIGS["sigmoid"], shared_expert_size=2 * CONFIGS["sigmoid"].expert_size, dense_layers=(0,))
    assert family(dots1) == "dots1"
    for other in (
        {"shared_expert_size": 0}, {"shared_expert_size": dots1.expert_size + 1}, {"shared_expert_gate": True},
        {"dense_layers": (1,)}, {"qk_norm": "none"}, {"gate": replace(dots1.gate, group_score="max")},
    ):  # fmt: skip
        assert family(replace(dots1, **other)) == "firstorder_moe", other


def test_softmax_after_opens_in_transformers(tmp_path):
    """A softmax over the chosen experts is the renormalised softmax over all: transformers' Qwen3-MoE computes it."""
    model = MoE(replace(CONFIGS["wide"], gate=GATES["softmax_after"]), stream(0, "after"))
    save(model, tmp_path)
    assert load(tmp_path).config.gate == GATES["softmax_after"]
    with torch.no_grad():
        torch.testing.assert_close(theirs(tmp_path)(tokens()).logits, model(tokens()), rtol=1e-5, atol=1e-5)


def test_public_entry_point(folders):
    """sandbox.model.load(folder)(tokens_BS) gives logits_BSV."""
    with torch.no_grad():
        logits = sandbox.model.load(str(folders["olmoe"]))(tokens())
    assert logits.shape == (5, 23, 40)


@pytest.mark.parametrize("shape", ["qwen3_moe", "qwen3_moe, one dense layer", "olmoe", "mixtral"])
def test_stacked_experts_are_taken(folders, shape):
    """The stacked experts that transformers holds in memory load to the same bits as the per-expert files."""
    model, other = load(folders[shape]), MoE(load(folders[shape]).config)
    memory = theirs(folders[shape]).state_dict()
    assert any(name.endswith("experts.gate_up_proj") for name in memory)
    load_hf(other, memory.items())
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), other.parameters(), strict=True))


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
        ("qwen3_moe", {"architectures": None}, r"architectures.*\[\]"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias.*false.*true"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3_moe", {"hidden_act": "gelu"}, 'hidden_act.*"silu".*"gelu"'),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope_param.*yarn"),
        ("qwen3_moe", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.*linear"),
        ("qwen3_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor.*1.0.*0.5"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*fp8"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "experts_per_token.*6.*7"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "layer_types.*sliding_attention"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv.*null.*8.0"),
        ("mixtral", {"sliding_window": 128}, "sliding_window.*null.*128"),
        ("dots1", {"layer_types": None, "sliding_window": 8, "max_window_layers": 2}, "layer_types.*sliding_attention"),
        ("dots1", {"n_group": 3}, "divisible into 3 groups, got 8"),
        ("dots1", {"n_shared_experts": None}, "n_shared_experts: expected"),
        ("mixtral", {"num_key_value_heads": 3}, "num_heads.*3.*4"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise.*0.1"),
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


def test_latent_attention_is_refused_in_one_line(tmp_path):
    """A DeepSeek-V3 folder of transformers' own: the line names the field, its value, the class, and what opens."""
    sizes = SIZES | {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 8}
    experts = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    heads = {"qk_nope_head_dim": 8, "v_head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 24}
    T.DeepseekV3ForCausalLM(T.DeepseekV3Config(**sizes, **experts, **heads)).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"kv_lora_rank: expected none .*grouped-query.*Dots1.*got 8.*DeepseekV3"
    ) as error:
        load(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path / "config.json") in str(error.value)


def test_a_missing_field_is_named(folders, tmp_path):
    """A config.json without a size that the model needs says which."""
    fields = json.loads((folders["olmoe"] / "config.json").read_text())
    del fields["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"hidden_size.*missing"):
        load(tmp_path)


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


def test_bfloat16_files_open_in_float32(folders, tmp_path):
    """A checkpoint kept in bfloat16 becomes float32 parameters of exactly those values."""
    weights = {name: t.bfloat16() for name, t in load_file(folders["qwen3"] / "model.safetensors").items()}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["qwen3"] / "config.json").read_text())
    for name, tensor in to_hf(load(tmp_path)):
        assert tensor.dtype == torch.float32 and torch.equal(tensor, weights[name].float())


def test_defaults_build_a_config():
    """The smallest config needs sizes alone."""
    config = ModelConfig(8, 8, 1, 1, 1, 8, num_experts=2, expert_size=8)
    assert config.moe_layers == (0,)
