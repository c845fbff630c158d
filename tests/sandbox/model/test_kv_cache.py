"""The cache of keys and values: decoding has the bits of the full pass, with repeated, dropped and replaced rows."""

from __future__ import annotations

import pytest
import torch

from sandbox.model import KVCache
from tests.sandbox.model.test_model import CONFIGS, build, tokens


@pytest.mark.parametrize("name", CONFIGS)
def test_decode_equals_prefill_at_every_position_with_ragged_prompts(name):
    """Prompts of lengths 1, 9 and 5 prefilled together, then decoded token by token: the bits of the full pass."""
    model, t = build(name), tokens(3, 40)
    lengths = torch.tensor([1, 9, 5])
    with torch.no_grad():
        whole = model(t)
        cache = KVCache(model.config, 3, 40)
        first = model(t[:, :9], cache=cache)
        for b, n in enumerate(lengths.tolist()):
            assert torch.equal(first[b, :n], whole[b, :n])
        cache.truncate(lengths)
        for step in range(31):
            position = lengths + step
            logits = model(t.gather(1, position[:, None]), cache=cache)
            assert torch.equal(logits[:, 0], whole[torch.arange(3), position])
        assert cache.lengths_B.tolist() == (lengths + 31).tolist()


def test_a_cache_continues_in_chunks_and_groups_and_drops_rows():
    """Prefill once, repeat for a group, feed chunks, drop finished rows: the bits of the full pass all the way."""
    model, t = build("qwen3"), tokens(6, 30)
    t[1::2, :10] = t[::2, :10]  # pairs share a prompt
    with torch.no_grad():
        whole = model(t)
        cache = KVCache(model.config, 3, 30)
        model(t[::2, :10], cache=cache)
        cache = cache.repeat(2)
        assert torch.equal(model(t[:, 10:17], cache=cache), whole[:, 10:17])
        kept = torch.tensor([4, 1])
        cache = cache.select(kept)
        assert torch.equal(model(t[kept, 17:18], cache=cache), whole[kept, 17:18])
        # Writing again at an earlier position replaces what stood there.
        cache.truncate(torch.tensor([12, 12]))
        assert torch.equal(model(t[kept, 12:14], cache=cache), whole[kept, 12:14])


def test_the_longest_row_is_known_whatever_changed_the_lengths():
    """`longest` is the largest length after every way of changing lengths; it is kept, so a stale one would show."""
    cache = KVCache(build("qwen3").config, 3, 40)
    assert cache.longest == 0
    cache.lengths_B = torch.tensor([4, 9, 2])
    assert cache.longest == 9
    before = cache.lengths_B
    cache.advance(3)
    assert cache.longest == 12 and cache.lengths_B.tolist() == [7, 12, 5] and before.tolist() == [4, 9, 2]
    cache.truncate(torch.tensor([7, 6, 5]))
    assert cache.longest == 7
    assert cache.select(torch.tensor([2, 1])).longest == 6
    assert KVCache.concat([cache, cache.repeat(2)]).longest == 7
