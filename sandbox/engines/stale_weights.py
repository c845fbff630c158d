"""Defect: an engine that samples from weights some versions old, as in asynchronous and off-policy RL.

A response may begin under old weights and continue under the newest (an in-flight weight update): MiniRL (arXiv
2512.01374) sec. 2.4 counts both as policy staleness; here they are part of the gap between mu and old.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from sandbox.engines.defect import BREAKS_NONE, BREAKS_TRAINER, Defect, Link, dial
from sandbox.model import MoE
from sandbox.model.checkpoint import load_hf
from theory.contracts import NamedTensors

PREFIX = "rollout_weights."


class StaleWeights(Defect):
    """Samples from the weights of `versions` hand-overs ago, or the oldest it has; `Response.version` says which.

    With `switch_at` < 1 every response continues with the newest weights after its first ceil(switch_at max_tokens)
    tokens. The cache is kept, with the old weights' keys and values (as in an in-flight update), or recomputed under
    the new weights (as after an abort and resume). Such a response has two versions, and `Response.version` is the
    older one: no token is staler than that. Routes are those of the pass that computed a token's successor, even if the
    cache is recomputed.

    Breaks trainer == engine, by one update per version; with a switch also prefill == decode, as no single set of
    weights gives these log-probabilities. `versions` = 0 is exact.
    """

    place: ClassVar[float] = 8
    at_most_one: ClassVar[bool] = True
    kind: Literal["stale_weights"] = "stale_weights"
    versions: int = Field(default=1, ge=0, description="number of hand-overs by which the weights lag")
    switch_at: float = Field(
        default=1.0, gt=0, le=1, description="share of max_tokens after which the newest weights take over; 1: never"
    )
    cache: Literal["kept", "recomputed"] = Field(
        default="kept", description="cache after the switch: old keys and values, or those of the newest weights"
    )

    @classmethod
    def rungs(cls) -> Mapping[str, Defect]:
        return {
            "1 version behind": cls(versions=1),
            "2 versions behind": cls(versions=2),
            "4 versions behind": cls(versions=4),
            "4 behind, from a half on new, cache kept": cls(versions=4, switch_at=0.5),
            "4 behind, from a half on new, cache recomputed": cls(versions=4, switch_at=0.5, cache="recomputed"),
        }

    @property
    def setting(self) -> str:
        if self.switch_at == 1:
            return f"by {self.versions}"
        return f"by {self.versions}, newest from {dial(self.switch_at)} on, cache {self.cache}"

    @property
    def breaks(self) -> frozenset[Link]:
        if self.versions == 0:
            return BREAKS_NONE
        return BREAKS_TRAINER if self.switch_at == 1 else frozenset({"prefill", "trainer"})

    def switch_position(self, max_tokens: int) -> int | None:
        """The first response position that the newest weights sample; None if there is none."""
        # Rounded first: 0.55 of 100 is 55.000000000000007 in float64.
        position = math.ceil(round(self.switch_at * max_tokens, 9))
        return position if self.versions > 0 and position < max_tokens else None


def lagging(defects: Sequence[Defect]) -> StaleWeights | None:
    """The stale weights among these defects, if they lag by a version or more."""
    return next((defect for defect in defects if isinstance(defect, StaleWeights) and defect.versions > 0), None)


class WeightHistory:
    """The newest weights and up to `versions` earlier sets, as an engine stores them (after its other defects)."""

    def __init__(self, model: MoE, versions: int):
        self.versions = versions
        self.newest = deepcopy(model)
        self._sets: dict[int, dict[str, Tensor]] = {}

    @torch.no_grad()
    def push(self, named_tensors: NamedTensors, version: int, oldest: MoE) -> int:
        """Stores the newest set, loads the oldest kept set into `oldest`, and returns that set's version.

        An equal version is replaced. Raises ValueError for a version older than the newest, and as `load_hf` does.
        """
        if self._sets and version < max(self._sets):
            raise ValueError(f"load_weights: expected a version of at least {max(self._sets)}, got {version}")
        # Before the set is stored: if it raises, the history is as it was.
        load_hf(self.newest, named_tensors)
        # Clones: the next hand-over writes into the same parameters.
        self._sets[version] = {name: tensor.clone() for name, tensor in self.newest.state_dict().items()}
        while len(self._sets) > self.versions + 1:
            del self._sets[min(self._sets)]
        first = min(self._sets)
        # Copied into `oldest`, so that a later deletion of the set leaves the engine's weights alone.
        oldest.load_state_dict(self._sets[first])
        return first

    def state_tensors(self) -> dict[str, Tensor]:
        """All sets but the newest, which a resumed run hands over again."""
        older = sorted(self._sets)[:-1]
        return {f"{PREFIX}{version}.{name}": t for version in older for name, t in self._sets[version].items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_tensors`; other tensors are ignored. ValueError if a set does not fit the model."""
        sets: dict[int, dict[str, Tensor]] = {}
        for version, name, tensor in _entries(tensors):
            sets.setdefault(version, {})[name] = tensor.clone()
        own = {name: tensor.shape for name, tensor in self.newest.state_dict().items()}
        for version, weights in sets.items():
            got = {name: tensor.shape for name, tensor in weights.items()}
            if got != own:
                name = min(n for n in own.keys() | got.keys() if own.get(n) != got.get(n))
                expected, given = _size(own.get(name)), _size(got.get(name))
                raise ValueError(
                    f"checkpoint does not fit the config: stale weight {name} of version {version} is {given}, "
                    f"expected {expected}"
                )
        self._sets = sets


def _entries(tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, str, Tensor]]:
    for key, tensor in tensors.items():
        if key.startswith(PREFIX):
            version, _, name = key.removeprefix(PREFIX).partition(".")
            yield int(version), name, tensor


def _size(shape: torch.Size | None) -> str:
    return "absent" if shape is None else str(tuple(shape))
