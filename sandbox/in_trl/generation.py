"""The object that TRL's GRPOTrainer takes for vLLM: it holds an engine of the sandbox, samples, and takes weights."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from jaxtyping import Float
from torch import Tensor

from lab.tasks import TextTask
from sandbox.engines.engine import SandboxEngine
from theory.contracts import Rollouts, Sampling
from theory.streams import derive_seed

NEEDED = ("trl", "accelerate", "datasets", "tokenizers")


def is_installed() -> bool:
    """Whether TRL and what its trainer imports are here (the extra `bench`)."""
    return all(importlib.util.find_spec(name) is not None for name in NEEDED)


def imported() -> Any:
    """The package `trl`, with its trainer loaded; ImportError where `is_installed` says False."""
    with warnings.catch_warnings():
        # It imports a vLLM that is installed, whose release and imports are warned of, and which is not used here.
        warnings.simplefilter("ignore")
        import trl  # type: ignore[import-not-found]
        import trl.trainer.grpo_trainer  # type: ignore[import-not-found]
    return trl


class SandboxGeneration:
    """`trl.generation.vllm_generation.VLLMGeneration` over a sandbox engine, as far as GRPOTrainer calls it.

    Global step n samples the prompts that the task gives for n, with the draws of `theory.collection.collect`: from
    equal weights, the same responses as a run of the sandbox, bit for bit. `rollouts` and `rewards_B` are those of the
    last call of `generate`.
    """

    rollouts: Rollouts
    rewards_B: Float[Tensor, " B"]

    def __init__(self, engine: SandboxEngine, task: TextTask, seed: int) -> None:
        self.engine, self.task, self.seed = engine, task, seed
        self.version = -1

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A context in which a new GRPOTrainer with `use_vllm` takes this object instead of starting vLLM."""
        with patch.object(imported().trainer.grpo_trainer, "VLLMGeneration", self._opened):
            yield

    def _opened(self, model: Any, **settings: Any) -> SandboxGeneration:
        """Stands for VLLMGeneration's constructor. ValueError where the policy would be truncated or penalised."""
        plain = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
        for name, value in plain.items():
            if settings[name] != value:
                raise ValueError(
                    f"{name}: expected {value}, since this engine samples the whole policy, got {settings[name]}"
                )
        self.model = model
        self.temperature, self.max_tokens = settings["temperature"], settings["max_completion_length"]
        return self

    def sync_weights(self) -> None:
        """Hands the trainer's weights to the engine, under the names that transformers has for them in memory."""
        self.version += 1
        self.engine.load_weights(self.model.state_dict().items(), self.version)

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[Any, ...]:
        """Tokens and log mu of one response per entry of `prompts`, in which each prompt occurs G times in a row."""
        asked = self.task.prompts(self.version, len(prompts) // num_generations)
        expected = [list(prompt.tokens) for prompt in asked for _ in range(num_generations)]
        if prompts != expected:
            raise ValueError(f"expected the task's prompts of global step {self.version + 1}, in order, got others")
        sampling = Sampling(
            max_tokens=self.max_tokens,
            num_responses=num_generations,
            temperature=self.temperature,
            seed=derive_seed(self.seed, "rollout", self.version),
        )
        self.rollouts = self.engine.generate(asked, sampling)
        responses = self.rollouts.responses
        self.rewards_B = torch.tensor([self.task.reward(r.prompt, r) for r in responses])
        # One number per token in a list of its own: vLLM gives several candidates, the sampled one first.
        logprobs = [[[logp] for logp in r.logp_mu.tolist()] for r in responses]
        return prompts, [r.tokens.tolist() for r in responses], logprobs, None

    def rewards(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        """The reward function for GRPOTrainer: the task's rewards of the last responses, which these must be."""
        assert completion_ids == [r.tokens.tolist() for r in self.rollouts.responses], "TRL reordered the responses"
        return self.rewards_B.tolist()


__all__ = ["NEEDED", "SandboxGeneration", "imported", "is_installed"]
