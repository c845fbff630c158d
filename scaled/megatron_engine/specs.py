"""The layers as Megatron's specifications, for CPUs and GPUs, and the modules that Megatron lacks.

Transformer Engine's modules where it is installed, Megatron's local ones elsewhere, with the same parameter names but
for the experts'. Letters beyond theory/contracts.py: d width of a head, W all heads' widths together.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from lab.hf import ModelShape
from scaled.megatron_engine import cpu_shims
from scaled.megatron_engine.context_parallel import GatheredAttention


class Norm(torch.nn.RMSNorm):
    """RMSNorm under Megatron's constructor; its gradient is summed over the sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ProjectionNorm(torch.nn.Module):
    """RMSNorm of queries or keys over all heads together (OLMoE), the heads split over the tensor-parallel ranks.

    y = x / sqrt(mean over all heads and channels of x^2 + eps) * weight
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, num_heads: int) -> None:
        super().__init__()
        self.eps, self.width = eps, num_heads * hidden_size
        size = self.width // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x_SBHd: Float[Tensor, "S B H d"]) -> Float[Tensor, "S B H d"]:
        wide_SBW = x_SBHd.float().flatten(2)
        squares_SB1 = wide_SBW.square().sum(dim=-1, keepdim=True)
        # Summed forward, and backward too: every rank's output depends on every rank's input.
        total_SB1 = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares_SB1))
        normed_SBW = wide_SBW * torch.rsqrt(total_SB1 / self.width + self.eps)
        # As in transformers: statistics in fp32, the weight applied in the model's type.
        return (normed_SBW.to(x_SBHd.dtype) * self.weight).view_as(x_SBHd)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description of the weight for a checkpoint: split along axis 0 over tensor parallelism."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


class GatheredLatentAttention(GatheredAttention):
    """Local attention for MLA, whose keys are wider than its values; MLA passes the scale."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert v_channels in (0, self.config.kv_channels)  # the output's width; Attention itself passes none


def layer_specs(shape: ModelShape) -> TransformerBlockSubmodules:
    """The specification of all decoder layers and of the norm after them."""
    parts = _parts()
    norm = parts["norm"]
    dense = ModuleSpec(module=MLP, submodules=parts["mlp"])
    layers = [
        ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=_attention_spec(shape, parts),
                self_attn_bda=get_bias_dropout_add,  # type: ignore[arg-type]  # any function does
                pre_mlp_layernorm=norm,
                mlp=dense if n in shape.dense_layers else _experts_spec(parts),
                mlp_bda=get_bias_dropout_add,  # type: ignore[arg-type]
            ),
        )
        for n in range(shape.num_layers)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _parts() -> dict[str, Any]:
    if not cpu_shims.has_fused_kernels():
        mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        return {
            "norm": Norm,
            "column": ColumnParallelLinear,
            "row": RowParallelLinear,
            # Megatron's own column-parallel choice forgets to sum the position keys' gradient over the ranks.
            "duplicated": Linear,
            "attention": GatheredAttention,
            "latent_attention": GatheredLatentAttention,
            "mlp": mlp,
            "experts": ModuleSpec(module=SequentialMLP, submodules=mlp),
        }
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    grouped = MLPSubmodules(linear_fc1=te.TEColumnParallelGroupedLinear, linear_fc2=te.TERowParallelGroupedLinear)
    return {
        "norm": te.TENorm,
        "column": te.TEColumnParallelLinear,
        "row": te.TERowParallelLinear,
        "duplicated": te.TELinear,
        "attention": te.TEDotProductAttention,
        "latent_attention": te.TEDotProductAttention,
        "mlp": MLPSubmodules(linear_fc1=te.TEColumnParallelLinear, linear_fc2=te.TERowParallelLinear),
        "experts": ModuleSpec(module=TEGroupedMLP, submodules=grouped),
    }


def _attention_spec(shape: ModelShape, parts: dict[str, Any]) -> ModuleSpec:
    params = {"attn_mask_type": AttnMaskType.causal}
    if shape.latent_attention is not None:
        latent = MLASelfAttentionSubmodules(
            linear_q_proj=parts["column"],
            linear_q_down_proj=parts["duplicated"],
            linear_q_up_proj=parts["column"],
            linear_kv_down_proj=parts["duplicated"],
            linear_kv_up_proj=parts["column"],
            core_attention=parts["latent_attention"],
            linear_proj=parts["row"],
            q_layernorm=parts["norm"],
            kv_layernorm=parts["norm"],
        )
        return ModuleSpec(module=MLASelfAttention, params=params, submodules=latent)
    submodules = SelfAttentionSubmodules(
        linear_qkv=parts["column"],
        core_attention=parts["attention"],
        linear_proj=parts["row"],
        q_layernorm=_query_norm(shape, shape.num_heads, parts),
        k_layernorm=_query_norm(shape, shape.num_kv_heads, parts),
    )
    return ModuleSpec(module=SelfAttention, params=params, submodules=submodules)


def _query_norm(shape: ModelShape, num_heads: int, parts: dict[str, Any]) -> Any:
    if shape.qk_norm == "projection":
        return ModuleSpec(module=ProjectionNorm, params={"num_heads": num_heads})
    return parts["norm"] if shape.qk_norm == "head" else IdentityOp


def _experts_spec(parts: dict[str, Any]) -> ModuleSpec:
    # MoELayer builds it only where the configuration has a size for it.
    shared = ModuleSpec(module=SharedExpertMLP, submodules=parts["mlp"])
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=parts["experts"], shared_experts=shared))


__all__ = ["GatheredLatentAttention", "Norm", "ProjectionNorm", "layer_specs"]
