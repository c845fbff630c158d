"""Defect: a hand-over that omits tensors, so that the engine keeps their first values.

verl#7495: a weight sync omitted the LoRA tensors, so the engine always sampled from the initial policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from lab.hf.families import ROUTERS
from sandbox.engines.defect import BREAKS_TRAINER, Defect, Link
from theory.contracts import NamedTensors

PREFIX = "rollout_first."
PARTS: Mapping[str, tuple[str, ...]] = {
    "all": ("",),
    "experts": (".experts.",),
    "attention": (".self_attn.",),
    "routers": ROUTERS,
}
"""The omitted tensors, by parts of their Hugging Face names."""
WITH_ROUTERS = ("all", "routers")
"""The parts that hold the gates."""


class PartialWeights(Defect):
    """The tensors of one part of the model keep the values of the first hand-over; all others follow the trainer.

    Breaks trainer == engine from the second hand-over on, by more the further those tensors have been trained.
    """

    place: ClassVar[float] = 9
    at_most_one: ClassVar[bool] = True
    kind: Literal["partial_weights"] = "partial_weights"
    missing: Literal["all", "experts", "attention", "routers"] = Field(
        default="all", description="the tensors that later hand-overs omit; all: the engine keeps its first weights"
    )

    @classmethod
    def rungs(cls) -> Mapping[str, Defect]:
        return {
            "nothing arrives after the first hand-over": cls(),
            "experts never arrive": cls(missing="experts"),
            "attention never arrives": cls(missing="attention"),
            "routers never arrive": cls(missing="routers"),
        }

    @property
    def breaks(self) -> frozenset[Link]:
        return BREAKS_TRAINER

    def withholds(self, name: str) -> bool:
        """Whether the tensor of that Hugging Face name keeps its first value."""
        return any(part in name for part in PARTS[self.missing])


class FirstWeights:
    """The first values of the tensors that these defects withhold from later hand-overs."""

    def __init__(self, defects: Sequence[Defect]):
        self._defects = [defect for defect in defects if isinstance(defect, PartialWeights)]
        self._first: dict[str, Tensor] = {}
        self._new: dict[str, Tensor] = {}

    def arrived(self, named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """The tensors as they arrive: a withheld one is replaced by the first of its name, once that was kept."""
        self._new = {}
        if not self._defects:
            yield from named_tensors
            return
        for name, tensor in named_tensors:
            if not any(defect.withholds(name) for defect in self._defects):
                yield name, tensor
                continue
            if name not in self._first:
                # A clone: the caller may hand over live weights, which its next update changes in place.
                self._new[name] = tensor.detach().clone()
            yield name, self._first.get(name, tensor)

    def keep(self) -> None:
        """Keeps the first values that came with the last hand-over; a refused one leaves none."""
        self._first |= self._new
        self._new = {}

    def state_tensors(self) -> dict[str, Tensor]:
        """The state that a resumed run needs besides the newest weights."""
        return {PREFIX + name: tensor for name, tensor in self._first.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_tensors`; other tensors are ignored."""
        found = {key.removeprefix(PREFIX): tensor for key, tensor in tensors.items() if key.startswith(PREFIX)}
        self._first = {name: tensor.clone() for name, tensor in found.items()}
