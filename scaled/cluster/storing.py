"""Values of actors, packed so that their largest tensors stay in the object store: routes, router features, and mu's
likeliest tokens with log old of them.

The sender puts these tensors into objects of their own, beside the parcel of the rest: apart by kind and by response,
since an object travels to another machine whole. Those of engines are apart by layers, too, where machines of ranks
read them apart (`scaled.stages`). In the receiver's value a `StoredRecord`, `StoredFeatures` or `StoredTokenRows` has
their references.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import ray
import torch
from torch import Tensor

from scaled.cluster.buckets import ALIGNMENT, EMPTY, Bucket, buckets
from scaled.cluster.features import StoredFeatures, StoredRows
from scaled.cluster.routes import RouteSource, StoredRecord
from scaled.cluster.sources import Owner, RankGroup, Source, columns
from scaled.cluster.stretches import Stretches
from scaled.cluster.token_rows import StoredTokenRows
from scaled.cluster.transfer import Hole, Parcel, pack, unpack
from scaled.objects import LEAST_BYTES, OF_ENGINE
from theory.contracts import Rollouts
from theory.oversampling import Backlog
from theory.routing.features import RouterFeatures
from theory.routing.record import MISSING, RoutingRecord
from theory.top_tokens import TokenRows

Layers = tuple[int, ...]

KEPT = (RoutingRecord, RouterFeatures, TokenRows)
"""The types whose tensors lie apart. What is stored already, a subclass, travels as its references."""


def pack_apart(
    value: Any, num: int, least: int = LEAST_BYTES, layer_sets: Sequence[Sequence[int]] = ()
) -> tuple[Parcel | Bucket | None, ...]:
    """The value as a parcel, and its largest tensors in at most `num` buckets; None for those that are not needed.

    A bucket has whole responses, of at least `least` bytes if there are as many, one kind of rows, and layers of one
    of the sets: so a process fetches little that it does not read. The value then has a stored record, stored features
    or stored rows in the place of each; the receiver's `unpack_apart` says where the tensors are.
    """
    apart = _Apart(least, layer_sets)
    parcel = pack(value, apart.stand_in)
    objects = apart.objects(num)
    object_of = {piece: number for number, pieces in enumerate(objects) for piece in pieces}
    stored: list[Bucket | None] = [apart.bucket(pieces) for pieces in objects]
    stored += [None] * (num - len(objects))
    return replace(parcel, objects=tuple(object_of[piece] for piece in range(len(object_of)))), *stored


class _Apart:
    """The largest tensors of a value that is being packed: in pieces of whole responses, each of a kind."""

    def __init__(self, least: int, layer_sets: Sequence[Sequence[int]]):
        self.least, self.layer_sets = least, layer_sets
        self.pieces: list[Tensor] = []
        self._kinds: dict[str, list[int]] = {}
        self._names: dict[int, str] = {}

    def stand_in(self, found: Any) -> StoredRecord | StoredFeatures | StoredTokenRows | None:
        """The object to pack in the place of this one, which may have such tensors; None for this one itself."""
        if isinstance(found, type):
            return None
        for name, part in getattr(found, "__dict__", {}).items():
            if type(part) in KEPT:
                # A pass's natural experts are another kind than those that it used: who reads one seldom reads both.
                self._names.setdefault(id(part), name)
        kind = self._names.get(id(found), "")
        if type(found) is RoutingRecord:
            return self._record(found, kind)
        if type(found) is RouterFeatures:
            return self._features(found, kind)
        if type(found) is TokenRows:
            return self._tokens(found, kind)
        return None

    def objects(self, num: int) -> list[list[int]]:
        """The numbers of the pieces of each object, of one kind each: at most `num` objects."""
        if len(self._kinds) > num:
            raise ValueError(f"expected room for objects of {len(self._kinds)} kinds, got {num}")
        found = []
        for numbers in self._kinds.values():
            own, most = self._together(numbers, self.least), num // len(self._kinds)
            if len(own) > most:
                size = sum(self.pieces[number].nbytes for number in numbers)
                # All but the last have at least this many bytes each.
                own = self._together(numbers, -(-size // (most - 1)) if most > 1 else size + 1)
            found += own
        return found

    def _together(self, numbers: Sequence[int], least: int) -> list[list[int]]:
        """Pieces that follow each other, in groups of at least so many bytes; the last may have fewer."""
        found, size = [[]], 0
        for number in numbers:
            if size >= least:
                found.append([])
                size = 0
            found[-1].append(number)
            size += self.pieces[number].nbytes
        return found

    def bucket(self, pieces: Sequence[int]) -> Bucket:
        """These pieces, each under its number."""
        own = [(str(piece), self.pieces[piece]) for piece in pieces]
        # Room for all with their gaps: each object is one bucket.
        return next(buckets(own, sum(ALIGNMENT + tensor.nbytes for _, tensor in own), are_kept=True), EMPTY)

    def _put(self, kind: str, tensor: Tensor, layers: tuple[int, ...]) -> tuple[Any, str, Any, tuple[int, ...]]:
        """The fields of the `Source` of these rows."""
        number = len(self.pieces)
        self.pieces.append(tensor)
        self._kinds.setdefault(kind, []).append(number)
        # The sender has no reference yet: its bucket becomes an object when the call returns.
        return Hole("stored", number), str(number), Hole("owner", 0), layers

    def _shares(self, offsets: Tensor, row_bytes: int) -> list[tuple[int, int]]:
        """[start, stop) of the responses of each piece: the fewest that have `least` bytes, and the rest."""
        ends, bounds = (offsets * row_bytes).tolist(), [0]
        for b in range(1, len(ends)):
            if ends[b] - ends[bounds[-1]] >= self.least or b == len(ends) - 1:
                bounds.append(b)
        return list(pairwise(bounds)) or [(0, 0)]

    def _cut(self, rows: Tensor, layer_numbers: tuple[int, ...], kind: str) -> list[tuple[Tensor, Layers, str]]:
        """Rows of layers cut by `layer_sets`, each with its layers, and a kind of its own."""
        found = []
        for number, layers in enumerate(self.layer_sets):
            own = tuple(n for n in layer_numbers if n in layers)
            if own and own != layer_numbers:
                found.append((rows[:, columns(layer_numbers, own)], own, f"{kind} {number}"))
        # Without sets, or where all layers are in one of them, rows stay as they lie.
        assert not found or sum(len(own) for _, own, _ in found) == len(layer_numbers), "each layer is in one set"
        return found or [(rows, layer_numbers, kind)]

    def _record(self, found: RoutingRecord, kind: str) -> StoredRecord:
        sources, parts = list[RouteSource](), []
        for rows_RLK, layers, own in self._cut(found.experts, found.layer_numbers, kind):
            shares = self._shares(found.offsets, rows_RLK[:1].nbytes)
            parts.append(_in_shares(found.offsets, shares, len(sources)))
            for low, high in shares:
                ids_RLK = rows_RLK[int(found.offsets[low]) : int(found.offsets[high])]
                # Found where the ids are, so that the driver counts missing rows without fetching any.
                missing = (ids_RLK[..., 0] == MISSING).any(1).nonzero()[:, 0]
                sources.append(RouteSource(*self._put(own, ids_RLK, layers), missing))
        whole, slots = Stretches.concat(parts), (found.num_slots, found.experts.dtype)
        return StoredRecord(tuple(sources), whole, found.offsets, found.layer_numbers, found.num_experts, slots)

    def _tokens(self, found: TokenRows, kind: str) -> StoredTokenRows:
        shares = self._shares(found.offsets, found.values[:1].nbytes)
        rows = (found.values[int(found.offsets[low]) : int(found.offsets[high])] for low, high in shares)
        sources = [Source(*self._put(kind, own_AK, ())) for own_AK in rows]  # they are of no layer
        columns = found.width, found.dtype
        return StoredTokenRows(sources, _in_shares(found.offsets, shares), found.offsets, columns, found.fill)

    def _features(self, found: RouterFeatures, kind: str) -> StoredFeatures:
        def rows(name: str, whole_FLX: Tensor) -> StoredRows:
            sources, source_GF, row_GF = list[Source](), [], []
            cut = self._cut(whole_FLX, found.layer_numbers, f"{kind} {name}")
            for x_FLX, layers, own in cut:
                shares = self._shares(found.offsets, x_FLX[:1].nbytes)
                cuts = [(int(found.offsets[low]), int(found.offsets[high])) for low, high in shares]
                row_F = [torch.arange(stop - start) for start, stop in cuts]
                numbers = (torch.full_like(own_F, number) for number, own_F in enumerate(row_F, len(sources)))
                source_GF.append(torch.cat(list(numbers)))
                row_GF.append(torch.cat(row_F))
                sources += [Source(*self._put(own, x_FLX[start:stop], layers)) for start, stop in cuts]
            sets = tuple(layers for _, layers, _ in cut)
            places = torch.stack(source_GF), torch.stack(row_GF)
            return StoredRows(tuple(sources), sets, *places, whole_FLX.shape[2], whole_FLX.dtype)

        hidden = None if found.hidden is None else rows("hidden", found.hidden)
        return StoredFeatures(found.rows, found.offsets, hidden, rows("logits", found.logits), found.layer_numbers)


def _in_shares(offsets: Tensor, shares: Sequence[tuple[int, int]], first: int = 0) -> Stretches:
    """A stretch for each response, in sources of these responses, which are numbered from `first` on."""
    parts = []
    for number, (low, high) in enumerate(shares, first):
        own = torch.arange(low, high)
        start_S, num_S = offsets[own] - offsets[low], offsets.diff()[own]
        parts.append(Stretches(torch.full_like(own, number), own, torch.zeros_like(own), start_S, num_S))
    return Stretches.concat(parts)


def unpack_apart(parcel: Parcel, stored: Sequence[Any], group: RankGroup, home: int) -> Any:
    """The value of a parcel whose largest tensors lie in these buckets, made by actor `home` of the group."""
    return unpack(parcel, stored=[stored[number] for number in parcel.objects], owner=[Owner(group, home)])


def stored_backlog(backlog: Backlog | None, group: RankGroup, layer_sets: Sequence[Sequence[int]]) -> Backlog | None:
    """The backlog with its routes and likeliest tokens in the object store, like those of `group`, with which
    its responses are joined. The group cuts its records by `layer_sets`.

    The group's first actor counts as their maker.
    """
    if backlog is None:
        return None
    # A response that continues is joined from old and new rows, and a record has rows of one kind only.
    groups = [replace(own, rollouts=stored_rollouts(own.rollouts, group, layer_sets)) for own in backlog.groups]
    return replace(backlog, groups=tuple(groups))


def stored_rollouts(rollouts: Rollouts | None, group: RankGroup, layer_sets: Sequence[Sequence[int]]) -> Any:
    """The same for rollouts, or None."""
    packed: Any = pack_apart(rollouts, OF_ENGINE, layer_sets=layer_sets)
    parcel, *stored = packed
    return unpack_apart(parcel, [None if bucket is None else ray.put(bucket) for bucket in stored], group, 0)


__all__ = ["pack_apart", "stored_backlog", "stored_rollouts", "unpack_apart"]
