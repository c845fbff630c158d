"""The defects keep their promises with compiled kernels: those of test_defect_chain.py, measured again."""

from __future__ import annotations

import pytest
import torch

from sandbox.training.numerics import of_precision
from tests.contracts import worlds
from tests.sandbox.compiled_world import COMPILED
from tests.sandbox.engines import test_defect_chain as chain

OTHERS = ("weights-fp8-channel", "reduction bf16", "router-noise", "logit-noise", "top-k, scored")
NAMES = [name for name in chain.BROKEN if name.startswith(("activations", "cache", "stale")) or name in OTHERS]
"""A defect for every hook of a pass, all that round inside one, and all that load, switch or copy models."""


@pytest.fixture(scope="module")
def world() -> chain.World:
    """The chain's world of two versions, computed with compiled kernels."""
    now, before = worlds.model().compute_with(COMPILED), worlds.model().compute_with(COMPILED)
    with torch.no_grad():
        for parameter, other in zip(before.parameters(), worlds.model(seed=1).parameters(), strict=True):
            parameter.add_(0.05 * other)
    return chain.World(before, now)


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
