"""Laws of router features that stay in the object store: every answer has the bits of one process.

Ray's store is stood for by the objects themselves; a run on the cluster has it for real (test_cluster_run.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scaled.cluster import features as stored_features
from scaled.cluster.features import LEAST_ROWS, StoredFeatures, StoredRows, products
from scaled.cluster.storing import pack_apart, unpack_apart
from scaled.cluster.transfer import pack, unpack
from scaled.megatron_engine.parts import BatchSizes, RoutePart, local_features
from tests.contracts import worlds
from tests.scaled.test_stored_routes import LAYERS, ROWS, SETS, HereGroup
from theory.algorithm import Algorithm, OptimizerSettings
from theory.loop import global_step, hand_over
from theory.objectives import Objective, preset
from theory.routing.features import RouterFeatures, layer_products
from theory.routing.measures import route_distances, route_kl, route_tv
from theory.routing.packed_rows import offsets_of
from theory.routing.predictor import PredictorSettings
from theory.streams import stream

pytestmark = pytest.mark.usefixtures("references_are_objects")

WIDTH, EXPERTS = 16, 12


def draw_features(seed: int, num_rows: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> RouterFeatures:
    """Rows 0, 2, 4, ... of each response."""
    draws, F = stream(seed, "stored"), sum(num_rows)
    rows = torch.cat([2 * torch.arange(n) for n in num_rows])
    hidden, logits = (torch.randn(F, len(LAYERS), n, generator=draws).to(dtype) for n in (WIDTH, EXPERTS))
    return RouterFeatures(rows, offsets_of(num_rows), hidden, logits, LAYERS)


def predictor(seed: int = 0) -> dict[int, Tensor]:
    draws = stream(seed, "predictor")
    return {n: torch.randn(WIDTH, EXPERTS, generator=draws) for n in LAYERS}


def travelled(
    features: RouterFeatures, num: int, group: HereGroup, home: int = 0, sets: Sequence[Sequence[int]] = ()
) -> StoredFeatures:
    """The features as their receiver has them, hidden states and logits in `num` objects each and nowhere else, cut by
    these sets of layers."""
    parcel, *stored = pack_apart({"features": features}, 2 * num, least=1, layer_sets=sets)
    assert all(len(entry.shape) < 3 for entry in parcel.bucket.entries), "rows of layers travelled"
    return unpack_apart(parcel, stored, group, home)["features"]


def parts_of(features: RouterFeatures) -> list[RoutePart]:
    """The parts of two stages of layers with two ranks each, of every second response; none without a row."""
    parts = []
    for home in range(4):
        layers = LAYERS[home // 2 :: 2]
        chosen = list(range(len(features)))[home % 2 :: 2]
        some = features.select(chosen)
        own = some.at(torch.arange(len(some.rows)), some.offsets, layers)
        parts.append(RoutePart(tuple(chosen), 0, layers, None, None, own))
    return parts


def of_ranks(features: RouterFeatures, group: HereGroup) -> RouterFeatures:
    """The features from those ranks' parts."""
    there = []
    for home, part in enumerate(parts_of(features)):
        parcel, *stored = pack_apart(part, 16)
        there.append(unpack_apart(parcel, stored, group, home))
    found = local_features(BatchSizes((12,) * len(features), 1), there)
    assert found is not None
    return found


def same(stored: RouterFeatures, here: RouterFeatures) -> None:
    """Equal in all fields, to the bit; what is stored stays so."""
    assert isinstance(stored, StoredFeatures) and not isinstance(here, StoredFeatures)
    assert here.hidden is not None and stored.has_hidden
    for name in ("rows", "offsets", "hidden", "logits"):
        ours, theirs = getattr(stored, name), getattr(here, name)
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype, name
    assert stored.layer_numbers == here.layer_numbers and stored.nbytes == here.nbytes and len(stored) == len(here)


@given(st.integers(0, 99), ROWS, st.integers(3, 6), SETS, st.data())
def test_stored_features_are_the_features(
    seed: int, rows: list[int], num: int, sets: Sequence[Sequence[int]], data: st.DataObject
) -> None:
    """Selecting, concatenating and some rows and layers give the same features, however many objects they lie in, and
    by whatever layers they are cut."""
    group, here = HereGroup(1), draw_features(seed, rows)
    stored = travelled(here, num, group, sets=sets)
    same(stored, here)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=8))
    same(stored.select(chosen), here.select(chosen))
    same(RouterFeatures.concat([stored.select(chosen), stored]), RouterFeatures.concat([here.select(chosen), here]))
    where = torch.tensor(data.draw(st.lists(st.integers(0, sum(rows) - 1), min_size=1, max_size=8)))
    asked = where, offsets_of([len(where)]), (2, 8)
    same(stored.at(*asked), here.at(*asked))
    assert group.num_bytes == [], "nobody had to be asked"


