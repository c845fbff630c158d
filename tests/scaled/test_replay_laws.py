"""Laws of replay in Megatron: one for each of the field's historical bugs that a training engine can have.

The numbers in the docstrings' brackets are those of the bugs' catalogue: global lists (1), dense layers (2), row counts
(3), padding (4), recomputation and stale queues (16), reference passes (20), selection bias (22), more experts than a
byte holds (24), shared experts (25), routers without the hook (26). Those of 16 and 20 are in replay_flight_laws.py,
that of dead gradients (17) in rank_update_laws.py.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.scaled.megatron_world import tiny_folder
from tests.scaled.rank_world import (
    OneRank,
    algorithm,
    altered,
    altered_routes,
    batch,
    layers,
    sandbox_engine,
    training,
    verdicts_on,
    write_model,
)
from tests.scaled.replay_flight_laws import FLIGHT_LAWS, minus_threes
from theory.objectives import preset
from theory.routing.passes import RoutingPlan
from theory.routing.record import RoutingRecord


def rows_are_transposed_both_ways(folder: Path) -> None:
    """Row s of response b stands at s * B + b in Megatron and at b * S + s in theory, and comes back."""
    from scaled.megatron_engine.replay import batch_major, position_major

    S, B = 5, 3
    x_SB1 = torch.tensor([[[10 * b + s] for b in range(B)] for s in range(S)])
    x_N1 = batch_major(x_SB1)
    assert x_N1[:, 0].tolist() == [10 * b + s for b in range(B) for s in range(S)]
    assert torch.equal(position_major(x_N1, B), x_SB1.flatten(0, 1))


def two_models_do_not_touch_each_other(folder: Path) -> None:
    """[1] A model built and replayed beside another leaves its routes alone; no router is in Megatron's list."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    rollouts = batch()
    routing = altered(rollouts)
    first = OneRank(folder, algorithm("R3"), keep_reference=True)
    alone = first.score(rollouts, routing)
    second = OneRank(folder, algorithm("R3"))
    assert RouterReplay.global_router_replay_instances == []
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    second.score(rollouts, RoutingPlan("natural"))
    beside = first.score(rollouts, routing)
    assert torch.equal(alone.logp_BT, beside.logp_BT)
    assert torch.equal(alone.experts.experts, beside.experts.experts)  # type: ignore[union-attr]


def layers_are_bound_by_number(folder: Path) -> None:
    """[2] With dense layers 0 and 2 the record's layers 1 and 3 reach routers 1 and 3; another set is an error."""
    dense = (0, 2)
    path = write_model(folder.parent / "dense", dense)
    rollouts = batch()
    record = altered_routes(rollouts, layers(dense), missing=0.0)
    ours, theirs = OneRank(path, algorithm("R3")), sandbox_engine(path, algorithm("R3"))
    routing = RoutingPlan("replay", record=record)
    a, b = ours.score(rollouts, routing), theirs.score(rollouts, routing)
    assert a.experts is not None and a.experts.layer_numbers == (1, 3)
    assert torch.equal(a.experts.experts, record.experts)
    assert (a.logp_BT - b.logp_BT).abs().max() < 1e-5
    renamed = RoutingRecord(record.experts, record.offsets, (0, 1), record.num_experts)
    with pytest.raises(ValueError, match=r"layers \[1, 3\], got \[0, 1\]"):
        ours.score(rollouts, RoutingPlan("replay", record=renamed))
    swapped = RoutingRecord(record.experts.flip(1).contiguous(), record.offsets, (1, 3), record.num_experts)
    assert not torch.equal(ours.score(rollouts, RoutingPlan("replay", record=swapped)).logp_BT, a.logp_BT)


