"""The ledger's unit of work in the benchmark: global steps of configs/claims/border.yaml from random weights.

Every response has LENGTH tokens, about the mean of the ledger's runs, and the learning rate is 0: a step that is
repeated does the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lab.config import shipped
from lab.config.load import load
from lab.tasks import TextTask
from sandbox.bench.reference_work import SEED, even_share
from sandbox.config import SandboxRun
from sandbox.engines.engine import SandboxEngine
from sandbox.kernels import EAGER, Kernels
from sandbox.model import MoE
from sandbox.run import open_task
from sandbox.training.engine import SandboxTrainingEngine
from theory.collection import collect
from theory.contracts import Prompt, Response
from theory.loop import StepResult, global_step, hand_over, learn
from theory.objectives import preset
from theory.streams import stream

CONFIG = shipped.FOLDER / "claims" / "border.yaml"
LENGTH = 21
UPDATES = 8


class EvenAnswers:
    """The prompts of a task, with the share of even tokens as reward: random weights solve nothing."""

    def __init__(self, task: TextTask) -> None:
        self.task = task

    def prompts(self, step: int, num_prompts: int) -> Sequence[Prompt]:
        """The prompts of the task in a step."""
        return self.task.prompts(step, num_prompts)

    def held_out(self) -> Sequence[Prompt]:
        """No prompts: nothing is evaluated here."""
        return ()

    def reward(self, prompt: Prompt, response: Response) -> float:
        """The share of even tokens, in [0, 1]."""
        return even_share(response)


class LedgerStep:
    """Global steps of `num_minibatches` updates on 64 responses each, by GRPO without a remedy, on own engines."""

    def __init__(self, num_minibatches: int, kernels: Kernels = EAGER) -> None:
        config = load(CONFIG, [], {"sandbox": SandboxRun})
        assert isinstance(config, SandboxRun)
        task, stated = open_task(config), config.algorithm.build()
        self.algorithm = replace(
            stated,
            objective=preset("grpo"),
            num_prompts=stated.num_prompts * num_minibatches,
            num_minibatches=num_minibatches,
            max_tokens=LENGTH,
            optimizer=replace(stated.optimizer, learning_rate=0.0),
        )
        model = MoE(config.model.build(task.tokenizer.vocab_size), stream(SEED, "bench-ledger"), kernels)
        self.task = EvenAnswers(task)
        self.trainer = SandboxTrainingEngine(
            model,
            self.algorithm.optimizer,
            micro_batch_size=config.training.micro_batch_size,
            keep_old_pass=num_minibatches == 1,
        )
        # Without a stop token, so that no response ends early.
        self.engine = SandboxEngine(model.config, config.engine.defects, kernels=kernels)
        hand_over(self.algorithm, self.engine, self.trainer, version=0)

    def step(self) -> StepResult:
        """All of it: sampling, the old pass, the updates, their metrics, and the push. Always step 0."""
        return global_step(0, self.algorithm, self.engine, self.trainer, self.task, SEED)

    def training(self) -> Callable[[], StepResult]:
        """The work after sampling, the push left out, as a function that can be called repeatedly."""
        collected = collect(0, self.algorithm, self.engine, self.task, SEED)
        return lambda: learn(0, self.algorithm, self.trainer, collected, SEED)


__all__ = ["CONFIG", "LENGTH", "UPDATES", "LedgerStep"]
