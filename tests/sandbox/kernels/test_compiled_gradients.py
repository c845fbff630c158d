"""Gradients of the compiled operators: the eager ones to rounding, and sums over the rows that have one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sandbox import kernels
from sandbox.kernels import EAGER
from sandbox.model.config import ModelConfig
from tests.sandbox.compiled_world import COMPILED
from tests.sandbox.kernels.test_compiled_kernels import drawn
from theory.routing import gates
from theory.routing.gates import GATES


def gradients(function, *inputs: Tensor) -> list[Tensor]:
    """The value, then the gradient of a weighted sum of it by every input."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    (out * drawn(9, *out.shape)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def cases() -> dict[str, tuple]:
    """Each operator with inputs whose sizes are no multiple of any block, as (call on a set of kernels, inputs)."""
    experts = drawn(0, 37, 5).topk(2).indices.sort(dim=-1).values
    many = (
        drawn(0, 400, 3).topk(2).indices.sort(dim=-1).values
    )  # some 270 rows per expert: more than are worked on at once
    seen = torch.arange(1, 22)[None]
    angle = drawn(1, 21, 5)
    tables = [kernels.rotation(t, torch.arange(21)[None], 3) for t in kernels.rotation_tables(angle)]
    return {
        "linear": (lambda own, x, w: own.linear(x, w), drawn(0, 3, 11, 13), drawn(0, 19, 13)),
        "linear of many rows": (lambda own, x, w: own.linear(x, w), drawn(0, 300, 40), drawn(0, 19, 40)),
        "rms_norm": (lambda own, x, w: own.rms_norm(x, w, 1e-3), drawn(0, 7, 5, 13), drawn(0, 5, 13)),
        "swiglu": (lambda own, x: own.swiglu(x), drawn(0, 7, 26)),
        "sigmoid": (lambda own, x: own.sigmoid(x), drawn(0, 7, 3)),
        "rotate": (lambda own, x: own.rotate(x, *tables), drawn(0, 2, 21, 3, 10)),
        "attention": (
            lambda own, q, k, v: own.attention(q, k, v, own.key_mask(seen, 32, q.dtype)),
            drawn(0, 2, 21, 6, 20), drawn(1, 2, 2, 32, 20), drawn(2, 2, 2, 32, 20),
        ),
        "experts": (
            lambda own, x, w, g, d: own.grouped_experts(x, experts, w, g, d),
            drawn(0, 37, 11), drawn(1, 37, 2), drawn(2, 5, 11, 26), drawn(3, 5, 13, 11),
        ),
        "many experts": (
            lambda own, x, w, g, d: own.grouped_experts(x, many, w, g, d),
            drawn(0, 400, 9), drawn(1, 400, 2), drawn(2, 3, 9, 10), drawn(3, 3, 5, 9),
        ),
        "gate": (lambda own, x: gates.weigh(x, experts, own.gate(GATES["deepseek_v3"])), drawn(0, 37, 5)),
    }  # fmt: skip


@pytest.mark.parametrize("name", cases())
def test_values_and_gradients_are_the_eager_ones(name):
    """Value and gradient by every input are those of torch's operators, to 1e-5 of their norm: float32 sums."""
    function, *inputs = cases()[name]
    ours = gradients(lambda *x: function(COMPILED, *x), *inputs)
    eager = gradients(lambda *x: function(EAGER, *x), *inputs)
    for a, b in zip(ours, eager, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.mark.parametrize("name", ["linear of many rows", "rms_norm", "many experts", "self_attention"])
def test_rows_without_a_gradient_are_in_no_sum(name):
    """A row whose output has no gradient changes no bit of any other gradient, even where it is NaN."""
    config = ModelConfig(
        vocab_size=5,
        hidden_size=24,
        num_layers=1,
        num_heads=3,
        num_kv_heads=1,
        head_dim=8,
        dense_layers=(0,),
        dense_size=8,
    )
    tables = [torch.ones(1, 20, 4, 8), torch.zeros(1, 20, 4, 8)]
    attend = lambda own, x, q, k: own.self_attention(config, x, *tables, q, k)  # noqa: E731
    known = cases() | {"self_attention": (attend, drawn(0, 7, 20, 40), drawn(1, 8), drawn(2, 8))}
    function, x, *others = known[name]
    out = function(COMPILED, x, *others)
    # The last of each sequence's tokens: no other token's output depends on what they hold.
    without = torch.arange(out.shape[-2]).expand(out.shape[:-1]) >= out.shape[-2] * 2 // 3
    found = []
    for rows in (x, torch.where(without[..., None], torch.nan, x)):
        leaves = [t.clone().requires_grad_() for t in (rows, *others)]
        grad = torch.where(without[..., None], 0.0, drawn(9, *out.shape))
        found.append(torch.autograd.grad(function(COMPILED, *leaves), leaves, grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not found[0][0][without].any()
