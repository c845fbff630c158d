"""The kernels compute what a naive float64 oracle computes, and a row's bits never depend on the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from sandbox import kernels
from sandbox.kernels import experts as expert_kernels
from sandbox.kernels import products
from sandbox.kernels.numerics import EXACT, Numerics, compose
from theory.streams import stream

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 130)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=stream(seed, "test_kernels", *shape))


def naive_experts(x_ND, experts_NK, weights_NK, gate_up_EDF, down_EFD):
    """The definition, one token and one slot at a time."""
    rows = []
    for x_D, experts_K, weights_K in zip(x_ND, experts_NK, weights_NK, strict=True):
        row = torch.zeros_like(x_D)
        for e, weight in zip(experts_K.tolist(), weights_K, strict=True):
            gate, up = (x_D @ gate_up_EDF[e]).chunk(2)
            row = row + weight * ((gate * torch.sigmoid(gate) * up) @ down_EFD[e])
        rows.append(row)
    return torch.stack(rows)


def expert_inputs(N: int, D: int, width: int, E: int, K: int, seed: int = 0):
    experts_NK = draw(N, E, seed=seed).topk(K).indices.sort(dim=-1).values
    weights_NK = draw(N, K, seed=seed + 1).softmax(dim=-1)
    return draw(N, D, seed=seed), experts_NK, weights_NK, draw(E, D, 2 * width) / D**0.5, draw(E, width, D) / width**0.5


def naive_attention(q_BSHd, k_BhPd, v_BhPd, bias_BSP):
    """The definition, one query head at a time."""
    H, h, d = q_BSHd.shape[2], k_BhPd.shape[1], q_BSHd.shape[3]
    heads = []
    for i in range(H):
        k, v = k_BhPd[:, i // (H // h)], v_BhPd[:, i // (H // h)]
        scores = q_BSHd[:, :, i] @ k.transpose(1, 2) / d**0.5 + bias_BSP
        heads.append(scores.softmax(dim=-1) @ v)
    return torch.stack(heads, dim=2)


def causal_bias(S: int, P: int) -> torch.Tensor:
    return torch.zeros(S, P).masked_fill(torch.arange(P) > torch.arange(S)[:, None], float("-inf"))[None]


def test_probe_finds_no_broken_link_here():
    """With one thread every link of the chain holds on the machine that runs the tests."""
    assert kernels.probe() == []


@pytest.mark.parametrize(
    ("fault", "link"),
    [("MIN_ROWS", "linear"), ("MIN_ROWS", "grouped_experts"), ("KEY_BLOCK", "attention")],
)
def test_probe_names_a_broken_link(monkeypatch, fault, link):
    """Without one of the precautions, the probe names the link, unless this machine's library does not need it."""
    for module in (products, expert_kernels):
        monkeypatch.setattr(module, fault, {"MIN_ROWS": 1, "KEY_BLOCK": 4096}[fault], raising=False)
    x, weight = draw(512, 64), draw(136, 64)
    keys = draw(1, 304, 16)
    needed = (
        not torch.equal(F.linear(x[:1], weight), F.linear(x, weight)[:1])
        if fault == "MIN_ROWS"
        else not torch.equal(
            draw(1, 300, 304)[:, :8, :208] @ keys[:, :208],
            F.pad(draw(1, 300, 304)[:, :8, :208], (0, 96)) @ keys,
        )
    )
    assert any(line.startswith(link) for line in kernels.probe()) or not needed


@pytest.mark.parametrize(("D", "width"), [(16, 5), (20, 13), (64, 128), (256, 64), (512, 16)])
def test_linear_rows_do_not_depend_on_the_batch(D, width):
    """Any run of rows has the same bits alone as inside 1500 rows."""
    x, weight = draw(1500, D), draw(width, D)
    whole = kernels.linear(x, weight)
    for n in (*SIZES, 511, 1025):
        assert torch.equal(kernels.linear(x[:n], weight), whole[:n])
        assert torch.equal(kernels.linear(x[-n:], weight), whole[-n:])
    # Float32 sums of D terms against float64: D rounding errors at most, each 6e-8 relative to the terms.
    oracle = x.double() @ weight.double().T
    assert (whole - oracle).abs().max() < D * 6e-8 * (x.abs().double() @ weight.abs().double().T).max()


@pytest.mark.parametrize("function", [kernels.sigmoid, kernels.swiglu])
@pytest.mark.parametrize("D", [2, 6, 24, 40, 82, 128])
def test_elementwise_rows_do_not_depend_on_the_batch(function, D):
    """At widths that no vector unit divides, a row has the same bits alone as inside 300 rows."""
    x = draw(300, D)
    whole = function(x)
    for n in SIZES:
        for start in (0, 1, 13):
            assert torch.equal(function(x[start : start + n].contiguous()), whole[start : start + n])


def test_sigmoid_and_its_gradient_at_the_ends():
    """sigmoid is exact to rounding, and finite with a finite gradient where exp overflows."""
    x = torch.tensor([[-200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 200.0]], requires_grad=True)
    y = kernels.sigmoid(x)
    torch.testing.assert_close(y.double(), x.double().sigmoid(), rtol=1e-6, atol=1e-30)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, (y * (1 - y)).detach(), rtol=1e-5, atol=1e-7)


