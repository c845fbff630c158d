"""A push of weights into a running engine: vLLM's layerwise reload, and the packing that it omits on a CPU.

vLLM 0.32 packs unquantised experts for its CPU matmul when they are first loaded, but a reload copies plain weights
over the packed ones (`UnquantizedFusedMoEMethod._setup_kernel` processes the weights on the first load alone): the
model then computes with scrambled experts and reports nothing. The weights themselves show whether that happened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

FIRST_EXPERT = re.compile(r"layers\.(\d+)\.mlp\.experts\.0\.(gate|up)_proj\.weight$")
EXPERTS = re.compile(r"layers\.(\d+)\.mlp\.experts\.routed_experts$")

PART_BYTES = 256 * 2**20
"""Weights go to the workers in parts of this size."""


def in_parts(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors in lists of at most PART_BYTES, or of one larger tensor."""
    part: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in named_tensors:
        if part and num_bytes + tensor.nbytes > PART_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append((name, tensor))
        num_bytes += tensor.nbytes
    if part:
        yield part


class Push:
    """One push of a whole set of weights, in parts of any size."""

    def __init__(self, model: nn.Module):
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._model = model
        self._first_expert: dict[tuple[int, str], Tensor] = {}
        initialize_layerwise_reload(model)

    def add(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Loads some of the weights."""
        self._model.load_weights(self._noted(named_tensors))  # type: ignore[operator]

    def _noted(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        for name, tensor in named_tensors:
            # Kept for `pack_cpu_experts`, which tells packed weights from plain ones by them.
            if match := FIRST_EXPERT.search(name):
                self._first_expert[int(match[1]), match[2]] = tensor
            yield name, tensor

    def finish(self, model_config: Any, tensor_rank: int) -> int:
        """Ends the reload; returns the number of layers whose experts had to be packed afterwards."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._model, model_config)
        if model_config.hf_text_config.tie_word_embeddings:
            tie_head(self._model)
        return pack_cpu_experts(self._model, self._first_expert, tensor_rank)


def tie_head(model: nn.Module) -> None:
    """Ties the head to the embeddings again: a reload processes the embeddings alone, and on a CPU the head keeps a
    packed copy of the old ones."""
    head: Any = model.lm_head
    embedding: Any = model.model.embed_tokens  # type: ignore[union-attr]
    head.weight = embedding.weight
    head.quant_method.process_weights_after_loading(head)


def pack_cpu_experts(model: nn.Module, first_expert: dict[tuple[int, str], Tensor], tensor_rank: int) -> int:
    """Packs experts that hold plain weights where vLLM's CPU kernel reads packed ones; returns the number of layers.

    A layer is judged by its first expert, which is compared with the pushed weights, plain and packed. RuntimeError
    where it is neither: this code does not know the layout.
    """
    layers = [(int(m[1]), layer) for name, layer in model.named_modules() if (m := EXPERTS.search(name))]
    packed_layers = [(number, layer, isa) for number, layer in layers if (isa := _packed_isa(layer)) is not None]
    num_packed = 0
    for number, layer, isa in packed_layers:
        from vllm._custom_ops import cpu_prepack_moe_weight

        held: Tensor = layer.w13_weight.data[0]  # type: ignore[union-attr, index]
        F = held.shape[0] // 2
        # vLLM splits gate and up separately over tensor-parallel ranks, and stacks this rank's two parts.
        own = slice(F * tensor_rank, F * (tensor_rank + 1))
        plain = torch.cat([first_expert[number, part][own].to(held) for part in ("gate", "up")])
        if torch.equal(held, cpu_prepack_moe_weight(plain[None].clone(), isa).view_as(held)):
            continue
        if not torch.equal(held, plain):
            raise RuntimeError(f"layer {number}: vLLM holds its experts in a layout that is neither plain nor packed")
        for weight in (layer.w13_weight, layer.w2_weight):
            data: Tensor = weight.data  # type: ignore[assignment]
            data.copy_(cpu_prepack_moe_weight(data.clone(), isa).view_as(data))
        num_packed += 1
    return num_packed


def _packed_isa(layer: nn.Module) -> str | None:
    """The instruction set that the layer's experts are packed for; None where its kernel reads plain weights."""
    from vllm.platforms import current_platform

    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    if not current_platform.is_cpu() or kernel is None:
        return None
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    experts = kernel.fused_experts
    is_packed = isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch
    return experts.isa if is_packed else None
