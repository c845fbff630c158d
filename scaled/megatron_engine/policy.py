"""One policy on one rank: its model chunks, and the schedule that runs micro-batches through them.

The same forward serves the old, reference and gradient passes. It scores response rows only, and routes in one
`ReplayContext` per micro-batch and chunk. Losses add up over micro-batches and data-parallel ranks, without averages.

Extra letters: b responses of a micro-batch; n its response tokens, packed; K of mu's likeliest tokens.
Papers: MiniRL (arXiv 2512.01374) Eq. 5, R3 (2510.11370) Eq. 8 and 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from lab.hf import ModelShape
from scaled.config import TrainingBlock
from scaled.megatron_engine.micro_batches import MicroBatch
from scaled.megatron_engine.model import build_model
from scaled.megatron_engine.parallel import Layout
from scaled.megatron_engine.parts import RoutePart, TokenPart, route_parts
from scaled.megatron_engine.replay import ChunkReplay, in_flight, local_plan
from scaled.megatron_engine.scoring import ResponseHead
from scaled.megatron_engine.weights import load_hf
from theory.routing.packed_rows import offsets_of
from theory.routing.passes import RoutingPlan
from theory.routing.replay import ReplayContext
from theory.top_tokens import TokenRows

Loss = Callable[[MicroBatch, Float[Tensor, "b T"], Float[Tensor, "b T K"] | None], Float[Tensor, ""]]
"""A micro-batch's share of the loss that a gradient pass minimises, from log pi of the sampled tokens and, where the
rollouts have them, of mu's likeliest tokens."""


@dataclass
class PassResult:
    """The results of this rank's chunks on all micro-batches of one pass."""

    tokens: list[TokenPart] = field(default_factory=list)
    routes: list[RoutePart] = field(default_factory=list)


@dataclass(frozen=True)
class _Pass:
    plan: RoutingPlan
    loss: Loss | None
    result: PassResult


