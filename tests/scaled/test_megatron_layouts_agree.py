"""Laws of layouts: one, two or four ranks, however they split the model, do what the sandbox's engine does, in fp32.

Sums run in other orders in every layout. Measured over all: 3e-6 nats in log-probabilities, 8e-6 in router
logits of size 20, 1.2e-6 in weights after two updates, 2e-6 in a gradient norm of 5; tolerances are four times that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scaled.config import ModelBlock, TrainingBlock
from tests.scaled.megatron_world import free_ports, in_turn, spawn
from tests.scaled.rank_world import (
    LAYOUTS,
    algorithm,
    batch,
    farthest,
    layers,
    merged,
    minibatches,
    on_host,
    passes,
    sandbox_engine,
    training,
    write_model,
)
from theory.contracts import TokenScores
from theory.routing.predictor import fold

LOGP, LOGITS, WEIGHTS = 1e-5, 4e-5, 5e-6
DENSE = (1,)  # pipeline stages and chunks with different numbers of routers
# Besides every layout as it is: what only together with another layout could break.
CASES: dict[str, dict[str, Any]] = {
    **LAYOUTS,
    "DP2 sharded optimizer": {"distributed_optimizer": True},
    "TP2+EP2 full recompute": {**LAYOUTS["TP2+EP2"], "recompute": "full"},
    "PP2 full recompute": {**LAYOUTS["PP2"], "recompute": "full", "micro_batch_size": 1},
    # A short response of a wide micro-batch lies on one rank alone: the other has no token to score.
    "CP2+EP2 full recompute": {**LAYOUTS["CP2+EP2"], "recompute": "full", "micro_batch_size": 1},
    "EP2 allgather by tokens": {**LAYOUTS["EP2 allgather"], "max_tokens_per_micro_batch": 20},
    "PP2 by tokens": {**LAYOUTS["PP2"], "max_tokens_per_micro_batch": 20, "recompute": "full"},
    "PP2+VPP2 selective recompute": {**LAYOUTS["PP2+VPP2"], "recompute": "selective", "micro_batch_size": 1},
}
# Four ranks: groups of context parallelism beside those of the other kinds.
FOUR: dict[str, dict[str, Any]] = {
    # Ranks that share an expert have unequal numbers of tokens for it.
    "TP2+EP2+ETP2": {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 2},
    "TP2+CP2+EP4": {"tensor_parallel": 2, "context_parallel": 2, "expert_parallel": 4},
    "DP2+CP2 sharded optimizer": {"context_parallel": 2, "distributed_optimizer": True},
    "PP2+VPP2+CP2": {**LAYOUTS["PP2+VPP2"], "context_parallel": 2},
    "PP2+CP2 by tokens": {**LAYOUTS["PP2"], "context_parallel": 2, "max_tokens_per_micro_batch": 20},
}
WORLDS: dict[int, dict[str, dict[str, Any]]] = {1: {"1 rank": {}}, 2: CASES, 4: FOUR}
NUM_RANKS = {name: num_ranks for num_ranks, cases in WORLDS.items() for name in cases}
Ran = Callable[[str], list[dict[str, Any]]]
NUM = 7  # no multiple of two ranks of two responses: some micro-batches are filled up


def run_cases(rank: int, folder: Path, old: TokenScores, num_ranks: int, ports: list[int]) -> dict[str, Any]:
    """On one rank, for each case: the parts of every pass, of two updates, and what it holds afterwards."""
    from scaled.megatron_engine.rank import MegatronRank

    rollouts = batch(NUM)
    routings = passes(rollouts, layers(DENSE))

    def act(_: str, layout: TrainingBlock) -> dict[str, Any]:
        engine = MegatronRank(ModelBlock(path=str(folder)), layout, algorithm(), keep_reference=True)
        result: dict[str, Any] = {key: engine.score(rollouts, routing) for key, routing in routings.items()}
        result["reference"] = engine.score_reference(rollouts)
        made = minibatches(rollouts, old, routings["replay"])
        result["updates"] = [engine.update(part, algorithm().objective, routing) for part, routing in made]
        result["weights"] = on_host(engine.export())
        result["folded"] = on_host(engine.export(folded=True))
        result["predictor"] = engine.predictor_weights()
        result["gradients"] = {} if layout.distributed_optimizer else on_host(engine.gradients())
        return result

    layouts = {name: training(num_ranks, **fields) for name, fields in WORLDS[num_ranks].items()}
    return in_turn(rank, layouts, ports, act)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, Any]:
    folder = write_model(tmp_path_factory.mktemp("layouts") / "model", DENSE)
    engine = sandbox_engine(folder, algorithm(), keep_reference=True)
    rollouts = batch(NUM)
    routings = passes(rollouts, layers(DENSE))
    result: dict[str, Any] = {name: engine.score(rollouts, routing) for name, routing in routings.items()}
    assert not torch.equal(result["replay"].experts.experts, result["replay"].natural.experts)
    result["reference"] = engine.score_reference(rollouts)
    made = minibatches(rollouts, result["replay"], routings["replay"])
    result["updates"] = [engine.update(part, algorithm().objective, routing) for part, routing in made]
    return {
        **result,
        "folder": folder,
        "weights": dict(engine.named_tensors()),
        "predictor": engine.predictor_weights(),
    }


@pytest.fixture(scope="module")
def ranks(expected) -> Ran:
    """The ranks' results of a case; processes are started once for each number of ranks, when first asked for."""

    @functools.cache
    def world(num_ranks: int) -> list[dict[str, Any]]:
        ports = free_ports(len(WORLDS[num_ranks]))
        folder, old = expected["folder"], expected["replay"]
        return spawn(num_ranks, run_cases, folder, old, num_ranks, ports, limit_s=400)

    return lambda case: [rank[case] for rank in world(NUM_RANKS[case])]


