"""Gradients of the compiled operators: the eager ones to rounding, and sums over the rows that have one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sandbox import kernels
from sandbox.kernels import EAGER
from sandbox.kernels.interface import AttentionWeights
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
    """Each operator with more rows than one part of its loops has, and sizes that are no multiple of any block.

    As (call on a set of kernels, inputs).
    """
    experts = drawn(0, 700, 5).topk(2).indices.sort(dim=-1).values
    seen = torch.arange(1, 42)[None]
    angle = drawn(1, 41, 5)
    tables = [kernels.rotation(t, torch.arange(41)[None], 3) for t in kernels.rotation_tables(angle)]
    return {
        "linear": (lambda own, x, w: own.linear(x, w), drawn(0, 7, 100, 13), drawn(0, 67, 13)),
        "rms_norm": (lambda own, x, w: own.rms_norm(x, w, 1e-3), drawn(0, 2500, 5, 13), drawn(0, 5, 13)),
        "swiglu": (lambda own, x: own.swiglu(x), drawn(0, 7000, 26)),
        "sigmoid": (lambda own, x: own.sigmoid(x), drawn(0, 9000, 3)),
        "rotate": (lambda own, x: own.rotate(x, *tables), drawn(0, 90, 41, 3, 10)),
        "attention": (
            lambda own, q, k, v: own.attention(q, k, v, own.key_mask(seen, 48, q.dtype)),
            drawn(0, 3, 41, 6, 20), drawn(1, 3, 2, 48, 20), drawn(2, 3, 2, 48, 20),
        ),
        "experts": (
            lambda own, x, w, g, d: own.grouped_experts(x, experts, w, g, d),
            drawn(0, 700, 11), drawn(1, 700, 2), drawn(2, 5, 11, 26), drawn(3, 5, 13, 11),
        ),
        "gate": (
            lambda own, x: gates.route(x, 2, own.gate(GATES["deepseek_v3"]), torch.zeros(16))[1], drawn(0, 700, 16)
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", cases())
def test_values_and_gradients_are_the_eager_ones(name):
    """Value and gradient by every input are those of torch's operators, to 1e-5 of their norm: float32 sums."""
    function, *inputs = cases()[name]
    ours = gradients(lambda *x: function(COMPILED, *x), *inputs)
    eager = gradients(lambda *x: function(EAGER, *x), *inputs)
    for a, b in zip(ours, eager, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


CONFIG = ModelConfig(
    vocab_size=5, hidden_size=24, num_layers=1, num_heads=3, num_kv_heads=1, head_dim=8, dense_layers=(0,), dense_size=8
)


def before_mlp(own, x: Tensor, *weights: Tensor) -> Tensor:
    """The outputs of a layer up to its MLP side by side: x + attention(norm x), its norm, the router's logits."""
    tables = [torch.ones(1, 20, 4, 8), torch.zeros(1, 20, 4, 8)]
    out, hidden, logits = own.attention_layer(CONFIG, AttentionWeights(*weights), x, *tables)
    return torch.cat([out, hidden.view_as(out), logits.view(*out.shape[:2], -1)], dim=-1)


def layer_inputs() -> list[Tensor]:
    """x and the weights of `before_mlp`."""
    shapes = (7, 20, 24), (24,), (40, 24), (8,), (8,), (24, 24), (24,), (6, 24)
    return [drawn(i, *shape) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("name", ["linear", "rms_norm", "experts", "attention_layer"])
def test_rows_without_a_gradient_are_in_no_sum(name):
    """A row whose output has no gradient changes no bit of any other gradient, even where it is NaN."""
    known = cases() | {"attention_layer": (before_mlp, *layer_inputs())}
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


def test_a_layer_up_to_its_mlp_has_the_bits_of_its_operators():
    """Its outputs and gradients are those of norms, products and attention one after the other, bit for bit.

    The gradients of the norms of queries and keys are sums over rows in another order: to 1e-5 of their norm.
    """

    def separately(x: Tensor, norm: Tensor, qkv: Tensor, q_norm: Tensor, k_norm: Tensor, o: Tensor, *mlp: Tensor):
        own, (B, S, _) = COMPILED, x.shape
        qk, v = own.linear(own.rms_norm(x, norm, CONFIG.norm_eps), qkv).split([32, 8], dim=-1)
        weight = torch.cat([q_norm.expand(3, 8), k_norm.expand(1, 8)])
        q, k = own.rms_norm(qk.unflatten(-1, (4, 8)), weight, CONFIG.norm_eps).split([3, 1], dim=2)
        k, v = (F.pad(t.view(B, S, 1, 8).transpose(1, 2), (0, 0, 0, 4)) for t in (k, v))
        seen = own.key_mask(torch.arange(1, S + 1)[None], 24, x.dtype)
        out = own.linear(own.attention(q, k, v, seen).reshape(B, S, 24), o) + x
        hidden = own.rms_norm(out, mlp[0], CONFIG.norm_eps)
        return torch.cat([out, hidden, own.linear(hidden, mlp[1])], dim=-1)

    ours = gradients(lambda *x: before_mlp(COMPILED, *x), *layer_inputs())
    expected = gradients(separately, *layer_inputs())
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        if i in (4, 5):
            assert (a - b).norm() <= 1e-5 * b.norm()
        else:
            assert torch.equal(a, b), i
