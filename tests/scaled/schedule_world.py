"""The sandbox's engines in this process, for the laws of schedules and of the probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from tests.contracts import worlds
from tests.scaled.cluster_world import ShareEngine
from theory.algorithm import Algorithm, OptimizerSettings, Oversampling
from theory.contracts import Prompt, Rollouts, Sampling
from theory.objectives import preset
from theory.routing.predictor import PredictorSettings

STEPS = 4


def algorithm(mode: str = "R3") -> Algorithm:
    return Algorithm(
        objective=preset("minirl"),
        mode=mode,
        predictor=PredictorSettings(learning_rate_multiplier=10.0, num_positions=4),
        num_prompts=4,
        num_responses=2,
        num_minibatches=2,
        max_tokens=6,
        optimizer=OptimizerSettings(learning_rate=1e-2, weight_decay=0.0),
    )


class Watched(ShareEngine):
    """An engine that remembers when it sampled, and from what."""

    def __init__(self) -> None:
        super().__init__(worlds.model_config(), worlds.DEFECTS["exact"], stop_tokens=(worlds.STOP,))
        self.events: list[tuple[str, int]] = []

    def load_weights(self, named_tensors, version: int) -> None:
        super().load_weights(named_tensors, version)
        self.events.append(("load", version))

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, first_response: int = 0) -> Rollouts:
        self.events.append(("generate", self.version))
        return super().generate(prompts, sampling, first_response)


def world(mode: str = "R3"):
    """An algorithm, an engine, a trainer and a task; the same every time."""
    recipe = algorithm(mode)
    predictor = recipe.predictor if recipe.passes.trains_predictor else None
    return recipe, Watched(), worlds.training_engine(worlds.model(), predictor), worlds.EvenTokens()


def weights(learner) -> dict[str, Tensor]:
    return dict(learner.named_tensors())


def partial(max_staleness: int) -> Algorithm:
    over = Oversampling(extra_prompts=2, max_staleness=max_staleness)
    return replace(algorithm(), max_tokens=60, oversampling=over)
