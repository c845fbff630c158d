"""The dry run of a layout: real Megatron-core builds every pipeline stage, without memory and without other ranks.

It runs in a process of its own, under a fake process group and on the meta device, so that divisors, the places of
layers and experts, and the parameters of a rank are Megatron's own answers.
"""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lab.hf import ModelShape
from scaled.config import TrainingBlock
from scaled.megatron_engine.parallel import check_layout

LIMIT_S = 300
"""Seconds after which a dry run is ended."""

PROGRAM = "import sys; from scaled.plan.layout import build; build(*sys.argv[1:])"

# Bytes per parameter: weights, gradients (always fp32), optimiser states (Adam's two moments and, in bf16, the master).
BYTES = {"bf16": (2, 4, 12), "fp32": (4, 4, 8)}


@dataclass(frozen=True)
class RankPlan:
    """The shards of one rank. `layers` are decoder layers from 0, by model chunk; parameters are its own.

    num_local_experts: of each of its MoE layers, 0 where it has none.
    replicated_parameters: those of dense_parameters that every tensor-parallel rank has whole (norms, routers).
    weight_bytes, gradient_bytes: of all its parameters. optimizer_bytes: of its share of the optimiser states, which
    are sharded over CP x DP ranks (experts: over the replicas of an expert) with the distributed optimiser.
    peak_bytes: resident memory of the dry run itself.
    """

    rank: int
    stage: int
    layers: tuple[tuple[int, ...], ...]
    num_local_experts: int
    dense_parameters: int
    expert_parameters: int
    replicated_parameters: int
    num_replicas: int
    expert_data_parallel: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: int

    @property
    def num_parameters(self) -> int:
        """All parameters of the rank."""
        return self.dense_parameters + self.expert_parameters


def dry_run(shape: ModelShape, training: TrainingBlock) -> list[RankPlan]:
    """The parameters of the first rank of each pipeline stage, as Megatron-core builds it.

    Raises ValueError, naming the field to change, for a layout that does not divide the model; RuntimeError with the
    end of Megatron's own message where it refuses something else; TimeoutError where it takes longer than LIMIT_S.
    """
    check_layout(shape, training)
    per_stage = training.num_ranks // training.pipeline_parallel
    ranks = [stage * per_stage for stage in range(training.pipeline_parallel)]
    with tempfile.TemporaryDirectory(prefix="dry-run-") as name:
        request, answer = Path(name) / "request", Path(name) / "answer"
        request.write_bytes(pickle.dumps((shape, training, ranks)))
        # The process imports what this one would, wherever it was started.
        paths = os.pathsep.join(map(os.path.abspath, sys.path))
        try:
            done = subprocess.run(
                # Without warnings, the last line of stderr is the error's own text (`summary.dry_run_layout`).
                [sys.executable, "-P", "-W", "ignore", "-c", PROGRAM, str(request), str(answer)],
                # No GPU: a machine that has one would otherwise build Transformer Engine's modules on it.
                env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it took longer than {LIMIT_S:g} s") from None
        if done.returncode:
            raise RuntimeError(f"training: the dry run failed: {done.stderr.strip()[-2000:]}")
        return pickle.loads(answer.read_bytes())


def _plan(shape: ModelShape, training: TrainingBlock, rank: int) -> RankPlan:
    """Joins a fake world as this rank, builds its chunks on the meta device, counts, and leaves."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from scaled.megatron_engine import parallel
    from scaled.megatron_engine.model import build_model

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=training.num_ranks)
    # Gloo groups need a store that keeps values; the fake one keeps none.
    parallel.make_groups(training, create_gloo_process_groups=False)
    chunks = build_model(shape, training, device="meta")
    layout = parallel.layout(training, shape.num_layers)
    experts = dense = replicated = 0
    for name, parameter in (named for chunk in chunks for named in chunk.named_parameters()):
        # Not shared experts, which are `.mlp.shared_experts.`: TP splits them, as other dense weights.
        if ".mlp.experts." in name:
            experts += parameter.numel()
        else:
            dense += parameter.numel()
            replicated += 0 if getattr(parameter, "tensor_model_parallel", False) else parameter.numel()
    parallel.shutdown()
    weight, gradient, state = BYTES[training.precision]
    shards = (layout.num_replicas, layout.edp_size) if training.distributed_optimizer else (1, 1)
    return RankPlan(
        rank=rank,
        stage=layout.pp_rank,
        layers=layout.layers,
        num_local_experts=shape.num_experts // layout.ep_size if experts else 0,
        dense_parameters=dense,
        expert_parameters=experts,
        replicated_parameters=replicated,
        num_replicas=layout.num_replicas,
        expert_data_parallel=layout.edp_size,
        weight_bytes=weight * (dense + experts),
        gradient_bytes=gradient * (dense + experts),
        optimizer_bytes=math.ceil(state * dense / shards[0]) + math.ceil(state * experts / shards[1]),
        peak_bytes=_peak_bytes(),
    )


def _peak_bytes() -> int:
    # Not getrusage: its maximum outlives exec, so it would be the caller's if that is larger.
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def build(request: str, answer: str) -> None:
    """Writes the RankPlans that `dry_run` asks its process for."""
    shape, training, ranks = pickle.loads(Path(request).read_bytes())
    Path(answer).write_bytes(pickle.dumps([_plan(shape, training, rank) for rank in ranks]))


__all__ = ["RankPlan", "dry_run"]