def rows_must_be_those_of_the_batch(folder: Path) -> None:
    """[3] A record with a row too many, too few, or of other responses is an error, not a window's cut."""
    engine = OneRank(folder, algorithm("R3"))
    rollouts = batch()
    record = altered_routes(rollouts, layers())
    longest = max(record.num_rows_B)
    padded = RoutingRecord(
        record.padded(longest).flatten(0, 1), torch.arange(9) * longest, record.layer_numbers, record.num_experts
    )
    for wrong in (
        padded,
        record.part(rows=(0, longest - 1)),
        record.select([1, 0, 2, 3, 4, 5, 6, 7]),
        record.select([0]),
    ):
        with pytest.raises(ValueError, match="rows per response"):
            engine.score(rollouts, RoutingPlan("replay", record=wrong))
    rows = tuple(torch.tensor([n]) for n in record.num_rows_B)
    with pytest.raises(ValueError, match="feature rows in"):
        engine.score(rollouts, RoutingPlan("natural", feature_rows=rows))
    with pytest.raises(ValueError, match="feature rows of 8 responses, got 7"):
        engine.score(rollouts, RoutingPlan("natural", feature_rows=rows[:7]))
    assert engine.score(rollouts, RoutingPlan("natural")).experts is not None  # none of them left anything behind


def missing_rows_and_padding_are_natural(folder: Path) -> None:
    """[4] Rows of -1 get the live router's experts and no other; padding changes nothing for a response."""
    engine = OneRank(folder, algorithm("R3"))
    rollouts = batch()
    record = altered_routes(rollouts, layers(), missing=0.5)
    scores = engine.score(rollouts, RoutingPlan("replay", record=record))
    assert scores.experts is not None and scores.natural is not None
    is_recorded_RL = record.is_recorded
    assert 0.3 < is_recorded_RL.float().mean() < 0.7
    assert torch.equal(scores.experts.experts[is_recorded_RL], record.experts[is_recorded_RL])
    assert torch.equal(scores.experts.experts[~is_recorded_RL], scores.natural.experts[~is_recorded_RL])
    nothing = RoutingRecord(
        torch.full_like(record.experts, -1), record.offsets, record.layer_numbers, record.num_experts
    )
    bare = engine.score(rollouts, RoutingPlan("replay", record=nothing))
    assert torch.equal(bare.logp_BT, engine.score(rollouts, RoutingPlan("natural")).logp_BT)
    shortest = min(range(8), key=lambda b: rollouts.responses[b].num_tokens)
    alone = engine.score(rollouts.select([shortest]), RoutingPlan("replay", record=record.select([shortest])))
    T = alone.logp_BT.shape[1]
    assert (alone.logp_BT[0] - scores.logp_BT[shortest, :T]).abs().max() < 1e-5


def a_selection_bias_chooses_and_stays(folder: Path) -> None:
    """[22, 25] With sigmoid gates, a selection bias and shared experts: the bias chooses, and no update moves it."""
    path = tiny_folder(folder.parent / "moonlight", "deepseek_v3")
    rollouts = batch()
    moe = (1, 2, 3)
    engine = OneRank(path, algorithm("R3", optimizer={"weight_decay": 0.0}))
    natural = engine.score(rollouts, RoutingPlan("natural"))
    assert natural.experts is not None and natural.experts.layer_numbers == moe and natural.experts.num_slots == 2
    replayed = engine.score(rollouts, RoutingPlan("replay", record=natural.experts))
    assert torch.equal(replayed.logp_BT, natural.logp_BT)
    replay = RoutingPlan("replay", record=altered_routes(rollouts, moe, missing=0.0))
    before = {n: t.clone() for n, t in engine.named_tensors() if n.endswith("correction_bias")}
    assert len(before) == 3
    scores = engine.score(rollouts, replay)
    assert torch.equal(scores.experts.experts, replay.record.experts)  # type: ignore[union-attr]
    engine.update(minus_threes(rollouts), preset("minirl"), replay)
    after = dict(engine.named_tensors())
    assert all(torch.equal(after[name], bias) for name, bias in before.items())
    router = engine.rank.policy.chunks[0].decoder.layers[1].mlp.router
    router.expert_bias.fill_(0.0)
    router.expert_bias[5] = 10.0
    biased = engine.score(rollouts, RoutingPlan("natural"))
    assert bool((biased.experts.layer(1) == 5).any(dim=-1).all())  # type: ignore[union-attr]


