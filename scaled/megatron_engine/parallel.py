"""The process groups of a layout, and which share of the work a rank has in it.

Ranks are numbered tensor-parallel first, then context-parallel, then data-parallel, then by pipeline stage (Megatron's
"tp-cp-ep-dp-pp").
Megatron is imported late: `check_layout` serves `plan` on machines and in processes without it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor
from torch._C._distributed_c10d import Store

from lab.hf import ModelShape
from scaled.config import TrainingBlock


@dataclass(frozen=True)
class Layout:
    """A rank's place: sizes and ranks of data (dp), context (cp), tensor (tp), pipeline (pp), expert (ep) and
    expert-tensor (etp) parallelism; edp are the replicas of one expert. `layers` are the decoder layers of each model
    chunk, from 0. The defaults are a rank alone.
    """

    dp_rank: int = 0
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1
    edp_rank: int = 0
    edp_size: int = 1
    layers: tuple[tuple[int, ...], ...] = ((),)

    @property
    def num_chunks(self) -> int:
        """VPP: model chunks of this rank."""
        return len(self.layers)

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between the parallel regions are split by position; always so with tensor parallelism."""
        return self.tp_size > 1

    @property
    def is_last_stage(self) -> bool:
        """Whether the rank's last chunk has the head."""
        return self.pp_rank == self.pp_size - 1

    def has_embedding(self, chunk: int) -> bool:
        """Whether this chunk starts the model."""
        return self.pp_rank == 0 and chunk == 0

    def has_head(self, chunk: int) -> bool:
        """Whether this chunk ends the model."""
        return self.is_last_stage and chunk == self.num_chunks - 1

    @property
    def replica_rank(self) -> int:
        """The rank's number among those that hold the same dense weights: the ranks of CP x DP."""
        return self.dp_rank * self.cp_size + self.cp_rank

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same dense weights."""
        return self.dp_size * self.cp_size

    @property
    def is_reporter(self) -> bool:
        """Whether the rank reports the tokens of its data-parallel rank; the others of TP and CP have the same."""
        return self.tp_rank == 0 and self.cp_rank == 0

    def context_runs(self, width: int) -> tuple[range, ...]:
        """The positions of a padded width that this rank has embeddings and queries of (`context_runs`)."""
        return context_runs(width, self.cp_rank, self.cp_size)

    def router_runs(self, width: int) -> tuple[range, ...]:
        """The positions that this rank's routers see, ascending: its TP share of `context_runs`, in that order.

        ValueError for a width that does not divide.
        """
        runs = self.context_runs(width)
        num = sum(map(len, runs))
        if num % self.tp_size:
            raise ValueError(f"expected a multiple of {self.tp_size} sequence-parallel chunks, got {num} positions")
        # The share is cut from the runs laid end to end, so it may begin in one and end in the next.
        size, before, found = num // self.tp_size, 0, []
        for run in runs:
            start = max(self.tp_rank * size - before, 0)
            found.append(run[start : max((self.tp_rank + 1) * size - before, start)])
            before += len(run)
        return tuple(run for run in found if len(run))


def context_runs(width: int, cp_rank: int, cp_size: int) -> tuple[range, ...]:
    """The positions of a padded width that a context-parallel rank has, ascending.

    Of 2 CP equal runs rank r has numbers r and 2 CP - 1 - r, so that each rank has the same share of the causal mask
    (Llama 3, arXiv 2407.21783, sec. 3.3.2); all positions where CP is 1. ValueError for a width that does not divide.
    """
    if cp_size == 1:
        return (range(width),)
    if width % (2 * cp_size):
        raise ValueError(f"expected a multiple of {2 * cp_size} context-parallel runs, got a width of {width}")
    size = width // (2 * cp_size)
    return tuple(range(n * size, (n + 1) * size) for n in (cp_rank, 2 * cp_size - 1 - cp_rank))


def context_positions(width: int, cp_size: int) -> Int[Tensor, "C Q"]:
    """The positions of a padded width that each of the C context-parallel ranks has, in its order."""
    ranks = (context_runs(width, rank, cp_size) for rank in range(cp_size))
    return torch.stack([torch.cat([torch.arange(run.start, run.stop) for run in runs]) for runs in ranks])


def check_layout(shape: ModelShape, training: TrainingBlock) -> None:
    """ValueError, naming the field to change, where the layout does not divide the model."""
    tp, etp, ep = training.tensor_parallel, training.expert_tensor_parallel, training.expert_parallel
    rows = [
        ("tensor_parallel", tp, "attention heads", shape.num_heads),
        ("tensor_parallel", tp, "key-value heads", shape.num_kv_heads),
        # 0 where the model has no such units: every size divides it.
        ("tensor_parallel", tp, "dense hidden units", shape.dense_size if shape.dense_layers else 0),
        ("tensor_parallel", tp, "shared-expert hidden units", shape.shared_expert_size),
        ("expert_parallel", ep, "experts", shape.num_experts),
        ("expert_tensor_parallel", etp, "hidden units of an expert", shape.expert_size),
    ]
    for field, size, what, number in rows:
        if number % size:
            raise ValueError(f"training.{field}: expected a divisor of {number} {what}, got {size}")
    _check_stages(training, shape.num_layers)


def _check_stages(training: TrainingBlock, num_layers: int) -> None:
    """ValueError, naming the field, where Megatron could not deal the decoder layers out."""
    pp, vpp = training.pipeline_parallel, training.virtual_pipeline
    if training.uneven_stages == (None, None):
        if num_layers % (pp * vpp):
            smaller = smaller_last_stage(num_layers, pp) if vpp == 1 else None
            hint = f", or {smaller} layers in training.num_layers_in_last_pipeline_stage" if smaller else ""
            raise ValueError(
                f"training.pipeline_parallel x training.virtual_pipeline: expected a divisor of {num_layers} decoder "
                f"layers{hint}, got {pp * vpp}"
            )
        return
    fixed = {place: n for place, n in zip(("first", "last"), training.uneven_stages, strict=True) if n is not None}
    for place, number in fixed.items():
        if number % vpp:
            field = f"training.num_layers_in_{place}_pipeline_stage"
            raise ValueError(f"{field}: expected a multiple of training.virtual_pipeline {vpp}, got {number}")
    left, others = num_layers - sum(fixed.values()), pp - len(fixed)
    if others == 0 and vpp > 1:  # Megatron-core 0.16 divides by the number of other stages
        raise ValueError(
            f"training.num_layers_in_first_pipeline_stage: expected null with two stages of {vpp} chunks, whose last "
            f"one has {fixed['last']}, got {fixed['first']}"
        )
    if (left != 0) if others == 0 else (left <= 0 or left % (others * vpp)):
        wanted = f"a multiple of {others * vpp}" if others else "none"
        raise ValueError(
            f"training.num_layers_in_{[*fixed][-1]}_pipeline_stage: expected to leave {wanted} of {num_layers} decoder "
            f"layers to {others} other stages, got {' + '.join(map(str, fixed.values()))}, which leaves {left}"
        )


def smaller_last_stage(num_layers: int, num_stages: int) -> int | None:
    """The layers of a last stage that is as little smaller as possible than the others, which are equal; None where
    all are equal, and where no layer would be left for it."""
    others = -(-num_layers // num_stages)
    left = num_layers - (num_stages - 1) * others
    return left if 0 < left < others else None


def stage_sizes(training: TrainingBlock, num_layers: int) -> tuple[int, ...]:
    """The number of decoder layers of each pipeline stage, of all its chunks, where `check_layout` raises nothing."""
    first, last = ([] if number is None else [number] for number in training.uneven_stages)
    others = training.pipeline_parallel - len(first + last)
    each = (num_layers - sum(first + last)) // others if others else 0
    return (*first, *[each] * others, *last)


def layers_of(training: TrainingBlock, num_layers: int, pp_rank: int) -> tuple[tuple[int, ...], ...]:
    """The decoder layers, from 0, of each model chunk of a pipeline stage (interleaved: chunk v of stage p is the
    (v x PP + p)-th of the PP x VPP runs of layers)."""
    chunks = [size // training.virtual_pipeline for size in stage_sizes(training, num_layers)]
    starts = [v * sum(chunks) + sum(chunks[:pp_rank]) for v in range(training.virtual_pipeline)]
    return tuple(tuple(range(start, start + chunks[pp_rank])) for start in starts)


def initialize(training: TrainingBlock, rank: int, world_size: int, store: Store) -> None:
    """Joins the process group that meets in `store` and makes Megatron's groups; gloo on CPUs, NCCL on GPUs.

    Nothing is drawn from a global generator. Raises ValueError where `world_size` is not the layout's.
    """
    if world_size != training.num_ranks:
        raise ValueError(
            f"training.num_ranks: expected the {world_size} processes that were started, got {training.num_ranks}"
        )
    is_gpu = torch.cuda.is_available()
    if is_gpu:
        # Ray shows an actor only its own GPU.
        torch.cuda.set_device(rank % torch.cuda.device_count())
    set_deterministic(bool(training.deterministic))
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=training.timeout_s),
    )
    # Megatron takes whole minutes.
    make_groups(training, distributed_timeout_minutes=max(1, round(training.timeout_s / 60)))


def set_deterministic(is_deterministic: bool) -> None:
    """Makes this process's GPU sums run in one order, or in any: Megatron then sums a token's experts by atomics.

    Call it before the first matrix product and the first group: cuBLAS and NCCL read their settings once.
    """
    if is_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
        # Sums in the switch of a node have no fixed order (NVIDIA/nccl#1497).
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no code reads such memory
    torch.use_deterministic_algorithms(is_deterministic)


def make_groups(training: TrainingBlock, **options: Any) -> None:
    """Megatron's groups of the layout, over an existing process group; `options` are for Megatron."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from scaled.megatron_engine import cpu_shims

    cpu_shims.install()
    parallel_state.initialize_model_parallel(**group_sizes(training), **options)
    model_parallel_cuda_manual_seed(0)  # states of Megatron's own tracker, from which nothing is drawn


