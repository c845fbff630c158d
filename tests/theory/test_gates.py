"""Gate conventions: they are transformers' routers, and what a gate must not depend on, it does not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from theory.routing.gates import GATES, Gate, route, select, weigh
from theory.streams import stream

E, K, D = 16, 4, 12
CONVENTIONS = {
    **GATES,
    "deepseek_v2": replace(GATES["deepseek_v2"], num_groups=4, num_top_groups=2),
    "deepseek_v3": replace(GATES["deepseek_v3"], num_groups=4, num_top_groups=2),
}
SOFTMAX = [name for name, gate in CONVENTIONS.items() if gate.score == "softmax"]

seeds = st.integers(0, 9999)


def draw_logits(seed: int, N: int = 6, num_experts: int = E) -> Tensor:
    """Random router logits, two nats wide."""
    return 2 * torch.randn(N, num_experts, generator=stream(seed, "logits"))


def draw_bias(seed: int) -> Tensor:
    """A random selection bias of the size of a sigmoid's spread."""
    return 0.3 * torch.randn(E, generator=stream(seed, "bias"))


def hf_config(gate: Gate) -> SimpleNamespace:
    """The config that transformers' routers read, for this gate."""
    return SimpleNamespace(
        num_experts_per_tok=K,
        num_experts=E,
        num_local_experts=E,
        hidden_size=D,
        norm_topk_prob=gate.renormalise,
        routed_scaling_factor=gate.scaling,
        topk_method="group_limited_greedy",
        n_group=gate.num_groups,
        topk_group=gate.num_top_groups,
    )


ROUTERS = {
    "qwen3": Qwen3MoeTopKRouter,
    "mixtral": MixtralTopKRouter,
    "olmoe": OlmoeTopKRouter,
    "deepseek_v2": DeepseekV2TopkRouter,
    "deepseek_v3": DeepseekV3TopkRouter,
    "moonlight": DeepseekV3TopkRouter,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTERS)
def test_gates_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    """Experts equal, and weights to rounding, what the family's own router chooses on the same logits."""
    gate = CONVENTIONS[name]
    generator = stream(3, "hf", name)
    router = ROUTERS[name](hf_config(gate))
    router.weight.data = torch.randn(E, D, generator=generator, dtype=torch.float32).to(dtype)
    bias = None
    if hasattr(router, "e_score_correction_bias"):
        bias = 0.2 * torch.randn(E, generator=generator, dtype=torch.float32)
        router.e_score_correction_bias.copy_(bias)
    hidden = torch.randn(200, D, generator=generator, dtype=torch.float32).to(dtype)
    logits, expected_weights, expected_experts = router(hidden)
    expected_experts, order = expected_experts.sort(dim=-1)
    experts, weights = route(logits.detach(), K, gate, bias)
    assert torch.equal(experts, expected_experts)
    # One rounding of the type of the weights, where the sum over the set was taken in another order.
    eps = torch.finfo(weights.dtype).eps
    torch.testing.assert_close(weights, expected_weights.gather(1, order).to(weights.dtype), rtol=4 * eps, atol=0)


@pytest.mark.parametrize("name", [n for n in ROUTERS if n in SOFTMAX])
def test_saturated_gates_are_those_of_transformers(name: str) -> None:
    """Where all scores but a few underflow to 0, the experts of weight 0 that fill the set up are the same too."""
    gate, generator = CONVENTIONS[name], stream(4, "saturated", name)
    router = ROUTERS[name](hf_config(gate))
    router.weight.data = torch.randn(E, D, generator=generator, dtype=torch.float32)
    hidden = 200 * torch.randn(200, D, generator=generator, dtype=torch.float32)
    logits, _, expected = router(hidden)
    experts, weights = route(logits.detach(), K, gate)
    assert float((weights == 0).double().mean()) > 0.5
    assert torch.equal(experts, expected.sort(dim=-1).values)


