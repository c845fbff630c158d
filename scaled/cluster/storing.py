"""Values of actors, packed so that their largest tensors stay in the object store: routes, router features, and mu's
likeliest tokens with log old of them.

The sender puts these tensors into objects of their own, beside the parcel of the rest. In the receiver's value a
`StoredRecord`, `StoredFeatures` or `StoredTokenRows` has their references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from torch import Tensor

from scaled.cluster.buckets import ALIGNMENT, EMPTY, Bucket, buckets
from scaled.cluster.features import StoredFeatures, StoredRows
from scaled.cluster.routes import RouteSource, StoredRecord
from scaled.cluster.sources import Owner, RankGroup, Source
from scaled.cluster.stretches import Stretches
from scaled.cluster.token_rows import StoredTokenRows
from scaled.cluster.transfer import Hole, Parcel, pack, shares, unpack
from theory.contracts import Rollouts
from theory.oversampling import Backlog
from theory.routing.features import RouterFeatures
from theory.routing.record import MISSING, RoutingRecord
from theory.top_tokens import TokenRows

KINDS = 2
"""Objects for each share of the responses: one has routes and features, the other rows of tokens. A rank that replays
none of mu's routes fetches the second alone."""

Put = Callable[[int, Tensor, tuple[int, ...]], tuple[Any, str, Any, tuple[int, ...]]]
"""(number of the object, tensor (rows, L, X) or (rows, K), its layers) -> the fields of its `Source`."""


def pack_apart(value: Any, num: int = 1) -> tuple[Parcel | Bucket, ...]:
    """The value as a parcel, and its largest tensors in KINDS * `num` buckets, each of some responses.

    The value then has a stored record, stored features or stored rows in the place of each; the receiver's
    `unpack_apart` says where the tensors are.
    """
    tensors: list[list[tuple[str, Tensor]]] = [[] for _ in range(KINDS * num)]

    def put(number: int, tensor: Tensor, layers: tuple[int, ...]) -> tuple[Any, str, Any, tuple[int, ...]]:
        name = str(len(tensors[number]))
        tensors[number].append((name, tensor))
        # The sender has no reference yet: its bucket becomes an object when the call returns.
        return Hole("stored", number), name, Hole("owner", 0), layers

    def stand_in(found: Any) -> StoredRecord | StoredFeatures | StoredTokenRows | None:
        # The exact type: what is stored already, a subclass, travels as its references.
        if type(found) is RoutingRecord:
            return _record_apart(found, num, put)
        if type(found) is RouterFeatures:
            return _features_apart(found, num, put)
        if type(found) is TokenRows:
            return _tokens_apart(found, num, put)
        return None

    parcel = pack(value, stand_in)
    # Room for all with their gaps: each object is one bucket.
    sizes = [sum(ALIGNMENT + tensor.nbytes for _, tensor in own) for own in tensors]
    stored = (next(buckets(own, size, are_kept=True), EMPTY) for own, size in zip(tensors, sizes, strict=True))
    return parcel, *stored


def _record_apart(found: RoutingRecord, num: int, put: Put) -> StoredRecord:
    sources = []
    for number, (low, high) in enumerate(shares(len(found), num)):
        ids_RLK = found.experts[int(found.offsets[low]) : int(found.offsets[high])]
        # Found where the ids are, so that the driver counts missing rows without fetching any.
        missing = (ids_RLK[..., 0] == MISSING).any(1).nonzero()[:, 0]
        sources.append(RouteSource(*put(number, ids_RLK, found.layer_numbers), missing))
    slots = found.num_slots, found.experts.dtype
    whole = _in_shares(found.offsets, num)
    return StoredRecord(tuple(sources), whole, found.offsets, found.layer_numbers, found.num_experts, slots)


def _tokens_apart(found: TokenRows, num: int, put: Put) -> StoredTokenRows:
    sources = []
    for number, (low, high) in enumerate(shares(len(found), num)):
        own_AK = found.values[int(found.offsets[low]) : int(found.offsets[high])]
        sources.append(Source(*put(num + number, own_AK, ())))  # they are of no layer
    columns = found.width, found.dtype
    return StoredTokenRows(sources, _in_shares(found.offsets, num), found.offsets, columns, found.fill)


def _in_shares(offsets: Tensor, num: int) -> Stretches:
    """A stretch for each response, in `num` sources of some responses each."""
    parts = []
    for number, (low, high) in enumerate(shares(len(offsets) - 1, num)):
        own = torch.arange(low, high)
        start_S, num_S = offsets[own] - offsets[low], offsets.diff()[own]
        parts.append(Stretches(torch.full_like(own, number), own, torch.zeros_like(own), start_S, num_S))
    return Stretches.concat(parts)


def _features_apart(found: RouterFeatures, num: int, put: Put) -> StoredFeatures:
    cuts = [(int(found.offsets[low]), int(found.offsets[high])) for low, high in shares(len(found), num)]
    hidden = None if found.hidden is None else _rows_apart(found.hidden, cuts, found.layer_numbers, put)
    logits = _rows_apart(found.logits, cuts, found.layer_numbers, put)
    return StoredFeatures(found.rows, found.offsets, hidden, logits, found.layer_numbers)


def _rows_apart(x_FLX: Tensor, cuts: Sequence[tuple[int, int]], layers: tuple[int, ...], put: Put) -> StoredRows:
    sources = tuple(Source(*put(number, x_FLX[cut[0] : cut[1]], layers)) for number, cut in enumerate(cuts))
    row_F = [torch.arange(stop - start) for start, stop in cuts]
    source_1F = torch.cat([torch.full_like(own_F, number) for number, own_F in enumerate(row_F)])[None]
    return StoredRows(sources, (layers,), source_1F, torch.cat(row_F)[None], x_FLX.shape[2], x_FLX.dtype)


def unpack_apart(parcel: Parcel, stored: Sequence[Any], group: RankGroup, home: int) -> Any:
    """The value of a parcel whose largest tensors lie in these buckets, made by actor `home` of the group."""
    return unpack(parcel, stored=stored, owner=[Owner(group, home)])


def stored_backlog(backlog: Backlog | None, group: RankGroup) -> Backlog | None:
    """The backlog with its routes and likeliest tokens in the object store, like those of `group`, with which
    its responses are joined.

    The group's first actor counts as their maker.
    """
    if backlog is None:
        return None
    # A response that continues is joined from old and new rows, and a record has rows of one kind only.
    groups = [replace(own, rollouts=stored_rollouts(own.rollouts, group)) for own in backlog.groups]
    return replace(backlog, groups=tuple(groups))


def stored_rollouts(rollouts: Rollouts | None, group: RankGroup) -> Any:
    """The same for rollouts, or None."""
    packed: Any = pack_apart(rollouts)
    parcel, *stored = packed
    return unpack_apart(parcel, [ray.put(bucket) for bucket in stored], group, 0)


__all__ = ["KINDS", "pack_apart", "stored_backlog", "stored_rollouts", "unpack_apart"]
