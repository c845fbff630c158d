"""Shapes are checked within tests, but for those marked `unchecked`."""

from __future__ import annotations

import jaxtyping
import pytest
import torch

from theory.advantages import group_mean, noisy_labels

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
