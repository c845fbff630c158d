"""The ledger of replay: no layer is routed twice or never, recomputation repeats the forward, misuse is an error."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from torch.utils.checkpoint import checkpoint

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
    run,
    seeds,
)
from theory.routing.gates import GATES, route, weigh
from theory.routing.passes import RoutingPlan
from theory.routing.replay import LedgerError, ReplayContext


@pytest.mark.parametrize("name", CONVENTIONS)
@pytest.mark.parametrize("source", ["natural", "replay"])
@given(seed=seeds)
def test_recomputation_changes_no_gradient(name: str, source: str, seed: int) -> None:
    """Activation checkpointing of every layer gives the outputs and gradients of the plain backward, bit for bit."""
    num_rows = [3, 4]
    model, inputs = TinyMoE(seed, CONVENTIONS[name]), draw_inputs(seed, num_rows, 4)
    record = draw_record(seed, num_rows, num_missing=1)
    routing = RoutingPlan(source, record=record if source == "replay" else None)
    plain, _ = run(model, inputs, num_rows, routing)
    expected = torch.autograd.grad(plain.square().sum(), list(model.parameters()))
    with ReplayContext(routing, num_rows, 4, LAYERS) as context:
        hidden = inputs.flatten(0, 1)
        for i in range(len(LAYERS)):
            hidden = checkpoint(
                model.block, i, hidden, context, use_reentrant=False,
                context_fn=lambda: (nullcontext(), context.recompute()),
            )  # fmt: skip
        grads = torch.autograd.grad(hidden.square().sum(), list(model.parameters()))
    assert torch.equal(hidden.view_as(plain), plain)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@given(seed=seeds)
def test_recomputed_natural_routes_cannot_flip(seed: int) -> None:
    """Recomputation under other logits (a near tie, say) still gives the first forward's experts, on every row."""
    model, inputs = TinyMoE(seed), draw_inputs(seed, [2, 3], 4)
    with ReplayContext(RoutingPlan("natural"), [2, 3], 4) as context:
        hidden = inputs.flatten(0, 1)
        logits = hidden @ model.gates[0]
        first, _ = context.route(1, hidden, logits, K, model.gate)
        with context.recompute():
            again, weights = context.route(1, hidden, -logits, K, model.gate)
        assert torch.equal(again, first)
        assert torch.equal(weights, weigh(-logits, first, model.gate))
    assert not torch.equal(route(-logits, K, model.gate)[0], first)


def test_recomputation_without_its_context_is_an_error() -> None:
    """A checkpointed layer that asks again without `recompute()` fails in backward, instead of routing anew."""
    model, inputs = TinyMoE(0), draw_inputs(0, [3], 3)
    context = ReplayContext(RoutingPlan("natural"), [3], 3)
    with context:
        out = checkpoint(model.block, 0, inputs.flatten(0, 1), context, use_reentrant=False)
        with pytest.raises(LedgerError, match="layer 1: expected one use per forward, got another"):
            out.sum().backward()


def ask(context: ReplayContext, number: int, N: int = 3, num_experts: int = E, slots: int = K) -> None:
    """Routes layer `number` on zeros."""
    context.route(number, torch.zeros(N, D), torch.arange(num_experts).expand(N, -1) * 1.0, slots, GATES["qwen3"])


def replay_pass() -> ReplayContext:
    """A replay over one response of 3 rows."""
    return ReplayContext(RoutingPlan("replay", record=draw_record(0, [3])), [3], 3)


def go_through(context: ReplayContext, numbers: Sequence[int], recomputed: Sequence[int] = (), **sizes: int) -> None:
    """Routes these layers in one forward, and then recomputes those."""
    with context:
        for number in numbers:
            ask(context, number, **sizes)
        with context.recompute():
            for number in recomputed:
                ask(context, number, **sizes)


def test_each_layer_is_routed_exactly_once() -> None:
    """A layer that is routed twice, or never, fails the pass (SkyRL #1908, verl #7340)."""
    go_through(replay_pass(), [4, 1, 2], recomputed=[2, 1, 4])
    with pytest.raises(LedgerError, match="layer 2: expected one use per forward"):
        go_through(replay_pass(), [2, 2])
    with pytest.raises(LedgerError, match=r"every layer of \[1, 2, 4\] .* got \[1, 4\]: never \[2\]"):
        go_through(replay_pass(), [4, 1])
    with pytest.raises(LedgerError, match="layer 2: expected one use per recomputation"):
        go_through(replay_pass(), [2], recomputed=[2, 2])
    with pytest.raises(LedgerError, match="layer 4: expected a layer that the forward has routed"):
        go_through(replay_pass(), [2], recomputed=[4])
    with pytest.raises(LedgerError, match=r"got \[1\]: never \[2, 4\]"):
        go_through(ReplayContext(RoutingPlan("natural"), [3], 3, LAYERS), [1])
    nested = replay_pass()
    with nested.recompute(), pytest.raises(LedgerError, match="one recomputation at a time"):
        nested.recompute().__enter__()


