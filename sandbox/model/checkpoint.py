"""Reads and writes Hugging Face folders: config.json and safetensors of the architectures in lab/hf/families.py.

One table of views maps every Hugging Face name to the part of our parameters that holds it; reading, writing and the
weight hand-over between engines all use it. A folder that the decoder cannot compute is refused; pickles are never
opened. A model that no public class can express (a gated shared expert, say) is written under our own architecture
name: it opens here, not in transformers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lab.hf import ModelShape, config_fields, misfits, misshapen, parse_shape, read_json, some, with_special_ids
from lab.hf.shape import Parts
from sandbox.model.config import ModelConfig, config_of
from sandbox.model.decoder import MoE

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load(folder: str | Path) -> MoE:
    """The model of a Hugging Face folder, in float32. Raises FileNotFoundError, or ValueError with one line."""
    folder = Path(folder)
    config = read_config(folder)
    try:
        _check_size(config.shape(), _files(folder))
        model = MoE(config)
        load_hf(model, _read_tensors(folder))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return model


def read_config(folder: str | Path) -> ModelConfig:
    """The sizes that a Hugging Face folder states, without its weights; errors as `load`."""
    file = Path(folder) / "config.json"
    shape = parse_shape(read_json(file), str(file), "sandbox")
    try:
        return config_of(shape)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def save(model: MoE, folder: str | Path, source: Mapping[str, Any] | None = None) -> None:
    """Writes config.json and model.safetensors, each atomically, for transformers and `load`.

    `source`: the fields of the config.json that the model was opened from, whose special tokens are kept.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(model.embedding.dtype).removeprefix("torch.")
    fields = config_fields(model.config.shape())
    fields = fields if source is None else with_special_ids(fields, source)
    text = json.dumps({**fields, "dtype": dtype}, indent=2) + "\n"
    # Weights before config.json: a new folder that has a config has its weights too.
    save_file(dict(to_hf(model)), folder / (WEIGHTS + ".partial"), metadata={"format": "pt"})
    os.replace(folder / (WEIGHTS + ".partial"), folder / WEIGHTS)
    # The files of a model that was here before: the cluster's reader opens all, with or without their index.
    for older in (folder / INDEX, *folder.glob("model-?????-of-?????.safetensors")):
        older.unlink(missing_ok=True)
    (folder / "config.json.partial").write_text(text, encoding="utf-8")
    os.replace(folder / "config.json.partial", folder / "config.json")


