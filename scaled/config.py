"""The run configuration of the cluster world: `lab.config.run.RunConfig` plus Megatron-core, vLLM and Ray.

The same file runs tiny on a CPU and whole on a cluster: only the device, the parallel sizes and the model differ.
Names are Megatron-core's and vLLM's where they have one.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lab.config.algorithm import refuse_truncation
from lab.config.run import CheckpointBlock, RunConfig
from lab.strict import ConfigError, Strict
from scaled.cluster_config import ClusterBlock, LimitsBlock, ScheduleBlock, TrainingBlock
from scaled.evidence import Evidence


class ModelBlock(Strict):
    """A Hugging Face folder: the weights that training starts from, and the config.json that describes the model."""

    path: str = Field(min_length=1, description="Hugging Face folder with config.json and safetensors")
    shape: str | None = Field(
        default=None,
        description="name of a file in scaled/shapes, which `plan` reads where the folder is not on this machine",
    )


class PrecisionBlock(Strict):
    """The inference engine's precision; ranks quantise the weights at every push."""

    compute: Literal["fp32", "bf16", "fp16"] = Field(default="bf16", description="weights and activations")
    weights: Literal["same", "fp8_block", "int8"] = Field(
        default="same",
        description="fp8_block: e4m3 in blocks of 128 x 128; int8: a scale per channel, activations a scale per token",
    )
    kernels: Literal["auto", "native", "rounded"] = Field(
        default="auto",
        description="of fp8_block and int8: vLLM's own, or weights rounded to that grid and computed in `compute` "
        "(needs no kernel; activations are not rounded), or the first that works",
    )
    kv_cache: Literal["same", "fp8"] = Field(default="same", description="keys and values")
    batch_invariant: bool | None = Field(
        default=None,
        description="true: a token's log-probability does not depend on its neighbours in the batch (vLLM's "
        "batch-invariant kernels, GPUs only); slower",
    )


class RolloutBlock(Strict):
    """vLLM: the number, size and precision of the engines."""

    num_engines: int = Field(default=1, ge=1, le=2**16, description="independent engines; prompts are split among them")
    tensor_parallel: int = Field(default=1, ge=1, description="GPUs of one engine")
    precision: PrecisionBlock = Field(default_factory=PrecisionBlock, description="the engines' number formats")
    max_model_len: int = Field(default=512, ge=8, description="longest prompt and response together, in tokens")
    max_num_seqs: int = Field(default=128, ge=1, description="sequences decoded at a time")
    max_num_batched_tokens: int = Field(
        default=2048, ge=32, le=2**31, description="tokens per engine step; longer prompts are chunked"
    )
    prefix_caching: bool = Field(default=False, description="reuse keys and values of shared prompt blocks")
    enforce_eager: bool = Field(default=True, description="no compilation and no CUDA graphs")
    kv_cache_gib: float = Field(default=1.0, gt=0, description="KV cache on a CPU, in GiB")
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1, description="share of GPU memory on a GPU")
    routes: Literal["auto", "official", "capture"] = Field(
        default="auto",
        description="routed experts: vLLM's own return path, our capture in the worker, or the first that works",
    )
    top_p: float = Field(default=1.0, description="1, no nucleus sampling: the tokens that it drops are not recorded")
    top_k: int = Field(default=0, description="0, no limit: the tokens that it drops are not recorded")
    timeout_s: float = Field(
        default=600, gt=0, description="longest wait for a piece of a rollout; beyond it an engine is lost"
    )
    max_restarts: int = Field(default=3, ge=0, description="restarts of engines that died, over the whole run")

    @model_validator(mode="after")
    def _samples_what_is_scored(self) -> RolloutBlock:
        refuse_truncation({"top_p": self.top_p, "top_k": self.top_k})
        return self


class ProbeBlock(Strict):
    """After every push both engines score the same tokens; a gap beyond the precision's level stops the run."""

    num_sequences: int = Field(default=8, ge=1, description="probe sequences")
    num_tokens: int = Field(default=32, ge=2, description="tokens per sequence")
    max_mean_abs_diff: float | None = Field(
        default=None,
        gt=0,
        description="mean of min(|logp_mu - logp_old|, 1) in nats that stops the run; null: the precision's",
    )


class ScaledCheckpointBlock(CheckpointBlock):
    """The checkpoints from which a killed run continues, and whether it waits for the disk."""

    asynchronous: bool | None = Field(
        default=None,
        description="true: ranks copy their state to host memory and write it while the run continues",
    )


