"""Batches and objectives that the tests of theory/objectives share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from theory.objectives import Objective, ObjectiveOutput, correction, preset
from theory.streams import stream

TIGHT = {
    "token_tis": {"cap": 1.1},
    "prefix_tis": {"cap": 1.1},
    "seq_tis": {"cap": 1.1},
    "icepop": {"lo": 0.9, "hi": 1.1},
    "seq_mis": {"lo": 0.8, "hi": 1.2},
    "geo_rs": {"lo": 0.9, "hi": 1.1},
    "k3_rs": {"max_k3": 0.01},
}
"""Bounds that, on the batches below, bind on some tokens or responses and not on others."""


@dataclass(frozen=True)
class Batch:
    """Six ragged responses, with tokens in their middle that mu did not sample."""

    pi: Tensor
    old: Tensor
    mu: Tensor
    advantages: Tensor
    mask: Tensor

    def __call__(self, objective: Objective, **kwargs) -> ObjectiveOutput:
        return objective(self.pi, self.old, self.mu, self.advantages, self.mask, **kwargs)

    def gradient(self, objective: Objective, **kwargs) -> Tensor:
        pi = self.pi.clone().requires_grad_()
        dataclasses.replace(self, pi=pi)(objective, **kwargs).objective.backward()
        assert pi.grad is not None
        return pi.grad

    def rows(self, index: Any) -> Batch:
        return Batch(*(x[index] for x in (self.pi, self.old, self.mu, self.advantages, self.mask)))


def make_batch(seed: int, staleness: float = 0.25, gap: float = 0.15, B: int = 6, T: int = 5) -> Batch:
    generator = stream(seed, "objectives")

    def noise() -> Tensor:
        return torch.randn(B, T, generator=generator, dtype=torch.float64)

    mask = torch.rand(B, T, generator=generator) < 0.75
    mask[:, 0] = True
    mu = -1.0 + 0.5 * noise()
    old = mu + gap * noise()
    pi = old + staleness * noise()
    return Batch(pi, old, mu, torch.randn(B, generator=generator, dtype=torch.float64), mask)


def tuned(name: str, correction_name: str) -> Objective:
    return preset(name, correction=correction(correction_name, **TIGHT.get(correction_name, {})))
