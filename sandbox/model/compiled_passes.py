"""Whole forward passes without gradients in a few C++ calls, for sampling, prefill and scoring.

They use the row functions of the operators in sandbox/kernels/compiled/, so both give the same bits; tests
compare them, and their rounding with the hooks of `Numerics`. Unless a routing must be asked in between, all layers are
one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sandbox.kernels import round_up
from sandbox.kernels.compiled.attention_layer import QK_NORMS
from sandbox.kernels.compiled.build import library
from sandbox.kernels.compiled.elementwise import plain, rms_norm
from sandbox.kernels.compiled.gates import SizesStruct, gate_struct
from sandbox.kernels.compiled.ops import LANES, check_ids, pack, product_of
from sandbox.kernels.compiled.rounding import RoundingStruct, rounded, struct_of
from sandbox.kernels.experts import ascending
from sandbox.kernels.numerics import Numerics
from sandbox.kernels.rounding import Rounding
from sandbox.model.kv_cache import KVCache
from sandbox.model.layers import ExpertMLP, Layer
from sandbox.model.routing import NaturalRecorder, Routing
from sandbox.model.weights import DecoderWeights
from theory.routing.gates import Gate
from theory.routing.replay import NaturalRouting

_POINTERS = (
    "attention_norm", "qkv", "q_norm", "k_norm", "o", "mlp_norm", "plain_gate_up", "plain_down", "shared_gate",
    "router", "bias", "gate_up", "down",
)  # fmt: skip


class _LayerStruct(ctypes.Structure):
    """`LayerWeights` of pass.hpp, field by field."""

    _fields_ = (*((name, ctypes.c_void_p) for name in _POINTERS), ("plain_size", ctypes.c_int64))


class _BatchStruct(ctypes.Structure):
    """`Batch` of pass.hpp, field by field."""

    _fields_ = (*((name, ctypes.c_int64) for name in ("B", "S", "capacity", "stride")), ("positions", ctypes.c_void_p))


def passes(model: DecoderWeights, gate: Gate) -> CompiledPasses | None:
    """The passes of a model at its present weights; None if the head width is not a multiple of LANES."""
    return None if model.config.head_dim % LANES else CompiledPasses(model, gate)


class CompiledPasses:
    """Whole passes over packed copies of the large weights, with the bits of the separate operators.

    They are valid until the weights change, for numerics that state their `rounding()`; other hooks are not called.
    `gate` is the gate convention with which a routing weighs its experts.
    """

    def __init__(self, model: DecoderWeights, gate: Gate) -> None:
        self._model, self._gate = model, gate
        # The structs hold bare addresses: `_tensors` and `_tables` keep the memory alive.
        self._tensors = [_layer_tensors(layer) for layer in cast(Iterable[Layer], model.layers)]
        self._layers = (_LayerStruct * len(self._tensors))()
        for struct, (tensors, plain_size) in zip(self._layers, self._tensors, strict=True):
            for name, tensor in tensors.items():
                setattr(struct, name, tensor.data_ptr())
            struct.plain_size = plain_size
        self._tables = plain(model.cos_Pd), plain(model.sin_Pd)
        self._sizes = _sizes(model, *self._tables)
        self._head_VD = model.embedding if model.head is None else model.head
        self._head = pack(self._head_VD, transposed=True)
        self._norm = plain(model.norm.detach())
        self._rounding: Rounding | None = None
        self._steps: RoundingStruct | None = None

    def forward(
        self,
        x_BSD: Float[Tensor, "B S D"],
        positions_BS: Int[Tensor, "#B S"],
        routing: Routing,
        cache: KVCache | None,
        numerics: Numerics,
    ) -> Float[Tensor, "B S D"]:
        """All layers and the last norm. `x_BSD`, the embedded tokens, is overwritten; positions are the cache's slots.

        A `NaturalRecorder` takes the routes of all layers in one call, and NaturalRouting none; any other routing is
        called layer by layer, as are numerics with a hook for router logits, unless they state its `router_noise`.
        """
        rounding = numerics.rounding()
        assert rounding is not None, "these numerics do not state their rounding"
        B, S, D = x_BSD.shape
        config = self._model.config
        x_ND, positions_BS = plain(x_BSD).view(-1, D), positions_BS.expand(B, S).contiguous()
        if cache is None:
            shape = 1, B, config.num_kv_heads, round_up(S, LANES), config.head_dim
            # Without a cache every layer overwrites the same keys and values: a stride of 0.
            # Uninitialised: slots beyond a query's own keys enter no softmax and no sum (attention.hpp).
            k, v, by_layer = x_BSD.new_empty(shape), x_BSD.new_empty(shape), 0
        else:
            k, v, by_layer = cache.k_LBhCd, cache.v_LBhCd, cache.k_LBhCd.stride(0)
        # It holds a bare address: `positions_BS` must live until the calls below have returned.
        batch = _BatchStruct(B, S, k.shape[3], k.stride(1), positions_BS.data_ptr())
        recorder = routing if isinstance(routing, NaturalRecorder) else None
        is_natural = recorder is not None or isinstance(routing, NaturalRouting)
        noise = None
        if is_natural and rounding.asks_router:
            noise = numerics.router_noise(len(config.moe_layers), B * S, config.num_experts)
        if is_natural and (noise is not None or not rounding.asks_router):
            self._natural(x_ND, batch, rounding, k, v, by_layer, recorder, noise)
            return x_ND.view(B, S, D)
        asked = None if is_natural else routing
        self._routed(x_ND, batch, rounding, k, v, by_layer, asked, recorder, numerics)
        return rms_norm(x_ND, self._norm, config.norm_eps).view(B, S, D)

    def logits(self, hidden_ND: Float[Tensor, "N D"], numerics: Numerics) -> Float[Tensor, "N V"]:
        """The next-token logits of these rows, before the hook `logits`."""
        rounding = numerics.rounding()
        assert rounding is not None, "these numerics do not state their rounding"
        # The head is none of the large products, so its input has the steps of the others.
        return product_of(rounded(plain(hidden_ND), rounding.other_inputs), self._head, None, self._head_VD.shape[0])

    def _address_of(self, rounding: Rounding) -> int:
        # By identity: the steps of a generate call are one object, and a hash of them takes as long as a small product.
        if self._rounding is not rounding or self._steps is None:
            self._rounding, self._steps = rounding, struct_of(rounding)
        return ctypes.addressof(self._steps)

    def _natural(
        self,
        x_ND: Tensor,
        batch: _BatchStruct,
        rounding: Rounding,
        k: Tensor,
        v: Tensor,
        by_layer: int,
        recorder: NaturalRecorder | None,
        noise: Tensor | None,
    ) -> None:
        """All layers and the last norm, in place."""
        (N, D), config = x_ND.shape, self._model.config
        L, E, K = len(config.moe_layers), config.num_experts, config.experts_per_token
        keeps = L > 0 and recorder is not None and recorder.keep_features
        # One more than there are routers: a dense layer writes its norm to the place of the next router's input.
        rooms = L + 1 if keeps else 1
        hidden, logits = x_ND.new_empty(rooms, N, D), x_ND.new_empty(rooms, N, E)
        # Weights of one layer at a time: the next layer overwrites them, as no recorder takes them.
        ids, weights = torch.empty(L, N, K, dtype=torch.int64), x_ND.new_empty(N, K)
        at = ctypes.addressof(self._sizes), ctypes.addressof(self._layers), len(self._layers), ctypes.addressof(batch)
        how = self._address_of(rounding), k.data_ptr(), v.data_ptr(), by_layer
        library()("fo_forward", *at, *how, self._norm, x_ND, keeps, noise, hidden, logits, ids, weights)
        if recorder is not None:
            recorder.take(ids, hidden[:L] if keeps else None, logits[:L] if keeps else None)

    def _routed(
        self,
        x_ND: Tensor,
        batch: _BatchStruct,
        rounding: Rounding,
        k: Tensor,
        v: Tensor,
        by_layer: int,
        asked: Routing | None,
        recorder: NaturalRecorder | None,
        numerics: Numerics,
    ) -> None:
        (N, D), model, call, rounds = x_ND.shape, self._model, library(), self._address_of(rounding)
        sizes, size = ctypes.addressof(self._sizes), ctypes.sizeof(_LayerStruct)
        for number, (tensors, _) in enumerate(self._tensors):
            layer = ctypes.addressof(self._layers) + number * size
            hidden, logits = x_ND.new_empty(N, D), x_ND.new_empty(N, model.config.num_experts)
            # In bytes: four per float32.
            at = k.data_ptr() + 4 * number * by_layer, v.data_ptr() + 4 * number * by_layer
            call("fo_attention_half", sizes, layer, ctypes.addressof(batch), rounds, *at, x_ND, hidden, logits)
            ids = weights = None  # null pointers: a dense layer has no routes
            if "router" in tensors:
                logits = plain(numerics.router_logits(number, logits))
                ids, weights = self._chosen(number, hidden, logits, tensors.get("bias"), asked, recorder)
            call("fo_mlp_half", sizes, layer, rounds, N, hidden, ids, weights, x_ND)

    def _chosen(
        self,
        number: int,
        hidden: Tensor,
        logits: Tensor,
        bias: Tensor | None,
        asked: Routing | None,
        recorder: NaturalRecorder | None,
    ) -> tuple[Tensor, Tensor]:
        """The experts of one layer and their weights: the natural ones if `asked` is None."""
        config = self._model.config
        K = config.experts_per_token
        if asked is not None:
            # Ascending, as these kernels add up a row's experts in the order of its slots.
            ids, weights = ascending(*asked.route(number, hidden, logits, K, self._gate, bias))
            check_ids(ids, config.num_experts)
            return ids.contiguous(), plain(weights)
        ids, weights = torch.empty(len(logits), K, dtype=torch.int64), logits.new_empty(len(logits), K)
        library()("fo_route", ctypes.addressof(self._sizes), bias, len(logits), logits, True, ids, weights)
        if recorder is not None:
            keeps = recorder.keep_features
            recorder.take(ids[None], hidden[None] if keeps else None, logits[None] if keeps else None)
        return ids, weights


def _sizes(model: DecoderWeights, cos_Pd: Tensor, sin_Pd: Tensor) -> SizesStruct:
    config = model.config
    return SizesStruct(
        D=config.hidden_size, H=config.num_heads, h=config.num_kv_heads, d=config.head_dim, E=config.num_experts,
        K=config.experts_per_token, F=config.expert_size, qk_norm=QK_NORMS.index(config.qk_norm),
        eps=config.norm_eps, scale=config.head_dim**-0.5, gate=gate_struct(config.gate),
        cos=cos_Pd.data_ptr(), sin=sin_Pd.data_ptr(),
    )  # fmt: skip


def _layer_tensors(layer: Layer) -> tuple[dict[str, Tensor], int]:
    """A layer's weights under the names of `LayerWeights`, and the hidden width of its plain or shared MLP."""
    attention, mlp = layer.attention, layer.mlp
    out = {
        "attention_norm": plain(layer.attention_norm.detach()),
        "mlp_norm": plain(layer.mlp_norm.detach()),
        "qkv": pack(attention.qkv, transposed=True),
        "o": pack(attention.o, transposed=True),
    }
    if attention.config.qk_norm != "none":
        out |= {"q_norm": plain(attention.q_norm.detach()), "k_norm": plain(attention.k_norm.detach())}
    dense = mlp.shared if isinstance(mlp, ExpertMLP) else mlp
    if isinstance(mlp, ExpertMLP):
        out |= {"router": pack(mlp.router, transposed=True)}
        out |= {name: pack(getattr(mlp, name), transposed=False) for name in ("gate_up", "down")}
        if mlp.selection_bias is not None:
            out["bias"] = plain(mlp.selection_bias)
        if mlp.shared_gate is not None:
            out["shared_gate"] = pack(mlp.shared_gate, transposed=True)
    if dense is None:
        return out, 0
    out |= {f"plain_{name}": pack(getattr(dense, name), transposed=True) for name in ("gate_up", "down")}
    return out, dense.down.shape[1]
