"""The world of the audit, enumerated once for all files of tests."""

from __future__ import annotations

import pytest

from sandbox.exact import audit
from sandbox.exact.audit import ENGINES
from sandbox.exact.routed_policy import RoutedPolicy
from tests.sandbox.exact.tree_world import PROMPT, REWARD_Y, SEED, STALENESS, TREE, World, tiny_moe
from theory.routing.passes import Mode
from theory.streams import stream


@pytest.fixture(scope="session")
def world() -> World:
    model = tiny_moe(4, stream(SEED, "model"))
    direction_Q = audit.random_direction(model, stream(SEED, "direction"))
    step_Q = audit.step_at(model, direction_Q, TREE, PROMPT, STALENESS)
    off, on = {}, {}
    for name, mode, problem in audit.moe_cells(model, TREE, PROMPT, REWARD_Y, step_Q=step_Q):
        off[name, mode] = problem
    engines = {name: ENGINES[name] for name in ("exact", "weights-fp8", "router-noise")}
    modes: tuple[Mode, ...] = ("none", "R2", "R3")
    for name, mode, problem in audit.moe_cells(model, TREE, PROMPT, REWARD_Y, engines=engines, modes=modes):
        on[name, mode] = problem
    target = off["exact", "none"].target
    assert isinstance(target, RoutedPolicy)
    return World(model, step_Q, target, off, on)