class Policy:
    """The model chunks of one rank with the weights of a Hugging Face folder, trained or frozen.

    `chunks` are the bare GPTModels. `wrapped` are the modules that the schedule runs: each chunk inside Float16Module
    under bf16, and inside DistributedDataParallel if trained.
    """

    def __init__(
        self,
        shape: ModelShape,
        training: TrainingBlock,
        layout: Layout,
        folder: str,
        *,
        trained: bool,
        freeze_router: bool,
    ) -> None:
        self.shape, self.training, self.layout = shape, training, layout
        self.chunks = build_model(shape, training)
        self.wrapped: list[Any] = list(self.chunks)
        config = self.chunks[0].config
        if training.precision == "bf16":
            # Before weights are loaded: it casts the fp32 selection bias too, and casting back would not restore bits.
            self.wrapped = [Float16Module(config, chunk) for chunk in self.chunks]
            for router in self._routers():
                router._maintain_float32_expert_bias()
        load_hf(self.chunks, shape, layout, folder)
        self.device = next(self.chunks[0].parameters()).device
        self.replays = [ChunkReplay(chunk, shape.gate) for chunk in self.chunks]
        last = len(self.chunks) - 1
        self.head = None
        if layout.has_head(last):
            output_layer = self.chunks[last].output_layer
            self.head = ResponseHead(output_layer, layout.sequence_parallel, shape.vocab_size, training.logit_chunk)
        # Losses and gradients are sums, not means over micro-batches and ranks: the objective has its own denominators.
        config.calculate_per_token_loss = True
        if layout.num_chunks > 1:
            # Batched sends and receives are matched in order of issue: with two interleaved stages, each the other's
            # next and previous, activations and gradients would be swapped (p2p_communication.py:_batched_p2p_ops).
            config.batch_p2p_comm, config.overlap_p2p_comm = False, True
        if trained:
            self._train(freeze_router)
        else:
            for chunk in self.chunks:
                chunk.requires_grad_(False)

    def _routers(self) -> Iterator[TopKRouter]:
        return (module for chunk in self.chunks for module in chunk.modules() if isinstance(module, TopKRouter))

    def _train(self, freeze_router: bool) -> None:
        for router in self._routers():
            # Before DDP, which makes gradient buffers for the parameters that require gradients by then.
            router.weight.requires_grad_(not freeze_router)
        config = self.chunks[0].config
        # In fp32, since micro-batches' gradients add up in the buffer, and bf16 would drop the small ones.
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=self.training.distributed_optimizer
        )
        self.wrapped = [
            DistributedDataParallel(config, ddp, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self.wrapped)
        ]
        config.finalize_model_grads_func = _finalize

    def run(self, micro_batches: Sequence[MicroBatch], plan: RoutingPlan, loss: Loss | None = None) -> PassResult:
        """One pass over this rank's micro-batches, forward only without `loss`; a collective.

        With it, every parameter's main_grad then holds the gradient of the losses, summed over all ranks.
        Raises LedgerError if a layer was not routed exactly once in a pass.
        """
        this = _Pass(plan, loss, PassResult())
        # An iterator for each chunk: the schedule asks every chunk for every micro-batch, each in its own order.
        feeds = [iter([(number, micro) for micro in micro_batches]) for number in range(len(self.wrapped))]
        is_single = len(self.wrapped) == 1
        # Megatron's schedule leaves gradients on where it runs forward only.
        with in_flight(self.replays), torch.set_grad_enabled(loss is not None):
            get_forward_backward_func()(
                forward_step_func=partial(self._forward_step, this),
                data_iterator=feeds[0] if is_single else feeds,
                model=self.wrapped[0] if is_single else self.wrapped,
                num_microbatches=len(micro_batches),
                # For sends between stages; ignored where shapes vary, since stages then exchange shapes.
                seq_length=micro_batches[0].width,
                micro_batch_size=len(micro_batches[0].num_rows_b),
                forward_only=loss is None,
            )
        return this.result

    def _forward_step(
        self, this: _Pass, feed: Iterator[tuple[int, MicroBatch]], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict]]]:
        number, micro = next(feed)
        return self._forward(this, number, micro), partial(self._score, this, micro)

    def _forward(self, this: _Pass, number: int, micro: MicroBatch) -> Tensor:
        if self.head is not None and self.layout.has_head(number):
            # The head runs inside the forward, so it must be told first which rows to score.
            self.head.expect(micro.rank_n, micro.rows_n, micro.targets_nJ, micro.temperature)
        # Not read: the rotary embedding counts positions by itself, zigzag under context parallelism.
        positions_bS = torch.zeros_like(micro.tokens_bS)

        def forward() -> Tensor:
            return self.wrapped[number](micro.tokens_bS, positions_bS, None)

        replay = self.replays[number]
        if not replay.layer_numbers:  # a chunk with dense layers only
            return forward()
        runs = self.layout.router_runs(micro.width)
        local = local_plan(this.plan, micro.indices, micro.num_filling, runs, replay.layer_numbers)
        # Runs ascend, so a response's rows here are the first ones of the rank's positions.
        num_rows_b = [sum(min(max(n - run.start, 0), len(run)) for run in runs) for n in micro.num_rows_b]
        context = ReplayContext(local, num_rows_b, sum(map(len, runs)), replay.layer_numbers)

        def done(finished: ReplayContext) -> None:
            if micro.indices:
                this.result.routes += route_parts(finished, micro.indices, runs, for_update=this.loss is not None)

        return replay.run(context, forward, done)

    def _score(self, this: _Pass, micro: MicroBatch, scores_1n: Tensor) -> tuple[Tensor, Tensor, dict]:
        """Megatron's loss function on the last stage: (loss, no tokens to divide by, nothing to report)."""
        (entropy_n, squares_n), logp_n = scores_1n[0, :, :2].detach().unbind(1), scores_1n[0, :, 2]
        size = (len(micro.indices), micro.num_positions)
        where = (micro.response_n, micro.position_n)
        logp_bT = logp_n.new_zeros(size).index_put(where, logp_n)
        logp_nK = scores_1n[0, :, 3:] if scores_1n.shape[2] > 3 else None
        if self.layout.is_reporter and micro.indices:
            part = TokenPart(micro.indices, logp_bT.detach().cpu())
            if this.loss is None:
                entropy_bT = entropy_n.new_zeros(size).index_put(where, entropy_n).cpu()
                squares_bT = squares_n.new_zeros(size).index_put(where, squares_n).cpu()
                part = replace(part, entropy_bT=entropy_bT, sum_squares_bT=squares_bT)
                if logp_nK is not None:
                    offsets = offsets_of(torch.bincount(micro.response_n, minlength=size[0]).tolist())
                    part = replace(part, logp_top=TokenRows(logp_nK.detach().cpu().contiguous(), offsets))
            this.result.tokens.append(part)
        no_tokens = torch.zeros((), dtype=torch.int, device=logp_n.device)
        if this.loss is None:
            return logp_n.sum(), no_tokens, {}
        logp_bTK = None
        if logp_nK is not None:
            logp_bTK = logp_n.new_zeros((*size, logp_nK.shape[1])).index_put(where, logp_nK)
        # An empty micro-batch runs backward too, since other ranks wait for this one in collectives.
        loss = this.loss(micro, logp_bT, logp_bTK) if micro.indices else scores_1n[..., 2:].sum()
        # Three values: of a pair, Megatron divides the loss by the number of micro-batches.
        return loss, no_tokens, {}


def _finalize(chunks: list[torch.nn.Module], _: Tensor | None = None, **keywords: Any) -> None:
    finalize_model_grads(chunks, None, **keywords)  # without the number of tokens, so that the sum is not divided


__all__ = ["Loss", "PassResult", "Policy"]
