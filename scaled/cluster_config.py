"""The blocks of a cluster run's config that say how its processes work together: schedule, places, time limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field, model_serializer, model_validator

from lab.strict import Strict

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
    object_store_gib: float = Field(default=0.5, gt=0, description="Ray's object store, where the run starts Ray")
    bucket_mib: int = Field(default=256, ge=1, description="weights travel in buckets of this size")
    max_rank_restarts: int = Field(default=3, ge=0, description="resumes from a checkpoint after a rank died, per run")
    limits: LimitsBlock | None = Field(
        default=None,
        description="seconds until a silent process is lost, by stage; null: start, save and load 3600, push 1800, "
        "score 7200, update 14400",
    )


__all__ = ["ClusterBlock", "LimitsBlock", "ScheduleBlock"]
