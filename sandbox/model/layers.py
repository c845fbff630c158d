"""The layers of the decoder in sandbox/model/decoder.py, and the state that they share in one forward pass.

Letters beyond theory/contracts.py, where N and P mean something else: N = B S rows of a flattened batch, O output
width, F MLP hidden width, H query heads, h key heads, d head width, P key slots (padded), M cache slots that a pass
writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sandbox.kernels import Kernels, product
from sandbox.kernels.interface import AttentionWeights
from sandbox.kernels.numerics import EXACT, Numerics, Site
from sandbox.model.config import ModelConfig
from sandbox.model.kv_cache import KVCache
from sandbox.model.routing import Routing
from theory.routing.gates import Gate


@dataclass(frozen=True)
class Products:
    """The arithmetic of a matrix product: all that `linear` needs, in a layer or for the head."""

    kernels: Kernels
    numerics: Numerics


@dataclass(frozen=True)
class Pass(Products):
    """The state that every layer of one forward pass shares: kernels, numerics, rotations, key mask, cache, routing.

    cos_BSHd, sin_BSHd: a row per head, queries and keys together (H + h heads). num_slots: P. slots_M: the slots of the
    cache that this pass fills; None without a cache.
    """

    gate: Gate
    routing: Routing
    cos_BSHd: Tensor
    sin_BSHd: Tensor
    key_mask: Tensor
    num_slots: int
    cache: KVCache | None
    slots_M: Tensor | None


def matrix(*shape: int) -> nn.Parameter:
    """A parameter of zeros, to be initialised or loaded."""
    return nn.Parameter(torch.zeros(shape))


def linear(x: Tensor, weight_OD: Tensor, site: Site, shared: Products) -> Tensor:
    """x W^T with the kernels of `shared` and its numerics' hooks for `site`."""
    multiply, numerics = shared.kernels.linear, shared.numerics
    if numerics is EXACT:
        return multiply(x, weight_OD)
    num_rows = x.shape[:-1].numel()
    x, weight_OD = numerics.activation(x, site), numerics.weight(weight_OD, site)
    return numerics.output(product(multiply, x, weight_OD, num_rows, site, numerics), site)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions and normalised queries and keys."""

    def __init__(self, config: ModelConfig, layer_number: int):
        super().__init__()
        self.config, self.layer_number = config, layer_number
        H, h, d = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = matrix((H + 2 * h) * d, config.hidden_size)
        self.o = matrix(config.hidden_size, H * d)
        if config.qk_norm != "none":
            per_head = config.qk_norm == "head"
            self.q_norm = nn.Parameter(torch.ones(d if per_head else H * d))
            self.k_norm = nn.Parameter(torch.ones(d if per_head else h * d))

    def forward(self, x_BSD: Tensor, shared: Pass) -> Tensor:
        return linear(self._attended(linear(x_BSD, self.qkv, "qkv", shared), shared), self.o, "o", shared)

    def _attended(self, qkv: Tensor, shared: Pass) -> Tensor:
        """The outputs of all heads side by side, (B, S, H d)."""
        H, h, d = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        B, S, _ = qkv.shape
        qk, v = qkv.split_with_sizes([(H + h) * d, h * d], dim=-1)
        qk_BSHd = shared.kernels.rotate(
            self._normalised(qk, shared.kernels).view(B, S, H + h, d), shared.cos_BSHd, shared.sin_BSHd
        )
        q, k = qk_BSHd.split_with_sizes([H, h], dim=2)
        k, v = shared.numerics.kv(k, v.view(B, S, h, d))
        P = shared.num_slots
        if shared.cache is None:
            # Pad with zeros: the slots beyond S have weight 0, but 0 times uninitialised memory may be NaN.
            k_BhPd, v_BhPd = (F.pad(t.transpose(1, 2), (0, 0, 0, P - S)) for t in (k, v))
        else:
            assert shared.slots_M is not None
            shared.cache.write(self.layer_number, shared.slots_M, k, v)
            k_BhPd = shared.cache.k_LBhCd[self.layer_number, :, :, :P]
            v_BhPd = shared.cache.v_LBhCd[self.layer_number, :, :, :P]
        out_BSHd = shared.kernels.attention(q, k_BhPd, v_BhPd, shared.key_mask)
        return out_BSHd.reshape(B, S, H * d)

    def _normalised(self, qk: Tensor, own: Kernels) -> Tensor:
        H, h, d, eps = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim, self.config.norm_eps
        if self.config.qk_norm == "none":
            return qk
        if self.config.qk_norm == "head":
            # One call for queries and keys: only the weight differs between their heads.
            weight_Hd = torch.cat([self.q_norm.expand(H, d), self.k_norm.expand(h, d)])
            return own.rms_norm(qk.unflatten(-1, (H + h, d)), weight_Hd, eps)
        q, k = qk.split([H * d, h * d], dim=-1)
        return torch.cat([own.rms_norm(q, self.q_norm, eps), own.rms_norm(k, self.k_norm, eps)], dim=-1)


class DenseMLP(nn.Module):
    """down(silu(gate x) * up x), the MLP of a dense layer and of a shared expert."""

    def __init__(self, hidden_size: int, size: int):
        super().__init__()
        self.gate_up = matrix(2 * size, hidden_size)
        self.down = matrix(hidden_size, size)

    def forward(self, x_ND: Tensor, shared: Pass) -> Tensor:
        gate_up_NF = linear(x_ND, self.gate_up, "gate_up", shared)
        return linear(shared.kernels.swiglu(gate_up_NF), self.down, "down", shared)


class ExpertMLP(nn.Module):
    """A router, its experts, and the shared expert if the config has one."""

    selection_bias: Tensor | None

    def __init__(self, config: ModelConfig, layer_number: int):
        super().__init__()
        self.config, self.layer_number = config, layer_number
        D, E, width = config.hidden_size, config.num_experts, config.expert_size
        self.router = matrix(E, D)
        self.gate_up = matrix(E, D, 2 * width)
        self.down = matrix(E, width, D)
        # A buffer, as no gradient reaches it: DeepSeek-V3's bias decides which experts are chosen, not their weights.
        self.register_buffer("selection_bias", torch.zeros(E) if config.gate.score == "sigmoid" else None)
        self.shared = DenseMLP(D, config.shared_expert_size) if config.shared_expert_size > 0 else None
        self.shared_gate = matrix(1, D) if config.shared_expert_gate else None

    def forward(self, x_ND: Tensor, shared: Pass, logits_NE: Tensor | None = None) -> Tensor:
        """The experts' outputs; `logits_NE` are the router's, where they are known already."""
        if logits_NE is None:
            logits_NE = linear(x_ND, self.router, "router", shared)
        logits_NE = shared.numerics.router_logits(self.layer_number, logits_NE)
        config = self.config
        # `shared.gate` is config.gate with this model's kernels: config.gate alone would route with torch's operators.
        experts_NK, weights_NK = shared.routing.route(
            self.layer_number, x_ND, logits_NE, config.experts_per_token, shared.gate, self.selection_bias
        )
        grouped_experts = shared.kernels.grouped_experts
        out_ND = grouped_experts(x_ND, experts_NK, weights_NK, self.gate_up, self.down, shared.numerics)
        if self.shared is None:
            return out_ND
        extra_ND = self.shared(x_ND, shared)
        if self.shared_gate is not None:
            extra_ND = shared.kernels.sigmoid(linear(x_ND, self.shared_gate, "shared_gate", shared)) * extra_ND
        return out_ND + extra_ND


class Layer(nn.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, config: ModelConfig, layer_number: int):
        super().__init__()
        self.eps = config.norm_eps
        self.attention_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.attention = Attention(config, layer_number)
        self.mlp_norm = nn.Parameter(torch.ones(config.hidden_size))
        is_dense = layer_number in config.dense_layers
        self.mlp = DenseMLP(config.hidden_size, config.dense_size) if is_dense else ExpertMLP(config, layer_number)

    def forward(self, x_BSD: Tensor, shared: Pass) -> Tensor:
        x_BSD, hidden_ND, logits_NE = self._before_mlp(x_BSD, shared)
        mlp = self.mlp
        out_ND = mlp(hidden_ND, shared, logits_NE) if isinstance(mlp, ExpertMLP) else mlp(hidden_ND, shared)
        # In place, here and below: each block returns a new tensor, and no operator's gradient reads it.
        return out_ND.add_(x_BSD.flatten(0, 1)).view_as(x_BSD)

    def _before_mlp(self, x_BSD: Tensor, shared: Pass) -> tuple[Tensor, Tensor, Tensor | None]:
        """x + attention(norm x), its norm, and the router's logits if they came with them."""
        attention, own = self.attention, shared.kernels
        # One fused operator. It calls no hook and reads no cache, and is None where the kernels have no such operator.
        if shared.numerics is EXACT and shared.cache is None:
            norms = (None, None) if attention.config.qk_norm == "none" else (attention.q_norm, attention.k_norm)
            router = self.mlp.router if isinstance(self.mlp, ExpertMLP) else None
            weights = AttentionWeights(self.attention_norm, attention.qkv, *norms, attention.o, self.mlp_norm, router)
            found = own.attention_layer(attention.config, weights, x_BSD, shared.cos_BSHd, shared.sin_BSHd)
            if found is not None:
                return found
        x_BSD = attention(own.rms_norm(x_BSD, self.attention_norm, self.eps), shared).add_(x_BSD)
        return x_BSD, own.rms_norm(x_BSD, self.mlp_norm, self.eps).flatten(0, 1), None