def test_layers_must_be_those_of_the_record() -> None:
    """A layer that the record lacks, and a record of other layers than the model's, are errors (verl #5452)."""
    with pytest.raises(LedgerError, match=r"one of the layers \[1, 2, 4\], got layer 0"):
        go_through(replay_pass(), [0])
    record = draw_record(0, [3])
    with pytest.raises(ValueError, match=r"expected the model's layers \[0, 1, 2\], got \[1, 2, 4\] to be replay"):
        ReplayContext(RoutingPlan("replay", record=record), [3], 3, (0, 1, 2))


def test_a_pass_lives_once_and_only_inside_its_context() -> None:
    """No routing before, after or twice; a failed pass keeps nothing (stale queues: SkyRL #1908, mcore)."""
    context = ReplayContext(RoutingPlan("natural"), [3], 3)
    with pytest.raises(LedgerError, match="layer 1: expected to be inside `with`, got a new pass"):
        ask(context, 1)
    with pytest.raises(LedgerError, match="expected a pass that has run, got one that is new"):
        _ = context.used
    with context:
        ask(context, 1)
    with pytest.raises(LedgerError, match="layer 2: expected to be inside `with`, got a closed pass"):
        ask(context, 2)
    with pytest.raises(LedgerError, match=r"expected a new pass .* got one that is closed"), context:
        pass
    failed = ReplayContext(RoutingPlan("natural"), [3], 3)
    with pytest.raises(LedgerError, match="layer 1: expected one use"):
        go_through(failed, [1, 1])
    for read in ("used", "natural", "features"):
        with pytest.raises(LedgerError, match="got one that is failed"):
            getattr(failed, read)
    with pytest.raises(LedgerError, match="got one that is failed"), failed:
        pass


def test_results_wait_for_the_whole_forward() -> None:
    """Reading the record before every layer was routed is an error; a dense model has none."""
    with replay_pass() as context:
        ask(context, 1)
        with pytest.raises(LedgerError, match=r"over layers \[1, 2, 4\], got none yet of \[2, 4\]"):
            _ = context.used
        ask(context, 2)
        ask(context, 4)
    with ReplayContext(RoutingPlan("natural", feature_rows=(torch.arange(2),)), [3], 3) as dense:
        pass
    assert dense.used is None
    assert dense.natural is None
    assert dense.features is None


def test_sizes_that_do_not_fit_name_both_numbers() -> None:
    """Rows, slots, experts and feature rows of another batch or model are errors (verl #5989, sglang #36515)."""
    record = draw_record(0, [3])
    with pytest.raises(ValueError, match=r"expected a record of \[4\] rows per response, got \[3\]"):
        ReplayContext(RoutingPlan("replay", record=record), [4], 4)
    with pytest.raises(ValueError, match="expected a width of at least 3 rows, got 2"):
        ReplayContext(RoutingPlan("natural"), [3], 2)
    for kwargs, message in (
        ({"N": 6}, r"layer 1: expected 3 rows \(1 responses x 3\), got 6"),
        ({"num_experts": 9}, "layer 1: expected 3 of 8 experts as recorded, got 3 of 9"),
        ({"slots": 2}, "layer 1: expected 3 of 8 experts as recorded, got 2 of 8"),
    ):
        with pytest.raises(ValueError, match=message):
            go_through(replay_pass(), [1], **kwargs)
    with ReplayContext(RoutingPlan("natural"), [3], 3) as context:
        ask(context, 1)
        with pytest.raises(ValueError, match="layer 2: expected 8 experts as before, got 9"):
            ask(context, 2, num_experts=9)
    for rows, message in (
        ((torch.tensor([0, 3]),), r"response 0: expected feature rows in \[0, 3\), got \[0, 3\]"),
        ((torch.tensor([0]), torch.tensor([0])), "expected feature rows of 1 responses, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            ReplayContext(RoutingPlan("natural", feature_rows=rows), [3], 3)


def test_contradictory_routings_are_errors() -> None:
    """A replay needs a record and nothing else may have one; likewise for the predictor (slime #1909, verl #7805)."""
    record, predictor = draw_record(0, [3]), draw_predictor(0)
    with pytest.raises(ValueError, match="record if and only if source is 'replay', got no record with 'replay'"):
        RoutingPlan("replay")
    with pytest.raises(ValueError, match="got a record of 1 responses with 'natural'"):
        RoutingPlan("natural", record=record)
    with pytest.raises(ValueError, match=r"predictor if and only if .* got one for layers \[\] with 'predicted'"):
        RoutingPlan("predicted")
    with pytest.raises(ValueError, match=r"got one for layers \[1, 2, 4\] with 'replay'"):
        RoutingPlan("replay", record=record, predictor=predictor)
    with pytest.raises(ValueError, match="gates 'predicted' only with source 'predicted', got source 'natural'"):
        RoutingPlan("natural", gates="predicted")
    with pytest.raises(ValueError, match="expected keep_hidden only with feature rows, got no rows"):
        RoutingPlan("natural", keep_hidden=True)
    with pytest.raises(ValueError, match="expected feature rows of 1 responses, got 2"):
        RoutingPlan("replay", record=record, feature_rows=(torch.arange(1), torch.arange(1)))
