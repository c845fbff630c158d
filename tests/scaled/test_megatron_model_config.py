"""Laws of the configuration: Megatron routes as theory's gate says; what it cannot, or undoes replay, is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lab.hf import ModelShape, parse_shape
from lab.hf.yarn import Yarn
from scaled.config import TrainingBlock
from tests.scaled.megatron_world import free_ports, joined, said, spawn, tiny_config
from theory.routing.gates import GATES, Gate, route
from theory.streams import stream

GROUPED = replace(GATES["deepseek_v3"], num_groups=4, num_top_groups=2)
# Gate, experts per token, selection bias.
ROUTES: dict[str, tuple[Gate, int, bool]] = {
    "qwen3": (GATES["qwen3"], 2, False),
    "olmoe": (GATES["olmoe"], 2, False),
    "softmax after": (GATES["softmax_after"], 3, False),
    "moonlight": (GATES["moonlight"], 3, True),
    "deepseek v3": (GROUPED, 4, True),
    "deepseek v2 lite": (replace(GATES["olmoe"], scaling=16.0), 3, False),
    "deepseek v2": (replace(GATES["deepseek_v2"], num_groups=4, num_top_groups=3), 3, False),
}
REFUSED: dict[str, tuple[Gate, int, bool, str]] = {
    "sigmoid, not renormalised": (
        replace(GATES["moonlight"], renormalise=False), 2, True,
        "gate: expected renormalise True with sigmoid scores and 2 experts, got False",
    ),
    "one expert that sums to 1": (
        GATES["qwen3"], 1, False, "gate: expected at least 2 experts per token where weights sum to 1, got 1"
    ),
    "softmax with bias": (
        GATES["olmoe"], 2, True, "gate: expected sigmoid scores with a selection bias, got softmax"
    ),
    "groups by one of two": (
        replace(GATES["deepseek_v2"], num_groups=4, num_top_groups=2), 4, False,
        "gate: expected experts_per_token // num_top_groups = 1 with group score max (Megatron-core sums that many), "
        "got 4 // 2",
    ),
}  # fmt: skip
# One value that is refused for each field of model.REPLAYABLE.
UNDOES: dict[str, Any] = {
    "moe_enable_routing_replay": False,
    "moe_router_fusion": True,
    "moe_router_load_balancing_type": "sinkhorn",
    "moe_aux_loss_coeff": 0.01,
    "moe_z_loss_coeff": 1e-3,
    "moe_input_jitter_eps": 0.01,
    "moe_router_force_load_balancing": True,
    "moe_expert_capacity_factor": 1.0,
    "moe_token_dropping": True,
    "moe_pad_expert_input_to_capacity": True,
    "moe_router_bias_update_rate": 1e-3,
    "cuda_graph_impl": "local",
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "mtp_num_layers": 1,
}
N, E = 64, 8


def _shape(gate: Gate, K: int, has_bias: bool) -> ModelShape:
    return replace(parse_shape(tiny_config()), gate=gate, experts_per_token=K, has_selection_bias=has_bias)


def run_config(rank: int, port: int) -> dict[str, Any]:
    """Routes by Megatron under every gate's configuration, words of refusals, and what building does besides."""
    import copy

    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    from scaled.megatron_engine import model

    training = TrainingBlock(precision="fp32")
    logits_NE = 3 * torch.randn(N, E, generator=stream(0, "logits"))
    bias_E = 0.3 * torch.randn(E, generator=stream(0, "bias"))
    routes = {}
    for name, case in ROUTES.items():
        config = model.transformer_config(_shape(*case), training)
        routes[name] = topk_routing_with_score_function(
            logits_NE,
            config.moe_router_topk,
            use_pre_softmax=config.moe_router_pre_softmax,
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=config.moe_router_score_function,
            expert_bias=bias_E if config.moe_router_enable_expert_bias else None,
        )
    gates = {
        name: said(lambda case=case: model.transformer_config(_shape(*case[:3]), training))
        for name, case in REFUSED.items()
    }
    plain = model.transformer_config(parse_shape(tiny_config()), training)
    undoes = {}
    for name, value in UNDOES.items():
        changed = copy.copy(plain)
        setattr(changed, name, value)
        undoes[name] = said(lambda changed=changed: model.refuse(changed))
    state = torch.get_rng_state()
    with joined(training, rank, port):
        for family in ("qwen3_moe", "deepseek_v3"):
            model.build_model(parse_shape(tiny_config(family)), training)
        heads = said(
            lambda: model.build_model(parse_shape(tiny_config()), TrainingBlock(num_ranks=3, tensor_parallel=3))
        )
    halves = TrainingBlock(num_ranks=2, precision="fp32", context_parallel=2)
    stretched = {n: replace(parse_shape(tiny_config()), yarn=Yarn(8.0, n)) for n in (6, 8)}
    cut = {n: said(lambda shape=shape: model.transformer_config(shape, halves)) for n, shape in stretched.items()}
    return {
        "cut": cut,
        "routes": routes,
        "gates": gates,
        "undoes": undoes,
        "fields": [name for name, _, _ in model.REPLAYABLE],
        "plain": said(lambda: model.refuse(plain)),
        "is_untouched": torch.equal(state, torch.get_rng_state()),
        "heads": heads,
        "masked": _masked(model),
    }


