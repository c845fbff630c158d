"""The run config of the sandbox: `lab.config.run.RunConfig` plus this world's model, engine and cold start."""

from __future__ import annotations

import sys
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from lab.config.run import RunConfig
from lab.strict import ConfigError, Strict
from sandbox.engines import EngineConfig
from sandbox.engines.partial_weights import WITH_ROUTERS, PartialWeights
from sandbox.engines.reduction_order import ReductionOrder
from sandbox.engines.stale_weights import lagging
from sandbox.kernels import Kernels, choose
from sandbox.model.config import ModelConfig
from theory.routing.gates import GATES


class ModelBlock(Strict):
    """A small decoder built from these sizes, or one loaded from a Hugging Face folder (`path`)."""

    path: str | None = Field(default=None, description="Hugging Face folder to open; the sizes below are then ignored")
    hidden_size: int = Field(default=64, ge=8, le=2**20, description="width D of the residual stream")
    num_layers: int = Field(default=3, ge=1, le=1_000, description="decoder layers")
    num_heads: int = Field(default=4, ge=1, le=2**16, description="query heads")
    num_kv_heads: int = Field(default=2, ge=1, le=2**16, description="key and value heads (GQA)")
    head_dim: int = Field(default=16, ge=2, le=2**16, description="width of one head")
    num_experts: int = Field(
        default=16, ge=0, le=2**15, description="experts E per MoE layer; 0 makes every layer dense"
    )
    experts_per_token: int = Field(default=2, ge=1, description="slots K")
    expert_size: int = Field(default=64, ge=1, le=2**20, description="hidden width F of one expert")
    dense_size: int = Field(default=128, ge=1, le=2**20, description="hidden width of a dense layer's MLP")
    dense_layers: tuple[int, ...] = Field(default=(), description="indices of layers with a plain MLP")
    shared_expert_size: int = Field(default=0, ge=0, le=2**20, description="width of the shared expert; 0 for none")
    gate: Literal["qwen3", "mixtral", "olmoe", "softmax_after", "deepseek_v2", "deepseek_v3"] = Field(
        default="qwen3", description="gate convention"
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> ModelBlock:
        if self.path is None:
            self.build(vocab_size=1)  # raises if they do not; any vocabulary size fits
        return self

    def build(self, vocab_size: int) -> ModelConfig:
        """The config of a decoder with these sizes and a vocabulary of `vocab_size` tokens."""
        sizes = self.model_dump(exclude={"path"}) | {"vocab_size": vocab_size, "gate": GATES[self.gate]}
        if self.num_experts == 0:
            sizes["dense_layers"] = tuple(range(self.num_layers))
        return ModelConfig(**sizes)


class TrainingBlock(Strict):
    """The training engine's arithmetic; the algorithm block has its objective."""

    micro_batch_size: int = Field(default=128, ge=1, description="responses in one forward and backward")
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="of the model's matrix products; the exact engine shares it. Weights stay in fp32"
    )
    products: Literal["fp8_e4m3"] | None = Field(
        default=None,
        description="format of inputs and weights of the large products, in training passes only (no engine shares "
        "it); null: that of `precision`",
    )
    reduction_order: ReductionOrder = Field(
        default=ReductionOrder(units=1),
        description="how sums depend on the micro-batch; units > 1: repeated forward passes differ",
    )


class ColdStartBlock(Strict):
    """The supervised stage on generated demonstrations before RL; its result is cached by the hash of its inputs."""

    teacher: str | None = Field(
        default=None, description="teacher that writes the demonstrations; null: the task's first one"
    )
    target_accuracy: float = Field(default=0.4, gt=0, le=1, description="sampled accuracy at which the stage ends")
    max_updates: int = Field(default=2000, ge=1, description="updates after which the stage fails with an error")
    batch_size: int = Field(default=64, ge=1, le=2**16, description="demonstrations per update")
    learning_rate: float = Field(default=3e-3, gt=0, description="AdamW learning rate after warm-up")
    warmup_updates: int = Field(default=20, ge=0, description="updates of linear warm-up")
    check_every: int = Field(default=25, ge=1, description="updates between accuracy checks")
    num_check: int = Field(default=128, ge=8, le=2**16, description="problems per accuracy check")
    seed: int = Field(default=0, description="seed of this stage, separate from the run's: all seeds share it")
    cache: str = Field(default="runs/.cache/cold_start", description="folder of finished cold starts")


