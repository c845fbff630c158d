"""Replay: what each pass of each mode routes by, and a ledger that lets no layer be routed twice or never."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from theory.routing.gates import GATES, Gate, route, weigh
from theory.routing.passes import MODES, PASSES, Mode, PassRouting
from theory.routing.record import MISSING, RoutingRecord, flat_rows
from theory.routing.replay import LedgerError, NaturalRouting, RoutingPass, is_noop
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
        self.jitter = 0.0

    def block(self, i: int, hidden_ND: Tensor, routing: RoutingPass | NaturalRouting) -> Tensor:
        """One MoE layer with a residual."""
        logits_NE = hidden_ND @ self.gates[i] + self.jitter * torch.arange(E)
        experts_NK, weights_NK = routing.route(LAYERS[i], hidden_ND, logits_NE, K, self.gate)
        mixed_NDD = (self.experts[i][experts_NK] * weights_NK[..., None, None]).sum(dim=1)
        return hidden_ND + torch.tanh(torch.einsum("nd,nde->ne", hidden_ND, mixed_NDD))

    def forward(self, inputs_BSD: Tensor, routing: RoutingPass | NaturalRouting) -> Tensor:
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
    return RoutingRecord.pack(payloads, [n + 1 for n in num_rows], LAYERS, E)


def draw_predictor(seed: int, size: float = 0.5) -> dict[int, Tensor]:
    """A random W_p per layer."""
    generator = stream(seed, "predictor")
    return {n: size * torch.randn(D, E, generator=generator) for n in LAYERS}


def run(model: TinyMoE, inputs: Tensor, num_rows: list[int], routing: PassRouting) -> tuple[Tensor, RoutingPass]:
    """One forward under this routing."""
    with RoutingPass(routing, num_rows, inputs.shape[1], LAYERS) as routing_pass:
        outputs = model(inputs, routing_pass)
    return outputs, routing_pass


num_rows_lists = st.lists(st.integers(1, 5), min_size=1, max_size=3)
seeds = st.integers(0, 999)


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
    natural, recorded = run(model, inputs, num_rows, PassRouting("natural"))
    replayed, replay = run(model, inputs, num_rows, PassRouting("replay", record=recorded.used))
    assert torch.equal(replayed, natural)
    assert torch.equal(model(inputs, NaturalRouting()), natural)
    grads = [torch.autograd.grad(out.square().sum(), list(model.parameters())) for out in (natural, replayed)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert replay.changed_fraction == 0
    assert replay.num_native_rows == 0
    assert replay.num_rows == sum(num_rows)
    assert recorded.used is not None
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
    with RoutingPass(PassRouting("replay", record=record), num_rows, width) as routing_pass:
        for number in (4, 1, 2):  # binding is by number: the order of the calls is free
            experts, weights = routing_pass.route(number, hidden, logits, K, gate)
            expected = natural.clone()
            recorded = record.layer(number).long()
            is_there = recorded[:, 0] != MISSING
            expected[rows[is_there]] = recorded[is_there]
            assert torch.equal(experts, expected)
            assert torch.equal(weights, weigh(logits, expected, gate))
    used, live = routing_pass.used, routing_pass.natural
    assert used is not None
    assert live is not None
    assert torch.equal(used.experts[record.is_recorded], record.experts[record.is_recorded])
    assert torch.equal(used.experts[~record.is_recorded], live.experts[~record.is_recorded])
    assert torch.equal(live.layer(2).long(), natural[rows])
    assert routing_pass.num_native_rows == record.num_native_rows
    pairs = zip(used.experts.flatten(0, 1).tolist(), live.experts.flatten(0, 1).tolist(), strict=True)
    differs = [set(a) != set(b) for a, b in pairs]
    assert routing_pass.changed_fraction == pytest.approx(sum(differs) / len(differs), abs=1e-15)


@given(seed=seeds, num_rows=num_rows_lists)
def test_a_micro_batch_is_its_responses(seed: int, num_rows: list[int]) -> None:
    """Routing responses together, in another order, at another width or alone gives each the same record."""
    model, record = TinyMoE(seed), draw_record(seed, num_rows)
    feature_rows = tuple(torch.arange(0, n, 2) for n in num_rows)
    routing = PassRouting("replay", record=record, feature_rows=feature_rows)
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
    plain, natural = run(model, inputs, num_rows, PassRouting("natural"))
    routing = PassRouting("predicted", gates=gates, predictor=draw_predictor(seed, size=0.0))
    predicted, routing_pass = run(model, inputs, num_rows, routing)
    assert torch.equal(predicted, plain)
    assert routing_pass.used is not None
    assert natural.used is not None
    assert torch.equal(routing_pass.used.experts, natural.used.experts)


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
    for gates, weighing in (("predicted", biased), ("live", logits)):
        routing = PassRouting("predicted", gates=gates, predictor=predictor, feature_rows=(torch.tensor([0, 3]),))
        with RoutingPass(routing, [5], 5) as routing_pass:
            for number in LAYERS:
                experts, weights = routing_pass.route(number, hidden, logits, K, gate)
                if number == 1:
                    top = biased.softmax(dim=1).topk(K, dim=1).indices.sort(dim=1).values
                    assert torch.equal(experts, top)
                    assert weights.dtype == dtype
                    assert torch.equal(weights, weighing.to(wide).softmax(dim=1).gather(1, top).to(dtype))
        natural, features = routing_pass.natural, routing_pass.features
        assert natural is not None
        assert torch.equal(natural.layer(1).long(), route(logits, K, gate)[0])
        # Features are h_old and p_old, without the predictor's bias.
        assert features is not None
        assert torch.equal(features.logits, logits[[0, 3], None].expand(-1, 3, -1))
        assert torch.equal(features.hidden, hidden[[0, 3], None].expand(-1, 3, -1))
        assert not features.logits.requires_grad


@pytest.mark.parametrize("name", CONVENTIONS)
@pytest.mark.parametrize("source", ["natural", "replay"])
@given(seed=seeds)
def test_recomputation_changes_no_gradient(name: str, source: str, seed: int) -> None:
    """Activation checkpointing of every layer gives the outputs and gradients of the plain backward, bit for bit."""
    num_rows = [3, 4]
    model, inputs = TinyMoE(seed, CONVENTIONS[name]), draw_inputs(seed, num_rows, 4)
    record = draw_record(seed, num_rows, num_missing=1)
    routing = PassRouting(source, record=record if source == "replay" else None)
    plain, _ = run(model, inputs, num_rows, routing)
    expected = torch.autograd.grad(plain.square().sum(), list(model.parameters()))
    with RoutingPass(routing, num_rows, 4, LAYERS) as routing_pass:
        hidden = inputs.flatten(0, 1)
        for i in range(len(LAYERS)):
            hidden = checkpoint(
                model.block, i, hidden, routing_pass, use_reentrant=False,
                context_fn=lambda: (nullcontext(), routing_pass.recompute()),
            )  # fmt: skip
        grads = torch.autograd.grad(hidden.square().sum(), list(model.parameters()))
    assert torch.equal(hidden.view_as(plain), plain)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


@given(seed=seeds)
def test_recomputed_natural_routes_cannot_flip(seed: int) -> None:
    """Recomputation under other logits (a near tie, say) still gives the first forward's experts, on every row."""
    model, inputs = TinyMoE(seed), draw_inputs(seed, [2, 3], 4)
    with RoutingPass(PassRouting("natural"), [2, 3], 4) as routing_pass:
        hidden = inputs.flatten(0, 1)
        logits = hidden @ model.gates[0]
        first, _ = routing_pass.route(1, hidden, logits, K, model.gate)
        with routing_pass.recompute():
            again, weights = routing_pass.route(1, hidden, -logits, K, model.gate)
        assert torch.equal(again, first)
        assert torch.equal(weights, weigh(-logits, first, model.gate))
    assert not torch.equal(route(-logits, K, model.gate)[0], first)


