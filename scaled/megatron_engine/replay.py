"""Replay in Megatron: theory's `ReplayContext` behind the hook that Megatron's router calls for its top-k.

Each router of a model chunk asks the pass of the micro-batch in flight which experts to use. It weighs them itself, by
its own convention, from the live scores. Megatron keeps state for the whole process (the list of instances, the action,
the first-in-first-out lists); here each chunk has its own.

Extra letters: S positions of the rank's chunk, N = B * S rows of the flattened micro-batch.
Papers: R3 (arXiv 2510.11370) Eq. 8 and 9; Pr2 (arXiv 2606.00395) Eq. 4-7.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from theory.routing.gates import Gate
from theory.routing.passes import RoutingPlan
from theory.routing.record import RoutingRecord
from theory.routing.replay import LedgerError, ReplayContext


def batch_major(x_SBX: Float[Tensor, "S B X"]) -> Float[Tensor, "N X"]:
    """Megatron's rows in theory's order: row s of response b moves from s * B + b to b * S + s."""
    return x_SBX.transpose(0, 1).flatten(0, 1)


def position_major(x_NX: Tensor, num_responses: int) -> Tensor:
    """The inverse of `batch_major`, still flattened: row s of response b stands at s * B + b."""
    return x_NX.unflatten(0, (num_responses, -1)).transpose(0, 1).flatten(0, 1)


def local_plan(
    plan: RoutingPlan, indices: Sequence[int], num_padding: int, runs: Sequence[range], layers: Sequence[int]
) -> RoutingPlan:
    """The routing of one model chunk of one rank: these responses, the rows `runs` of each, its own layers.

    `num_padding` empty responses follow the chosen ones: they fill up a micro-batch and have no rows.
    """

    def window(record: RoutingRecord) -> RoutingRecord:
        parts = [
            record.part(responses=indices, rows=(run.start, run.stop), layers=layers, num_empty=num_padding)
            for run in runs
        ]
        if len(parts) == 1:
            return parts[0]
        # Side by side for each response, as a context-parallel rank has its two runs.
        return RoutingRecord.spliced([[(part, b, 0) for part in parts] for b in range(len(parts[0]))])

    record, rows, scored = plan.record, plan.feature_rows, plan.scored
    if record is not None:
        record = window(record)
    if isinstance(scored, RoutingRecord):
        scored = window(scored)
    if rows is not None:
        inside = [_inside(rows[b], runs) for b in indices]
        rows = (*inside, *(torch.zeros(0, dtype=torch.int64) for _ in range(num_padding)))
    absent = sorted(set(layers) - set(plan.predictor)) if plan.source == "predicted" else []
    if absent:
        raise ValueError(f"expected a predictor for layers {list(layers)}, got none for {absent}")
    predictor = {n: plan.predictor[n] for n in layers} if plan.source == "predicted" else {}
    return replace(plan, record=record, feature_rows=rows, predictor=predictor, scored=scored)


def _inside(row_F: Int[Tensor, " F"], runs: Sequence[range]) -> Int[Tensor, " _"]:
    """The rows that lie in `runs`, counted from the first row of the first run on."""
    befores = accumulate(map(len, runs[:-1]), initial=0)
    return torch.cat(
        [
            row_F[(row_F >= run.start) & (row_F < run.stop)] - run.start + before
            for run, before in zip(runs, befores, strict=True)
        ]
    )


@dataclass
class Flight:
    """One micro-batch's pass over one chunk, from its forward to the end of its backward."""

    context: ReplayContext
    done: Callable[[ReplayContext], None]
    recomputed: set[int] = field(default_factory=set)


