"""One inference engine in a Ray actor, and the interface that it must have; `rollout_group` is their group."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from scaled.cluster.buckets import Bucket
from scaled.cluster.ray_cluster import Worker
from scaled.cluster.storing import pack_apart
from scaled.cluster.transfer import Parcel, pack, unpack
from scaled.cluster.weights import tensors_of
from scaled.config import RolloutBlock
from scaled.objects import OF_ENGINE
from theory.contracts import NamedTensors, Prompt, Rollouts, Sampling


@runtime_checkable
class ClusterEngine(Protocol):
    """The object that an engine actor holds: it samples a rollout's pieces, several at a time, and scores."""

    @property
    def num_unfinished(self) -> int:
        """The responses of all pieces in flight that have not ended."""
        ...

    def begin(self, number: int, prompts: Sequence[Prompt], sampling: Sampling, first_response: int = 0) -> None:
        """Takes a piece up: these prompts, whose responses the whole draw numbers from `first_response` on."""
        ...

    def sample(self, room: int = 0, most: int | None = None, steps: int | None = None) -> list[tuple[int, Rollouts]]:
        """Samples until a piece has ended, or at most `room` responses are unfinished; the pieces that have ended.

        A response with `most` tokens need not go on: it may end as "abort", then or later. After `steps` decoding steps
        the engine may return without a piece, to be called again.
        """
        ...

    def give_up(self) -> None:
        """Ends the pieces in flight without an answer."""
        ...

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """As theory's contract, with tensors that the group's `convert` made."""
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log-probabilities of tokens 1.. of each sequence."""
        ...

    def sleep(self) -> None:
        """Frees the GPU memory of weights and cache for the ranks' turn (colocated placement)."""
        ...

    def wake(self) -> None:
        """Takes that memory back; weights must be pushed before the next rollout."""
        ...


BuildEngine = Callable[[], ClusterEngine]


class OneByOne:
    """The pieces of an engine that samples one after the other; a subclass has `generate`, for one piece."""

    generate: Callable[..., Rollouts]

    @cached_property
    def _pieces(self) -> dict[int, tuple[Sequence[Prompt], Sampling, int]]:
        return {}

    @property
    def num_unfinished(self) -> int:
        return sum(len(prompts) * sampling.num_responses for prompts, sampling, _ in self._pieces.values())

    def begin(self, number: int, prompts: Sequence[Prompt], sampling: Sampling, first_response: int = 0) -> None:
        self._pieces[number] = prompts, sampling, first_response

    def sample(self, room: int = 0, most: int | None = None, steps: int | None = None) -> list[tuple[int, Rollouts]]:
        if not self._pieces:
            return []
        number, piece = next(iter(self._pieces.items()))
        rollouts = self.generate(*piece)
        del self._pieces[number]
        return [(number, rollouts)]

    def give_up(self) -> None:
        self._pieces.clear()

    # It shares no GPU with ranks.
    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass


class EngineActor(Worker):
    """One engine in its own process. Its records are cut by `layer_sets` (`storing.pack_apart`)."""

    engine: ClusterEngine
    layer_sets: Sequence[Sequence[int]]

    def start(self, build: BuildEngine, layer_sets: Sequence[Sequence[int]]) -> None:
        # Not in __init__, where Ray would report the caller's error as the actor's death.
        self.engine, self.layer_sets = build(), layer_sets

    def sample(
        self, parcel: Parcel, room: int, most: int | None, steps: int | None
    ) -> tuple[Parcel | Bucket | None, ...]:
        """Begins the parcel's pieces, and samples as `ClusterEngine.sample`: what has ended, and what has not."""
        for number, *piece in unpack(parcel):
            self.engine.begin(number, *piece)
        ended = self.engine.sample(room, most, steps)
        return pack_apart((ended, self.engine.num_unfinished), OF_ENGINE, layer_sets=self.layer_sets)

    def give_up(self) -> None:
        self.engine.give_up()

    def load_weights(self, refs: Sequence[Any], version: int) -> None:
        # In a list, Ray passes references as they are: `tensors_of` fetches one bucket at a time.
        self.engine.load_weights(tensors_of(refs), version)

    def score(self, sequences: Sequence[Sequence[int]]) -> Parcel:
        return pack(self.engine.score(sequences))

    def turn(self, awake: bool) -> None:
        """Takes GPU memory back if `awake`, else gives it up for the ranks' turn (colocated placement)."""
        if awake:
            self.engine.wake()
        else:
            self.engine.sleep()


def build_vllm(
    config_json: str, rollout: RolloutBlock, stop_tokens: Sequence[int], features_under_graphs: bool = False
) -> ClusterEngine:
    """A vLLM engine of the model with this config.json; it has no weights until some are pushed."""
    from scaled.vllm_engine.engine import VllmEngine

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config_json, encoding="utf-8")
        # The engine has a config.json of its own, so this one may go.
        return VllmEngine(Path(folder), rollout, stop_tokens, features_under_graphs=features_under_graphs)


__all__ = ["BuildEngine", "ClusterEngine", "EngineActor", "OneByOne", "build_vllm"]