def test_features_that_are_cut_otherwise_are_not_joined() -> None:
    """A response would have no source at the other's layers."""
    one, other = (travelled(draw_features(0, [2, 3]), 4, HereGroup(1), sets=sets) for sets in ((), ((1, 2), (5, 8))))
    with pytest.raises(AssertionError, match="cut by the same layers"):
        RouterFeatures.concat([one, other])


@given(st.integers(0, 99), ROWS, st.data())
def test_parts_of_ranks_become_the_same_features(seed: int, rows: list[int], data: st.DataObject) -> None:
    """Stages and ranks are put together, whether their hidden states have travelled or not, and selected from."""
    here, group = draw_features(seed, rows), HereGroup(4)
    stored = of_ranks(here, group)
    same(stored, here)
    local = local_features(BatchSizes((12,) * len(here), 1), parts_of(here))
    assert local is not None and torch.equal(local.hidden, here.hidden) and torch.equal(local.logits, here.logits)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=8))
    one = stored.select(chosen)
    assert isinstance(one, StoredFeatures)
    same(unpack(pack(one)), here.select(chosen))


@pytest.mark.parametrize("sign", [1, -1])
def test_products_are_made_where_hidden_states_are_read(sign: int) -> None:
    """p + h W_p and p - h W_p have the bits of one process, in a process that reads its rows."""
    here, group, W = draw_features(0, [9, 12, 10]), HereGroup(4), predictor()
    stored = of_ranks(here, group)
    shifted, expected = (one.plus_bias(W) if sign > 0 else one.minus_bias(W) for one in (stored, here))
    for one in (shifted, shifted.without_hidden()):
        read, asked = unpack(pack(one.select([2]))), (torch.arange(1, 10), offsets_of([9]), (2, 8))
        assert torch.equal(read.at(*asked).logits, expected.select([2]).at(*asked).logits)
    assert group.num_bytes == []