class ChunkReplay:
    """The routers of one model chunk, and the passes of the micro-batches that are in flight through it.

    `layer_numbers` are the routers' decoder layers, from 0. Several models in one process do not affect each other.
    """

    def __init__(self, chunk: torch.nn.Module, gate: Gate) -> None:
        self._forward: Flight | None = None
        self._backward: Flight | None = None
        self._waiting: deque[Flight] = deque()
        routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
        self._hooks = [_RouterHook(router, gate, self) for router in routers]
        self.layer_numbers = tuple(sorted(hook.layer_number for hook in self._hooks))
        if len(set(self.layer_numbers)) != len(self.layer_numbers):
            raise ValueError(f"expected routers of distinct decoder layers, got {self.layer_numbers}")

    @property
    def num_waiting(self) -> int:
        """The number of passes whose backward has not ended."""
        return len(self._waiting)

    def run(
        self, context: ReplayContext, forward: Callable[[], Tensor], done: Callable[[ReplayContext], None]
    ) -> Tensor:
        """forward()'s output, routed in `context`, which is closed and passed to `done` after the backward.

        Without gradients this happens at once. Raises LedgerError if the forward did not route every local layer
        exactly once, or if another forward of this chunk has not finished.
        """
        if self._forward is not None:
            raise LedgerError("expected one forward at a time through a model chunk, got a nested one")
        flight = Flight(context.__enter__(), done)
        self._forward = flight
        self._waiting.append(flight)
        try:
            output = forward()
        finally:
            self._forward = None  # a failed forward stays in `_waiting` until `clear`
        context.used  # noqa: B018 - raises if a local layer was not routed, before the output is sent on
        # requires_grad alone does not tell: Megatron sets it on outputs for the next stage, without gradients too.
        if torch.is_grad_enabled() and output.requires_grad:
            # The output's gradient comes first in a backward, before any layer is recomputed.
            output.register_hook(lambda _: self._begin_backward(flight))
        else:
            self._finish(flight)
        return output

    def clear(self) -> None:
        """Abandons every pass in flight, with an error."""
        failure = LedgerError("the passes in flight were abandoned")
        for flight in self._waiting:
            flight.context.__exit__(LedgerError, failure, None)
        self._waiting.clear()
        self._forward = self._backward = None
        for hook in self._hooks:
            hook.forget()

    def current(self) -> tuple[Flight, bool]:
        """The pass that a router's call belongs to, and whether the call is a recomputation inside a backward."""
        if torch._C._current_graph_task_id() != -1:  # torch has no public name for "inside a backward"
            if self._backward is None:
                raise LedgerError("expected recomputation in the backward of a routed forward, got another backward")
            return self._backward, True
        if self._forward is None:
            raise LedgerError("expected a forward inside a replay context, got one outside")
        return self._forward, False

    def _begin_backward(self, flight: Flight) -> None:
        if self._backward is not None or not self._waiting or flight is not self._waiting[0]:
            raise LedgerError("expected backward passes one at a time, in the order of their forwards")
        self._backward = flight
        # Autograd's engine calls back when the whole backward is done; the first chunk's input has no gradient to hook.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish(flight))

    def _finish(self, flight: Flight) -> None:
        self._backward = None
        self._waiting.remove(flight)
        # Closed first, so that nothing can be routed any more in the pass whose routes `done` reads.
        flight.context.__exit__(None, None, None)
        flight.done(flight.context)


