"""Laws of `firstorder doctor --localise`: files in, the module's name first, and one line for what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from firstorder.cli import main
from firstorder.localise import open_reference
from lab.doctor.layers.modules import inspect
from lab.doctor.layers.states import States
from lab.doctor.layers.words import PARTS
from sandbox.model.checkpoint import save
from tests.pages.layers import MODELS, PLANTS, Patient, hidden_states
from tests.sandbox.model.hf_shapes import SHAPES

PATIENT = Patient(MODELS["Qwen3-MoE's"], seed=5, num_prompts=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, a dump of an engine whose layer 2 has its experts out of place, and the trainer's dump."""
    folder = tmp_path_factory.mktemp("localise")
    save(PATIENT.model, folder / "model")
    engine = PATIENT.engine(PLANTS["experts one place on"], 2)
    hidden_states(engine.model, PATIENT.sequences, engine.numerics(0)).save(folder / "mu.states.safetensors")
    PATIENT.old.save(folder / "old.states.safetensors")
    return folder


def test_the_module_is_in_the_first_line_and_what_to_do_in_the_second(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against the model one dump is out and one is not; the exit code is 3, and 0 where nothing is out."""
    mu, old = str(folder / "mu.states.safetensors"), str(folder / "old.states.safetensors")
    assert main(["doctor", mu, "--localise", "--model", str(folder / "model")]) == 3
    first, second, *rest = capsys.readouterr().out.splitlines()
    wanted = "the first module outside the band of bf16 is model.layers.2.mlp: the MLP or its experts of layer 2."
    assert first == f"mu.states.safetensors: {wanted}" and second == f"Do first: {PARTS['mlp'][1]}"
    assert rest[0].startswith("  model.layers.2.mlp is off by") and "the sandbox's exact engine" in rest[-1]
    assert main(["doctor", old, "--localise", "--model", str(folder / "model")]) == 0
    assert "every module is within the band of bf16" in capsys.readouterr().out
    assert main(["doctor", mu, old, "--localise", "--json"]) == 3
    (place,) = json.loads(capsys.readouterr().out)["places"]
    assert place["module"] == "model.layers.2.mlp" and len(place["checks"]) == 4 * 4 + 3 + 1
    assert main(["doctor", mu, old, "--localise", "--fail-on", "none"]) == 0


def test_a_folder_of_other_weights_is_said_to_be_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nearly every module is out, none is blamed: the folder is not what ran."""
    other = Patient(MODELS["Qwen3-MoE's"], seed=6, num_prompts=1)
    save(other.model, folder / "other")
    assert main(["doctor", str(folder / "old.states.safetensors"), "--localise", "--model", str(folder / "other")]) == 3
    said = capsys.readouterr().out
    assert "nearly every module is outside the band" in said and "the folder holds the weights that ran" in said


def test_misuse_is_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing options, other sequences, rows that do not fit and unknown precisions are named."""
    mu = folder / "mu.states.safetensors"
    states = States.load(mu)
    tensors = {"tokens": states.tokens, "lengths": states.lengths, **states.values}
    name = "model.layers.0.mlp.out"
    files = {
        "rows": {**tensors, name: tensors[name][:-1]},
        "width": {**tensors, name: tensors[name][:, :-1]},
        "lengths": {**tensors, "lengths": states.lengths + 1},
        "nothing": {"tokens": states.tokens, "lengths": states.lengths},
        "others": {**tensors, "tokens": states.tokens.flip(0)},
        "large": {**tensors, "tokens": states.tokens + 1000},
    }
    for key, content in files.items():
        safetensors.torch.save_file({n: x.contiguous() for n, x in content.items()}, tmp_path / f"{key}.safetensors")
    model = ["--localise", "--model", str(folder / "model")]
    for arguments, wanted in {
        (str(mu), "--localise"): "--localise: expected --model FOLDER, or two dumps",
        (str(mu), *model, "--precision", "bf15"): "--precision: expected one of fp32, bf16, fp16, fp8, got 'bf15'",
        (str(folder), *model): "expected traces or dumps of hidden states, got the folder",
        (str(tmp_path / "none.safetensors"), *model): "no such file",
        (str(tmp_path / "rows.safetensors"), *model): f"rows.safetensors: {name}: expected floats of",
        (str(tmp_path / "width.safetensors"), *model): f"{name}: expected (",
        (str(tmp_path / "lengths.safetensors"), *model): "lengths: expected counts above 0 that sum up to",
        (str(tmp_path / "nothing.safetensors"), *model): "expected inputs and outputs of modules",
        (str(tmp_path / "large.safetensors"), *model): "tokens: expected ids below 40",
        (str(mu), str(tmp_path / "others.safetensors"), "--localise"): "the same sequences in both dumps",
        (str(mu), *model, "--fail-on", "stale"): "--fail-on: expected any or none with --localise",
    }.items():
        assert main(["doctor", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert wanted in error and error.count("\n") == 1, error


def deepseek(folder: Path) -> torch.nn.Module:
    """A tiny DeepSeek-V3 of transformers, which the sandbox does not open, as a folder."""
    import transformers

    config = transformers.DeepseekV3Config(
        vocab_size=40, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=8,
        n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=24,
        intermediate_size=48, first_k_dense_replace=1, max_position_embeddings=64, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral"])
def test_transformers_own_models_are_references_and_dump_by_the_hooks(name: str, tmp_path: Path) -> None:
    """The hooks on a model of transformers give a dump that is the reference's; a layer that is spoilt is named."""
    from tests.lab.doctor.hooks import dumped

    torch.manual_seed(0)
    model = deepseek(tmp_path) if name == "deepseek_v3" else SHAPES[name]().eval()
    if name != "deepseek_v3":
        model.save_pretrained(tmp_path)
    reference = open_reference(tmp_path)
    assert reference.name == ("transformers in float32" if name == "deepseek_v3" else "the sandbox's exact engine")
    sequences = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8]]

    def states() -> States:
        return dumped(model, lambda tokens: model(torch.tensor([tokens])), sequences, tmp_path)

    checks = inspect(states(), reference, "fp32")
    assert max(check.error for check in checks) < 1e-5 and len(checks) >= 3 * 4
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.mul_(1.1)
    assert [check.module for check in inspect(states(), reference, "bf16") if check.is_out] == [
        "model.layers.1.self_attn"
    ]
