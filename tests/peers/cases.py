"""Cases that both sides have: a name, our function and theirs, on batches of ragged responses with holes.

Each case gives pairs of tensors, ours and theirs, by what they are: a value, a gradient, a weight, a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor

from tests.theory.objective_batches import Batch
from theory.objectives import Objective

Pairs = dict[str, tuple[Tensor, Tensor]]
Code = tuple[ModuleType, ModuleType]


@dataclass(frozen=True)
class Case:
    """One comparison. `run` takes the peer's code (verl's modules; nothing of TRL) and a seed."""

    name: str
    run: Callable[[Any, int], Pairs]


def gradients(batch: Batch, objective: Objective, theirs: Callable[[Tensor], Tensor]) -> Pairs:
    """J and its gradient beside a loss and its gradient."""
    pi = batch.pi.clone().requires_grad_()
    loss = theirs(pi)
    loss.backward()
    assert pi.grad is not None
    value = batch(objective).objective.detach()
    return {"value": (value, -loss.detach()), "gradient": (batch.gradient(objective), -pi.grad)}


def differences(case: Case, code: Any, seeds: range) -> dict[str, float]:
    """The largest absolute difference over these seeds, by what it is of."""
    found: dict[str, float] = {}
    for seed in seeds:
        for what, (ours, theirs) in case.run(code, seed).items():
            found[what] = max(found.get(what, 0.0), (ours - theirs).abs().max().item())
    return found
