"""Shared parts of the plan's tests: the published models, and recipes with options."""

from __future__ import annotations

import pytest

from firstorder.worlds import Schemas
from lab.config.load import load
from scaled.config import ScaledRun
from scaled.model_shape import load_shape

QWEN, MOONLIGHT, OLMOE = (load_shape("-", name) for name in ("qwen3-30b-a3b", "moonlight-16b-a3b", "olmoe-1b-7b"))
EACH_SHAPE = pytest.mark.parametrize("shape", [QWEN, MOONLIGHT, OLMOE], ids=["qwen3", "moonlight", "olmoe"])


def loaded(name: str, *options: str) -> ScaledRun:
    """The recipe of that name in configs/scaled, changed by options of the command line."""
    config = load(f"configs/scaled/{name}.yaml", options, Schemas())
    assert isinstance(config, ScaledRun)
    return config