def natural_routes_are_megatrons_own(folder: Path) -> None:
    """Routed naturally by theory, each family's gate has the experts and log-probs of Megatron's own top-k."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from scaled.megatron_engine.model import build_model
    from scaled.megatron_engine.weights import load_hf

    rollouts = batch(1, seed=3)
    response = rollouts.responses[0]
    sequence = torch.cat([torch.tensor(response.prompt.tokens), response.tokens])
    n = len(sequence) - 1
    for family in ("qwen3_moe", "olmoe", "deepseek_v3", "deepseek_v2"):
        path = tiny_folder(folder.parent / f"own {family}", family)
        engine = OneRank(path, algorithm("none"), micro_batch_size=1)
        ours = engine.score(rollouts, RoutingPlan("natural"))
        chunk = build_model(engine.rank.shape, training())[0]
        load_hf([chunk], engine.rank.shape, engine.rank.layout, path)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
        with torch.no_grad():
            device = engine.rank.policy.device
            logits = chunk(sequence[None, :n].to(device), torch.arange(n, device=device)[None], None)[0].cpu()
        recorded = [indices.sort(dim=-1).values.cpu() for indices in RouterReplay.get_recorded_data()]
        RouterReplay.clear_global_router_replay_instances()
        assert ours.experts is not None and len(recorded) == len(engine.rank.shape.moe_layers)
        for number, indices in zip(engine.rank.shape.moe_layers, recorded, strict=True):
            assert torch.equal(ours.experts.layer(number).to(torch.int64), indices), (family, number)
        logp = logits.log_softmax(-1).gather(1, sequence[1:, None])[-len(response.tokens) :, 0]
        assert (ours.logp_BT[0] - logp).abs().max() < 1e-5, family


def more_experts_than_a_byte_holds(folder: Path) -> None:
    """[24] With 300 experts ids above 255 are replayed as they are."""
    path = tiny_folder(
        folder.parent / "wide", "qwen3_moe", num_experts=300, moe_intermediate_size=8, num_hidden_layers=2
    )
    rollouts = batch(4)
    rows = sum(r.num_tokens - 1 for r in rollouts.responses)
    ids = torch.tensor([[254, 299], [128, 256]]).expand(rows, 2, 2).to(torch.int16)
    offsets = torch.tensor([0, *(r.num_tokens - 1 for r in rollouts.responses)]).cumsum(0)
    record = RoutingRecord(ids.contiguous(), offsets, (0, 1), 300)
    scores = OneRank(path, algorithm("R3")).score(rollouts, RoutingPlan("replay", record=record))
    assert torch.equal(scores.experts.experts, record.experts)  # type: ignore[union-attr]


def a_model_without_the_hook_is_refused(folder: Path) -> None:
    """[26] A router without Megatron's replay hook, as a fused one, is refused before anything runs."""
    from scaled.megatron_engine.replay import ChunkReplay

    engine = OneRank(folder, algorithm("R3"))
    chunk = engine.rank.policy.chunks[0]
    chunk.decoder.layers[0].mlp.router.router_replay = None
    with pytest.raises(ValueError, match="moe_enable_routing_replay"):
        ChunkReplay(chunk, engine.rank.shape.gate)


def models_are_freed(folder: Path) -> None:
    """An engine that is dropped is collected with its routers: nothing process-wide holds them."""
    import weakref

    engine = OneRank(folder, algorithm("R3"))
    engine.score(batch(2), RoutingPlan("natural"))
    router = weakref.ref(engine.rank.policy.chunks[0].decoder.layers[0].mlp.router)
    del engine
    gc.collect()
    assert router() is None


LAWS = (
    rows_are_transposed_both_ways,
    two_models_do_not_touch_each_other,
    layers_are_bound_by_number,
    rows_must_be_those_of_the_batch,
    missing_rows_and_padding_are_natural,
    *FLIGHT_LAWS,
    a_selection_bias_chooses_and_stays,
    natural_routes_are_megatrons_own,
    more_experts_than_a_byte_holds,
    a_model_without_the_hook_is_refused,
    models_are_freed,
)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[str, str | None]:
    return verdicts_on(__name__, write_model(tmp_path_factory.mktemp("replay") / "model"))[0]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_replay(verdicts, law):
    """Each law (its own docstring) holds in a real world of one rank."""
    assert verdicts[law.__name__] is None, verdicts[law.__name__]
