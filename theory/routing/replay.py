"""Replay: the context from which a model gets its routes during one pass.

Only the set of experts is replayed, never its weights, so gradients reach the router. A `ReplayContext` belongs to one
forward and backward of one micro-batch, is handed to the model by its caller, and keeps a ledger: every layer is
routed exactly once, recomputation gives the first forward's experts again, and anything else is an error.

Letters beyond theory/contracts.py: N = B * width rows of the flattened batch, R rows without padding.
Papers: R3 (arXiv 2510.11370) Eq. 8 and 9; Pr2 (arXiv 2606.00395) Eq. 4-7, App. C.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theory.routing import gates
from theory.routing.features import RouterFeatures
from theory.routing.gates import Gate
from theory.routing.packed_rows import flat_rows, offsets_of
from theory.routing.passes import RoutingPlan
from theory.routing.predictor import predictive_logits
from theory.routing.record import RoutingRecord, index_dtype


class LedgerError(ValueError):
    """A replay context was not used exactly once per layer, in one forward and its backward."""


class NaturalRouting:
    """Routing without replay, record or ledger, as for inference, a reference model or a teacher."""

    def route(
        self,
        layer_number: int,
        hidden_ND: Float[Tensor, "N D"],
        logits_NE: Float[Tensor, "N E"],
        num_slots: int,
        gate: Gate,
        selection_bias_E: Float[Tensor, " E"] | None = None,
    ) -> tuple[Int[Tensor, "N K"], Float[Tensor, "N K"]]:
        """The experts that the logits choose, ascending, and their weights."""
        return gates.route(logits_NE, num_slots, gate, selection_bias_E)


class ReplayContext:
    """The routing of one forward and backward of one micro-batch of B responses, padded to `width` rows each.

    Row s of response b is row b * width + s of the flattened batch; rows from num_rows_B[b] on are padding and are
    routed naturally, as are rows that the record lacks. `layer_numbers`, the MoE layers of the model, are needed only
    where neither record nor predictor names them: they tell which layer was never routed.
    Enter it once; leave it after backward. An exception inside clears everything.
    """

    def __init__(
        self, plan: RoutingPlan, num_rows_B: Sequence[int], width: int, layer_numbers: Sequence[int] | None = None
    ) -> None:
        self.plan = plan
        self._num_rows_B = [int(n) for n in num_rows_B]
        self._width = width
        self._layer_numbers = plan.expected_layers(layer_numbers)
        self._state: Literal["new", "open", "closed", "failed"] = "new"
        # Layers routed again by the recomputation in progress; None outside of one.
        self._recomputed: set[int] | None = None
        self._forget()
        plan.require_rows(self._num_rows_B, width)
        self._rows_R = flat_rows(self._num_rows_B, width)
        self._where_F = plan.flat_feature_rows(self._num_rows_B, width)

    def _forget(self) -> None:
        self._experts: dict[int, Tensor] = {}
        self._natural: dict[int, Tensor] = {}
        self._hidden: dict[int, Tensor] = {}
        self._logits: dict[int, Tensor] = {}
        self._scores: dict[int, Tensor] = {}
        self._num_experts: int | None = None

    def __enter__(self) -> ReplayContext:
        if self._state != "new":
            raise LedgerError(f"expected a new pass (one forward and its backward), got one that is {self._state}")
        self._state = "open"
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # Routes of half a forward would read like a whole record.
            self._state = "failed"
            self._forget()
            return
        absent = sorted(set(self._layer_numbers or ()) - set(self._experts))
        if absent:
            seen = sorted(self._experts)
            self._state = "failed"
            self._forget()
            raise LedgerError(f"expected every layer of {self._layer_numbers} to be routed, got {seen}: never {absent}")
        self._state = "closed"

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """A context in which layers that the forward has routed may be routed again, and get the same experts.

        For activation recomputation: `checkpoint(..., context_fn=lambda: (nullcontext(), context.recompute()))`.
        Natural routes are held as well: a near tie that flips would change what backward differentiates.
        """
        if self._recomputed is not None:
            raise LedgerError("expected one recomputation at a time, got a nested one")
        self._recomputed = set()
        try:
            yield
        finally:
            self._recomputed = None

    def route(
        self,
        layer_number: int,
        hidden_ND: Float[Tensor, "N D"],
        logits_NE: Float[Tensor, "N E"],
        num_slots: int,
        gate: Gate,
        selection_bias_E: Float[Tensor, " E"] | None = None,
    ) -> tuple[Int[Tensor, "N K"], Float[Tensor, "N K"]]:
        """The experts of every row at this layer, ascending, and their weights in the logits' type.

        Gradients reach the logits through the weights; with predicted gates also the router's input through h W_p.
        Raises LedgerError outside the context, for a layer that the record or predictor lacks, for a second use.
        """
        self._check_use(layer_number, logits_NE, num_slots)
        weighed_NE = self.weighed_logits(layer_number, hidden_ND, logits_NE)
        by = (num_slots, gate, selection_bias_E)
        # Predicted gates use the logits that predicted routes choose by: h W_p is computed once for both.
        choosing_NE = weighed_NE if self.plan.gates == "predicted" else None
        experts_NK = self._chosen(layer_number, hidden_ND, logits_NE, choosing_NE, *by)
        return experts_NK, gates.weigh(weighed_NE, experts_NK, gate).to(logits_NE.dtype)

    def choose(
        self,
        layer_number: int,
        hidden_ND: Float[Tensor, "N D"],
        logits_NE: Float[Tensor, "N E"],
        num_slots: int,
        gate: Gate,
        selection_bias_E: Float[Tensor, " E"] | None = None,
    ) -> Int[Tensor, "N K"]:
        """The experts of `route`, entered in the ledger, for a model that weighs them itself; `logits_NE` are live."""
        self._check_use(layer_number, logits_NE, num_slots)
        return self._chosen(layer_number, hidden_ND, logits_NE, None, num_slots, gate, selection_bias_E)

    def _chosen(
        self,
        layer_number: int,
        hidden_ND: Tensor,
        logits_NE: Tensor,
        choosing_NE: Tensor | None,
        num_slots: int,
        gate: Gate,
        selection_bias_E: Tensor | None,
    ) -> Tensor:
        if self._recomputed is not None:
            # Nothing is entered again: the ledger has the first forward's choices, features and scores.
            self._recomputed.add(layer_number)
            # The ledger keeps ids narrow; `gather` takes int64 alone.
            return self._experts[layer_number].to(torch.int64)
        # Under replay too: rows without a record use it, and metrics compare it with the replayed routes.
        natural_NK = gates.select(logits_NE, num_slots, gate, selection_bias_E)
        experts_NK = natural_NK
        if self.plan.source == "predicted":
            if choosing_NE is None:
                choosing_NE = predictive_logits(logits_NE, hidden_ND, self.plan.predictor[layer_number])
            experts_NK = gates.select(choosing_NE, num_slots, gate, selection_bias_E)
        elif self.plan.record is not None:
            experts_NK = self._replayed(self.plan.record.layer(layer_number), natural_NK)
        self._enter_in_ledger(layer_number, experts_NK, natural_NK, hidden_ND, logits_NE)
        if self.plan.scored is not None:
            self._scores[layer_number] = self._scored(layer_number, logits_NE, gate)
        return experts_NK

    def weighed_logits(
        self, layer_number: int, hidden_ND: Float[Tensor, "N D"], logits_NE: Float[Tensor, "N E"]
    ) -> Float[Tensor, "N E"]:
        """The logits that weights come from: p + h W_p where gates are predicted (Pr2 Eq. 6), else the live ones."""
        if self.plan.gates == "live":
            return logits_NE
        return predictive_logits(logits_NE, hidden_ND, self.plan.predictor[layer_number])

    def _check_use(self, layer_number: int, logits_NE: Tensor, num_slots: int) -> None:
        N, E = logits_NE.shape
        if self._state != "open":
            raise LedgerError(f"layer {layer_number}: expected to be inside `with`, got a {self._state} pass")
        if self._layer_numbers is not None and layer_number not in self._layer_numbers:
            raise LedgerError(f"expected one of the layers {self._layer_numbers}, got layer {layer_number}")
        B, width = len(self._num_rows_B), self._width
        if B * width != N:
            raise ValueError(f"layer {layer_number}: expected {B * width} rows ({B} responses x {width}), got {N}")
        record = self.plan.record
        if record is not None and (record.num_experts, record.num_slots) != (E, num_slots):
            expected = f"{record.num_slots} of {record.num_experts} experts"
            raise ValueError(f"layer {layer_number}: expected {expected} as recorded, got {num_slots} of {E}")
        if self._num_experts not in (None, E):
            raise ValueError(f"layer {layer_number}: expected {self._num_experts} experts as before, got {E}")
        self._num_experts = E
        if self._recomputed is None and layer_number in self._experts:
            raise LedgerError(f"layer {layer_number}: expected one use per forward, got another outside recompute()")
        if self._recomputed is not None and layer_number not in self._experts:
            raise LedgerError(f"layer {layer_number}: expected a layer that the forward has routed, got a new one")
        if self._recomputed is not None and layer_number in self._recomputed:
            raise LedgerError(f"layer {layer_number}: expected one use per recomputation, got another")

    def _replayed(self, recorded_RK: Tensor, natural_NK: Tensor) -> Tensor:
        recorded_RK = recorded_RK.to(natural_NK)
        is_recorded_R = recorded_RK[:, 0] >= 0  # a row that the record lacks holds -1
        # A copy: the ledger keeps the natural choice too.
        experts_NK = natural_NK.clone()
        # Only these rows: padding and rows without a record keep the natural choice.
        experts_NK[self._rows_R.to(natural_NK.device)[is_recorded_R]] = recorded_RK[is_recorded_R]
        return experts_NK

    def _enter_in_ledger(
        self, number: int, experts_NK: Tensor, natural_NK: Tensor, hidden_ND: Tensor, logits_NE: Tensor
    ) -> None:
        narrow = index_dtype(logits_NE.shape[1])
        rows_R = self._rows_R.to(experts_NK.device)
        # The padding's experts are kept too: recomputation must repeat them as well.
        self._experts[number] = experts_NK.to(narrow)
        self._natural[number] = natural_NK.to(narrow).index_select(0, rows_R)
        if self._where_F is not None:
            # Detached: the predictor learns from them after the step, and a graph would keep every activation alive.
            where_F = self._where_F.to(logits_NE.device)
            self._logits[number] = logits_NE.detach().index_select(0, where_F)
            if self.plan.keep_hidden:
                self._hidden[number] = hidden_ND.detach().index_select(0, where_F)

    @torch.no_grad()
    def _scored(self, number: int, logits_NE: Tensor, gate: Gate) -> Tensor:
        """The log-scores of the experts that the plan names, without padding."""
        rows_R, scored = self._rows_R.to(logits_NE.device), self.plan.scored
        used_NK = self._experts[number]
        ids_RK = scored.layer(number) if isinstance(scored, RoutingRecord) else used_NK.index_select(0, rows_R)
        logp_RE = gates.log_scores(logits_NE.index_select(0, rows_R), gate)
        return logp_RE.gather(1, ids_RK.to(logp_RE.device, torch.int64))

    def _routed_layers(self) -> tuple[int, ...]:
        # An open pass may be read: scaled/megatron_engine/replay.py does so between forward and backward.
        if self._state in ("new", "failed"):
            raise LedgerError(f"expected a pass that has run, got one that is {self._state}")
        absent = sorted(set(self._layer_numbers or ()) - set(self._experts))
        if absent:
            raise LedgerError(f"expected a forward over layers {self._layer_numbers}, got none yet of {absent}")
        return tuple(sorted(self._experts))

    def _record(self, by_layer: Mapping[int, Tensor]) -> RoutingRecord | None:
        numbers = self._routed_layers()
        if not numbers:
            return None
        assert self._num_experts is not None
        experts = torch.stack([by_layer[n] for n in numbers], dim=1)
        return RoutingRecord(experts, offsets_of(self._num_rows_B).to(experts.device), numbers, self._num_experts)

    @property
    def used(self) -> RoutingRecord | None:
        """The experts that the forward used, without padding; None for a model with no MoE layer."""
        return self._record({n: e.index_select(0, self._rows_R.to(e.device)) for n, e in self._experts.items()})

    @property
    def natural(self) -> RoutingRecord | None:
        """The experts that the forward's live logits, without any predictor, would have chosen; None as for `used`."""
        return self._record(self._natural)

    @property
    def scores(self) -> RouterFeatures | None:
        """log p of the plan's `scored` experts under the live logits, in the place of logits, on every row; None where
        it names none.
        """
        numbers = self._routed_layers()
        if not numbers or self.plan.scored is None:
            return None
        rows = torch.cat([torch.arange(n) for n in self._num_rows_B])
        scores_RLK = torch.stack([self._scores[n] for n in numbers], dim=1)
        return RouterFeatures(rows, offsets_of(self._num_rows_B), None, scores_RLK, numbers)

    @property
    def features(self) -> RouterFeatures | None:
        """Live logits (without predictor) at the feature rows and, if kept, router inputs; None without rows."""
        numbers, rows = self._routed_layers(), self.plan.feature_rows
        if not numbers or rows is None:
            return None
        return RouterFeatures(
            rows=torch.cat(list(rows)),
            offsets=offsets_of([len(r) for r in rows]),
            hidden=torch.stack([self._hidden[n] for n in numbers], dim=1) if self.plan.keep_hidden else None,
            logits=torch.stack([self._logits[n] for n in numbers], dim=1),
            layer_numbers=numbers,
        )
