"""Laws of the selection bias inside a pass: it takes part in every choice that is the model's own, and in no weight."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.theory.tiny_moe import D, E, K, draw_predictor, draw_record
from theory.routing.gates import GATES, select, weigh
from theory.routing.passes import RoutingPlan
from theory.routing.record import MISSING
from theory.routing.replay import NaturalRouting, ReplayContext
from theory.streams import stream

GATE = replace(GATES["moonlight"], scaling=1.0)
ROWS = [4, 2]


@given(seed=st.integers(0, 999))
def test_every_choice_of_a_pass_takes_the_bias(seed: int) -> None:
    """Natural, predicted, missing and padded rows choose with the bias; replayed ones and all weights ignore it."""
    generator = stream(seed, "biased")
    N = len(ROWS) * max(ROWS)
    hidden, logits = torch.randn(N, D, generator=generator), torch.randn(N, E, generator=generator)
    bias = torch.randn(E, generator=generator)
    record, predictor = draw_record(seed, ROWS, num_missing=1), draw_predictor(seed)
    natural, weights = NaturalRouting().route(1, hidden, logits, K, GATE, bias)
    assert torch.equal(natural, select(logits, K, GATE, bias))
    assert torch.equal(weights, weigh(logits, natural, GATE))
    predicted = select(logits + hidden @ predictor[2], K, GATE, bias)
    rows_R = torch.tensor([0, 1, 2, 3, 4, 5])
    replayed = natural.clone()
    known_R = record.layer(2)[:, 0] != MISSING
    replayed[rows_R[known_R]] = record.layer(2)[known_R].long()
    for routing, expected in (
        (RoutingPlan("natural"), natural),
        (RoutingPlan("replay", record=record), replayed),
        (RoutingPlan("predicted", predictor=predictor), predicted),
    ):
        with ReplayContext(routing, ROWS, max(ROWS)) as context:
            for number in (1, 2, 4):
                experts, weights = context.route(number, hidden, logits, K, GATE, bias)
                if number == 2:
                    assert torch.equal(experts, expected)
                    assert torch.equal(weights, weigh(logits, expected, GATE))
        assert context.natural is not None
        assert torch.equal(context.natural.layer(2).long(), natural[rows_R])
