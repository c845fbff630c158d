"""A run of the sandbox's config by TRL's GRPOTrainer, recorded as the sandbox records its own."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lab.beginning import input_hashes, record_process
from lab.config.load import config_hash, to_yaml
from lab.ending import finish
from lab.progress import ProgressKind, progress_of
from lab.recording import NonFiniteError, RunRecorder
from lab.records import RunFolder, manifest
from lab.strict import ConfigError, did_you_mean
from lab.tasks import TextTask
from lab.translate import FRAMEWORKS
from sandbox.config import SandboxRun
from sandbox.export import tokenizer_of, write
from sandbox.in_trl.generation import SandboxGeneration, imported
from sandbox.kernels.numerics import EXACT
from sandbox.model import MoE
from sandbox.model.checkpoint import load_hf
from sandbox.run import build_engine, initial_model, open_task
from sandbox.training.callbacks import Evaluation
from sandbox.training.numerics import training_numerics
from theory.contracts import TokenScores
from theory.divergences import discrepancy_metrics, masked_mean
from theory.loop import StepResult
from theory.step_metrics import rollout_metrics


def arguments(config: SandboxRun, output: str, own: Mapping[str, Any]) -> Any:
    """The config as a GRPOConfig: the options of `firstorder translate --to trl --sizes`, a laptop's, and `own`.

    ConfigError names the parts of the recipe that TRL has no option for, and what TRL refuses.
    """
    numerics = config.training.precision, config.training.reduction_order, config.training.products
    if training_numerics(*numerics) is not EXACT:
        given = ", ".join(f"{name} {value}" for name, value in config.training if name != "micro_batch_size")
        raise ConfigError(
            f"training: expected precision fp32 in the plain order of sums, as TRL trains here, got {given}"
        )
    algorithm = config.algorithm.build()
    translation = FRAMEWORKS["trl"](algorithm)
    if translation.unsaid:
        raise ConfigError(f"TRL has no option for {'; '.join(map(str, translation.unsaid))}")
    known = {field.name for field in dataclasses.fields(imported().GRPOConfig)}
    for name in own:
        if name not in known:
            raise ConfigError(f"--trl.{name}: unknown argument of GRPOConfig{did_you_mean(name, known)}")
    N = algorithm.num_minibatches
    options = {option.name: option.value for option in [*translation.recipe, *translation.sizes]} | {
        # TRL makes N mini-batches of a rollout by their size.
        "per_device_train_batch_size": algorithm.num_prompts * algorithm.num_responses // N,
        "gradient_accumulation_steps": 1,
        "max_steps": config.num_steps * N,
        "seed": config.seed,
        # The task's own order, by which each step's prompts are known.
        "shuffle_dataset": False,
        "output_dir": output, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "save_strategy": "no",
        "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    try:
        return imported().GRPOConfig(**options | dict(own))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"GRPOConfig: {' '.join(str(error).split())}") from None


def train(config: SandboxRun, own: Mapping[str, Any], progress: ProgressKind = "lines") -> RunFolder:
    """Runs the config in TRL, with the engine and the cold start that the sandbox would use; the finished folder.

    `own`: arguments of GRPOConfig that replace those of the config's translation. The folder has what a sandbox's run
    has but checkpoints and timings, under the name with `-trl` after it.
    Raises ConfigError as `arguments`, and NonFiniteError as a run of the sandbox.
    """
    config = config.model_copy(update={"name": f"{config.name}-trl"}).settled()
    config.kernels().set_threads(1)
    with tempfile.TemporaryDirectory(prefix="firstorder-trl-") as scratch:
        settings = arguments(config, f"{scratch}/trl", own)
        task = open_task(config)
        model = initial_model(config, task, progress)
        folder = RunFolder.create(Path(config.output), config.name, config_hash(config), datetime.now(UTC))
        folder.write_config(to_yaml(config))
        with folder.hold():
            inputs = input_hashes(config.model.path, config.task)
            record_process(folder, manifest(seed=config.seed) | _words(config, own), inputs)
            recording = TrlRecording(config, folder, task, model, progress)
            try:
                _trainer(config, task, model, recording, settings, Path(scratch) / "model").train()
            except NonFiniteError:
                finish(config, folder)
                raise
            finish(config, folder)
    return folder


def _words(config: SandboxRun, own: Mapping[str, Any]) -> dict[str, Any]:
    """The engine, the trainer and its own settings, for the manifest."""
    import transformers

    return {
        "engine": config.engine.words,
        "trainer": f"GRPOTrainer of TRL {imported().__version__}, transformers {transformers.__version__}",
        "trainer_settings": dict(own),
    }


class TrlRecording:
    """Metrics, traces and evaluations of a run in TRL, numbered by global steps."""

    def __init__(
        self, config: SandboxRun, folder: RunFolder, task: TextTask, model: MoE, progress: ProgressKind
    ) -> None:
        self.config, self.mirror = config, MoE(model.config, kernels=config.kernels())
        self.generation = SandboxGeneration(
            build_engine(config, model.config, task, config.engine.defects), task, config.seed
        )
        evaluation = Evaluation(config, build_engine(config, model.config, task, ()))
        self.shown = progress_of(progress, config.name, config.num_steps, 0)
        self.recorder = RunRecorder(
            config, folder, lambda number: evaluation.of(self.mirror, task, number), self.shown,
            decode=task.tokenizer.decode,
        )  # fmt: skip
        self.grad_norms: list[float] = []

    def scored(self, logp_old_BT: Float[Tensor, "B T"], entropy_BT: Float[Tensor, "B T"]) -> None:
        """Takes the old pass of a rollout, computed by TRL's trainer."""
        rollouts, batch = self.generation.rollouts, self.generation.rollouts.padded()
        rewards_B = self.generation.rewards_B
        mask_BT = batch.is_response_BT
        logp_old_BT, entropy_BT = (torch.where(mask_BT, x_BT, 0.0) for x_BT in (logp_old_BT, entropy_BT))
        metrics = rollout_metrics(rollouts, rewards_B, max_turns=1)
        metrics |= discrepancy_metrics(logp_old_BT, batch.logp_mu_BT, mask_BT)
        metrics["actor/entropy"] = masked_mean(entropy_BT, mask_BT).item()
        self.result = StepResult(metrics, rollouts, rewards_B, TokenScores(logp_old_BT, entropy_BT))
        if self.generation.version == 0:
            self._take_weights()
            self.recorder.begin()

    def updated(self, grad_norm: float) -> None:
        """Takes the norm of an update's gradient; after the last of N, writes the global step's row and trace."""
        self.grad_norms.append(grad_norm)
        N = self.config.algorithm.build().num_minibatches
        if len(self.grad_norms) == N:
            extra = {"actor/grad_norm": fmean(self.grad_norms), "actor/num_updates": float(N)}
            self.grad_norms = []
            self._take_weights()
            self.recorder.record(self.generation.version + 1, self.result, _nothing, extra)

    def _take_weights(self) -> None:
        load_hf(self.mirror, self.generation.model.state_dict().items())


