"""Hugging Face folders in and out: config.json and safetensors of Qwen3-MoE, OLMoE, Mixtral, dots.llm1 and dense Qwen3.

One table of views binds every Hugging Face name to the part of our parameters that holds it; reading, writing and the
weight hand-over between engines all go through it. What the decoder cannot do is refused, never ignored; pickles are
never opened. A model that none of these classes can express (a gated shared expert, say) is written under our own
architecture name: it opens here, not in transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sandbox.model.config import ModelConfig
from sandbox.model.decoder import MoE
from sandbox.model.hf_config import config_from_hf, config_to_hf, family

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load(folder: str | Path) -> MoE:
    """The model of a Hugging Face folder, in float32. Raises FileNotFoundError or ValueError with one clear line."""
    folder = Path(folder)
    model = MoE(config_from_hf(_read_json(folder / "config.json"), where=str(folder / "config.json")))
    try:
        load_hf(model, _read_tensors(folder))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return model


def save(model: MoE, folder: str | Path) -> None:
    """Writes config.json and model.safetensors, each atomically, so that transformers and `load` open the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(model.embedding.dtype).removeprefix("torch.")
    text = json.dumps({**config_to_hf(model.config), "dtype": dtype}, indent=2) + "\n"
    save_file(dict(to_hf(model)), folder / (WEIGHTS + ".partial"), metadata={"format": "pt"})
    os.replace(folder / (WEIGHTS + ".partial"), folder / WEIGHTS)
    (folder / "config.json.partial").write_text(text, encoding="utf-8")
    os.replace(folder / "config.json.partial", folder / "config.json")


