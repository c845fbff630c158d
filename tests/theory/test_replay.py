"""Replay: what each pass of each mode routes by, whichever way its rows are batched."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.theory.tiny_moe import (
    CONVENTIONS,
    LAYERS,
    D,
    E,
    K,
    TinyMoE,
    draw_inputs,
    draw_predictor,
    draw_record,
    num_rows_lists,
    run,
    seeds,
)
from theory.routing import replay
from theory.routing.gates import GATES, route, weigh
from theory.routing.packed_rows import flat_rows
from theory.routing.passes import MODES, PASSES, Mode, RoutingPlan
from theory.routing.predictor import predictive_logits
from theory.routing.record import MISSING
from theory.routing.replay import NaturalRouting, ReplayContext
from theory.streams import stream


def test_passes_are_the_design_table() -> None:
    """Rollout, old and gradient passes of the five modes, row by row."""
    table = {mode: (p.rollout, p.old, p.gradient) for mode, p in PASSES.items()}
    assert table == {
        "none": ("natural", "natural", "natural"),
        "R2": ("natural", "natural", "replay_old"),
        "R3": ("natural", "replay_rollout", "replay_rollout"),
        "Pr2": ("natural", "predicted", "replay_old"),
        "Pr3": ("predicted", "replay_rollout", "replay_rollout"),
    }
    assert tuple(PASSES) == MODES == get_args(Mode)
    assert [m for m in MODES if PASSES[m].trains_predictor] == ["Pr2", "Pr3"]
    assert [m for m in MODES if PASSES[m].records_rollout] == ["R3", "Pr3"]
    assert [m for m in MODES if PASSES[m].records_old] == ["R2", "Pr2"]


@pytest.mark.parametrize("name", CONVENTIONS)
@given(seed=seeds, num_rows=num_rows_lists)
def test_replaying_the_natural_record_changes_no_bit(name: str, seed: int, num_rows: list[int]) -> None:
    """Natural, recorded and replayed passes give the same outputs and gradients bit for bit; so does inference."""
    model, width = TinyMoE(seed, CONVENTIONS[name]), max(num_rows) + 2
    inputs = draw_inputs(seed, num_rows, width)
    natural, recorded = run(model, inputs, num_rows, RoutingPlan("natural"))
    replayed, replay = run(model, inputs, num_rows, RoutingPlan("replay", record=recorded.used))
    assert torch.equal(replayed, natural)
    assert torch.equal(model(inputs, NaturalRouting()), natural)
    grads = [torch.autograd.grad(out.square().sum(), list(model.parameters())) for out in (natural, replayed)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert recorded.used is not None and replay.used is not None and replay.natural is not None
    assert torch.equal(replay.used.experts, replay.natural.experts)
    assert replay.used.num_missing_rows == 0 and replay.used.num_rows_B == num_rows
    assert recorded.used.layer_numbers == LAYERS


@given(seed=seeds, num_rows=num_rows_lists, num_missing=st.integers(0, 2))
def test_replay_uses_the_record_where_it_has_rows(seed: int, num_rows: list[int], num_missing: int) -> None:
    """Recorded rows use the recorded experts; missing rows and padding the natural ones."""
    width = max(num_rows) + 1
    record = draw_record(seed, num_rows, num_missing)
    generator = stream(seed, "logits")
    N = len(num_rows) * width
    hidden, logits = torch.randn(N, D, generator=generator), torch.randn(N, E, generator=generator)
    gate = GATES["qwen3"]
    natural, _ = route(logits, K, gate)
    rows = flat_rows(num_rows, width)
    with ReplayContext(RoutingPlan("replay", record=record), num_rows, width) as context:
        for number in (4, 1, 2):  # binding is by number: the order of the calls is free
            experts, weights = context.route(number, hidden, logits, K, gate)
            expected = natural.clone()
            recorded = record.layer(number).long()
            is_there = recorded[:, 0] != MISSING
            expected[rows[is_there]] = recorded[is_there]
            assert torch.equal(experts, expected)
            assert torch.equal(weights, weigh(logits, expected, gate))
    used, live = context.used, context.natural
    assert used is not None
    assert live is not None
    assert torch.equal(used.experts[record.is_recorded], record.experts[record.is_recorded])
    assert torch.equal(used.experts[~record.is_recorded], live.experts[~record.is_recorded])
    assert torch.equal(live.layer(2).long(), natural[rows])


@given(seed=seeds, num_rows=num_rows_lists)
def test_a_micro_batch_is_its_responses(seed: int, num_rows: list[int]) -> None:
    """Routing responses together, in another order, at another width or alone gives each the same record."""
    model, record = TinyMoE(seed), draw_record(seed, num_rows)
    feature_rows = tuple(torch.arange(0, n, 2) for n in num_rows)
    routing = RoutingPlan("replay", record=record, feature_rows=feature_rows)
    inputs = draw_inputs(seed, num_rows, max(num_rows))
    _, whole = run(model, inputs, num_rows, routing)
    for b, n in enumerate(num_rows):
        _, alone = run(model, inputs[b : b + 1, :n], [n], routing.select([b]))
        assert whole.used is not None
        assert alone.used is not None
        assert torch.equal(alone.used.experts, whole.used.select([b]).experts)
        assert whole.features is not None
        assert alone.features is not None
        # Matmuls of other sizes may round otherwise.
        torch.testing.assert_close(alone.features.logits, whole.features.select([b]).logits, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("gates", ["live", "predicted"])
@pytest.mark.parametrize("name", CONVENTIONS)
@given(seed=seeds)
def test_a_zero_predictor_is_no_predictor(name: str, gates: str, seed: int) -> None:
    """With W_p = 0, Pr2's old pass routes and weighs as R2's, bit for bit."""
    model, num_rows = TinyMoE(seed, CONVENTIONS[name]), [4, 2]
    inputs = draw_inputs(seed, num_rows, 4)
    plain, natural = run(model, inputs, num_rows, RoutingPlan("natural"))
    routing = RoutingPlan("predicted", gates=gates, predictor=draw_predictor(seed, size=0.0))
    predicted, context = run(model, inputs, num_rows, routing)
    assert torch.equal(predicted, plain)
    assert context.used is not None
    assert natural.used is not None
    assert torch.equal(context.used.experts, natural.used.experts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@given(seed=seeds)
def test_predicted_routing_is_equations_4_to_6(dtype: torch.dtype, seed: int) -> None:
    """Experts are the top-k of softmax(p + h W_p); predicted gates are its values, live gates the softmax of p."""
    generator = stream(seed, "predicted")
    hidden = torch.randn(5, D, generator=generator).to(dtype)
    logits = torch.randn(5, E, generator=generator).to(dtype)
    predictor, gate = draw_predictor(seed), GATES["olmoe"]
    # 16-bit logits widen to float32, in which the bias must be added.
    wide = torch.promote_types(dtype, torch.float32)
    biased = logits.to(wide) + hidden.to(wide) @ predictor[1].to(wide)
    plain = RoutingPlan("predicted", predictor=predictor, feature_rows=(torch.tensor([0, 3]),), keep_hidden=True)
    for gates, weighing in (("predicted", biased), ("live", logits)):
        routing = replace(plain, gates=gates)
        with ReplayContext(routing, [5], 5) as context:
            for number in LAYERS:
                experts, weights = context.route(number, hidden, logits, K, gate)
                if number == 1:
                    top = biased.softmax(dim=1).topk(K, dim=1).indices.sort(dim=1).values
                    assert torch.equal(experts, top)
                    assert weights.dtype == dtype
                    assert torch.equal(weights, weighing.to(wide).softmax(dim=1).gather(1, top).to(dtype))
        natural, features = context.natural, context.features
        assert natural is not None
        assert torch.equal(natural.layer(1).long(), route(logits, K, gate)[0])
        # Features are h_old and p_old, without the predictor's bias.
        assert features is not None
        assert torch.equal(features.logits, logits[[0, 3], None].expand(-1, 3, -1))
        assert torch.equal(features.hidden, hidden[[0, 3], None].expand(-1, 3, -1))
        assert not features.logits.requires_grad


@pytest.mark.parametrize("gates", ["live", "predicted"])
def test_one_product_with_the_predictor_a_layer(gates: Literal["live", "predicted"]) -> None:
    """`route` takes h W_p once, and gives the bits of `choose` and `weighed_logits`, which take it each for itself."""
    generator = stream(0, "once")
    hidden, logits = torch.randn(5, D, generator=generator), torch.randn(5, E, generator=generator)
    routing = RoutingPlan("predicted", gates=gates, predictor={1: draw_predictor(0)[1]})
    taken: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch, ReplayContext(routing, [5], 5, [1]) as whole:
        patch.setattr(replay, "predictive_logits", lambda *of: taken.append(predictive_logits(*of)) or taken[-1])
        experts, weights = whole.route(1, hidden, logits, K, GATES["qwen3"])
    assert len(taken) == 1
    with ReplayContext(routing, [5], 5, [1]) as parts:
        weighed = parts.weighed_logits(1, hidden, logits)
        chosen = parts.choose(1, hidden, logits, K, GATES["qwen3"])
    assert torch.equal(chosen, experts)
    assert torch.equal(weigh(weighed, chosen, GATES["qwen3"]).to(logits.dtype), weights)
