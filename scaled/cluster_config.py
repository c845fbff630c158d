"""The blocks of a cluster run's config on how its processes work together: layout, schedule, places, time limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, model_serializer, model_validator

from lab.strict import Strict


def _stage_layers(place: str) -> Any:
    """A field of Megatron's name, left out of dumps at its default, so that older configs keep their hashes."""
    said = f"decoder layers of the {place} stage, where stages are unequal; null: an equal share"
    return Field(default=None, ge=1, exclude_if=lambda number: number is None, description=said)


class TrainingBlock(Strict):
    """Megatron-core: the number of ranks, how they split the model, and their precision."""

    num_ranks: int = Field(default=1, ge=1, description="processes of the training engine, one per GPU")
    tensor_parallel: int = Field(default=1, ge=1, description="TP; above 1 sequence parallelism is on")
    # Left out of dumps at 1, so that configs from before it keep their hashes.
    context_parallel: int = Field(
        default=1, ge=1, exclude_if=lambda size: size == 1, description="CP, ranks that share each response's positions"
    )
    pipeline_parallel: int = Field(default=1, ge=1, description="PP, stages")
    virtual_pipeline: int = Field(default=1, ge=1, description="VPP, model chunks per stage (interleaved 1F1B)")
    num_layers_in_first_pipeline_stage: int | None = _stage_layers("first")
    num_layers_in_last_pipeline_stage: int | None = _stage_layers("last")
    expert_parallel: int = Field(default=1, ge=1, description="EP, ranks that share one set of experts")
    expert_tensor_parallel: int = Field(default=1, ge=1, description="ETP, ranks that share one expert")
    precision: Literal["fp32", "bf16"] = Field(
        default="bf16", description="weights and activations; bf16 keeps fp32 master weights and gradients"
    )
    micro_batch_size: int = Field(default=4, ge=1, description="responses per forward and backward pass of a rank")
    max_tokens_per_micro_batch: int | None = Field(
        default=None,
        ge=1,
        description="positions per forward and backward pass instead, padding included: responses are sorted by "
        "length and dealt out, so that ranks do equal work; null: micro_batch_size responses, padded to the longest",
    )
    logit_chunk: int = Field(
        default=1024, ge=1, description="response tokens whose logits a rank holds at a time; backward recomputes them"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none", description="activations recomputed in backward: none, those of the experts, all layers"
    )
    offload: tuple[Literal["gradients", "optimizer"], ...] | None = Field(
        default=None,
        description="GPU memory that colocated ranks free while engines use the GPUs: gradients are allocated again, "
        "optimizer states (bf16) wait in host memory; null: nothing",
    )
    distributed_optimizer: bool = Field(
        default=True, description="shard optimizer states over data- and context-parallel ranks"
    )
    token_dispatcher: Literal["alltoall", "allgather"] = Field(
        default="alltoall", description="exchange of the experts' tokens"
    )
    deterministic: bool | None = Field(
        default=None, description="true: sums have one order on GPUs too, so the same pass gives the same bits; slower"
    )
    timeout_s: float = Field(default=1800, gt=0, description="limit of a collective; beyond it a rank counts as lost")

    @model_validator(mode="after")
    def _layout_divides(self) -> TrainingBlock:
        replica = self.tensor_parallel * self.context_parallel * self.pipeline_parallel
        if self.num_ranks % replica:
            raise ValueError(
                f"num_ranks: expected a multiple of tensor_parallel x context_parallel x pipeline_parallel "
                f"= {replica}, got {self.num_ranks}"
            )
        expert = self.expert_parallel * self.expert_tensor_parallel * self.pipeline_parallel
        if self.num_ranks % expert:
            raise ValueError(
                f"num_ranks: expected a multiple of expert_parallel x expert_tensor_parallel x pipeline_parallel "
                f"= {expert}, got {self.num_ranks}"
            )
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            raise ValueError(f"virtual_pipeline: expected 1 where pipeline_parallel is 1, got {self.virtual_pipeline}")
        for place, number in zip(("first", "last"), self.uneven_stages, strict=True):
            if number is not None and self.pipeline_parallel == 1:
                field = f"num_layers_in_{place}_pipeline_stage"
                raise ValueError(f"{field}: expected null where pipeline_parallel is 1, got {number}")
        return self

    @model_validator(mode="after")
    def _widths_may_vary(self) -> TrainingBlock:
        if self.max_tokens_per_micro_batch is None or self.pipeline_parallel == 1:
            return self
        # Stages exchange shapes before tensors. Where both neighbours are one rank, these messages have an order that
        # interleaving does not keep. Megatron-core itself refuses the all-gather.
        if self.virtual_pipeline > 1:
            raise ValueError(
                f"virtual_pipeline: expected 1 with max_tokens_per_micro_batch, got {self.virtual_pipeline}"
            )
        if self.token_dispatcher == "allgather":
            raise ValueError(
                "token_dispatcher: expected alltoall with max_tokens_per_micro_batch and pipeline_parallel above 1, "
                "got allgather"
            )
        return self

    @model_validator(mode="after")
    def _states_are_apart(self) -> TrainingBlock:
        if "optimizer" in (self.offload or ()) and self.precision != "bf16":
            raise ValueError(
                f"offload: expected optimizer only under precision bf16 (in fp32 the optimizer's weights are the "
                f"model's own), got {self.precision}"
            )
        return self

    @property
    def uneven_stages(self) -> tuple[int | None, int | None]:
        """The decoder layers of the first and of the last stage; None for an equal share."""
        return self.num_layers_in_first_pipeline_stage, self.num_layers_in_last_pipeline_stage

    @property
    def data_parallel(self) -> int:
        """DP: the number of parts of a mini-batch."""
        return self.num_ranks // (self.tensor_parallel * self.context_parallel * self.pipeline_parallel)

    @property
    def num_replicas(self) -> int:
        """CP x DP: the number of ranks that hold the same dense weights, and share their optimizer states."""
        return self.context_parallel * self.data_parallel

    @property
    def width_multiple(self) -> int:
        """The width of a micro-batch is a multiple of this many positions, so that all ranks have equally many.

        Each CP rank has two runs of equal length, and TP ranks (sequence parallelism) equal shares of the two.
        """
        cp = self.context_parallel
        return self.tensor_parallel if cp == 1 else cp * math.lcm(2, self.tensor_parallel)


