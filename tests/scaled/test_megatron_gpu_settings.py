"""Laws of what ranks do on GPUs alone, as far as a CPU can see it: settings of libraries, and fused optimisers."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.scaled.rank_world import training

# Those of torch and of Megatron-core, whose import warns on a CPU.
pytestmark = pytest.mark.filterwarnings("ignore")
SETTINGS = ("CUBLAS_WORKSPACE_CONFIG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NCCL_NVLS_ENABLE")


@pytest.mark.parametrize("asked", [True, False])
def test_libraries_are_told_before_the_first_group(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS and NCCL read their variables once, NCCL with the first group; what the user has set stays."""
    from scaled.megatron_engine import parallel

    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    seen: dict[str, Any] = {}

    def begin(*args: Any, **words: Any) -> None:
        seen.update({name: os.environ.get(name) for name in SETTINGS})
        raise InterruptedError

    monkeypatch.setattr(dist, "init_process_group", begin)
    config = training(1, deterministic=asked)
    try:
        with pytest.raises(InterruptedError):
            parallel.initialize(config, 0, config.num_ranks, dist.HashStore())
    finally:
        parallel.set_deterministic(False)
    assert seen == dict(zip(SETTINGS, (":16:8", *(["0", "0"] if asked else [None, None])), strict=True))


class Fused:
    """An optimiser that takes each name of a parameter's state for a tensor of states, as Transformer Engine's does,
    and counts the steps of a group."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = [{"step": 0}, {"step": 0}]


class Part:
    """Megatron's optimiser around it, without shards."""

    is_stub_optimizer = False

    def __init__(self, inner: Any) -> None:
        self.optimizer, self.loaded = inner, {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for own in state["optimizer"]["state"].values():
            self.loaded |= {name: {"exp_avg": 1, "exp_avg_sq": 2}[name] for name in own}


def test_a_fused_optimiser_counts_steps_by_group() -> None:
    """It gets the moments alone; the number of updates goes to its groups."""
    from scaled.megatron_engine.optimizer import RankOptimizer
    from scaled.megatron_engine.optimizer_states import load_states

    part, moments = Part(Fused()), {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    tree: dict[str, dict[str, dict[int, dict[str, Tensor]]]] = {"optimizer": {"state": {0: moments}}}
    optimizer = object.__new__(RankOptimizer)
    optimizer.megatron = SimpleNamespace(chained_optimizers=[part])  # pyright: ignore[reportAttributeAccessIssue]
    load_states(optimizer, [tree], {}, num_updates=7)
    assert part.loaded == {"exp_avg": 1, "exp_avg_sq": 2}
    assert [group["step"] for group in part.optimizer.param_groups] == [7, 7]
