"""The defects keep their promises with compiled kernels: those of test_defect_chain.py, measured again."""

from __future__ import annotations

import pytest

from sandbox.training.numerics import of_precision
from tests.contracts import worlds
from tests.sandbox.compiled_world import COMPILED
from tests.sandbox.engines import test_defect_chain as chain

HOOKS = (
    "weights-fp8-channel", "activations-bf16", "activations-fp8", "activations fp8 per tensor", "cache-fp8",
    "cache fp8 per tensor", "reduction bf16", "router-noise", "logit-noise", "top-k, scored",
)  # fmt: skip
NAMES = [name for name in chain.BROKEN if name.startswith("stale") or name in HOOKS]
"""A defect for every hook of a pass, by row and by batch, and all that load, switch or copy models."""


@pytest.fixture(scope="module")
def world() -> chain.World:
    """The chain's world of two versions, computed with compiled kernels."""
    return chain.make_world(COMPILED)


@pytest.mark.parametrize("name", NAMES)
def test_a_defect_breaks_the_links_that_it_declares(name, world):
    """The defects' promises hold with compiled kernels as with eager ones: each breaks what it declares, no more."""
    assert set(chain.broken_links(world, chain.BROKEN[name])) == chain.BROKEN[name].breaks


def test_defects_compose(world):
    """An engine with several defects breaks the union of what each breaks, hooks inside a pass and after it alike."""
    defects = [chain.BROKEN[name] for name in ("logit-noise", "cache-fp8", "top-k")]
    assert set(chain.broken_links(world, *defects)) == frozenset().union(*(defect.breaks for defect in defects))
    # The noise is the same draw in both; what differs is the cache, a hook inside the pass.
    both, noise = world.engine(*defects[:2]), world.engine(defects[0])
    assert not chain.equal(*(engine.generate(worlds.prompts(), chain.SAMPLING) for engine in (both, noise)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_exact_engine_breaks_nothing(precision, world):
    """All four links hold in both precisions of training."""
    assert set(chain.broken_links(world, numerics=of_precision(precision))) == set()
