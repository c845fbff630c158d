"""Named streams: the same name gives the same draws, another name independent ones."""

from __future__ import annotations

import itertools

import torch

from theory.streams import derive_seed, stream


def test_the_name_decides_the_draws():
    """Equal names give equal draws; any change of seed or name changes them."""
    draws = [torch.rand(4, generator=stream(*name)) for name in [(0, "a"), (0, "a"), (1, "a"), (0, "b"), (0, "a", 1)]]
    assert torch.equal(draws[0], draws[1])
    assert not any(torch.equal(x, y) for x, y in itertools.combinations(draws[1:], 2))


def test_names_do_not_run_together():
    """(1, "2") and (12,) are different names, as are ("a", "b") and ("ab",)."""
    assert derive_seed(1, "2") != derive_seed(12)
    assert derive_seed(0, "a", "b") != derive_seed(0, "ab")


def test_seeds_are_63_bit_and_spread():
    """Of 2,000 seeds no two are equal, and each of the 63 bits is set in about half (within 5 standard errors)."""
    seeds = [derive_seed(7, "spread", i) for i in range(2000)]
    assert len(set(seeds)) == 2000
    for bit in range(63):
        share = sum(s >> bit & 1 for s in seeds) / 2000
        assert abs(share - 0.5) < 5 * 0.5 / 2000**0.5
    assert max(seeds) < 2**63
