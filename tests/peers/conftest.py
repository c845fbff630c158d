"""The peers' code, and float64 for comparisons of formulas."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.peers import verl_code


@pytest.fixture
def wide() -> Iterator[None]:
    """Formulas are compared, not roundings: TRL's numbers take torch's default type."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


@pytest.fixture(scope="module")
def code() -> Iterator[tuple[ModuleType, ModuleType]]:
    """verl's core_algos and rollout_corr_helper."""
    with verl_code.verl_code() as modules:
        yield modules
