"""Shapes are checked in each function's first calls of a test, but in tests marked `unchecked`."""

from __future__ import annotations

import jaxtyping
import pytest
import torch

from tests.shapes import CALLS
from theory.advantages import group_mean, noisy_labels
from theory.algorithm import BatchSettings, OptimizerSettings

INTEGERS_PG = torch.tensor([[0, 1]])
"""Rewards of a dtype that the annotation does not take."""


@pytest.mark.unchecked
def test_an_unchecked_test_runs_without() -> None:
    """The function runs as it does outside of pytest."""
    assert noisy_labels(INTEGERS_PG, 0.0, torch.Generator()).equal(INTEGERS_PG.float())


def test_the_next_one_is_checked_again() -> None:
    """A dtype or a shape that is not the annotation's is refused."""
    for wrong in (INTEGERS_PG, torch.zeros(2)):
        with pytest.raises(jaxtyping.TypeCheckError):
            group_mean(wrong)


@pytest.mark.parametrize("again", range(2))
def test_the_first_calls_of_each_test_are_checked(again: int) -> None:
    """A function refuses CALLS wrong calls in a test, takes the next one, and refuses again in the next test."""
    for _ in range(CALLS):
        with pytest.raises(jaxtyping.TypeCheckError):
            noisy_labels(INTEGERS_PG, 0.0, torch.Generator())
    assert noisy_labels(INTEGERS_PG, 0.0, torch.Generator()).equal(INTEGERS_PG.float())
    with pytest.raises(jaxtyping.TypeCheckError):
        group_mean(INTEGERS_PG)


def test_methods_properties_and_dataclasses_are_checked() -> None:
    """The making of a dataclass and a method of it refuse what their annotations do not take."""
    with pytest.raises(jaxtyping.TypeCheckError):
        BatchSettings(num_prompts="16")  # pyright: ignore[reportArgumentType]
    with pytest.raises(jaxtyping.TypeCheckError):
        OptimizerSettings().rate_at("1")  # pyright: ignore[reportArgumentType]
