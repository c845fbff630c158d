"""The hooks of docs/how-to/find-the-layer.md on a real vLLM and a real Megatron-core: a fault in one layer is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lab.doctor.layers.modules import inspect
from lab.doctor.layers.states import States
from sandbox.engines import ExpertLayout
from sandbox.engines.defect import kept_weights
from sandbox.measure.layers import DecoderReference
from sandbox.model import MoE
from sandbox.model.checkpoint import load_hf, to_hf
from sandbox.model.checkpoint import save as save_model
from tests.lab.doctor.hooks import code, watcher, written
from tests.scaled import vllm_world
from tests.scaled.megatron_world import free_ports, joined, spawn

SEQUENCES = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1, 8, 2, 8], [int(x) for x in torch.arange(2, 40)]]


def spoilt(sound: MoE) -> MoE:
    """The model with the experts of its last layer one place on."""
    bad = MoE(sound.config)
    load_hf(bad, kept_weights([ExpertLayout()], to_hf(sound)))
    return bad


def assert_placed(states: States, sound: MoE, precision: Any, parts: set[str]) -> None:
    """Layer 2's experts alone are outside the band, and attention, norms, routers and MLPs of every layer were seen."""
    checks = inspect(states, DecoderReference(sound), precision)
    assert [check.module for check in checks if check.is_out] == ["model.layers.2.mlp"], checks
    seen = {check.module for check in checks}
    assert {f"model.layers.{n}.{part}" for n in range(3) for part in parts} <= seen
    assert {"model.layers.0.mlp.gate", "model.layers.2.mlp.gate", "model.norm", "model.embed_tokens"} <= seen
    assert max(check.error / check.band for check in checks if not check.is_out) < 2


@pytest.mark.filterwarnings(*vllm_world.WARNINGS)
def test_vllms_dump_names_the_layer(tmp_path: Path) -> None:
    """In bf16, with the lines of the page: `watch` by apply_model, a sequence at a time, and the file."""
    from scaled.config import PrecisionBlock

    sound = vllm_world.model()
    bf16 = PrecisionBlock(compute="bf16")
    engine = vllm_world.engine(spoilt(sound), tmp_path / "m", bf16, routes="capture", prefix_caching=False)
    try:
        names = watcher()
        engine._engine.apply_model(names["watch"])
        for tokens in SEQUENCES:
            engine.score([tokens])
    finally:
        engine.close()
    states = written(names, SEQUENCES, tmp_path)
    assert states.precision == "bf16"
    assert_placed(states, sound, "bf16", {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})


def megatron_dump(rank: int, folder: str, port: int) -> None:
    """In a process of its own: the page's lines on a GPTModel in float32 that holds a folder's weights."""
    from scaled.megatron_engine import parallel
    from scaled.megatron_engine.model import build_model
    from scaled.megatron_engine.weights import load_hf as load_into
    from scaled.model_shape import load_shape
    from tests.scaled.rank_world import training

    block = training()
    with joined(block, rank, port):
        shape = load_shape(Path(folder) / "m")
        (model,) = build_model(shape, block)
        load_into([model], shape, parallel.layout(block, shape.num_layers), Path(folder) / "m")
        names = watcher() | {"model": model, "sequences": SEQUENCES, "torch": torch}
        exec(code("Megatron-core"), names)
        written(names, SEQUENCES, Path(folder))


def test_megatrons_dump_names_the_layer(tmp_path: Path) -> None:
    """In float32, with the lines of the page on a GPTModel; its router puts out weights, not logits."""
    sound = vllm_world.model()
    save_model(spoilt(sound), tmp_path / "m")
    spawn(1, megatron_dump, str(tmp_path), free_ports(1)[0], limit_s=600)
    states = States.load(tmp_path / "mu.states.safetensors")
    assert_placed(states, sound, "fp32", {"self_attn", "mlp"})
