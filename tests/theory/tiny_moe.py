"""A tiny model of MoE layers alone, with records and predictors for it, which the tests of replay share."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from theory.routing.gates import GATES, Gate
from theory.routing.passes import RoutingPlan
from theory.routing.payloads import pack_record
from theory.routing.record import MISSING, RoutingRecord
from theory.routing.replay import NaturalRouting, ReplayContext
from theory.streams import stream

D, E, K = 6, 8, 3
LAYERS = (1, 2, 4)
CONVENTIONS = {
    "softmax_after": GATES["softmax_after"],
    "olmoe": GATES["olmoe"],
    "deepseek_v3": replace(GATES["deepseek_v3"], num_groups=4, num_top_groups=3),
}


class TinyMoE(torch.nn.Module):
    """Three MoE layers whose experts are linear maps, with decoder layers 0 and 3 dense (absent)."""

    def __init__(self, seed: int, gate: Gate = GATES["qwen3"]) -> None:
        super().__init__()
        generator = stream(seed, "tiny")
        self.gate = gate
        self.gates = torch.nn.ParameterList([torch.randn(D, E, generator=generator) for _ in LAYERS])
        self.experts = torch.nn.ParameterList([torch.randn(E, D, D, generator=generator) / D for _ in LAYERS])

    def block(self, i: int, hidden_ND: Tensor, routing: ReplayContext | NaturalRouting) -> Tensor:
        """One MoE layer with a residual."""
        logits_NE = hidden_ND @ self.gates[i]
        experts_NK, weights_NK = routing.route(LAYERS[i], hidden_ND, logits_NE, K, self.gate)
        mixed_NDD = (self.experts[i][experts_NK] * weights_NK[..., None, None]).sum(dim=1)
        return hidden_ND + torch.tanh(torch.einsum("nd,nde->ne", hidden_ND, mixed_NDD))

    def forward(self, inputs_BSD: Tensor, routing: ReplayContext | NaturalRouting) -> Tensor:
        hidden_ND = inputs_BSD.flatten(0, 1)
        for i in range(len(LAYERS)):
            hidden_ND = self.block(i, hidden_ND, routing)
        return hidden_ND.view_as(inputs_BSD)


def draw_inputs(seed: int, num_rows: list[int], width: int) -> Tensor:
    """Random inputs; the padding is random too, as no law may depend on it."""
    return torch.randn(len(num_rows), width, D, generator=stream(seed, "inputs"))


def draw_record(seed: int, num_rows: list[int], num_missing: int = 0) -> RoutingRecord:
    """A random record over LAYERS, with some row-layers missing."""
    generator = stream(seed, "record")
    payloads = []
    for n in num_rows:
        ids = torch.rand(n, len(LAYERS), E, generator=generator).argsort(dim=-1)[..., :K]
        ids[torch.randperm(n, generator=generator)[:num_missing], 1] = MISSING
        payloads.append(ids)
    return pack_record(payloads, [n + 1 for n in num_rows], LAYERS, E)


def draw_predictor(seed: int, size: float = 0.5) -> dict[int, Tensor]:
    """A random W_p per layer."""
    generator = stream(seed, "predictor")
    return {n: size * torch.randn(D, E, generator=generator) for n in LAYERS}


def run(model: TinyMoE, inputs: Tensor, num_rows: list[int], plan: RoutingPlan) -> tuple[Tensor, ReplayContext]:
    """One forward under this routing."""
    with ReplayContext(plan, num_rows, inputs.shape[1], LAYERS) as context:
        outputs = model(inputs, context)
    return outputs, context


num_rows_lists = st.lists(st.integers(1, 5), min_size=1, max_size=3)
seeds = st.integers(0, 999)
