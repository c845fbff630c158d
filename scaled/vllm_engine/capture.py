"""The record of a worker's steps, by request: the routes of every row, and the features of a few.

Routes mirror the KV cache: a row's route is kept under the cache slot of its keys and values, so that a request which
finds its prefix cached also finds the routes of exactly those keys and values.

Extra letters: N rows of one engine step, C cache slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from theory.routing.record import MISSING, index_dtype

# An engine that schedules ahead of its samples may run a stopped request for one or two rows too many.
OVERRUN = 2

Slots = Callable[[str, int, int], np.ndarray]
"""Cache slots of rows [start, stop) of a request."""


@dataclass(frozen=True)
class EngineStep:
    """The rows that one engine step ran, in the order of its batch: counts[i] rows of a request from starts[i] on."""

    request_ids: Sequence[str]
    starts: Sequence[int]
    counts: Sequence[int]

    def spans(self) -> list[tuple[str, int, slice]]:
        """Each request, its first row of this step, and its slice of the batch."""
        spans, offset = [], 0
        for name, start, count in zip(self.request_ids, self.starts, self.counts, strict=True):
            spans.append((name, start, slice(offset, offset + count)))
            offset += count
        return spans


class RouteStore:
    """Routed experts of every row by request. A row that is run again (preemption) keeps the last route."""

    def __init__(self, num_layers: int, num_slots: int, num_experts: int, num_cache_slots: int):
        self._shape = (num_layers, num_slots)
        self._dtype = torch.empty(0, dtype=index_dtype(num_experts)).numpy().dtype
        self._chunks: dict[str, list[tuple[int, np.ndarray]]] = {}
        self._next_row: dict[str, int] = {}
        self._cache_CLK = np.full((num_cache_slots, *self._shape), MISSING, dtype=self._dtype)

    def add(self, step: EngineStep, experts_NLK: np.ndarray, slots: Slots) -> None:
        """Keeps the step's rows; a request that starts past its next row found those in between in the cache.

        `slots` is not called where the store was made without cache slots (prefix caching off).
        """
        has_cache = len(self._cache_CLK) > 0
        if has_cache:
            # All writes before any read: a request may share blocks that this very step computes.
            for name, start, span in step.spans():
                self._cache_CLK[slots(name, start, start + span.stop - span.start)] = experts_NLK[span]
        for name, start, span in step.spans():
            chunks = self._chunks.setdefault(name, [])
            if has_cache and start > 0 and start != self._next_row.get(name, 0):
                # Indexing by an array copies: later steps may reuse the slots.
                chunks.append((0, self._cache_CLK[slots(name, 0, start)]))
            chunks.append((start, experts_NLK[span].astype(self._dtype)))
            self._next_row[name] = start + span.stop - span.start

    def take(self, name: str, num_rows: int) -> np.ndarray:
        """Rows [0, num_rows) of a request as (rows, L, K), -1 where no step ran them; forgets the request."""
        rows_RLK = np.full((num_rows, *self._shape), MISSING, dtype=self._dtype)
        for start, experts in self._chunks.pop(name, []):
            kept = experts[: max(0, num_rows - start)]
            rows_RLK[start : start + len(kept)] = kept
        self._next_row.pop(name, None)
        return rows_RLK

    def clear(self) -> None:
        """Forgets the requests, not the cache."""
        self._chunks.clear()
        self._next_row.clear()

    def forget_cache(self) -> None:
        """Forgets the routes of cached rows, as the weights that made them are gone."""
        self._cache_CLK.fill(MISSING)


@dataclass
class FeatureRequest:
    """Rows of one request that may become features, and the key of each: row s has keys[s - (num_prompt - 1)]."""

    num_prompt: int
    num_features: int
    keys: Float[Tensor, " T"]

    def key(self, row: int) -> float:
        """The row's random key."""
        return float(self.keys[row - self.num_prompt + 1])


class FeatureStore:
    """Router inputs and logits on a uniform sample of rows, drawn while a response's length is still unknown.

    Every row that predicts a response token has its own independent uniform key, and the num_features smallest are
    kept. Independent, identically distributed keys put any number of rows into a uniformly random order, so the
    smallest T_c of the first n are uniform without replacement for every n. The length may depend on the tokens,
    because the keys do not.
    """

    def __init__(self) -> None:
        self._requests: dict[str, FeatureRequest] = {}
        self._kept: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}

    def open(self, name: str, request: FeatureRequest) -> None:
        """Starts a request; rows of requests that were not opened are ignored."""
        self._requests[name] = request
        self._kept[name] = {}

    def add(self, step: EngineStep, hidden_LND: Float[Tensor, "L N D"], logits_LNE: Float[Tensor, "L N E"]) -> None:
        """Keeps the step's rows that are among the smallest so far; a row that is run again replaces itself."""
        rows: list[tuple[str, int]] = []
        where: list[int] = []
        for name, start, span in step.spans():
            if name in self._requests:
                for row in self._candidates(name, start, start + span.stop - span.start):
                    rows.append((name, row))
                    where.append(span.start + row - start)
        if not rows:
            return
        # Gathered on the device first: only the chosen rows travel to the CPU.
        hidden_FLD = hidden_LND[:, where].transpose(0, 1).cpu()
        logits_FLE = logits_LNE[:, where].transpose(0, 1).cpu()
        for i, (name, row) in enumerate(rows):
            # clone: a view would keep the rows of the whole step alive.
            self._kept[name][row] = (hidden_FLD[i].clone(), logits_FLE[i].clone())
        # Spare rows, because `take` drops those of an overrun.
        for name in {name for name, _ in rows}:
            self._drop_largest(name, self._requests[name].num_features + OVERRUN)

    def _candidates(self, name: str, start: int, stop: int) -> list[int]:
        request, kept = self._requests[name], self._kept[name]
        first = request.num_prompt - 1
        last = first + len(request.keys)
        rows = range(max(start, first), min(stop, last))
        if len(kept) < request.num_features + OVERRUN:
            return list(rows)
        bound = max(request.key(row) for row in kept)
        # Or equal: the kept row with the largest key, run again, must replace itself.
        return [row for row in rows if request.key(row) <= bound]

    def _drop_largest(self, name: str, limit: int) -> None:
        request, kept = self._requests[name], self._kept[name]
        for row in sorted(kept, key=request.key)[limit:]:
            del kept[row]

    def take(self, name: str, num_rows: int) -> tuple[Int[Tensor, " F"], Tensor, Tensor] | None:
        """(rows ascending, hidden (F, L, D), logits (F, L, E)) among rows [0, num_rows); forgets the request.

        None where no row that predicts a response token was run: a request aborted while its prompt was read.
        """
        request, kept = self._requests.pop(name, None), self._kept.pop(name, {})
        within = [row for row in kept if row < num_rows]
        if request is None or not within:
            return None
        rows = sorted(sorted(within, key=request.key)[: request.num_features])
        hidden, logits = zip(*(kept[row] for row in rows), strict=True)
        return torch.tensor(rows, dtype=torch.int64), torch.stack(hidden), torch.stack(logits)

    def clear(self) -> None:
        """Forgets all requests."""
        self._requests.clear()
        self._kept.clear()