def group_sizes(training: TrainingBlock) -> dict[str, int | None]:
    """The arguments of Megatron's `initialize_model_parallel`."""
    return {
        "tensor_model_parallel_size": training.tensor_parallel,
        "context_parallel_size": training.context_parallel,
        "pipeline_model_parallel_size": training.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": training.virtual_pipeline if training.virtual_pipeline > 1 else None,
        "expert_model_parallel_size": training.expert_parallel,
        "expert_tensor_parallel_size": training.expert_tensor_parallel,
    }


def shutdown() -> None:
    """Leaves Megatron's groups and the process group; a later `initialize` starts afresh."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe.router_replay import RouterReplay

    # Process-wide state of torch and Megatron: without this the next `initialize` would inherit it.
    set_deterministic(False)
    RouterReplay.clear_global_router_replay_instances()
    parallel_state.destroy_model_parallel()
    tensor_parallel.random.initialize_rng_tracker(force_reset=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def layout(training: TrainingBlock, num_layers: int) -> Layout:
    """This rank's place; `initialize` must have run."""
    from megatron.core import parallel_state as state

    pp_rank = state.get_pipeline_model_parallel_rank()
    return Layout(
        dp_rank=state.get_data_parallel_rank(),
        dp_size=state.get_data_parallel_world_size(),
        cp_rank=state.get_context_parallel_rank(),
        cp_size=state.get_context_parallel_world_size(),
        tp_rank=state.get_tensor_model_parallel_rank(),
        tp_size=state.get_tensor_model_parallel_world_size(),
        pp_rank=pp_rank,
        pp_size=state.get_pipeline_model_parallel_world_size(),
        ep_rank=state.get_expert_model_parallel_rank(),
        ep_size=state.get_expert_model_parallel_world_size(),
        etp_rank=state.get_expert_tensor_parallel_rank(),  # type: ignore[arg-type]  # None without groups only
        etp_size=state.get_expert_tensor_parallel_world_size(),  # type: ignore[arg-type]
        edp_rank=state.get_expert_data_parallel_rank(),
        edp_size=state.get_expert_data_parallel_world_size(),
        layers=layers_of(training, num_layers, pp_rank),
    )


__all__ = [
    "Layout",
    "check_layout",
    "initialize",
    "layers_of",
    "layout",
    "shutdown",
    "smaller_last_stage",
    "stage_sizes",
]
