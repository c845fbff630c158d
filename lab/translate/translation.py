"""The pieces of a translation: options, what the framework has no option for, and differences that remain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from theory.algorithm import Algorithm
from theory.objectives import Objective
from theory.objectives.corrections.base import Truncated


@dataclass(frozen=True)
class Option:
    """One option of a framework: `value` is a string, number, truth value, list or None."""

    name: str
    value: Any


@dataclass(frozen=True)
class Unsaid:
    """A part of a recipe that a framework has no option for, and the reason."""

    part: str
    why: str

    def __str__(self) -> str:
        return f"{self.part}: {self.why}"


@dataclass
class Translation:
    """An algorithm as a framework's options; `kind` says where they go.

    recipe: objective, corrections and replay. sizes: batch, lengths and the optimiser, which a laptop's run should not
    hand on. unsaid: parts without an option. notes: things that options leave to the reader, or that the framework
    computes slightly differently.
    """

    title: str
    kind: str
    recipe: list[Option] = field(default_factory=list)
    sizes: list[Option] = field(default_factory=list)
    unsaid: list[Unsaid] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, **options: Any) -> None:
        """Options of the recipe."""
        self.recipe += [Option(name, value) for name, value in options.items()]

    def lacks(self, part: str, why: str) -> None:
        """A part of the recipe that has no option."""
        self.unsaid.append(Unsaid(part, why))

    def lacks_loss(self, objective: Objective, why: str) -> None:
        """The objective's trust region and ratio, which no loss of the framework has together."""
        self.lacks(f"trust region {objective.trust_region.name} on the ratio {objective.ratio.name}", why)


GEOMETRIC = ("sequence_geometric", "sequence_geometric_token")
"""The ratios of GSPO and GSPO-token."""

NEVER = 1e9
"""A bound that never binds on a ratio whose logarithm is limited to 20 nats, as verl limits it: e^20 is 4.9e8."""


def refuse_extras(into: Translation, algorithm: Algorithm, replays: Iterable[str]) -> None:
    """Names the parts that no framework here has, and a replay mode that is not among `replays`."""
    objective = algorithm.objective
    parts = {
        f"replay mode {algorithm.mode}": algorithm.mode != "none" and algorithm.mode not in replays,
        f"centering {objective.centering}": objective.centering != "none",
        "m2_budget": objective.m2_budget > 0,
        "router_shift_floor": objective.uses_router_shift,
        "freeze_router": algorithm.freeze_router,
        "label_noise": algorithm.label_noise > 0,
    }
    for part, is_used in parts.items():
        if is_used:
            into.lacks(part, "no such option")
    own = {
        "dynamic sampling": algorithm.dynamic_sampling_rounds > 1,
        "over-sampling": algorithm.oversampling is not None,
        "the length penalty": algorithm.overlong_buffer > 0,
        "turns": algorithm.max_turns > 1,
    }
    for part, is_used in own.items():
        if is_used:
            into.lacks(part, "not translated; the framework may have its own")


def is_plain_clip(objective: Objective) -> bool:
    """Whether the gradient is PPO's w r A grad log r, stopped at its clip.

    MiniRL's mask stops the same tokens, and with a weight on old/mu it multiplies by the same w r.
    """
    return objective.trust_region.name in ("min_clip", "minirl_mask") and objective.ratio.name == "token"


def require_old_numerator(into: Translation, objective: Objective) -> bool:
    """Names a weight on pi/mu, which the frameworks do not have, and the weight on old/mu that is nearest to it."""
    weight, why = objective.correction, "weights are on old/mu there"
    if not weight.weighted or weight.numerator == "old":
        return True
    if into.unsaid:  # another weight would not be enough
        into.lacks(f"correction {weight.name} of pi/mu", why)
        return False
    nearest = f"--algorithm.objective.correction '{{name: {weight.name}, numerator: old"
    nearest += f", cap: {weight.cap:g}" if isinstance(weight, Truncated) else ""
    into.lacks(f"correction {weight.name} of pi/mu", f"{why}; nearest: {nearest}}}'")
    return False


__all__ = [
    "GEOMETRIC",
    "NEVER",
    "Option",
    "Translation",
    "Unsaid",
    "is_plain_clip",
    "refuse_extras",
    "require_old_numerator",
]