def _nothing(number: int) -> None:
    """No checkpoint: TRL writes its own, if it is asked to."""


def _trainer(
    config: SandboxRun, task: TextTask, model: MoE, recording: TrlRecording, settings: Any, folder: Path
) -> Any:
    """The GRPOTrainer, over transformers' class with the model's weights, which go through this folder."""
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    write(model, tokenizer_of(config), folder)
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    num_prompts = config.algorithm.batch.num_prompts
    texts = [
        {"prompt": task.tokenizer.decode(p.tokens)}
        for step in range(config.num_steps)
        for p in task.prompts(step, num_prompts)
    ]
    with recording.generation.installed():
        trainer = _observed(imported().GRPOTrainer, recording.scored)(
            model=theirs,
            args=settings,
            train_dataset=datasets.Dataset.from_list(texts),
            reward_funcs=recording.generation.rewards,
            processing_class=transformers.AutoTokenizer.from_pretrained(folder, padding_side="left"),
            callbacks=[_observer(transformers.TrainerCallback, recording.updated)],
        )
    trainer.remove_callback(transformers.PrinterCallback)  # a line per update; ours is per ten global steps
    return trainer


def _observed(trainer: Any, scored: Callable[[Tensor, Tensor], None]) -> Any:
    """GRPOTrainer, which also gives each rollout's old pass, log-probs and entropies, to `scored`."""

    class Observed(trainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            ids, mask = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], 1) for x in ("ids", "mask"))
            with torch.no_grad():
                logp_BT, entropy_BT, _ = self._get_per_token_logps_and_entropies(
                    self.model, ids, mask, batch["completion_ids"].shape[1],
                    batch_size=self.args.per_device_train_batch_size, compute_entropy=True,
                )  # fmt: skip
            scored(logp_BT, entropy_BT)
            return batch

    return Observed


def _observer(base: Any, updated: Callable[[float], None]) -> Any:
    """A callback that gives each update's gradient norm, before clipping, to `updated`."""

    class Observer(base):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            if "grad_norm" in logs:  # not in the summary at the end
                updated(float(logs["grad_norm"]))

    return Observer()


__all__ = ["arguments", "train"]
