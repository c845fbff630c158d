"""The whole plan of a config: memory, payloads and cost, and as JSON; `tables` shows it."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass, field
from typing import Any

from lab.hf import ModelShape
from lab.strict import ConfigError
from scaled.config import ScaledRun
from scaled.model_shape import load_shape
from scaled.plan import compute, division, engine_memory, feasibility, in_progress, memory, parameters, payloads
from scaled.plan.assumptions import sentences
from scaled.plan.compute import StepCompute
from scaled.plan.conditions import check_settings
from scaled.plan.hardware import Gpu, gpu_named
from scaled.plan.host_memory import host_pools
from scaled.plan.layout import RankPlan, dry_run
from scaled.plan.memory import Memory
from scaled.plan.waits import Wait, longest_wait


@dataclass(frozen=True)
class GpuBudget:
    """The memory that a GPU must hold for one purpose, and its limit, in bytes."""

    memory: Memory
    limit: float

    @property
    def fits(self) -> bool:
        """Whether the memory is within the limit."""
        return self.memory.total <= self.limit


@dataclass(frozen=True)
class Plan:
    """The plan of a config. `misfits` has a line for everything that does not fit.

    `resident` is the memory that colocated ranks keep while engines are awake; None where they do not take turns.
    `host` is the CPU memory of a machine in a step, `loading` while it loads a checkpoint. `wait` is the longest wait
    for an engine.
    """

    config: ScaledRun
    shape: ModelShape
    gpu: Gpu
    training: GpuBudget
    resident: GpuBudget | None
    rollout: GpuBudget
    host: Memory
    loading: Memory
    payloads: dict[str, int]
    compute: StepCompute
    wait: Wait
    misfits: list[str]
    ranks: list[RankPlan] = field(default_factory=list)

    @property
    def budgets(self) -> dict[str, GpuBudget]:
        """The budgets by name, without `resident` where it is None."""
        found = {"training": self.training, "resident": self.resident, "rollout": self.rollout}
        return {name: budget for name, budget in found.items() if budget is not None}

    def to_json(self) -> dict[str, Any]:
        """Plain numbers under plain names: bytes, FLOPs, seconds."""
        cluster, training, rollout = self.config.cluster, self.config.training, self.config.rollout
        return {
            "name": self.config.name,
            "parameters": {"all": self.shape.num_parameters, "active": self.shape.num_active_parameters},
            "cluster": {
                "gpu": asdict(self.gpu),
                "num_nodes": cluster.num_nodes,
                "gpus_per_node": cluster.gpus_per_node,
                "gpus_needed": division.gpus_needed(self.config),
                "machines_needed": division.machines_needed(self.config),
                "placement": cluster.placement,
            },
            "layout": {
                "training": training.model_dump() | {"data_parallel": training.data_parallel},
                "rollout": {"num_engines": rollout.num_engines, "tensor_parallel": rollout.tensor_parallel},
            },
            "memory_bytes": {
                name: {"limit": budget.limit, "total": budget.memory.total, "parts": budget.memory.parts}
                for name, budget in self.budgets.items()
            },
            "host_bytes": self.host.parts,
            "loading_bytes": self.loading.parts,
            "payload_bytes": self.payloads,
            "compute": asdict(self.compute) | {"total_flops": self.compute.total_flops},
            "longest_wait": asdict(self.wait),
            "assumptions": assumptions(self),
            "dry_run": [asdict(rank) for rank in self.ranks],
            "fits": not self.misfits,
            "misfits": self.misfits,
        }


def make_plan(config: ScaledRun, mean_tokens: int | None = None, longest_tokens: int | None = None) -> Plan:
    """The plan of a config; its `misfits` name everything that does not fit.

    Raises ConfigError, naming the field, where something does not divide or the cluster has too few GPUs.
    """
    shape, gpu = load_shape(config.model.path, config.model.shape), gpu_named(config.cluster.gpu)
    # First, as all counts below divide by these sizes and drop the rest.
    division.check_divides(config, shape)
    check_settings(config, shape)
    division.check_places(config)
    step = compute.step_compute(config, shape, gpu, mean_tokens, longest_tokens)
    host, loading = host_pools(config, shape)
    lengths = step.mean_tokens, step.longest_tokens
    wait = longest_wait(config, shape, gpu, *lengths)
    return Plan(
        config=config,
        shape=shape,
        gpu=gpu,
        training=GpuBudget(memory.peak_training_memory(config, shape), feasibility.training_budget(config, gpu)),
        resident=GpuBudget(memory.resident_memory(config, shape), feasibility.resident_budget(config, gpu))
        if config.takes_turns
        else None,
        rollout=GpuBudget(
            engine_memory.rollout_memory(config, shape, lengths), feasibility.rollout_budget(config, gpu)
        ),
        host=host,
        loading=loading,
        payloads=step_payloads(config, shape),
        compute=step,
        wait=wait,
        misfits=feasibility.misfits(config, shape, gpu, wait, lengths),
    )


def assumptions(plan: Plan) -> list[str]:
    """The assumptions behind the numbers, one sentence each."""
    return sentences(plan.config, plan.shape, plan.gpu, plan.compute)


class Misfits(ConfigError):
    """Everything that does not fit its GPUs or its time, a line each in `told`."""

    def __init__(self, told: list[str]):
        super().__init__("; ".join(told))
        self.told = told


def require_fit(plan: Plan) -> None:
    """Raises Misfits where something does not fit."""
    if plan.misfits:
        raise Misfits(plan.misfits)


def step_payloads(config: ScaledRun, shape: ModelShape) -> dict[str, int]:
    """Bytes that one global step moves, responses at full length; records in Pr2's int32 beside ours.

    A push carries every weight once to each engine, in the engines' format. What engines send counts all responses in
    progress.
    """
    algorithm, rollout = config.algorithm.build(), config.rollout
    trained, S = algorithm.num_prompts * algorithm.num_responses, rollout.max_model_len
    responses = in_progress.responses_in_progress(config)
    b = parameters.ELEMENT_BYTES[config.training.precision]
    found: dict[str, int] = {}
    if shape.moe_layers:
        # In every mode: an engine sends its record whether a pass replays it or metrics alone read it.
        ours = payloads.id_bytes(shape)
        found[f"mu's routing records, int{8 * ours}"] = payloads.routing_bytes(shape, responses * S)
        found["the same in Pr2's int32"] = payloads.routing_bytes(shape, responses * S, payloads.INT32_BYTES)
        found[f"mu's routing record of one response, int{8 * ours}"] = payloads.routing_bytes(shape, S)
    if algorithm.passes.trains_predictor:
        positions = algorithm.predictor.num_positions
        found["router features"] = payloads.feature_bytes(shape, positions, responses, b)
        found["router features of one response"] = payloads.feature_bytes(shape, positions, 1, b)
    if algorithm.objective.uses_router_shift:
        found["old's router scores, float32"] = payloads.routing_bytes(shape, trained * S, payloads.SCORE_BYTES)
    if algorithm.objective.num_top > 0:
        num_top, T = algorithm.objective.num_top, algorithm.max_tokens
        found["mu's likeliest tokens"] = payloads.top_token_bytes(shape, num_top, responses * T)
        found["mu's likeliest tokens of one response"] = payloads.top_token_bytes(shape, num_top, T)
    if algorithm.oversampling is not None and algorithm.oversampling.unfinished == "keep":
        left, num_top = responses - trained, algorithm.objective.num_top
        kept = payloads.backlog_bytes(shape, left, algorithm.max_tokens, S, num_top)
        found["kept responses in a checkpoint"] = kept
    pushed = engine_memory.engine_weights(config, shape)
    found["weights pushed to one engine"] = pushed
    found[f"weights pushed to all {rollout.num_engines} engines"] = pushed * rollout.num_engines
    return found


def metric_payloads(config: ScaledRun, shape: ModelShape) -> dict[str, int]:
    """Bytes by the name of the metric that measures them; those of routes and features at full length."""
    algorithm = config.algorithm.build()
    # Trained responses alone, as the metrics count them (`cluster.usage.payloads`), not all in progress.
    num = algorithm.num_prompts * algorithm.num_responses
    b = parameters.ELEMENT_BYTES[config.training.precision]
    found = {"transfer/weights_bytes": engine_memory.engine_weights(config, shape)}
    if shape.moe_layers:
        found["transfer/routes_bytes"] = payloads.routing_bytes(shape, num * config.rollout.max_model_len)
    if algorithm.passes.rollout == "predicted":
        positions = algorithm.predictor.num_positions
        found["transfer/features_bytes"] = payloads.feature_bytes(shape, positions, num, b)
    return found


def has_megatron() -> bool:
    """Whether Megatron-core, with which the dry run builds, is installed."""
    # The parent first: find_spec of a submodule raises where its parent is missing.
    return importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None


def dry_run_layout(plan: Plan) -> list[RankPlan]:
    """The first rank of each pipeline stage, built by Megatron-core on the meta device in a process of its own.

    Raises ConfigError where Megatron-core refuses the layout, and where a rank has other weights than the plan counts.
    """
    training = plan.config.training
    try:
        ranks = dry_run(plan.shape, training)
    except RuntimeError as error:
        # The last line of the process's traceback is the error itself.
        raise ConfigError(f"training: Megatron-core refuses the layout: {str(error).splitlines()[-1]}") from error
    for rank in ranks:
        counted = parameters.rank_parameters(plan.shape, training, rank.stage).total
        if rank.num_parameters != counted:
            raise ConfigError(
                f"training: expected {counted} weights on rank {rank.rank} by the plan's count, got "
                f"{rank.num_parameters} from Megatron-core's build"
            )
    return ranks