KINDS = ("synchronous", "one_step_off")
"""`schedule.kind`, which named 0 and 1 before `steps_off` did, and still does in the dump that is hashed."""


class ScheduleBlock(Strict):
    """The lag of training behind sampling, in weight versions."""

    steps_off: int = Field(
        default=0,
        ge=0,
        description="weight versions between the weights that sample a batch and those that train on it: 0, engines "
        "and ranks wait for each other; k, engines sample up to k batches ahead",
    )
    max_staleness: int = Field(
        default=1, ge=0, description="weight versions that mu may lag behind old, at least steps_off; more are an error"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_kind(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or "kind" not in raw:
            return raw
        rest = {name: value for name, value in raw.items() if name != "kind"}
        if raw["kind"] not in KINDS:
            raise ValueError(f"kind: expected {' or '.join(KINDS)} (or steps_off in its place), got {raw['kind']}")
        if "steps_off" in rest:
            raise ValueError(f"kind: expected steps_off alone, which replaces it, got both ({raw['kind']})")
        return rest | {"steps_off": KINDS.index(raw["kind"])}

    @model_validator(mode="after")
    def _allows_its_own_lag(self) -> ScheduleBlock:
        if self.max_staleness < self.steps_off:
            raise ValueError(f"max_staleness: expected at least steps_off = {self.steps_off}, got {self.max_staleness}")
        return self

    @model_serializer(mode="wrap")
    def _to_kind(self, dump: Callable[[ScheduleBlock], dict[str, Any]]) -> dict[str, Any]:
        # The dump of a config from before `steps_off`, and so its hash, stays what it was.
        fields = dump(self)
        if self.steps_off >= len(KINDS):
            return fields
        # Not both keys: `_from_kind` refuses them, and a dump must validate again (`plan.search`).
        del fields["steps_off"]
        return {"kind": KINDS[self.steps_off]} | fields


class LimitsBlock(Strict):
    """Seconds without an answer after which a process is lost, by stage; a rollout's are `rollout.timeout_s`."""

    start: float = Field(default=3600.0, gt=0, description="a rank or engine is built, weights read from disk")
    push: float = Field(default=1800.0, gt=0, description="a rank sends a bucket, an engine loads all weights")
    score: float = Field(default=7200.0, gt=0, description="one pass of old, reference or probe scores")
    update: float = Field(default=14400.0, gt=0, description="one optimizer step")
    save: float = Field(default=3600.0, gt=0, description="a rank's part of a checkpoint")
    load: float = Field(default=3600.0, gt=0, description="a rank's return to a checkpoint")


class ClusterBlock(Strict):
    """Ray: a cluster to join, or one that is started for the run."""

    address: str | None = Field(default=None, description="of a running cluster (auto, or host:port); null starts one")
    interface: str | None = Field(
        default=None,
        min_length=1,
        description="network interface on which ranks meet, such as eth0, with one name on all machines; null: "
        "loopback where the run starts Ray, else that of Ray's own address",
    )
    placement: Literal["colocated", "separate"] = Field(
        default="separate", description="engines and ranks on the same GPUs, taking turns, or on their own"
    )
    num_nodes: int = Field(default=1, ge=1, description="machines, for plan and launch")
    gpus_per_node: int = Field(default=8, ge=1, description="GPUs of one machine, for plan and launch")
    gpu: str = Field(default="H100-80GB", description="GPU whose memory, FLOP/s and bandwidth `plan` uses")
    host_gib: float | None = Field(
        default=None, gt=0, description="CPU memory of one machine, for plan; null: its host memory is not checked"
    )
    object_store_gib: float = Field(
        default=0.5, gt=0, description="Ray's object store per machine, where the run or its Slurm script starts Ray"
    )
    bucket_mib: int = Field(default=256, ge=1, description="weights travel in buckets of this size")
    max_rank_restarts: int = Field(default=3, ge=0, description="resumes from a checkpoint after a rank died, per run")
    limits: LimitsBlock | None = Field(
        default=None,
        description="seconds until a silent process is lost, by stage; null: start, save and load 3600, push 1800, "
        "score 7200, update 14400",
    )


__all__ = ["ClusterBlock", "LimitsBlock", "ScheduleBlock", "TrainingBlock"]
