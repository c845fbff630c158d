"""Laws of routing records that stay in the object store: every answer is that of the same record in one process.

Ray's store is stood for by the objects themselves; the groups of actors have it for real (test_cluster_engines.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scaled.cluster import stretches
from scaled.cluster.routes import StoredRecord
from scaled.cluster.storing import pack_apart, unpack_apart
from scaled.cluster.transfer import pack, unpack
from scaled.megatron_engine.parts import BatchSizes, RoutePart, ScorePart, TokenPart, assemble_scores
from theory.routing.features import RouterFeatures
from theory.routing.measures import routing_metrics
from theory.routing.packed_rows import offsets_of
from theory.routing.record import MISSING, RoutingRecord, index_dtype
from theory.streams import stream

pytestmark = pytest.mark.usefixtures("references_are_objects")

LAYERS, SLOTS, EXPERTS = (1, 2, 5, 8), 2, 9


class HereGroup:
    """Actors that are functions; what they are asked and what they answer travels as between processes."""

    def __init__(self, num: int):
        self.num, self.num_bytes = num, []

    def ask(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        answers = [pack(work(*unpack(pack(arguments)), i)) for i in range(self.num)]
        self.num_bytes += [answer.num_bytes for answer in answers]
        return [unpack(answer) for answer in answers]


def draw_record(seed: int, num_rows: Sequence[int], missing: float = 0.0) -> RoutingRecord:
    """Distinct ascending experts; some row-layers are missing."""
    draws, R = stream(seed, "stored"), sum(num_rows)
    ids = torch.rand(R, len(LAYERS), EXPERTS, generator=draws).topk(SLOTS).indices.sort(-1).values
    ids[torch.rand(R, len(LAYERS), generator=draws) < missing] = MISSING
    return RoutingRecord(ids.to(index_dtype(EXPERTS)), offsets_of(num_rows), LAYERS, EXPERTS)


def travelled(
    record: RoutingRecord, num: int, group: HereGroup, home: int = 0, sets: Sequence[Sequence[int]] = ()
) -> StoredRecord:
    """The record as its receiver has it, its ids in `num` objects, cut by these sets of layers."""
    parcel, *stored = pack_apart({"record": record}, num, least=1, layer_sets=sets)
    assert all(entry.dtype != "int8" for entry in parcel.bucket.entries), "ids travelled with the answer"
    return unpack_apart(parcel, stored, group, home)["record"]


def of_ranks(record: RoutingRecord, group: HereGroup) -> StoredRecord:
    """The record from ranks: two stages of layers, each of which has two that share out positions; in micro-batches of
    every second response."""
    parts, longest = [], max(record.num_rows_B)
    for home in range(4):
        layers, rows = LAYERS[home // 2 :: 2], ((0, longest // 2), (longest // 2, longest))[home % 2]
        for first in (0, 1):
            chosen = list(range(len(record)))[first::2]
            if chosen:
                part = record.part(responses=chosen, rows=rows, layers=layers)
                parts.append((travelled(part, 1, group, home), chosen, rows[0]))
    whole = RoutingRecord.assembled(parts, record.num_rows_B)
    assert isinstance(whole, StoredRecord)
    return whole


def same(stored: RoutingRecord, here: RoutingRecord) -> None:
    """Equal in ids, rows, layers and counts; what is stored stays so."""
    assert isinstance(stored, StoredRecord) and not isinstance(here, StoredRecord)
    assert torch.equal(stored.experts, here.experts) and stored.experts.dtype == here.experts.dtype
    assert stored.num_rows_B == here.num_rows_B and stored.layer_numbers == here.layer_numbers
    assert (stored.num_slots, stored.nbytes, stored.num_experts) == (here.num_slots, here.nbytes, here.num_experts)
    assert stored.num_missing_rows == here.num_missing_rows and len(stored) == len(here)


ROWS = st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(lambda rows: sum(rows) > 0)


SETS = st.sampled_from([(), (range(9),), (range(5), range(5, 9)), ((1, 8), (2, 5)), ((2,), (5, 8), (1,))])
"""Sets of layers by which records are cut."""


@given(st.integers(0, 99), ROWS, st.integers(3, 6), SETS, st.data())
def test_a_stored_record_is_the_record(
    seed: int, rows: list[int], num: int, sets: Sequence[Sequence[int]], data: st.DataObject
) -> None:
    """Selecting, concatenating, splicing and a rank's part give the same ids, however many objects they lie in, and by
    whatever layers they are cut."""
    group, here = HereGroup(1), draw_record(seed, rows, missing=0.2)
    stored = travelled(here, num, group, sets=sets)
    same(stored, here)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=8))
    same(stored.select(chosen), here.select(chosen))
    both = RoutingRecord.concat([stored.select(chosen), stored])
    same(both, RoutingRecord.concat([here.select(chosen), here]))
    stretches = [[(i, data.draw(st.integers(0, rows[i]))) for i in chosen], [(0, 0)]]
    spliced = [
        RoutingRecord.spliced([[(record, i, start) for i, start in some] for some in stretches])
        for record in (stored, here)
    ]
    same(*spliced)
    start = data.draw(st.integers(0, 6))
    window = (start, data.draw(st.integers(start, 7)))
    asked = {"responses": chosen, "rows": window, "layers": (2, 8), "num_empty": 2}
    ours, theirs = both.part(**asked), RoutingRecord.concat([here.select(chosen), here]).part(**asked)
    assert not isinstance(ours, StoredRecord) and torch.equal(ours.experts, theirs.experts)
    assert ours.num_rows_B == theirs.num_rows_B and ours.layer_numbers == theirs.layer_numbers


@given(st.integers(0, 99), ROWS, st.integers(3, 5), SETS)
def test_metrics_of_ranks_are_those_of_one_process(
    seed: int, rows: list[int], num: int, sets: Sequence[Sequence[int]]
) -> None:
    """Layers over stages, positions and responses over ranks, missing rows: every metric has the same bits, whole and
    for a selection; and the driver is sent no ids."""
    group = HereGroup(4)
    mu, old = draw_record(seed, rows, missing=0.1), draw_record(seed + 1, rows)
    # Where half of the rows agree, tokens do at times.
    agrees_R = torch.rand(sum(rows), generator=stream(seed, "agrees")) < 0.5
    old.experts[agrees_R] = torch.where(mu.experts == MISSING, old.experts, mu.experts)[agrees_R]
    stored_mu, stored_old = travelled(mu, num, HereGroup(1), sets=sets), of_ranks(old, group)
    same(stored_old, old)
    assert routing_metrics(stored_mu, stored_old) == routing_metrics(mu, old)
    chosen = list(range(len(rows)))[::-2]
    if sum(rows[b] for b in chosen):
        assert routing_metrics(stored_mu.select(chosen), stored_old.select(chosen)) == routing_metrics(
            mu.select(chosen), old.select(chosen)
        )


def test_what_comes_back_is_numbers_of_rows_not_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two whole numbers a row from each stage, also where ranks compare a response at a time; each rank counts its own
    rows."""
    monkeypatch.setattr(stretches, "BLOCK_BYTES", 1)
    group, mu, old = HereGroup(4), draw_record(0, [400, 300, 5]), draw_record(1, [400, 300, 5])
    stored_mu, stored_old = travelled(mu, 2, HereGroup(1)), of_ranks(old, group)
    assert routing_metrics(stored_mu, stored_old) == routing_metrics(mu, old)
    assert sum(group.num_bytes) < 2 * 2 * 4 * 705 + 4 * 2000
    assert min(group.num_bytes) > 2 * 4 * 300