def to_hf(model: MoE) -> Iterator[tuple[str, Tensor]]:
    """Copies of the weights under their Hugging Face names, detached and contiguous."""
    for name, view in _views(model).items():
        yield name, view.clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def load_hf(model: MoE, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copies weights with Hugging Face names into the model: all of them, or none if an error is raised.

    Also accepts experts stacked as transformers 5 holds them in memory (`experts.gate_up_proj` (E, 2F, D) and
    `experts.down_proj` (E, D, F)), and a tied model's redundant `lm_head.weight`. Raises ValueError naming the
    missing, unexpected, repeated and misshapen weights.
    """
    shape = model.config.shape()
    views, stacked = _views(model), cache(lambda: _stacked_views(model, shape))
    copies: list[tuple[Tensor, Tensor]] = []
    given: dict[str, Tensor] = {}
    seen: set[str] = set()
    problems: dict[str, list[str]] = {"repeated": [], "unexpected": [], "misshapen": []}
    for name, tensor in named_tensors:
        if name.endswith("rotary_emb.inv_freq"):
            continue  # a constant in older checkpoints
        given[name] = tensor
        if name == "lm_head.weight" and model.head is None:
            continue
        # The name as it stands first: `in_files` would rename the `mlp` of a dense layer too.
        canonical = name if name in views else shape.in_files(name)
        target, covers = (views[canonical], [canonical]) if canonical in views else stacked().get(canonical, (None, []))
        if target is None:
            problems["unexpected"].append(name)
        elif seen.intersection(covers):
            problems["repeated"].append(name)
        elif wrong := misshapen(name, target.shape, tensor):
            problems["misshapen"].append(wrong)
        else:
            copies.append((target, tensor))
        # Also if it does not fit: it would be reported as missing as well.
        seen.update(covers)
    problems = {"missing": [name for name in views if name not in seen], **problems}
    if found := misfits(problems):
        raise ValueError(f"weights do not fit the model: {found}")
    _check_tied(model, given)
    # Only now: an error above leaves the model as it was.
    for target, tensor in copies:
        target.copy_(tensor)


def _check_tied(model: MoE, given: dict[str, Tensor]) -> None:
    if model.head is not None or "lm_head.weight" not in given:
        return
    # Both are there: missing embeddings were an error before this.
    if not torch.equal(given["lm_head.weight"], given["model.embed_tokens.weight"]):
        raise ValueError("lm_head.weight: expected the embeddings (the config ties them), got other values")


# By model: where its parameters lay, and the views. A hand-over asks twice, of the trainer's model and the engine's.
_KNOWN: WeakKeyDictionary[MoE, tuple[list[int], dict[str, Tensor]]] = WeakKeyDictionary()


def _views(model: MoE) -> dict[str, Tensor]:
    """The view of our parameters behind every Hugging Face name, in its Hugging Face shape; not to be changed."""
    # The views hold the memory that they show, so no other parameter can come to lie at its address.
    places = [tensor.data_ptr() for tensor in chain(model.parameters(), model.buffers())]
    known = _KNOWN.get(model)
    if known is None or known[0] != places:
        known = _KNOWN[model] = places, _made_views(model, model.config.shape())
    return known[1]


def _made_views(model: MoE, shape: ModelShape) -> dict[str, Tensor]:
    outer = {"embedding": model.embedding.data, "norm": model.norm.data}
    views = _bound(shape.outer(), outer if model.head is None else outer | {"head": model.head.data})
    layers: Any = model.layers
    for number, layer in enumerate(layers):
        views |= _bound(shape.norms(number), {"attention": layer.attention_norm.data, "mlp": layer.mlp_norm.data})
        views |= _bound(shape.attention(number), _attention_views(layer.attention))
        if number in shape.dense_layers:
            views |= _bound(shape.mlp(number), _mlp_views(layer.mlp))
        else:
            views |= _expert_views(layer.mlp, shape, number)
    return views


def _bound(parts: Parts, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
    assert parts.keys() == views.keys(), (parts, views.keys())
    return {weight.name: views[part] for part, weight in parts.items()}


def _attention_views(attention: Any) -> dict[str, Tensor]:
    config = attention.config
    H, h, d = config.num_heads, config.num_kv_heads, config.head_dim
    # split, chunk, transpose and unbind give views: what is copied into one is in the parameter.
    q, k, v = attention.qkv.data.split([H * d, h * d, h * d])
    views = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": attention.o.data}
    if config.qk_norm == "none":
        return views
    return views | {"q_norm": attention.q_norm.data, "k_norm": attention.k_norm.data}


def _mlp_views(mlp: Any) -> dict[str, Tensor]:
    gate, up = mlp.gate_up.data.chunk(2)
    return {"gate": gate, "up": up, "down": mlp.down.data}


def _expert_views(mlp: Any, shape: ModelShape, layer: int) -> dict[str, Tensor]:
    bias, shared_gate = mlp.selection_bias, mlp.shared_gate
    router = {"router": mlp.router.data} | ({} if bias is None else {"selection_bias": bias})
    views = _bound(shape.router(layer), router)
    # Experts are stored (E, in, out); a file has one (out, in) matrix per expert.
    stacks = *mlp.gate_up.data.transpose(1, 2).chunk(2, dim=1), mlp.down.data.transpose(1, 2)
    for e, of_expert in enumerate(zip(*(stack.unbind() for stack in stacks), strict=True)):
        views |= _bound(shape.expert(layer, e), dict(zip(("gate", "up", "down"), of_expert, strict=True)))
    shared = {} if mlp.shared is None else _mlp_views(mlp.shared)
    return views | _bound(
        shape.shared_expert(layer), shared if shared_gate is None else shared | {"shared_gate": shared_gate.data}
    )


def _stacked_views(model: MoE, shape: ModelShape) -> dict[str, tuple[Tensor, list[str]]]:
    """The view behind every name of stacked experts, and the per-expert names that it covers."""
    layers: Any = model.layers
    return {
        name: (getattr(layers[number].mlp, parameter).data.transpose(1, 2), covers)
        for number in shape.moe_layers
        for parameter, (name, covers) in zip(("gate_up", "down"), shape.stacked_experts(number).items(), strict=True)
    }


def _check_size(shape: ModelShape, files: list[Path]) -> None:
    """Raises ValueError, before memory is allocated, if the files are too small for all weights at one byte each."""
    there = sum(path.stat().st_size for path in files if path.is_file())
    if shape.num_parameters > there:
        raise ValueError(
            f"config.json states a model of {shape.num_parameters:,} weights, got weights of {there:,} bytes"
        )


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{INDEX}: expected a weight_map from weight names to file names")
        outside = [name for name in weight_map.values() if Path(name).name != name]
        if outside:
            raise ValueError(f"{INDEX}: expected names of files in the same folder, got {outside[0]}")
        names = sorted(set(weight_map.values()))
        if (folder / WEIGHTS).is_file() and names != [WEIGHTS]:
            # transformers opens the one file, the cluster's reader all: one of the two models is a leftover.
            raise ValueError(f"expected {WEIGHTS} or {INDEX}, got both, and the index names {some(names, 1)}")
        return [folder / name for name in names]
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