@pytest.mark.parametrize("block", [1, 100, 2**24], ids=["a row", "two rows", "all rows"])
@pytest.mark.parametrize("shift", [None, 1, -1], ids=["as stored", "plus", "minus"])
def test_logits_are_compared_where_they_were_made(
    shift: int | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KL and TV of pi's logits from cached ones have the bits of one process, however many rows a rank compares at
    once; two numbers for each row and layer come back, and the driver reads nothing."""
    monkeypatch.setattr(stored_features, "BLOCK_BYTES", block)
    rows, makers, engines, W = [9, 12, 10], HereGroup(4), HereGroup(1), predictor()
    live, cached = draw_features(0, rows, torch.float32).without_hidden(), draw_features(1, rows, torch.float32)
    there, kept = of_ranks(live, makers), travelled(cached, 3, engines)
    if shift is not None:
        cached, kept = (one.plus_bias(W) if shift > 0 else one.minus_bias(W) for one in (cached, kept))
    expected = route_distances(live, cached.without_hidden())
    assert expected == (
        route_kl(live.logits, cached.logits).item(),
        route_tv(live.logits, cached.logits).item(),
    )
    with monkeypatch.context() as patch:
        patch.setattr(StoredRows, "read", only_there(StoredRows.read))
        assert route_distances(there, kept.without_hidden()) == expected
    assert sum(makers.num_bytes) < 31 * len(LAYERS) * 2 * 8 + 4 * 2000
    assert engines.num_bytes == []


def test_other_rows_are_not_compared() -> None:
    """Features of other rows, responses or layers are an error that names both, stored or not."""
    live, other = draw_features(0, [3, 2]), draw_features(0, [2, 3])
    fewer = live.at(torch.arange(5), live.offsets, LAYERS[:2])
    moved = RouterFeatures(live.rows + 1, live.offsets, live.hidden, live.logits, LAYERS)
    for first, second in ((live, other), (live, fewer), (live, moved), (of_ranks(live, HereGroup(4)), moved)):
        with pytest.raises(
            ValueError, match=r"expected features of the same \(rows, responses, layers\), got \(5, 2, "
        ):
            route_distances(first, second)


def test_a_product_of_few_rows_has_the_bits_of_many() -> None:
    """At the width of Qwen3-30B, a row alone has the bits that it has among many; without padding it has not."""
    draws = stream(0, "few")
    hidden, W = torch.randn(40, 1, 2048, generator=draws), torch.randn(2048, 128, generator=draws)
    whole = products(hidden, {0: W}, (0,), torch.float32)
    assert torch.equal(whole, layer_products(hidden, W[None]))
    for num in range(1, LEAST_ROWS + 4):
        assert torch.equal(products(hidden[:num], {0: W}, (0,), torch.float32), whole[:num]), num


def test_a_selection_keeps_no_object_that_it_does_not_need() -> None:
    """The object store may drop hidden states of responses, and of layers, that nobody holds."""
    stored = travelled(draw_features(0, [2, 2, 2, 2]), 4, HereGroup(1))
    one = stored.select([3, 1])
    assert isinstance(one, StoredFeatures) and one.stored_hidden is not None
    assert len(stored.stored_logits.sources) == 4
    assert len(one.stored_logits.sources) == len(one.stored_hidden.sources) == 2
    ranks = of_ranks(draw_features(0, [2, 2]), HereGroup(4))
    own = ranks.at(torch.tensor([0]), offsets_of([1]), (1, 5))
    assert isinstance(own, StoredFeatures) and len(own.stored_logits.sources) == 1


def test_logits_alone_are_stored_too() -> None:
    """Features without hidden states, as pi's of an update, have nothing that a predictor could shift."""
    plain = draw_features(0, [3]).without_hidden()
    found = travelled(plain, 1, HereGroup(1))
    assert not found.has_hidden and found.hidden is None and found.nbytes == plain.nbytes
    assert torch.equal(found.logits, plain.logits)
    with pytest.raises(ValueError, match=r"expected features with the router's input \(hidden\), got logits alone"):
        found.plus_bias(predictor())
    kept = travelled(draw_features(0, [3]), 1, HereGroup(1))
    with pytest.raises(ValueError, match=r"expected a predictor for layers \[1, 2, 5, 8\], got none for \[8\]"):
        kept.plus_bias({n: w for n, w in predictor().items() if n != 8})
    with pytest.raises(ValueError, match="expected hidden in all parts or in none"):
        RouterFeatures.concat([kept, found])


def only_there(read: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`read` that fails in the driver, where sources know the group of actors that made them."""

    def checked(self: StoredRows, layer_numbers: Sequence[int]) -> Tensor:
        assert all(source.owner.group is None for source in self.sources), "the driver reads stored rows"
        return read(self, layer_numbers)

    return checked


class Apart:
    """An engine or a trainer whose arguments and answers travel as between processes; all that it has stays its own."""

    def __init__(self, inner: Any):
        self.inner, self.group = inner, HereGroup(1)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name not in ("generate", "score", "update"):
            return method

        def call(*arguments: Any) -> Any:
            parcel, *stored = pack_apart(method(*unpack(pack(arguments))), 16, least=64)
            return unpack_apart(parcel, stored, self.group, 0)

        return call


RSPO = preset("gmpo", router_shift_floor=0.8)


@pytest.mark.parametrize(
    ("mode", "objective"),
    [
        ("none", preset("minirl")), ("Pr2", preset("minirl")), ("Pr3", preset("minirl")), ("none", RSPO), ("Pr2", RSPO),
        ("R3", RSPO),
    ],
)  # fmt: skip
def test_global_steps_are_the_same(mode: str, objective: Objective, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics and predictors of two steps have the bits of one process, and the driver reads no stored row."""
    monkeypatch.setattr(StoredRows, "read", only_there(StoredRows.read))
    recipe = Algorithm(
        objective=objective, mode=mode, predictor=PredictorSettings(10.0, num_positions=4), num_prompts=4,
        num_responses=2, num_minibatches=2, max_tokens=6, optimizer=OptimizerSettings(learning_rate=1e-2),
    )  # fmt: skip
    engine, theirs = (worlds.rollout_engine("weights-bf16", worlds.model()) for _ in range(2))
    learner, one = (worlds.training_engine(worlds.model(), recipe.predictor) for _ in range(2))
    engine, learner = Apart(engine), Apart(learner)
    hand_over(recipe, engine, learner, version=0)
    hand_over(recipe, theirs, one, version=0)
    for step in range(2):
        found = global_step(step, recipe, engine, learner, worlds.EvenTokens(), seed=3)
        expected = global_step(step, recipe, theirs, one, worlds.EvenTokens(), seed=3)
        assert found.metrics == expected.metrics and found.metrics["routing/route_kl"] > 0
        assert found.metrics.get("predictor/loss", 0.0) > 0 or mode in ("none", "R3")
        assert isinstance(found.rollouts.features if mode == "Pr3" else found.scores.features, StoredFeatures)
        assert isinstance(found.scores.router_scores, StoredFeatures) == objective.uses_router_shift
        assert found.metrics.get("actor/router_shift_ratio", 1.0) < 1 or objective is not RSPO
    for number, W in learner.predictor_weights().items():
        assert bool(W.any()) == (mode not in ("none", "R3")) and torch.equal(W, one.predictor_weights()[number])