def test_blocks_are_whole_responses_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they are the record; each is within the bound, or one response."""
    row_bytes = len(LAYERS) * SLOTS
    monkeypatch.setattr(stretches, "BLOCK_BYTES", 10 * row_bytes)
    rows = [3, 3, 4, 1, 12, 0, 9, 2]
    here = draw_record(3, rows)
    for stored in (of_ranks(here, HereGroup(4)), travelled(here, 3, HereGroup(1))):
        found = list(stored.blocks())
        assert [len(block) for block in found] == [10, 1, 12, 9, 2]
        assert torch.equal(torch.cat(found), here.experts)


def test_a_selection_keeps_no_object_that_it_does_not_need() -> None:
    """The object store may drop the routes of responses that nobody holds."""
    stored = travelled(draw_record(0, [2, 2, 2, 2]), 4, HereGroup(1))
    assert len(stored.sources) == 4 and len(stored.select([3, 1]).sources) == 2


def test_a_row_from_no_rank_or_from_two_is_named() -> None:
    """Parts that leave a row of a layer out, or have it twice, are refused as they are in one process."""
    here, group = draw_record(0, [3, 4]), HereGroup(2)
    whole, last = travelled(here, 1, group), travelled(here.part(responses=[1], rows=(3, 4), layers=[5]), 1, group)
    with pytest.raises(ValueError, match="response 1, row 3, layer 5, got more than one"):
        RoutingRecord.assembled([(whole, [0, 1], 0), (last, [1], 3)], [3, 4])
    with pytest.raises(ValueError, match="response 1, row 4, layer 1, got none"):
        RoutingRecord.assembled([(whole, [0, 1], 0)], [3, 5])
    with pytest.raises(ValueError, match="got layer 3"):
        whole.part(layers=[3])


def rank_parts(old: RoutingRecord, used: RoutingRecord, T: int) -> list[ScorePart]:
    """The parts of two stages of layers, with two ranks of positions each, of an old pass in one micro-batch."""
    sizes, B, longest = BatchSizes(tuple(old.num_rows_B), T), len(old), max(old.num_rows_B)
    parts = []
    for home in range(4):
        rows = ((0, longest // 2), (longest // 2, longest))[home % 2]
        asked = {"rows": rows, "layers": LAYERS[home // 2 :: 2]}
        natural, replayed = old.part(**asked), used.part(**asked)
        numbers = torch.cat([torch.arange(rows[0], rows[0] + n) for n in natural.num_rows_B])
        scores = RouterFeatures(numbers, natural.offsets, None, replayed.experts.float(), natural.layer_numbers)
        route = RoutePart(tuple(range(B)), rows[0], natural.layer_numbers, replayed, natural, scores=scores)
        zeros = torch.zeros(B, T)
        tokens = (TokenPart(tuple(range(B)), zeros, zeros, zeros),) if home == 3 else ()
        parts.append(ScorePart(sizes, tokens, (route,)))
    return parts


def test_parts_of_ranks_become_the_same_scores_wherever_their_routes_are() -> None:
    """Experts, natural experts and router scores of stored parts are those of parts in this process."""
    old, used = draw_record(1, [5, 2, 6]), draw_record(2, [5, 2, 6])
    group, here = HereGroup(4), rank_parts(old, used, T=4)
    travelling = [pack_apart(part, 16) for part in here]
    there = [unpack_apart(parcel, stored, group, i) for i, (parcel, *stored) in enumerate(travelling)]
    local, remote = assemble_scores(here), assemble_scores(there)
    for name, record in (("experts", used), ("natural", old)):
        same(getattr(remote, name), getattr(local, name))
        assert torch.equal(getattr(local, name).experts, record.experts)
    for found in (local.router_scores, remote.router_scores):
        assert found is not None and torch.equal(found.offsets, used.offsets)
        assert torch.equal(found.logits, used.experts.float())
    with pytest.raises(ValueError, match="response 0, row 3, layer 1, got none"):
        assemble_scores([part for i, part in enumerate(there) if i != 1])
