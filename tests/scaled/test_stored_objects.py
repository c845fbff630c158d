"""Laws of the objects in which an answer's largest tensors lie: whole responses of one kind, neither small nor many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from scaled.cluster import sources, storing
from scaled.cluster.storing import pack_apart, stored_rollouts, unpack_apart
from scaled.megatron_engine.parts import RoutePart
from scaled.objects import LEAST_BYTES, OF_ENGINE
from tests.contracts import worlds
from tests.scaled.test_stored_features import draw_features
from tests.scaled.test_stored_routes import LAYERS, ROWS, SLOTS, HereGroup, draw_record
from tests.scaled.test_stored_tokens import draw_top
from theory.contracts import Sampling
from theory.routing.features import RouterFeatures

pytestmark = pytest.mark.usefixtures("references_are_objects")

ROW_BYTES = len(LAYERS) * SLOTS
"""Of int8."""


def part(num_rows: Sequence[int]) -> RoutePart:
    """A rank's part of these responses with all that it may have, features on each row."""
    used, natural = draw_record(1, num_rows), draw_record(2, num_rows)
    made = draw_features(3, num_rows)
    scores = RouterFeatures(made.rows, made.offsets, None, used.experts.float(), LAYERS)
    return RoutePart(tuple(range(len(num_rows))), 0, LAYERS, used, natural, made, scores)


def references(stored: Any) -> set[int]:
    """The objects of a stored record, stored rows or rows of tokens."""
    return {id(source.reference) for source in stored.sources}


def sizes(buckets: Sequence[Any]) -> list[int]:
    """Bytes of the tensors of each bucket."""
    return [sum(entry.num_bytes for entry in bucket.entries) for bucket in buckets if bucket is not None]


def test_each_kind_has_objects_of_its_own() -> None:
    """Experts used, natural experts, hidden states, logits, router scores, ids and log-probabilities of tokens: who
    fetches one of them fetches none of the others."""
    parcel, *stored = pack_apart([part([3, 4]), part([5, 2]), draw_top(0, [3, 4])], 32, least=1)
    first, second, top = unpack_apart(parcel, stored, HereGroup(1), 0)
    kinds: list[set[int]] = [references(top.id_rows), references(top.logp_rows)]
    for take in (
        lambda one: one.used,
        lambda one: one.natural,
        lambda one: one.features.stored_hidden,
        lambda one: one.features.stored_logits,
        lambda one: one.scores.stored_logits,
    ):
        kinds.append(references(take(first)) | references(take(second)))
    assert len(set.union(*kinds)) == sum(map(len, kinds)) == sum(bucket is not None for bucket in stored)
    assert {len(kind) for kind in kinds[2:]} == {4} and {len(kind) for kind in kinds[:2]} == {2}


@given(st.lists(ROWS, min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 6 * ROW_BYTES))
def test_objects_have_whole_responses_and_are_neither_small_nor_many(
    parts: list[list[int]], num: int, least: int
) -> None:
    """All but the last have `least` bytes, and with room enough none has much more. If they would be more than `num`,
    they are fewer and larger. No response is in two."""
    value = [{"record": draw_record(i, rows)} for i, rows in enumerate(parts)]
    parcel, *stored = pack_apart(value, num, least)
    roomy, longest = sizes(pack_apart(value, 64, least)[1:]), max(map(max, parts)) * ROW_BYTES
    # A record's rest lies with the first piece of the next, which ends at the response that makes it large enough.
    assert all(size < 2 * least + longest for size in roomy)
    for found in (sizes(stored), roomy):
        assert sum(found) == sum(map(sum, parts)) * ROW_BYTES
        assert all(size >= least for size in found[:-1])
    assert len(stored) == num and (sizes(stored) == roomy or len(roomy) > num)
    got = unpack_apart(parcel, stored, HereGroup(1), 0)
    for one, rows, here in zip(got, parts, value, strict=True):
        assert torch.equal(one["record"].experts, here["record"].experts)
        # Responses without rows have a stretch, too.
        assert one["record"].stretches.response_S.tolist() == list(range(len(rows)))