class _RouterHook(RouterReplay):
    """Takes the place of Megatron's RouterReplay in one router: sees the router's input, and answers its top-k."""

    def __init__(self, router: TopKRouter, gate: Gate, owner: ChunkReplay) -> None:
        super().__init__()
        if router.router_replay is None:
            raise ValueError("expected a model built with moe_enable_routing_replay, got a router without its hook")
        # The list is process-wide, and Megatron's setters act on all of it: other models must not reach this router.
        instances = RouterReplay.global_router_replay_instances
        instances[:] = [other for other in instances if other not in (self, router.router_replay)]
        assert router.layer_number is not None
        # Megatron counts decoder layers from 1, over all stages together.
        self.layer_number = int(router.layer_number) - 1
        self._router, self._gate, self._owner = router, gate, owner
        self._num_responses = 0
        self._seen: tuple[Tensor, Tensor] | None = None
        self._gating = router.gating
        router.gating = self.gating  # type: ignore[method-assign]
        router.router_replay = self

    def forget(self) -> None:
        """Drops the input of a forward that did not end."""
        self._seen = None

    def gating(self, hidden_SBD: Float[Tensor, "S B D"]) -> Float[Tensor, "S B E"]:
        """The logits by which Megatron weighs experts: the live ones, or p + h W_p where gates are predicted."""
        logits_SBE = self._gating(hidden_SBD)
        flight, _ = self._owner.current()
        self._num_responses = hidden_SBD.shape[1]
        hidden_ND, logits_NE = batch_major(hidden_SBD), batch_major(logits_SBE)
        self._seen = hidden_ND.detach(), logits_NE.detach()  # a choice has no gradient
        if flight.context.plan.gates == "live":
            return logits_SBE
        # Not detached, unlike the choice: with predicted gates the gradient also reaches hidden states through W_p.
        weighed_NE = flight.context.weighed_logits(self.layer_number, hidden_ND, logits_NE)
        return position_major(weighed_NE, self._num_responses).view_as(logits_SBE)

    def get_replay_topk(
        self,
        scores: Float[Tensor, "N E"],
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable | None = None,
    ) -> tuple[Float[Tensor, "N K"], Int[Tensor, "N K"]]:
        """Megatron's scores of the experts that the pass chooses, and these experts; rows are seq-major.

        The scores follow the model's convention (logits, softmax, sigmoid plus selection bias). The choice is theory's,
        from the live logits, so that groups and bias act as in every other engine.
        """
        flight, is_recomputation = self._owner.current()
        assert self._seen is not None, "Megatron's router asked for its top-k before its gating ran"
        # Taken, not kept: a second top-k without a gating of its own fails, and no activation outlives its use.
        (hidden_ND, logits_NE), self._seen = self._seen, None
        arguments = (self.layer_number, hidden_ND, logits_NE, topk, self._gate, self._router.expert_bias)
        if is_recomputation:
            # The context opens a recomputation per layer, so by itself it would not notice a layer's second one.
            if self.layer_number in flight.recomputed:
                raise LedgerError(f"layer {self.layer_number}: expected one recomputation per backward, got another")
            flight.recomputed.add(self.layer_number)
            with flight.context.recompute():
                experts_NK = flight.context.choose(*arguments)
        else:
            experts_NK = flight.context.choose(*arguments)
        indices_NK = position_major(experts_NK, self._num_responses)
        # Gathered from Megatron's own scores, so that gradients reach the router.
        return scores.gather(1, indices_NK), indices_NK


@contextmanager
def in_flight(chunks: Sequence[ChunkReplay]) -> Iterator[None]:
    """Encloses one schedule of forwards and backwards: nothing is in flight afterwards, even after an error.

    Raises LedgerError if a forward had no backward.
    """
    try:
        yield
        left = [chunk.num_waiting for chunk in chunks]
        if any(left):
            raise LedgerError(f"expected the backward of every forward, got {sum(left)} forwards without it")
    except BaseException:
        # A flight left behind would fail the next pass, whose backward would not be the first in line.
        for chunk in chunks:
            chunk.clear()
        raise


def check_routing(plan: RoutingPlan, num_rows_B: Sequence[int], moe_layers: Sequence[int]) -> None:
    """Raises ValueError if the routing of a whole batch does not fit the batch's rows, layers or feature rows.

    Call this before ranks cut their windows out of it: a window would hide a surplus row or layer.
    """
    rows = plan.feature_rows
    for record in (plan.record, plan.scored):
        if not isinstance(record, RoutingRecord):
            continue
        if record.num_rows_B != list(num_rows_B):
            raise ValueError(f"expected a record of {list(num_rows_B)} rows per response, got {record.num_rows_B}")
        if record.layer_numbers != tuple(moe_layers):
            raise ValueError(f"expected a record of layers {list(moe_layers)}, got {list(record.layer_numbers)}")
    if plan.source == "predicted" and sorted(plan.predictor) != list(moe_layers):
        raise ValueError(f"expected a predictor for layers {list(moe_layers)}, got {sorted(plan.predictor)}")
    if rows is None:
        return
    if len(rows) != len(num_rows_B):
        raise ValueError(f"expected feature rows of {len(num_rows_B)} responses, got {len(rows)}")
    for b, (row, n) in enumerate(zip(rows, num_rows_B, strict=True)):
        if bool(((row < 0) | (row >= n)).any()):
            raise ValueError(f"response {b}: expected feature rows in [0, {n}), got {row.tolist()}")