@given(S=st.integers(1, 40), G=st.integers(1, 3), h=st.integers(1, 2), seed=st.integers(0, 99))
def test_attention_is_the_definition(S, G, h, seed):
    """Values and gradients equal those of one head at a time, in float64."""
    P = kernels.round_up(S, kernels.MIN_KEYS)
    q, k, v = (t.double() for t in (draw(2, S, G * h, 8, seed=seed), draw(2, h, P, 8, seed=seed), draw(2, h, P, 8)))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    bias = causal_bias(S, P).double()
    ours, naive = kernels.attention(*inputs, bias), naive_attention(*inputs, bias)
    torch.testing.assert_close(ours, naive, rtol=1e-12, atol=1e-12)  # float64 rounding over 40 keys
    out_grad = draw(*ours.shape, seed=seed + 1).double()
    for got, expected in zip(
        torch.autograd.grad(ours, inputs, out_grad), torch.autograd.grad(naive, inputs, out_grad), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("H", "h", "d"), [(4, 2, 16), (4, 4, 8), (8, 1, 32), (2, 2, 12)])
def test_attention_prefill_equals_decode(H, h, d):
    """Up to 420 keys, over three blocks, the last query alone has the bits that it has in the prefill."""
    S = 420
    P = kernels.round_up(S, kernels.MIN_KEYS)
    q, k, v, bias = draw(2, S, H, d), draw(2, h, P, d), draw(2, h, P, d), causal_bias(S, P)
    whole = kernels.attention(q, k, v, bias)
    for s in (*range(1, 40), *range(40, S + 1, 19), 127, 128, 129, 208, 255, 256, 257, 300):
        n = kernels.round_up(s, kernels.MIN_KEYS)
        last = kernels.attention(q[:, s - 1 : s], k[:, :, :n], v[:, :, :n], bias[:, s - 1 : s, :n])
        assert torch.equal(last, whole[:, s - 1 : s]), s
        alone = kernels.attention(q[1:, :s], k[1:, :, :n], v[1:, :, :n], bias[:, :s, :n])
        assert torch.equal(alone, whole[1:, :s]), s


@given(N=st.integers(1, 40), E=st.integers(1, 6), K=st.integers(1, 6), seed=st.integers(0, 99), aligned=st.booleans())
def test_grouped_experts_are_the_definition(N, E, K, seed, aligned):
    """Values and gradients in x, weights and both parameters equal the loop over tokens and slots in float64."""
    inputs = expert_inputs(N, 8 if aligned else 6, 4 if aligned else 5, E, min(K, E), seed)
    single = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    double = [t.double().requires_grad_() if t.is_floating_point() else t for t in inputs]
    ours, naive = kernels.grouped_experts(*single), naive_experts(*double)
    # Values of order 1, sums of at most 8 terms in float32.
    torch.testing.assert_close(ours.double(), naive, rtol=1e-5, atol=1e-5)
    out_grad = draw(*ours.shape, seed=seed + 2)
    got = torch.autograd.grad(ours, [single[i] for i in (0, 2, 3, 4)], out_grad)
    expected = torch.autograd.grad(naive, [double[i] for i in (0, 2, 3, 4)], out_grad.double())
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g.double(), e, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("heads", [(), (3,)])
def test_rms_norm_is_the_definition(heads):
    """x w / sqrt(mean(x^2) + eps), and its gradients in x and w are those of finite differences in float64."""
    x, weight = draw(5, *(heads or (3,)), 8).double(), draw(*heads, 8, seed=1).double()
    expected = x * weight / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-3), expected, rtol=1e-14, atol=1e-14)
    inputs = (x.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, w: kernels.rms_norm(x, w, 1e-3), inputs)


@pytest.mark.parametrize("D", [6, 32, 41, 128])
def test_rms_norm_rows_do_not_depend_on_the_batch(D):
    """A row has the same bits alone as inside 300 rows, with gradients and without."""
    x, weight = draw(300, D), draw(D, seed=1)
    whole = kernels.rms_norm(x, weight, 1e-6)
    for n in SIZES:
        assert torch.equal(kernels.rms_norm(x[:n], weight, 1e-6), whole[:n])
    with torch.no_grad():
        assert torch.equal(kernels.rms_norm(x, weight, 1e-6), whole)


@pytest.mark.parametrize(("N", "E", "K"), [(1, 4, 2), (9, 4, 1), (40, 6, 3), (200, 16, 2)])
def test_the_plan_puts_every_pair_into_its_experts_group(N, E, K):
    """Row row_KN[k, n] holds token n, in the group of its k-th expert; a group has no row or at least MIN_ROWS."""
    experts_NK = expert_inputs(N, 2, 2, E, K)[1]
    plan = expert_kernels._plan(experts_NK, E)
    start_E, size_E = (
        plan.ends_E - plan.ends_E.diff(prepend=torch.tensor([0])),
        plan.ends_E.diff(prepend=torch.tensor([0])),
    )
    for k in range(K):
        row_N, expert_N = plan.row_KN[k], experts_NK[:, k]
        assert torch.equal(plan.token_R[row_N], torch.arange(N))
        assert ((row_N >= start_E[expert_N]) & (row_N < plan.ends_E[expert_N])).all()
    assert plan.row_KN.unique().numel() == N * K and len(plan.token_R) == plan.ends_E[-1]
    count_E = experts_NK.flatten().bincount(minlength=E)
    assert torch.equal(size_E, torch.where(count_E > 0, count_E.clamp(min=kernels.MIN_ROWS), 0).to(size_E))