def test_recomputation_without_its_context_is_an_error() -> None:
    """A checkpointed layer that asks again without `recompute()` fails in backward, instead of routing anew."""
    model, inputs = TinyMoE(0), draw_inputs(0, [3], 3)
    routing_pass = RoutingPass(PassRouting("natural"), [3], 3)
    with routing_pass:
        out = checkpoint(model.block, 0, inputs.flatten(0, 1), routing_pass, use_reentrant=False)
        with pytest.raises(LedgerError, match="layer 1: expected one use per forward, got another"):
            out.sum().backward()


def ask(routing_pass: RoutingPass, number: int, N: int = 3, num_experts: int = E, slots: int = K) -> None:
    """Routes layer `number` on zeros."""
    routing_pass.route(number, torch.zeros(N, D), torch.arange(num_experts).expand(N, -1) * 1.0, slots, GATES["qwen3"])


def replay_pass() -> RoutingPass:
    """A replay over one response of 3 rows."""
    return RoutingPass(PassRouting("replay", record=draw_record(0, [3])), [3], 3)


def go_through(routing_pass: RoutingPass, numbers: Sequence[int], recomputed: Sequence[int] = (), **sizes: int) -> None:
    """Routes these layers in one forward, and then recomputes those."""
    with routing_pass:
        for number in numbers:
            ask(routing_pass, number, **sizes)
        with routing_pass.recompute():
            for number in recomputed:
                ask(routing_pass, number, **sizes)


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
        go_through(RoutingPass(PassRouting("natural"), [3], 3, LAYERS), [1])
    nested = replay_pass()
    with nested.recompute(), pytest.raises(LedgerError, match="one recomputation at a time"):
        nested.recompute().__enter__()


def test_layers_must_be_those_of_the_record() -> None:
    """A layer that the record lacks, and a record of other layers than the model's, are errors (verl #5452)."""
    with pytest.raises(LedgerError, match=r"one of the layers \[1, 2, 4\], got layer 0"):
        go_through(replay_pass(), [0])
    record = draw_record(0, [3])
    with pytest.raises(ValueError, match=r"expected the model's layers \[0, 1, 2\], got \[1, 2, 4\] to be replay"):
        RoutingPass(PassRouting("replay", record=record), [3], 3, (0, 1, 2))