class ScaledRun(RunConfig):
    """One run on Megatron-core, vLLM and Ray."""

    backend: Literal["scaled"] = "scaled"
    model: ModelBlock = Field(description="source of the weights")
    training: TrainingBlock = Field(default_factory=TrainingBlock, description="Megatron-core")
    rollout: RolloutBlock = Field(default_factory=RolloutBlock, description="vLLM")
    probe: ProbeBlock = Field(default_factory=ProbeBlock, description="the check after every push")
    schedule: ScheduleBlock = Field(
        default_factory=ScheduleBlock, description="how far sampling runs ahead of training"
    )
    cluster: ClusterBlock = Field(default_factory=ClusterBlock, description="Ray")
    checkpoint: ScaledCheckpointBlock = Field(
        default_factory=ScaledCheckpointBlock, description="files from which a killed run continues"
    )
    evidence: Evidence | None = Field(default=None, description="the runs behind the algorithm; written by promote")

    @model_validator(mode="after")
    def _engines_and_ranks_take_turns(self) -> ScaledRun:
        if self.training.offload and not self.takes_turns:
            raise ValueError(
                f"training.offload: expected nothing unless cluster.placement is colocated and schedule.steps_off 0, "
                f"got {', '.join(self.training.offload)} with {self.cluster.placement} and {self.schedule.steps_off}"
            )
        return self

    @model_validator(mode="after")
    def _oversampling_fits(self) -> ScaledRun:
        over = self.algorithm.oversampling
        if over is None:
            return self
        is_kept = over.unfinished == "keep"
        # A new token is steps_off versions old at its own step, and one more at the step that could continue it.
        least = self.schedule.steps_off + 1
        if is_kept and over.max_staleness < least:
            raise ValueError(
                f"algorithm.oversampling.max_staleness: expected at least {least} where unfinished is keep and "
                f"schedule.steps_off {self.schedule.steps_off}, got {over.max_staleness}"
            )
        if is_kept and self.schedule.max_staleness < over.max_staleness:
            raise ValueError(
                f"schedule.max_staleness: expected at least algorithm.oversampling.max_staleness = "
                f"{over.max_staleness}, got {self.schedule.max_staleness}"
            )
        # Under drop, too, a step's next round continues the responses that the last one left.
        if (is_kept or self.algorithm.dynamic_sampling.enabled) and self.rollout.routes != "capture":
            raise ValueError(
                f"rollout.routes: expected capture where algorithm.oversampling.unfinished is keep or "
                f"algorithm.dynamic_sampling continues responses (vLLM's own path returns no routes of an aborted "
                f"request), got {self.rollout.routes}"
            )
        return self

    @property
    def takes_turns(self) -> bool:
        """Whether engines sleep while ranks train on the same GPUs."""
        return self.cluster.placement == "colocated" and self.schedule.steps_off == 0

    def require_shared_gpus(self) -> None:
        """Raises ConfigError where colocated engines need more GPUs than the ranks have; on CPUs it does not matter."""
        ranks, engines, width = self.training.num_ranks, self.rollout.num_engines, self.rollout.tensor_parallel
        if self.cluster.placement == "colocated" and engines * width > ranks:
            raise ConfigError(
                f"rollout.num_engines: expected at most training.num_ranks = {ranks} GPUs for colocated engines, got "
                f"{engines} engines x tensor_parallel {width} = {engines * width}"
            )

    @model_validator(mode="after")
    def _batch_divides(self) -> ScaledRun:
        batch, training = self.algorithm.batch, self.training
        share = training.data_parallel * training.micro_batch_size
        size = batch.num_prompts // batch.num_minibatches * batch.num_responses
        budget = training.max_tokens_per_micro_batch
        if budget is not None and budget < self.rollout.max_model_len:
            raise ValueError(
                f"training.max_tokens_per_micro_batch: expected at least rollout.max_model_len = "
                f"{self.rollout.max_model_len}, got {budget}"
            )
        if budget is not None and size < training.data_parallel:
            raise ValueError(
                f"algorithm.batch: expected mini-batches (num_prompts / num_minibatches x num_responses) of at least "
                f"a response for each of {training.data_parallel} data-parallel ranks, got {size}"
            )
        if budget is None and size % share:
            raise ValueError(
                f"algorithm.batch: expected mini-batches (num_prompts / num_minibatches x num_responses) in multiples "
                f"of data-parallel ranks x training.micro_batch_size = {training.data_parallel} x "
                f"{training.micro_batch_size}, got {size}"
            )
        if self.rollout.max_model_len <= self.algorithm.sampling.max_tokens:
            raise ValueError(
                f"rollout.max_model_len: expected more than algorithm.sampling.max_tokens = "
                f"{self.algorithm.sampling.max_tokens}, got {self.rollout.max_model_len}"
            )
        return self


__all__ = [
    "ClusterBlock", "LimitsBlock", "ModelBlock", "PrecisionBlock", "ProbeBlock", "RolloutBlock",
    "ScaledCheckpointBlock", "ScaledRun", "ScheduleBlock", "TrainingBlock",
]  # fmt: skip
