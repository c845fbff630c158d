"""Router features, later logits and predictors, which the tests of the predictor share."""

from __future__ import annotations

from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from theory.routing.features import RouterFeatures
from theory.routing.packed_rows import offsets_of
from theory.routing.predictor import loss_and_gradients
from theory.streams import stream

D, E, K = 4, 6, 2
LAYERS = (1, 3)
seeds = st.integers(0, 9999)


def draw_features(seed: int, F: int = 5) -> RouterFeatures:
    """Random (h_old, p_old) on F rows of one response."""
    generator = stream(seed, "features")
    return RouterFeatures(
        rows=torch.arange(F),
        offsets=offsets_of([F]),
        hidden=torch.randn(F, len(LAYERS), D, generator=generator),
        logits=torch.randn(F, len(LAYERS), E, generator=generator),
        layer_numbers=LAYERS,
    )


def draw_pi(seed: int, F: int = 5) -> Tensor:
    """Random router logits of pi on the same rows."""
    return torch.randn(F, len(LAYERS), E, generator=stream(seed, "pi"))


def draw_predictor(seed: int, size: float = 0.5) -> dict[int, Tensor]:
    """A random W_p per layer."""
    generator = stream(seed, "predictor")
    return {n: size * torch.randn(D, E, generator=generator) for n in LAYERS}


def loss_of(
    pi: Tensor, features: RouterFeatures, predictor: dict[int, Tensor], name: Literal["kl", "delta"] = "kl"
) -> Tensor:
    """The predictor's loss alone, differentiable in its weights."""
    return loss_and_gradients(name, pi, features, predictor)[0]


def drifted(features: RouterFeatures, drift: dict[int, Tensor]) -> Tensor:
    """pi's logits where every router moved by `drift` under unchanged inputs: p_old + h drift."""
    return features.plus_bias(drift).logits


def rows(features: RouterFeatures, chosen: list[int]) -> RouterFeatures:
    """The features on these rows of one response alone."""
    assert features.hidden is not None
    offsets = offsets_of([len(chosen)])
    return RouterFeatures(
        features.rows[chosen], offsets, features.hidden[chosen], features.logits[chosen], features.layer_numbers
    )