@pytest.mark.parametrize("source", ["natural", "replay", "predicted", "predicted, live gates"])
@pytest.mark.parametrize("case", NUM_RANKS)
def test_old_passes(case, source, ranks, expected):
    """All ranks' parts make the sandbox's scores: log-probs to rounding, experts and feature rows exactly."""
    from scaled.megatron_engine.parts import assemble_scores

    ours, theirs = assemble_scores([rank[source] for rank in ranks(case)]), expected[source]
    assert ours.experts is not None and ours.natural is not None and ours.features is not None
    assert torch.equal(ours.experts.experts, theirs.experts.experts)
    assert torch.equal(ours.natural.experts, theirs.natural.experts)
    assert torch.equal(ours.experts.offsets, theirs.experts.offsets)
    assert ours.experts.layer_numbers == layers(DENSE)
    assert torch.equal(ours.features.rows, theirs.features.rows)
    assert torch.equal(ours.features.offsets, theirs.features.offsets)
    assert (ours.logp_BT - theirs.logp_BT).abs().max() < LOGP
    assert (ours.entropy_BT - theirs.entropy_BT).abs().max() < LOGP
    assert (ours.sum_squares_BT - theirs.sum_squares_BT).abs().max() < LOGP
    assert (ours.features.logits - theirs.features.logits).abs().max() < LOGITS
    assert (ours.features.hidden - theirs.features.hidden).abs().max() < LOGITS
    assert torch.equal(ours.router_scores.rows, theirs.router_scores.rows)
    assert (ours.router_scores.logits - theirs.router_scores.logits).abs().max() < LOGITS


@pytest.mark.parametrize("case", NUM_RANKS)
def test_reference_passes(case, ranks, expected):
    """All ranks' parts make the sandbox's log pi_ref."""
    from scaled.megatron_engine.parts import assemble_logp

    ours = assemble_logp([rank["reference"] for rank in ranks(case)])
    assert (ours - expected["reference"]).abs().max() < LOGP


@pytest.mark.parametrize("case", NUM_RANKS)
def test_updates(case, ranks, expected):
    """Two updates give the sandbox's metrics, pi, natural routes and router logits."""
    from scaled.megatron_engine.parts import assemble_stats

    for index, theirs in enumerate(expected["updates"]):
        ours = assemble_stats([rank["updates"][index] for rank in ranks(case)])
        assert ours.metrics.keys() == theirs.metrics.keys()
        for name, value in theirs.metrics.items():
            assert ours.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
        assert ours.natural is not None and ours.features is not None
        assert torch.equal(ours.natural.experts, theirs.natural.experts)
        assert (ours.logp_pi_BT - theirs.logp_pi_BT).abs().max() < LOGP
        assert (ours.features.logits - theirs.features.logits).abs().max() < LOGITS


@pytest.mark.parametrize("case", NUM_RANKS)
def test_weights_and_predictor_after_updates(case, ranks, expected):
    """All ranks together hold the sandbox's weights, each tensor once, and its predictor, replicas to the bit."""
    exported = [rank["weights"] for rank in ranks(case)]
    assert len(merged(exported)) == sum(map(len, exported))
    assert farthest(merged(exported), expected["weights"]) < WEIGHTS
    predictor = merged([rank["predictor"] for rank in ranks(case)])
    assert farthest(predictor, expected["predictor"]) < 1e-6
    assert max(W_p.abs().max() for W_p in predictor.values()) > 1e-3


@pytest.mark.parametrize("case", ["DP2", "CP2", "DP2+CP2 sharded optimizer"])
def test_replicas_share_the_export_out(case, ranks):
    """Ranks that hold the same weights yield about equally many elements each, so that all work during a push."""
    sizes = [sum(tensor.numel() for tensor in rank["weights"].values()) for rank in ranks(case)]
    assert min(sizes) > 0.8 * sum(sizes) / len(sizes)


@pytest.mark.parametrize("case", NUM_RANKS)
def test_the_predictor_is_folded_where_its_gate_is(case, ranks):
    """The folded export is to the bit `fold` of all ranks' weights and predictor, each tensor from the same rank."""
    plain, folded = ([rank[key] for rank in ranks(case)] for key in ("weights", "folded"))
    assert [part.keys() for part in folded] == [part.keys() for part in plain]
    weights, ours = merged(plain), merged(folded)
    gates = {number: f"model.layers.{number}.mlp.gate.weight" for number in layers(DENSE)}
    theirs = dict(fold(weights.items(), merged([rank["predictor"] for rank in ranks(case)]), gates))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert sum(not torch.equal(ours[name], weights[name]) for name in weights) == len(layers(DENSE))


@pytest.mark.parametrize("case", [name for name in NUM_RANKS if name != "DP2" and "sharded" not in name])
def test_gradients(case, ranks):
    """The gradient that `gradients` gives is the same in every layout, tensor by tensor."""
    ours, plain = (merged([rank["gradients"] for rank in ranks(name)]) for name in (case, "DP2"))
    assert farthest(ours, plain) < 1e-5
    assert max(gradient.abs().max() for gradient in plain.values()) > 0.1


def test_nothing_is_sent_twice(ranks):
    """Ranks report each row of each layer once, and each response's log-probs once."""
    rows = [response.num_tokens - 1 for response in batch(NUM).responses]
    for name in NUM_RANKS:
        parts = [rank["replay"] for rank in ranks(name)]
        reported = sum(route.used.experts[..., 0].numel() for part in parts for route in part.routes)
        assert reported == sum(rows) * len(layers(DENSE)), name
        assert sorted(i for part in parts for token in part.tokens for i in token.indices) == list(range(NUM)), name
