"""One inference engine in a Ray actor, and the interface that it must have; `rollout_group` is their group."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from scaled.cluster.ray_cluster import Worker
from scaled.cluster.storing import pack_apart
from scaled.cluster.transfer import Bucket, Parcel, pack, unpack
from scaled.cluster.weights import tensors_of
from scaled.config import RolloutBlock
from theory.contracts import NamedTensors, Prompt, Rollouts, Sampling


@runtime_checkable
class ClusterEngine(Protocol):
    """The object that an engine actor holds: a RolloutEngine that can take a share of the prompts, and score."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, first_response: int = 0) -> Rollouts:
        """The responses to these prompts, which the whole draw numbers from `first_response` on."""
        ...

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """As theory's contract, with tensors that the group's `convert` made."""
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log-probabilities of tokens 1.. of each sequence."""
        ...


BuildEngine = Callable[[], ClusterEngine]


class EngineActor(Worker):
    """One engine in its own process."""

    engine: ClusterEngine

    def start(self, build: BuildEngine) -> None:
        # Not in __init__, where Ray would report the caller's error as the actor's death.
        self.engine = build()

    def generate(self, parcel: Parcel, first_response: int, num_stored: int) -> tuple[Parcel | Bucket, ...]:
        prompts, sampling = unpack(parcel)
        return pack_apart(self.engine.generate(prompts, sampling, first_response=first_response), num_stored)

    def load_weights(self, refs: Sequence[Any], version: int) -> None:
        # In a list, Ray passes references as they are: `tensors_of` fetches one bucket at a time.
        self.engine.load_weights(tensors_of(refs), version)

    def score(self, sequences: Sequence[Sequence[int]]) -> Parcel:
        return pack(self.engine.score(sequences))

    def turn(self, awake: bool) -> None:
        """Takes GPU memory back if `awake`, else gives it up for the ranks' turn (colocated placement)."""
        engine: Any = self.engine
        if awake:
            engine.wake()
        else:
            engine.sleep()


def build_vllm(
    config_json: str, rollout: RolloutBlock, stop_token: int | None, features_under_graphs: bool = False
) -> ClusterEngine:
    """A vLLM engine of the model with this config.json; it has no weights until some are pushed."""
    from scaled.vllm_engine.engine import VllmEngine

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config_json, encoding="utf-8")
        # The engine has a config.json of its own, so this one may go.
        return VllmEngine(Path(folder), rollout, stop_token, features_under_graphs=features_under_graphs)


__all__ = ["BuildEngine", "ClusterEngine", "EngineActor", "build_vllm"]
