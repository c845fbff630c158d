"""Gates in C++: the choice of experts and their weights as a whole pass computes them, for other passes."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sandbox.kernels.compiled.build import library
from sandbox.kernels.compiled.elementwise import plain
from sandbox.kernels.compiled.ops import check_ids
from sandbox.kernels.elementwise import apply
from theory.routing import gates
from theory.routing.gates import Gate


class GateStruct(ctypes.Structure):
    """`Gate` of routing.hpp, field by field."""

    _fields_ = (
        ("is_sigmoid", ctypes.c_int32), ("is_after", ctypes.c_int32), ("renormalise", ctypes.c_int32),
        ("num_groups", ctypes.c_int32), ("num_top_groups", ctypes.c_int32), ("is_top2_sum", ctypes.c_int32),
        ("scaling", ctypes.c_float),
    )  # fmt: skip


class SizesStruct(ctypes.Structure):
    """`Sizes` of pass.hpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("D", "H", "h", "d", "E", "K", "F", "qk_norm")),
        ("eps", ctypes.c_float), ("scale", ctypes.c_float), ("gate", GateStruct),
        ("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p),
    )  # fmt: skip


def gate_struct(gate: Gate) -> GateStruct:
    """The convention in the kernels' memory layout."""
    return GateStruct(
        gate.score == "sigmoid", gate.order == "after", gate.renormalise, gate.num_groups, gate.num_top_groups,
        gate.group_score == "top2_sum", gate.scaling,
    )  # fmt: skip


def _routed(logits: Tensor, ids: Tensor, weights: Tensor | None, gate: Gate, bias: Tensor | None) -> None:
    """Writes the chosen experts to `ids` if `weights` is None, else the weights of the given ids to `weights`."""
    (N, E), K = logits.shape, ids.shape[1]
    # The other sizes stay 0: `route` reads none of them.
    sizes = SizesStruct(E=E, K=K, gate=gate_struct(gate))
    bias = None if bias is None else plain(bias)
    library()("fo_route", ctypes.addressof(sizes), bias, N, plain(logits), weights is None, ids, weights)


class _Weigh(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, gate: Gate) -> Tensor:
        check_ids(ids, logits.shape[1])
        ids = ids.contiguous()
        ctx.save_for_backward(logits, ids)
        ctx.gate = gate
        weights = logits.new_empty(ids.shape)
        _routed(logits, ids, weights, gate, None)
        return weights

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, ids = ctx.saved_tensors
        # The gradient of torch's own gate, computed again: only the forward needs the kernels' bits.
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            weights = gates.weigh(logits, ids, replace(ctx.gate, kernels=None))
        return torch.autograd.grad(weights, logits, grads[0])[0], None, None


class CompiledGates:
    """`theory.routing.gates.GateKernels` whose softmax, ties and sums have the bits of whole passes."""

    def __deepcopy__(self, memo: dict) -> CompiledGates:
        return self  # it has no state

    def select(self, logits_NE: Tensor, num_slots: int, gate: Gate, selection_bias_E: Tensor | None) -> Tensor:
        ids = torch.empty(logits_NE.shape[0], num_slots, dtype=torch.int64)
        _routed(logits_NE.detach(), ids, None, gate, selection_bias_E)
        return ids

    def weigh(self, logits_NE: Tensor, experts_NK: Tensor, gate: Gate) -> Tensor:
        return apply(_Weigh, logits_NE, experts_NK, gate)


def compiled_gate(gate: Gate) -> Gate:
    """The same convention, computed by these kernels."""
    return replace(gate, kernels=CompiledGates())