def test_rotate_passes_gradcheck_and_keeps_norms():
    """A rotation keeps the norm of every pair, and its gradient is the rotation back."""
    angle, positions = draw(5, 4).double(), torch.tensor([[4, 0, 2], [1, 1, 3]])
    x = draw(2, 3, 2, 8).double().requires_grad_()
    tables = [kernels.rotation(table, positions, num_heads=2) for table in kernels.rotation_tables(angle)]
    assert torch.equal(tables[0][1, 2, :, 4:], angle[3].cos().expand(2, 4))
    assert torch.autograd.gradcheck(lambda t: kernels.rotate(t, *tables), [x])
    y = kernels.rotate(x, *tables)
    torch.testing.assert_close(
        y[..., :4] ** 2 + y[..., 4:] ** 2, x[..., :4] ** 2 + x[..., 4:] ** 2, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(("D", "width", "E", "K"), [(64, 64, 16, 2), (20, 28, 4, 1), (32, 24, 8, 8), (6, 5, 3, 2)])
def test_grouped_experts_rows_do_not_depend_on_the_batch(D, width, E, K):
    """A row has the same bits whatever the sizes of the experts' groups: alone, in a few, in 1200."""
    x, experts, weights, gate_up, down = expert_inputs(1200, D, width, E, K)
    whole = kernels.grouped_experts(x, experts, weights, gate_up, down)
    for n in (*SIZES, 600):
        part = kernels.grouped_experts(x[-n:], experts[-n:], weights[-n:], gate_up, down)
        assert torch.equal(part, whole[-n:]), n


@given(seed=st.integers(0, 99))
def test_grouped_experts_ignore_the_order_of_the_slots(seed):
    """A record that lists a row's experts in another order gives the same bits: the sum runs in ascending order."""
    x, experts, weights, gate_up, down = expert_inputs(9, 8, 8, 6, 4, seed)
    order = torch.randperm(4, generator=stream(seed, "slots"))
    whole = kernels.grouped_experts(x, experts, weights, gate_up, down)
    assert torch.equal(kernels.grouped_experts(x, experts[:, order], weights[:, order], gate_up, down), whole)


def test_a_machine_without_the_grouped_operator_gets_the_same_values(monkeypatch):
    """The loop that stands in for the grouped product is invariant too, and equal to rounding."""
    inputs = expert_inputs(100, 64, 32, 8, 2)
    fused = kernels.grouped_experts(*inputs)
    monkeypatch.setattr(expert_kernels, "_fused_mm", None)
    loop = kernels.grouped_experts(*inputs)
    torch.testing.assert_close(loop, fused, rtol=1e-5, atol=1e-5)
    x, experts, weights, gate_up, down = inputs
    assert torch.equal(kernels.grouped_experts(x[:3], experts[:3], weights[:3], gate_up, down), loop[:3])


class Scaled(Numerics):
    """Multiplies what the hooks see: enough to tell which hooks were called, and in which order."""

    def __init__(self, factor: float, shift: float):
        self.factor, self.shift = factor, shift

    def _touch(self, x):
        return x * self.factor + self.shift

    def activation(self, x, site):
        return self._touch(x)

    def output(self, x, site):
        return self._touch(x)

    def kv(self, k_BSHd, v_BSHd):
        return self._touch(k_BSHd), v_BSHd

    def router_logits(self, layer_number, logits_NE):
        return self._touch(logits_NE)

    def logits(self, logits_NV):
        return self._touch(logits_NV)


def test_exact_numerics_return_the_same_object():
    """The identity copies nothing, and composing nothing, or EXACT alone, is EXACT."""
    x = draw(2, 3)
    assert EXACT.activation(x, "qkv") is x and EXACT.output(x, "o") is x
    assert EXACT.router_logits(0, x) is x and EXACT.logits(x) is x
    assert compose([]) is EXACT and compose([EXACT, EXACT]) is EXACT


def test_composed_numerics_apply_in_order():
    """compose([f, g]) is g after f at every hook; f and g do not commute."""
    f, g = Scaled(2.0, 0.0), Scaled(1.0, 3.0)
    both = compose([f, EXACT, g])
    x, kv = draw(2, 3), draw(1, 2, 2, 4)
    expected = 2 * x + 3
    for got in (both.activation(x, "down"), both.output(x, "down"), both.router_logits(1, x), both.logits(x)):
        assert torch.equal(got, expected)
    k, v = both.kv(kv, kv)
    assert torch.equal(k, 2 * kv + 3) and torch.equal(v, kv)