class SandboxRun(RunConfig):
    """One sandbox run."""

    backend: Literal["sandbox"] = "sandbox"
    engine: EngineConfig = Field(default_factory=EngineConfig, description="the simulated inference engine")
    model: ModelBlock = Field(default_factory=ModelBlock, description="the model")
    cold_start: ColdStartBlock | None = Field(default_factory=ColdStartBlock, description="null: RL starts without it")
    training: TrainingBlock = Field(default_factory=TrainingBlock, description="the training engine")
    compile: bool | Literal["auto"] | None = Field(
        default=None,
        description="true: C++ kernels, built at first use ($CXX, g++ or clang++); null: torch's operators, whose bits "
        "differ; auto: true if the kernels can be built, else null; the run's config records which",
    )
    threads: int | None = Field(
        default=None, ge=1, description="threads of compiled kernels; they change no bit; null: one"
    )

    @field_validator("compile", mode="before")
    @classmethod
    def _compile_is_known(cls, value: Any) -> Any:
        if not isinstance(value, bool) and value not in ("auto", None):
            raise ValueError(f"expected true, false, null or auto, got {value}")
        return value

    def settled(self) -> SandboxRun:
        """This config with `compile: auto` resolved: true if the kernels can be built, else null and a line on stderr.

        The resolved config is recorded and hashed, so that equal hashes promise equal numbers.
        """
        if self.compile != "auto":
            return self
        try:
            choose(compiled=True)
        except ConfigError as error:
            # The messages of sandbox/kernels/compiled/build.py end in "got" and the reason.
            reason = str(error).partition("got")[2].lstrip(": ")
            print(f"compile: auto: using torch's operators; C++ kernels could not be built: {reason}", file=sys.stderr)
            return self.model_copy(update={"compile": None, "threads": None})
        return self.model_copy(update={"compile": True})

    def kernels(self) -> Kernels:
        """The kernels of both engines; ConfigError, naming `compile`, if they cannot be built.

        Call it on a `settled` config: `auto` is resolved once per run, and the run's record says how.
        """
        assert self.compile != "auto", "settled() comes first"
        return choose(bool(self.compile))

    @model_validator(mode="after")
    def _threads_fit(self) -> SandboxRun:
        # `auto` may become true; where it does not, `settled` drops the threads.
        if (self.threads or 1) > 1 and not self.compile:
            raise ValueError(f"threads: expected 1 without compile: true, got {self.threads}")
        return self

    @model_validator(mode="after")
    def _features_fit(self) -> SandboxRun:
        stale = lagging(self.engine.defects)
        if stale is not None and self.algorithm.replay.mode == "Pr3":
            raise ValueError(
                "algorithm.replay.mode: expected a mode other than Pr3 with stale_weights (mu's router logits hold "
                f"the predictor of {stale.versions} hand-overs ago), got Pr3"
            )
        partial = [defect.missing for defect in self.engine.defects if isinstance(defect, PartialWeights)]
        if self.algorithm.replay.mode == "Pr3" and set(partial) & set(WITH_ROUTERS):
            raise ValueError(
                "algorithm.replay.mode: expected a mode other than Pr3 with partial_weights that withhold routers "
                f"(mu's router logits never hold the predictor), got Pr3 with missing: {partial[0]}"
            )
        return self

    @model_validator(mode="after")
    def _teacher_is_there(self) -> SandboxRun:
        teacher = None if self.cold_start is None else self.cold_start.teacher
        if teacher is not None and teacher not in self.task.teachers:
            names = ", ".join(self.task.teachers)
            known = f"one of {names}" if names else "null (no solution_key, no teacher)"
            raise ValueError(f"cold_start.teacher: expected {known}, got {teacher}")
        return self

    @model_validator(mode="after")
    def _turns_fit(self) -> SandboxRun:
        stale = lagging(self.engine.defects)
        if self.algorithm.sampling.max_turns > 1 and stale is not None and stale.switch_at < 1:
            raise ValueError(
                f"engine.defects: expected stale_weights with switch_at = 1 where responses have turns (it counts the "
                f"tokens of one turn), got {stale.switch_at}"
            )
        return self

    @model_validator(mode="after")
    def _oversampling_fits(self) -> SandboxRun:
        over, stale = self.algorithm.oversampling, lagging(self.engine.defects)
        if over is None or stale is None:
            return self
        if stale.switch_at < 1:
            raise ValueError(
                f"engine.defects: expected stale_weights with switch_at = 1 beside algorithm.oversampling (it counts "
                f"the tokens of one call), got {stale.switch_at}"
            )
        least = stale.versions + 1
        if over.unfinished == "keep" and over.max_staleness < least:
            raise ValueError(
                f"algorithm.oversampling.max_staleness: expected at least {least} (a response continues a version "
                f"later, with weights that are {stale.versions} behind), got {over.max_staleness}"
            )
        return self

    @model_validator(mode="after")
    def _model_fits(self) -> SandboxRun:
        if self.model.path is None and self.task.needs_tokenizer:
            kind = self.task.kind
            raise ValueError(f"model.path: expected a Hugging Face folder for a {kind} task (its tokenizer), got null")
        if self.model.path is None:
            self.check_routers(self.model.build(1))
        return self

    def check_routers(self, shape: ModelConfig) -> None:
        """ValueError for a replay mode or a router shift beside a model without routers; a run asks it of a folder."""
        if shape.moe_layers:
            return
        mode, floor = self.algorithm.replay.mode, self.algorithm.build().objective.router_shift_floor
        if mode != "none":
            raise ValueError(f"algorithm.replay.mode: expected none for a model without routers, got {mode}")
        if floor < 1:
            raise ValueError(
                f"algorithm.objective.router_shift_floor: expected 1 for a model without routers, got {floor:g}"
            )