def _masked(model: Any) -> Any:
    """Logits of a head of 4 rows of which 3 are real, through the hook that `build_model` registers."""
    head = torch.nn.Linear(2, 4, bias=False)
    logits = head(torch.ones(1, 2))
    masked, _ = model._masks_from(3)(head, None, (logits, None))
    log_probs = masked.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum()
    entropy.backward()
    return logits, log_probs, entropy, head.weight.grad


@pytest.fixture(scope="module")
def ran() -> dict[str, Any]:
    return spawn(1, run_config, free_ports(1)[0])[0]


@pytest.mark.parametrize("name", ROUTES)
def test_megatron_routes_as_the_gate_says(name: str, ran: Any) -> None:
    """Experts are theory's exactly, weights to fp32 rounding (measured 1e-6 of up to 16; margin 4)."""
    gate, K, has_bias = ROUTES[name]
    logits_NE = 3 * torch.randn(N, E, generator=stream(0, "logits"))
    bias_E = 0.3 * torch.randn(E, generator=stream(0, "bias")) if has_bias else None
    experts_NK, weights_NK = route(logits_NE, K, gate, bias_E)
    probs_NE, map_NE = ran["routes"][name]
    assert torch.equal(map_NE, torch.zeros(N, E, dtype=torch.bool).scatter(1, experts_NK, True))
    assert torch.allclose(probs_NE.gather(1, experts_NK), weights_NK, rtol=4e-6, atol=1e-7)


@pytest.mark.parametrize("name", REFUSED)
def test_gates_that_megatron_lacks_are_refused(name: str, ran: Any) -> None:
    """A gate that Megatron would compute differently is an error that names both values."""
    assert ran["gates"][name] == REFUSED[name][3]


def test_every_field_that_undoes_replay_is_tried(ran: Any) -> None:
    """The table of refused values covers the table of fields, and our own configuration passes."""
    assert set(UNDOES) == set(ran["fields"])
    assert ran["plain"] == "ran"


@pytest.mark.parametrize("name", UNDOES)
def test_what_undoes_replay_is_refused(name: str, ran: Any) -> None:
    """A configuration under which a router would not use, or not only use, the replayed experts names its field."""
    line = ran["undoes"][name]
    assert line.startswith(f"{name}: expected ")
    assert line.endswith(f"got {UNDOES[name]}")


def test_building_draws_from_no_global_generator(ran: Any) -> None:
    """Joining a world and building models leave torch's global generator as it was."""
    assert ran["is_untouched"]


def test_a_layout_that_does_not_divide_is_refused(ran: Any) -> None:
    """Heads that do not divide over tensor parallelism stop the build before Megatron's own assertion."""
    assert ran["heads"] == "training.tensor_parallel: expected a divisor of 4 attention heads, got 3"


def test_padding_of_the_vocabulary_has_no_probability(ran: Any) -> None:
    """Padding rows get probability 0 and no gradient; log-probabilities and entropy of the others are exact."""
    logits, log_probs, entropy, gradient = ran["masked"]
    real = logits[:, :3].log_softmax(-1)
    assert torch.equal(log_probs[:, :3], real)
    assert log_probs.exp()[0, 3] == 0
    assert torch.isclose(entropy, -(real.exp() * real).sum())
    assert torch.isfinite(gradient).all() and not gradient[3].any()


def test_a_table_of_yarn_is_cut_evenly(ran: dict[str, Any]) -> None:
    """A length of pretraining that context-parallel ranks cannot cut is refused; one that they can is not."""
    line = "original_max_position_embeddings: expected a multiple of 4 (2 x training.context_parallel), got 6"
    assert ran["cut"] == {6: line, 8: "ran"}
