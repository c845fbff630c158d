"""A run's ranks and engines, built from its config: Megatron-core and vLLM at their places in the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from scaled.cluster.engine_actor import build_vllm
from scaled.cluster.rank_group import ScoringGroup, build_scorer, megatron_assembly
from scaled.cluster.ray_cluster import Cluster
from scaled.cluster.rollout_group import Lost, RolloutGroup
from scaled.cluster.training_group import TrainingGroup, build_megatron
from scaled.cluster.transfer import Meter
from scaled.config import ModelBlock, ScaledRun
from scaled.model_shape import load_shape
from scaled.stages import layer_sets
from scaled.vllm_engine.quantize import quantised


def training_group(config: ScaledRun, places: Cluster, meter: Meter) -> TrainingGroup:
    """The training engine, with the weights of `model.path`."""
    build = partial(build_megatron, _model(config), config.training, config.algorithm.build())
    return TrainingGroup(
        places,
        build,
        config.training.num_ranks,
        megatron_assembly(),
        bucket_bytes=_bucket(config),
        limits=config.cluster.limits,
        meter=meter,
    )


def scoring_group(config: ScaledRun, places: Cluster, meter: Meter) -> ScoringGroup:
    """The same ranks and weights without the means to train: the old pass's bits, at 2 bytes per bf16 weight."""
    return ScoringGroup(
        places,
        partial(build_scorer, _model(config), config.training),
        config.training.num_ranks,
        megatron_assembly(),
        bucket_bytes=_bucket(config),
        limits=config.cluster.limits,
        meter=meter,
    )


def _model(config: ScaledRun) -> ModelBlock:
    """The model block with a path that holds in every process."""
    return config.model.model_copy(update={"path": str(Path(config.model.path).resolve())})


def rollout_group(
    config: ScaledRun, stop_tokens: Sequence[int], places: Cluster, meter: Meter, lost: Lost | None = None
) -> RolloutGroup:
    """The rollout engine; its engines wait for weights. `lost` is called for each replaced one."""
    rollout = config.rollout
    # As text: engines take all weights from pushes, so that their machines need no model folder.
    config_json = (Path(config.model.path) / "config.json").read_text(encoding="utf-8")
    # A CUDA graph is captured once: where mu's features are needed later, it must contain their recorder.
    in_graphs = not rollout.enforce_eager and config.algorithm.build().passes.rollout == "predicted"
    return RolloutGroup(
        places,
        partial(build_vllm, config_json, rollout, stop_tokens, in_graphs),
        rollout.num_engines,
        max_num_seqs=rollout.max_num_seqs,
        timeout_s=float(rollout.timeout_s),
        max_restarts=rollout.max_restarts,
        bucket_bytes=_bucket(config),
        convert=partial(quantised, precision=rollout.precision),
        limits=config.cluster.limits,
        meter=meter,
        lost=lost,
        layer_sets=_layer_sets(config, places),
    )


def _layer_sets(config: ScaledRun, places: Cluster) -> tuple[tuple[int, ...], ...]:
    """The layers that machines of ranks read apart; none where there is one stage."""
    if config.training.pipeline_parallel == 1:
        return ()
    shape = load_shape(config.model.path, config.model.shape)
    return layer_sets(config.training, shape.num_layers, places.machines_of_ranks())


def _bucket(config: ScaledRun) -> int:
    return config.cluster.bucket_mib * 2**20