@given(seed=seeds)
def test_softmax_after_is_softmax_before_renormalised(seed: int) -> None:
    """exp(s_k) / sum over the set: the softmax over all experts cancels (R3 Eq. 8)."""
    logits = draw_logits(seed)
    experts_after, after = route(logits, K, GATES["softmax_after"])
    experts_before, before = route(logits, K, GATES["qwen3"])
    assert torch.equal(experts_after, experts_before)
    # Float64 rounding of a softmax, a sum and a quotient.
    torch.testing.assert_close(after, before, rtol=1e-14, atol=0)
    mask = torch.zeros_like(logits).scatter(1, experts_after, 1.0)
    eq_8 = (mask * logits.exp() / (mask * logits.exp()).sum(dim=1, keepdim=True)).gather(1, experts_after)
    torch.testing.assert_close(after, eq_8, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", CONVENTIONS)
@given(seed=seeds)
def test_ids_ascend_and_replaying_them_changes_no_bit(name: str, seed: int) -> None:
    """Natural ids are distinct and ascending, and weighing them again gives the natural weights bit for bit."""
    gate, logits = CONVENTIONS[name], draw_logits(seed)
    experts, weights = route(logits, K, gate)
    assert bool((experts.diff(dim=1) > 0).all())
    assert torch.equal(weigh(logits, experts, gate), weights)


@pytest.mark.parametrize("name", SOFTMAX)
@given(seed=seeds, shift=st.floats(-20, 20))
def test_softmax_gates_ignore_a_shift_of_the_logits(name: str, seed: int, shift: float) -> None:
    """Adding one number to all logits of a row changes neither the experts nor their weights."""
    gate, logits = CONVENTIONS[name], draw_logits(seed)
    experts, weights = route(logits, K, gate)
    moved_experts, moved = route(logits + shift, K, gate)
    assert torch.equal(moved_experts, experts)
    # A shift of 20 costs the logits up to 20 eps = 4e-15 each.
    torch.testing.assert_close(moved, weights, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", CONVENTIONS)
@given(seed=seeds)
def test_gates_are_equivariant_to_the_names_of_experts(name: str, seed: int) -> None:
    """Relabelling experts (whole groups, where there are groups) relabels the set and moves its weights along."""
    gate, logits, bias = CONVENTIONS[name], draw_logits(seed), draw_bias(seed)
    generator = stream(seed, "relabel")
    size = E // gate.num_groups
    groups = torch.randperm(gate.num_groups, generator=generator)
    inside = torch.stack([torch.randperm(size, generator=generator) for _ in range(gate.num_groups)])
    old_of_new = (groups[:, None] * size + inside[groups]).flatten()
    dense = torch.zeros_like(logits).scatter(1, *route(logits, K, gate, bias))
    relabelled = logits[:, old_of_new]
    dense_new = torch.zeros_like(logits).scatter(1, *route(relabelled, K, gate, bias[old_of_new]))
    # The sums over all experts are taken in another order.
    torch.testing.assert_close(dense_new, dense[:, old_of_new], rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", CONVENTIONS)
@given(seed=seeds)
def test_gradients_reach_the_logits_of_a_replayed_set(name: str, seed: int) -> None:
    """The weights of any set are differentiable in the live logits, with the gradient of their formula."""
    gate, logits = CONVENTIONS[name], draw_logits(seed, N=2).requires_grad_()
    experts = torch.rand(2, E, generator=stream(seed, "set")).argsort(dim=1)[:, :K].sort(dim=1).values
    assert torch.autograd.gradcheck(lambda x: weigh(x, experts, gate), (logits,))
    assert bool((torch.autograd.grad(weigh(logits, experts, gate)[:, 0].sum(), logits)[0] != 0).any())


@given(seed=seeds)
def test_selection_bias_chooses_but_does_not_weigh(seed: int) -> None:
    """The bias moves the set; the weights are those of the unbiased scores on that set (DeepSeek-V3)."""
    gate, logits, bias = CONVENTIONS["deepseek_v3"], draw_logits(seed), draw_bias(seed)
    experts, weights = route(logits, K, gate, bias)
    scores = logits.sigmoid().gather(1, experts)
    torch.testing.assert_close(weights, 2.5 * scores / scores.sum(dim=1, keepdim=True), rtol=1e-14, atol=0)
    huge = torch.where(torch.arange(E) < K, 100.0, 0.0)
    flat = replace(gate, num_groups=1, num_top_groups=1)
    assert select(logits, K, flat, huge).tolist() == [list(range(K))] * len(logits)


@given(seed=seeds)
def test_only_the_best_groups_are_chosen_from(seed: int) -> None:
    """The chosen experts are the best of the two best groups, by brute force over groups."""
    logits = draw_logits(seed, N=3)
    for name, num_summed in (("deepseek_v2", 1), ("deepseek_v3", 2)):
        gate = CONVENTIONS[name]
        scores = logits.softmax(dim=1) if gate.score == "softmax" else logits.sigmoid()
        for row, experts in zip(scores.tolist(), select(logits, K, gate).tolist(), strict=True):
            groups = [row[g * 4 : g * 4 + 4] for g in range(4)]
            ranked = sorted(range(4), key=lambda g: -sum(sorted(groups[g])[-num_summed:]))
            allowed = [g * 4 + i for g in ranked[:2] for i in range(4)]
            assert experts == sorted(sorted(allowed, key=lambda e: -row[e])[:K])


def test_low_precision_logits_are_scored_in_float32() -> None:
    """bfloat16 logits give the float32 weights, rounded once."""
    logits = draw_logits(0).to(torch.bfloat16)
    for gate in CONVENTIONS.values():
        experts, weights = route(logits, K, gate)
        wide_experts, wide = route(logits.float(), K, gate)
        assert torch.equal(experts, wide_experts)
        assert torch.equal(weights, wide.to(torch.bfloat16))


def test_sizes_that_do_not_fit_name_both_numbers() -> None:
    """Slots beyond the experts of the top groups, and experts that do not divide, are the caller's mistakes."""
    logits = draw_logits(0)
    with pytest.raises(ValueError, match="expected from 1 to 8 slots, got 9"):
        select(logits, 9, CONVENTIONS["deepseek_v2"])
    with pytest.raises(ValueError, match="divisible into 4 groups, got 15"):
        select(logits[:, :15], K, CONVENTIONS["deepseek_v3"])
    with pytest.raises(ValueError, match="at least 2 experts in each of 8 groups, got 8 in all"):
        select(logits[:, :8], K, GATES["deepseek_v3"])
    with pytest.raises(ValueError, match="from 1 to 2 top groups, got 3"):
        Gate("softmax", "before", renormalise=False, num_groups=2, num_top_groups=3)
    with pytest.raises(ValueError, match="expected order 'before' with score 'sigmoid'"):
        Gate("sigmoid", "after", renormalise=False)
    with pytest.raises(ValueError, match=r"expected a positive scaling, got 0\.0"):
        Gate("softmax", "before", renormalise=False, scaling=0.0)
