"""Shared parts of the plan's tests: the published models, and recipes with options."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest

from firstorder.worlds import Schemas
from lab.config.load import load
from scaled.config import ScaledRun
from scaled.model_shape import load_shape
from scaled.plan import layout
from tests.scaled.megatron_world import spawn

QWEN, MOONLIGHT, OLMOE = (load_shape("-", name) for name in ("qwen3-30b-a3b", "moonlight-16b-a3b", "olmoe-1b-7b"))
EACH_SHAPE = pytest.mark.parametrize("shape", [QWEN, MOONLIGHT, OLMOE], ids=["qwen3", "moonlight", "olmoe"])


def loaded(name: str, *options: str) -> ScaledRun:
    """The recipe of that name in configs/scaled, changed by options of the command line."""
    config = load(f"configs/scaled/{name}.yaml", options, Schemas())
    assert isinstance(config, ScaledRun)
    return config


@contextlib.contextmanager
def forked_builds() -> Iterator[None]:
    """Within, the process of a dry run is a copy of a server that has imported Megatron, which takes seven seconds."""
    with mock.patch.object(layout, "subprocess", wraps=subprocess) as patched:
        patched.run = _run_copy
        yield


def _run_copy(
    command: Sequence[str], *, env: dict[str, str], timeout: float, **_: bool
) -> subprocess.CompletedProcess[str]:
    spawn(1, _build, *command[-2:], env, limit_s=timeout)
    return subprocess.CompletedProcess(command, 0)


def _build(rank: int, request: str, answer: str, env: dict[str, str]) -> None:
    os.environ.update(env)
    layout.build(request, answer)