def test_a_pass_lives_once_and_only_inside_its_context() -> None:
    """No routing before, after or twice; a failed pass keeps nothing (stale queues: SkyRL #1908, mcore)."""
    routing_pass = RoutingPass(PassRouting("natural"), [3], 3)
    with pytest.raises(LedgerError, match="layer 1: expected to be inside `with`, got a new pass"):
        ask(routing_pass, 1)
    with pytest.raises(LedgerError, match="expected a pass that has run, got one that is new"):
        _ = routing_pass.used
    with routing_pass:
        ask(routing_pass, 1)
    with pytest.raises(LedgerError, match="layer 2: expected to be inside `with`, got a closed pass"):
        ask(routing_pass, 2)
    with pytest.raises(LedgerError, match=r"expected a new pass .* got one that is closed"), routing_pass:
        pass
    failed = RoutingPass(PassRouting("natural"), [3], 3)
    with pytest.raises(LedgerError, match="layer 1: expected one use"):
        go_through(failed, [1, 1])
    for read in ("used", "natural", "features"):
        with pytest.raises(LedgerError, match="got one that is failed"):
            getattr(failed, read)
    with pytest.raises(LedgerError, match="got one that is failed"), failed:
        pass


def test_results_wait_for_the_whole_forward() -> None:
    """Reading the record before every layer was routed is an error; a dense model has none."""
    with replay_pass() as routing_pass:
        ask(routing_pass, 1)
        with pytest.raises(LedgerError, match=r"over layers \[1, 2, 4\], got none yet of \[2, 4\]"):
            _ = routing_pass.used
        ask(routing_pass, 2)
        ask(routing_pass, 4)
    with RoutingPass(PassRouting("natural", feature_rows=(torch.arange(2),)), [3], 3) as dense:
        pass
    assert dense.used is None
    assert dense.natural is None
    assert dense.features is None


def test_sizes_that_do_not_fit_name_both_numbers() -> None:
    """Rows, slots, experts and feature rows of another batch or model are errors (verl #5989, sglang #36515)."""
    record = draw_record(0, [3])
    with pytest.raises(ValueError, match=r"expected a record of \[4\] rows per response, got \[3\]"):
        RoutingPass(PassRouting("replay", record=record), [4], 4)
    with pytest.raises(ValueError, match="expected a width of at least 3 rows, got 2"):
        RoutingPass(PassRouting("natural"), [3], 2)
    for kwargs, message in (
        ({"N": 6}, r"layer 1: expected 3 rows \(1 responses x 3\), got 6"),
        ({"num_experts": 9}, "layer 1: expected 3 of 8 experts as recorded, got 3 of 9"),
        ({"slots": 2}, "layer 1: expected 3 of 8 experts as recorded, got 2 of 8"),
    ):
        with pytest.raises(ValueError, match=message):
            go_through(replay_pass(), [1], **kwargs)
    with RoutingPass(PassRouting("natural"), [3], 3) as routing_pass:
        ask(routing_pass, 1)
        with pytest.raises(ValueError, match="layer 2: expected 8 experts as before, got 9"):
            ask(routing_pass, 2, num_experts=9)
    for rows, message in (
        ((torch.tensor([0, 3]),), r"response 0: expected feature rows in \[0, 3\), got \[0, 3\]"),
        ((torch.tensor([0]), torch.tensor([0])), "expected feature rows of 1 responses, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            RoutingPass(PassRouting("natural", feature_rows=rows), [3], 3)


def test_contradictory_routings_are_errors() -> None:
    """A replay needs a record and nothing else may have one; likewise for the predictor (slime #1909, verl #7805)."""
    record, predictor = draw_record(0, [3]), draw_predictor(0)
    with pytest.raises(ValueError, match="record if and only if source is 'replay', got no record with 'replay'"):
        PassRouting("replay")
    with pytest.raises(ValueError, match="got a record of 1 responses with 'natural'"):
        PassRouting("natural", record=record)
    with pytest.raises(ValueError, match=r"predictor if and only if .* got one for layers \[\] with 'predicted'"):
        PassRouting("predicted")
    with pytest.raises(ValueError, match=r"got one for layers \[1, 2, 4\] with 'replay'"):
        PassRouting("replay", record=record, predictor=predictor)
    with pytest.raises(ValueError, match="gates 'predicted' only with source 'predicted', got source 'natural'"):
        PassRouting("natural", gates="predicted")
    with pytest.raises(ValueError, match="expected feature rows of 1 responses, got 2"):
        PassRouting("replay", record=record, feature_rows=(torch.arange(1), torch.arange(1)))


def test_a_replay_that_does_nothing_is_noticed() -> None:
    """No-op: every route equals the natural one although the engines disagree; one changed route clears it."""
    record, other = draw_record(0, [3, 4], num_missing=1), draw_record(1, [3, 4])
    assert is_noop(record, record, discrepancy=0.01)
    assert not is_noop(record, record, discrepancy=0.0)
    assert not is_noop(record, other, discrepancy=0.01)
    with pytest.raises(ValueError, match="discrepancy of at least 0, got -1"):
        is_noop(record, record, discrepancy=-1.0)
