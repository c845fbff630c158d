"""The decoder: a Qwen3-MoE-shaped transformer whose routers ask a `Routing` which experts to use.

One class covers Qwen3-MoE, OLMoE and Mixtral shapes and their dense twin; sandbox/checkpoint.py opens and writes them
as Hugging Face folders. All arithmetic is that of the model's kernels (sandbox/kernels/), in training, prefill and
decoding alike.

Letters beyond theory/contracts.py: N = B S rows of a flattened batch, O output width, F MLP hidden width, H query
heads, h key heads, d head width, P key slots (padded).
Shapes follow Qwen3 (arXiv 2505.09388), OLMoE (arXiv 2409.02060) and Mixtral (arXiv 2401.04088).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from sandbox.kernels import EAGER, MIN_KEYS, Kernels, product, rotation, rotation_tables, round_up
from sandbox.kernels.interface import Passes
from sandbox.kv_cache import KVCache
from sandbox.model_config import ModelConfig
from sandbox.numerics import EXACT, Numerics, Site
from theory.routing.gates import Gate
from theory.routing.replay import NaturalRouting


@runtime_checkable
class Routing(Protocol):
    """Decides the experts of a forward pass: NaturalRouting, or a RoutingPass that replays and records."""

    def route(
        self,
        layer_number: int,
        hidden_ND: Float[Tensor, "N D"],
        logits_NE: Float[Tensor, "N E"],
        num_slots: int,
        gate: Gate,
        selection_bias_E: Float[Tensor, " E"] | None = None,
    ) -> tuple[Int[Tensor, "N K"], Float[Tensor, "N K"]]:
        """Expert ids, ascending in each row, and their weights; rows are the batch flattened, padding included."""
        ...


@runtime_checkable
class _Arithmetic(Protocol):
    """What a product needs to know of a pass."""

    @property
    def kernels(self) -> Kernels: ...

    @property
    def numerics(self) -> Numerics: ...


@dataclass(frozen=True)
class _Products:
    """The arithmetic of products outside the layers."""

    kernels: Kernels
    numerics: Numerics


@dataclass(frozen=True)
class _Pass:
    """What every layer of one forward pass shares: kernels, numerics, rotations, key mask, cache, routing."""

    kernels: Kernels
    gate: Gate
    numerics: Numerics
    routing: Routing
    cos_BSHd: Tensor
    sin_BSHd: Tensor
    key_mask: Tensor
    num_slots: int
    cache: KVCache | None
    slots_M: Tensor | None


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def _linear(x: Tensor, weight_OD: Tensor, site: Site, shared: _Arithmetic) -> Tensor:
    linear, numerics = shared.kernels.linear, shared.numerics
    if numerics is EXACT:
        return linear(x, weight_OD)
    num_rows = x.shape[:-1].numel()
    x, weight_OD = numerics.activation(x, site), numerics.weight(weight_OD, site)
    return numerics.output(product(linear, x, weight_OD, num_rows, site, numerics), site)


class Attention(nn.Module):
    """Causal attention with grouped queries, rotary positions and normalised queries and keys."""

    def __init__(self, config: ModelConfig, layer_number: int):
        super().__init__()
        self.config, self.layer_number = config, layer_number
        H, h, d = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = _weight((H + 2 * h) * d, config.hidden_size)
        self.o = _weight(config.hidden_size, H * d)
        if config.qk_norm != "none":
            per_head = config.qk_norm == "head"
            self.q_norm = nn.Parameter(torch.ones(d if per_head else H * d))
            self.k_norm = nn.Parameter(torch.ones(d if per_head else h * d))

    def forward(self, x_BSD: Tensor, shared: _Pass) -> Tensor:
        H, h, d = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        B, S, _ = x_BSD.shape
        qkv = _linear(x_BSD, self.qkv, "qkv", shared)
        qk, v = qkv.split_with_sizes([(H + h) * d, h * d], dim=-1)
        qk_BSHd = shared.kernels.rotate(
            self._normalised(qk, shared.kernels).view(B, S, H + h, d), shared.cos_BSHd, shared.sin_BSHd
        )
        q, k = qk_BSHd.split_with_sizes([H, h], dim=2)
        k, v = shared.numerics.kv(k, v.view(B, S, h, d))
        P = shared.num_slots
        if shared.cache is None:
            k_BhPd, v_BhPd = (F.pad(t.transpose(1, 2), (0, 0, 0, P - S)) for t in (k, v))
        else:
            assert shared.slots_M is not None
            shared.cache.write(self.layer_number, shared.slots_M, k, v)
            k_BhPd = shared.cache.k_LBhCd[self.layer_number, :, :, :P]
            v_BhPd = shared.cache.v_LBhCd[self.layer_number, :, :, :P]
        out_BSHd = shared.kernels.attention(q, k_BhPd, v_BhPd, shared.key_mask)
        return _linear(out_BSHd.reshape(B, S, H * d), self.o, "o", shared)

    def _normalised(self, qk: Tensor, own: Kernels) -> Tensor:
        H, h, d, eps = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim, self.config.norm_eps
        if self.config.qk_norm == "none":
            return qk
        if self.config.qk_norm == "head":
            weight_Hd = torch.cat([self.q_norm.expand(H, d), self.k_norm.expand(h, d)])
            return own.rms_norm(qk.unflatten(-1, (H + h, d)), weight_Hd, eps)
        q, k = qk.split([H * d, h * d], dim=-1)
        return torch.cat([own.rms_norm(q, self.q_norm, eps), own.rms_norm(k, self.k_norm, eps)], dim=-1)


class DenseMLP(nn.Module):
    """down(silu(gate x) * up x), the MLP of a dense layer and of a shared expert."""

    def __init__(self, hidden_size: int, size: int):
        super().__init__()
        self.gate_up = _weight(2 * size, hidden_size)
        self.down = _weight(hidden_size, size)

    def forward(self, x_ND: Tensor, shared: _Pass) -> Tensor:
        gate_up_NF = _linear(x_ND, self.gate_up, "gate_up", shared)
        return _linear(shared.kernels.swiglu(gate_up_NF), self.down, "down", shared)


class ExpertMLP(nn.Module):
    """A router, its experts, and a shared expert where the config has one."""

    selection_bias: Tensor | None

    def __init__(self, config: ModelConfig, layer_number: int):
        super().__init__()
        self.config, self.layer_number = config, layer_number
        D, E, width = config.hidden_size, config.num_experts, config.expert_size
        self.router = _weight(E, D)
        self.gate_up = _weight(E, D, 2 * width)
        self.down = _weight(E, width, D)
        # Sigmoid gates come with a bias that moves the choice alone and that no gradient reaches (DeepSeek-V3).
        self.register_buffer("selection_bias", torch.zeros(E) if config.gate.score == "sigmoid" else None)
        self.shared = DenseMLP(D, config.shared_expert_size) if config.shared_expert_size > 0 else None
        self.shared_gate = _weight(1, D) if config.shared_expert_gate else None

    def forward(self, x_ND: Tensor, shared: _Pass) -> Tensor:
        logits_NE = _linear(x_ND, self.router, "router", shared)
        logits_NE = shared.numerics.router_logits(self.layer_number, logits_NE)
        config = self.config
        experts_NK, weights_NK = shared.routing.route(
            self.layer_number, x_ND, logits_NE, config.experts_per_token, shared.gate, self.selection_bias
        )
        grouped_experts = shared.kernels.grouped_experts
        out_ND = grouped_experts(x_ND, experts_NK, weights_NK, self.gate_up, self.down, shared.numerics)
        if self.shared is None:
            return out_ND
        extra_ND = self.shared(x_ND, shared)
        if self.shared_gate is not None:
            extra_ND = shared.kernels.sigmoid(_linear(x_ND, self.shared_gate, "shared_gate", shared)) * extra_ND
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

    def forward(self, x_BSD: Tensor, shared: _Pass) -> Tensor:
        # Into the buffer of what is added: neither product's gradient needs its output.
        x_BSD = self.attention(shared.kernels.rms_norm(x_BSD, self.attention_norm, self.eps), shared).add_(x_BSD)
        hidden_ND = shared.kernels.rms_norm(x_BSD, self.mlp_norm, self.eps).flatten(0, 1)
        return self.mlp(hidden_ND, shared).add_(x_BSD.flatten(0, 1)).view_as(x_BSD)


class MoE(nn.Module):
    """The decoder. With a generator its weights come from it alone; without one all matrices are zero, to be loaded.

    Matrices ~ N(0, init_std^2 / fan-in), norms 1; embeddings ~ N(0, init_std^2), or N(0, init_std^2 / D) where the head
    is tied to them, so that logits start with unit variance. At the customary 0.02 a small model's experts hardly
    matter: its policy would not feel a wrong route.
    """

    cos_Pd: Tensor
    sin_Pd: Tensor

    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None, kernels: Kernels = EAGER):
        super().__init__()
        self.config = config
        self.compute_with(kernels)
        self.embedding = _weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.num_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.head = None if config.tied_head else _weight(config.vocab_size, config.hidden_size)
        # Positions in whole vector widths: the last lanes of a cosine would depend on the length of the table.
        position_P = torch.arange(round_up(config.max_positions, 64), dtype=torch.float32)
        even_d = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        angle_Pd = position_P[:, None] * (1.0 / config.rope_theta ** (even_d / config.head_dim))
        cos_Pd, sin_Pd = rotation_tables(angle_Pd)
        self.register_buffer("cos_Pd", cos_Pd, persistent=False)
        self.register_buffer("sin_Pd", sin_Pd, persistent=False)
        if generator is not None:
            self._draw(generator)

    @torch.no_grad()
    def _draw(self, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue  # a norm
            # Stacked experts are (E, in, out), everything else is (out, in).
            fan_in = parameter.shape[1]
            if name == "embedding" and self.head is not None:
                fan_in = 1
            parameter.normal_(0.0, self.config.init_std / fan_in**0.5, generator=generator)

    def compute_with(self, kernels: Kernels) -> MoE:
        """This model, with these kernels from now on."""
        self.kernels, self.gate = kernels, kernels.gate(self.config.gate)
        self._held: Passes | None = None
        return self

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the weights do not change: what whole passes make of them is made once."""
        before = self._held
        if before is None and self.kernels.passes is not None:
            self._held = self.kernels.passes(self)
        try:
            yield
        finally:
            self._held = before

    def router_parameters(self) -> Iterator[nn.Parameter]:
        """The router matrix of each MoE layer, in layer order."""
        return (layer.mlp.router for layer in self.layers if isinstance(layer.mlp, ExpertMLP))  # type: ignore[misc]

    def forward(
        self,
        tokens_BS: Int[Tensor, "B S"],
        routing: Routing | None = None,
        *,
        numerics: Numerics = EXACT,
        cache: KVCache | None = None,
        positions_B: Int[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B S V"]:
        """Next-token logits after every token; see `forward_hidden` for the arguments."""
        hidden_BSD = self.forward_hidden(tokens_BS, routing, numerics=numerics, cache=cache, positions_B=positions_B)
        return self.logits(hidden_BSD.flatten(0, 1), numerics=numerics).unflatten(0, hidden_BSD.shape[:2])

    def forward_hidden(
        self,
        tokens_BS: Int[Tensor, "B S"],
        routing: Routing | None = None,
        *,
        numerics: Numerics = EXACT,
        cache: KVCache | None = None,
        positions_B: Int[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B S D"]:
        """The normalised hidden state of every token, which `logits` turns into logits for the rows that are needed.

        Causal; right padding changes no bit of what stands before it. With a cache, row b's tokens go to the slots from
        `positions_B[b]` (by default after the tokens it holds) and see the slots before; its length advances by S,
        padding included: `KVCache.truncate` takes ragged prompts back. No gradients with a cache.
        Raises ValueError for tokens outside the vocabulary and positions outside the model or the cache.
        """
        positions_BS = self._positions(tokens_BS, cache, positions_B)
        x_BSD = F.embedding(tokens_BS, self.embedding)
        # Without a cache keys stand in slots 0 to S - 1, whatever their positions.
        whole = self._whole(numerics) if cache is not None or positions_B is None else None
        if whole is not None:
            hidden_BSD = whole.forward(x_BSD, positions_BS, routing or NaturalRouting(), cache)
        else:
            shared = self._prepare(positions_BS, routing or NaturalRouting(), numerics, cache)
            for layer in self.layers:
                x_BSD = layer(x_BSD, shared)
            hidden_BSD = self.kernels.rms_norm(x_BSD, self.norm, self.config.norm_eps)
        if cache is not None:
            cache.lengths_B = positions_BS[:, -1] + 1
        return hidden_BSD

    def logits(self, hidden_ND: Float[Tensor, "N D"], *, numerics: Numerics = EXACT) -> Float[Tensor, "N V"]:
        """The next-token logits of these rows."""
        whole = self._whole(numerics) if self._held is not None else None
        if whole is not None:
            return numerics.logits(whole.logits(hidden_ND))
        head_VD = self.embedding if self.head is None else self.head
        return numerics.logits(_linear(hidden_ND, head_VD, "head", _Products(self.kernels, numerics)))

    def _whole(self, numerics: Numerics) -> Passes | None:
        """The kernels' whole passes, where they have some and this is a pass for them: exact, and without gradients."""
        if self.kernels.passes is None or torch.is_grad_enabled() or not numerics.is_exact_inside:
            return None
        return self._held or self.kernels.passes(self)

    def _positions(self, tokens_BS: Tensor, cache: KVCache | None, positions_B: Tensor | None) -> Tensor:
        """Each token's position, (1, S) where all rows begin at 0; checks tokens, positions and cache."""
        B, S = tokens_BS.shape
        low, high = (int(v) for v in tokens_BS.aminmax())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(f"expected token ids in [0, {self.config.vocab_size}), got {low if low < 0 else high}")
        if positions_B is None:
            positions_B = torch.zeros(1, dtype=torch.int64) if cache is None else cache.lengths_B
        first, end = int(positions_B.min()), int(positions_B.max()) + S
        if first < 0 or end > self.config.max_positions:
            raise ValueError(f"expected positions in [0, {self.config.max_positions}), got {first} to {end - 1}")
        if cache is not None:
            cache.check(positions_B, B, S)
        return positions_B[:, None] + torch.arange(S)

    def _prepare(self, positions_BS: Tensor, routing: Routing, numerics: Numerics, cache: KVCache | None) -> _Pass:
        S = positions_BS.shape[1]
        if cache is None:
            query_BS, num_keys, slots_M = torch.arange(S)[None], S, None
        else:
            query_BS, num_keys, slots_M = positions_BS, int(positions_BS.max()) + 1, cache.slots(positions_BS)
        num_slots = round_up(num_keys, MIN_KEYS)
        key_mask = self.kernels.key_mask(query_BS + 1, num_slots, self.cos_Pd.dtype)
        num_heads = self.config.num_heads + self.config.num_kv_heads
        cos_BSHd, sin_BSHd = (rotation(table, positions_BS, num_heads) for table in (self.cos_Pd, self.sin_Pd))
        own = self.kernels, self.gate
        return _Pass(*own, numerics, routing, cos_BSHd, sin_BSHd, key_mask, num_slots, cache, slots_M)


def load(folder: str | Path) -> MoE:
    """The model of a Hugging Face folder (Qwen3-MoE, OLMoE, Mixtral, Qwen3 shapes), in float32: `checkpoint.load`."""
    from sandbox import checkpoint

    return checkpoint.load(folder)


__all__ = ["KVCache", "ModelConfig", "MoE", "Routing", "load"]