def to_hf(model: MoE) -> Iterator[tuple[str, Tensor]]:
    """Copies of the weights under their Hugging Face names, detached and contiguous."""
    for name, view in _views(model).items():
        yield name, view.detach().clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def load_hf(model: MoE, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copies Hugging Face-named weights into the model, all of them or (on an error) none.

    Also takes experts stacked as transformers 5 holds them in memory (`experts.gate_up_proj` (E, 2F, D) and
    `experts.down_proj` (E, D, F)), and a tied model's redundant `lm_head.weight`. Raises ValueError that names the
    missing, unexpected, repeated and misshapen weights.
    """
    views, stacked = _views(model), _stacked_views(model)
    copies: list[tuple[Tensor, Tensor]] = []
    given: dict[str, Tensor] = {}
    seen: set[str] = set()
    problems: dict[str, list[str]] = {"repeated": [], "unexpected": [], "misshapen": []}
    for name, tensor in named_tensors:
        if name.endswith("rotary_emb.inv_freq"):
            continue  # older checkpoints carry this constant
        given[name] = tensor
        if name == "lm_head.weight" and model.head is None:
            continue
        canonical = name if name in views else _canonical(model.config, name)
        target, covers = (views[canonical], [canonical]) if canonical in views else stacked.get(canonical, (None, []))
        if target is None:
            problems["unexpected"].append(name)
        elif seen.intersection(covers):
            problems["repeated"].append(name)
        elif tensor.shape != target.shape or not tensor.is_floating_point():
            problems["misshapen"].append(
                f"{name} (expected {tuple(target.shape)}, got {tuple(tensor.shape)} {str(tensor.dtype)[6:]})"
            )
        else:
            copies.append((target, tensor))
        seen.update(covers)
    problems = {"missing": [name for name in views if name not in seen], **problems}
    if any(problems.values()):
        raise ValueError(
            "weights do not fit the model: " + "; ".join(_named(*item) for item in problems.items() if item[1])
        )
    _check_tied(model, given)
    for target, tensor in copies:
        target.copy_(tensor)


def _check_tied(model: MoE, given: dict[str, Tensor]) -> None:
    if model.head is not None or "lm_head.weight" not in given:
        return
    if not torch.equal(given["lm_head.weight"], given["model.embed_tokens.weight"]):
        raise ValueError("lm_head.weight: expected the embeddings (the config ties them), got other values")


def _named(kind: str, names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{kind} {', '.join(names[:limit])}{more}"


def _moe_prefix(config: ModelConfig, layer_number: int) -> str:
    block = "block_sparse_moe" if family(config) == "mixtral" else "mlp"
    return f"model.layers.{layer_number}.{block}."


def _canonical(config: ModelConfig, name: str) -> str:
    """Mixtral's block is called `mlp` in memory and `block_sparse_moe` in files; both are taken."""
    return name.replace(".mlp.", ".block_sparse_moe.") if family(config) == "mixtral" else name


def _layers(model: MoE) -> list[Any]:
    return list(model.layers)


def _views(model: MoE) -> dict[str, Tensor]:
    """Every Hugging Face name and the view of our parameters that it stands for, in its Hugging Face shape."""
    views = {"model.embed_tokens.weight": model.embedding.data, "model.norm.weight": model.norm.data}
    if model.head is not None:
        views["lm_head.weight"] = model.head.data
    for number, layer in enumerate(_layers(model)):
        prefix = f"model.layers.{number}."
        views[prefix + "input_layernorm.weight"] = layer.attention_norm.data
        views[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm.data
        views |= _attention_views(layer.attention, model.config, prefix + "self_attn.")
        if number in model.config.dense_layers:
            views |= _mlp_views(layer.mlp, prefix + "mlp.")
        else:
            views |= _expert_views(layer.mlp, model.config, _moe_prefix(model.config, number))
    return views


def _attention_views(attention: Any, config: ModelConfig, prefix: str) -> dict[str, Tensor]:
    H, h, d = config.num_heads, config.num_kv_heads, config.head_dim
    q, k, v = attention.qkv.data.split([H * d, h * d, h * d])
    views = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": attention.o.data}
    if config.qk_norm != "none":
        views |= {"q_norm": attention.q_norm.data, "k_norm": attention.k_norm.data}
    return {f"{prefix}{name}.weight": view for name, view in views.items()}


def _mlp_views(mlp: Any, prefix: str) -> dict[str, Tensor]:
    gate, up = mlp.gate_up.data.chunk(2)
    views = {"gate_proj": gate, "up_proj": up, "down_proj": mlp.down.data}
    return {f"{prefix}{name}.weight": view for name, view in views.items()}


def _expert_views(mlp: Any, config: ModelConfig, prefix: str) -> dict[str, Tensor]:
    views = {prefix + "gate.weight": mlp.router.data}
    if mlp.selection_bias is not None:
        views[prefix + "gate.e_score_correction_bias"] = mlp.selection_bias
    names = ("w1", "w3", "w2") if family(config) == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    stacks = *mlp.gate_up.data.transpose(1, 2).chunk(2, dim=1), mlp.down.data.transpose(1, 2)
    for e, of_expert in enumerate(zip(*(stack.unbind() for stack in stacks), strict=True)):
        views |= {f"{prefix}experts.{e}.{name}.weight": view for name, view in zip(names, of_expert, strict=True)}
    if mlp.shared is not None:
        name = "shared_experts." if family(config) == "dots1" else "shared_expert."
        views |= _mlp_views(mlp.shared, prefix + name)
    if mlp.shared_gate is not None:
        views[prefix + "shared_expert_gate.weight"] = mlp.shared_gate.data
    return views


def _stacked_views(model: MoE) -> dict[str, tuple[Tensor, list[str]]]:
    """The names of stacked experts: their view, and the per-expert names that they stand for."""
    stacked = {}
    mixtral = family(model.config) == "mixtral"
    gate_up, down = (("w1", "w3"), ("w2",)) if mixtral else (("gate_proj", "up_proj"), ("down_proj",))
    for number in model.config.moe_layers:
        mlp, prefix = _layers(model)[number].mlp, _moe_prefix(model.config, number) + "experts."
        for name, parts, parameter in (("gate_up_proj", gate_up, mlp.gate_up), ("down_proj", down, mlp.down)):
            covers = [f"{prefix}{e}.{part}.weight" for e in range(model.config.num_experts) for part in parts]
            stacked[prefix + name] = (parameter.data.transpose(1, 2), covers)
    return stacked


def _read_json(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; expected a Hugging Face folder with config.json and safetensors"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{INDEX}: expected a weight_map from weight names to file names")
        outside = [name for name in weight_map.values() if Path(name).name != name]
        if outside:
            raise ValueError(f"{INDEX}: expected names of files in the same folder, got {outside[0]}")
        return [folder / name for name in sorted(set(weight_map.values()))]
    if not (folder / WEIGHTS).is_file():
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        if pickles:
            raise ValueError(f"expected safetensors, got only {pickles[0]}: a pickle can run code and is never opened")
        raise FileNotFoundError(f"{folder}: no {WEIGHTS} and no {INDEX}")
    return [folder / WEIGHTS]


def _read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in _files(folder):
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file, though {INDEX} names it")
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict: it cannot be iterated)
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path.name}: not a valid safetensors file ({error})") from None