def test_responses_of_a_mebibyte_have_an_object_each() -> None:
    """At their own size: a response of fewer bytes shares its object, a longer one does not."""
    least = LEAST_BYTES // ROW_BYTES
    _, *stored = pack_apart({"record": draw_record(0, [least, least + 5, 10, least // 2, least // 2, 7])}, OF_ENGINE)
    rows = [size // ROW_BYTES for size in sizes(stored)]
    assert rows == [least, least + 5, 10 + 2 * (least // 2), 7]


@example([[1, 0]], 12, 1)
@given(st.lists(ROWS, min_size=1, max_size=3), st.integers(6, 16), st.integers(1, 6 * ROW_BYTES))
def test_sets_of_layers_have_objects_of_their_own(parts: list[list[int]], num: int, least: int) -> None:
    """A reader of one set's layers fetches objects with these alone: routes, hidden states and logits. They have
    `least` bytes, too: so there are hardly more of them than of all layers, and not more than `num` in all."""
    sets = ((1, 8), (2, 5))
    value = [{"record": draw_record(i, rows), "features": draw_features(i, rows)} for i, rows in enumerate(parts)]
    parcel, *stored = pack_apart(value, num, least, sets)
    assert len(stored) == num
    asked: list[Any] = []
    with mock.patch.object(sources.ray, "get", lambda bucket: asked.append(bucket) or bucket):
        got = unpack_apart(parcel, stored, HereGroup(1), 0)
        seen: list[set[int]] = []
        for layers in sets:
            for one, here in zip(got, value, strict=True):
                part = one["record"].part(layers=layers)
                assert torch.equal(part.experts, here["record"].part(layers=layers).experts)
                features = one["features"]
                own = features.at(torch.arange(len(features.rows)), features.offsets, layers)
                there = here["features"].at(torch.arange(len(features.rows)), features.offsets, layers)
                assert torch.equal(own.hidden, there.hidden) and torch.equal(own.logits, there.logits)
            seen.append({id(bucket) for bucket in asked})
            asked.clear()
    # Nobody asks for an object without a byte: that of a last response without rows.
    assert not seen[0] & seen[1] and len(seen[0] | seen[1]) == sum(size > 0 for size in sizes(stored))
    whole, cut = (sizes(pack_apart(value, 999, least, some)[1:]) for some in ((), sets))
    # Each kind of a set has at most one small object, its last.
    assert sum(cut) == sum(whole) and sum(size < least for size in cut) <= 3 * len(sets)


def test_restored_rollouts_are_cut_as_an_engines_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses of a checkpoint are joined with those of engines, so that both need the same sets of layers."""
    monkeypatch.setattr(storing.ray, "put", lambda bucket: bucket)
    rollouts = worlds.rollout_engine("exact", worlds.model()).generate(worlds.prompts(3), Sampling(6, 2, seed=1))
    found = stored_rollouts(rollouts, HereGroup(1), ((1,), (0, 2)))
    assert sorted(source.layer_numbers for source in found.experts.sources) == [(0, 2), (1,)]


def test_a_layer_of_no_set_is_not_lost() -> None:
    """Sets that leave a layer out are our own mistake."""
    with pytest.raises(AssertionError, match="each layer is in one set"):
        pack_apart({"record": draw_record(0, [3])}, 8, 1, ((1, 2), (5,)))


def test_kinds_without_room_are_refused() -> None:
    """An answer of more kinds than objects is an error that has both numbers."""
    with pytest.raises(ValueError, match="expected room for objects of 5 kinds, got 4"):
        pack_apart(part([3, 4]), 4)


def test_restored_rollouts_are_the_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The responses of a checkpoint are put into the store as an engine's answer is, and no empty object with them."""
    put: list[Any] = []

    def kept(bucket: Any) -> Any:
        put.append(bucket)
        return bucket

    monkeypatch.setattr(storing.ray, "put", kept)
    rollouts = worlds.rollout_engine("exact", worlds.model()).generate(worlds.prompts(3), Sampling(6, 2, seed=1))
    found = stored_rollouts(rollouts, HereGroup(1), ())
    assert rollouts.experts is not None and torch.equal(found.experts.experts, rollouts.experts.experts)
    assert len(put) == 1 and stored_rollouts(None, HereGroup(1), ()) is None
