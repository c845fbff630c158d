"""The pass over the prompts of a generate call: prefixes come from the prefix cache, the rest is computed.

Letters beyond theory/contracts.py: W rows of a response's buffer; p prompts of one forward pass, n their computed
tokens, packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sandbox.engines.buffers import Buffers, PassRecorder
from sandbox.engines.prefix_cache import CachedPrefix, PrefixCache
from sandbox.kernels.numerics import Numerics
from sandbox.model import MoE
from sandbox.model.kv_cache import KVCache
from theory.contracts import Prompt


def run_prompts(
    model: MoE,
    prompts: Sequence[Prompt],
    num_copies: int,
    room: int,
    numerics: Numerics,
    buffers: Buffers,
    prefixes: PrefixCache | None = None,
) -> tuple[KVCache, Float[Tensor, "B V"]]:
    """The KV cache and the next-token logits after each prompt, for the `num_copies` adjacent responses of its group.

    Runs each prompt once, from the end of its known prefix, and writes its routes into the buffers of its responses.
    The cache has room for `room` tokens after the longest prompt. One forward pass runs all prompts without a known
    prefix; the others are packed greedily into passes that fit.
    """
    found = [None if prefixes is None else prefixes.find(prompt.tokens) for prompt in prompts]
    capacity = max(len(prompt.tokens) for prompt in prompts) + room
    caches, logits, order = [], [], []
    for chosen in _passes(prompts, found, min(capacity, model.config.max_positions)):
        cache = KVCache(model.config, len(chosen), capacity, model.norm.dtype)
        starts = [_take(hit, cache, row) for row, hit in enumerate(found[p] for p in chosen)]
        cache.lengths_B = torch.tensor(starts)
        lengths_p = torch.tensor([len(prompts[p].tokens) for p in chosen])
        tokens_pS = padded([prompts[p].tokens[start:] for p, start in zip(chosen, starts, strict=True)])
        recorder = PassRecorder(buffers.features is not None)
        hidden_pSD = model.forward_hidden(tokens_pS, recorder, numerics=numerics, cache=cache)
        # The pass counts padding as tokens; `truncate` takes it off the shorter prompts again.
        counts_p = lengths_p - torch.tensor(starts)
        cache.truncate(lengths_p)
        _store_routes(recorder, torch.tensor(chosen), torch.tensor(starts), counts_p, num_copies, buffers)
        # The row of a prompt's last token predicts the first token of its responses.
        caches.append(cache)
        logits.append(model.logits(hidden_pSD[torch.arange(len(chosen)), counts_p - 1], numerics=numerics))
        order += chosen
    for p, hit in enumerate(found):
        if hit is not None and buffers.experts_BWLK is not None:
            assert hit.experts_SLK is not None, "a prefix of a model with routers was kept without routes"
            buffers.experts_BWLK[p * num_copies : (p + 1) * num_copies, : hit.length] = hit.experts_SLK
    # Undo the packing: `order` has the prompt of each row of the caches, its argsort the row of each prompt.
    in_order = torch.tensor(order).argsort().repeat_interleave(num_copies)
    return KVCache.concat(caches).select(in_order), torch.cat(logits)[in_order]


def _passes(prompts: Sequence[Prompt], found: Sequence[CachedPrefix | None], limit: int) -> Iterator[list[int]]:
    """The prompts of each forward pass. Each is padded to the pass's longest part, and must then end within `limit`."""
    # All of these begin at 0, so padding makes none longer than the longest prompt, which fits.
    missed = [p for p, hit in enumerate(found) if hit is None]
    if missed:
        yield missed
    starts = {p: hit.length for p, hit in enumerate(found) if hit is not None}
    chosen, furthest = [], 0
    # Shortest parts first, so that the next part sets the pass's width; the prompt that starts furthest must have room
    # for it.
    for width, p in sorted((len(prompts[p].tokens) - start, p) for p, start in starts.items()):
        furthest = max(furthest, starts[p])
        if chosen and furthest + width > limit:
            yield chosen
            chosen, furthest = [], starts[p]
        chosen.append(p)
    if chosen:
        yield chosen


def _take(hit: CachedPrefix | None, cache: KVCache, row: int) -> int:
    """Copies the found keys and values into the row; returns the number of their tokens, 0 without a hit."""
    if hit is None:
        return 0
    cache.k_LBhCd[:, row, :, : hit.length] = hit.k_LhSd
    cache.v_LBhCd[:, row, :, : hit.length] = hit.v_LhSd
    return hit.length


def _store_routes(
    recorder: PassRecorder, prompts_p: Tensor, starts_p: Tensor, counts_p: Tensor, num_copies: int, buffers: Buffers
) -> None:
    """Writes the routes of each prompt's computed tokens, padding left out, to all responses of the prompt."""
    if buffers.experts_BWLK is None:
        return
    width = int(counts_p.max())
    p_n, s_n = (torch.arange(width) < counts_p[:, None]).nonzero(as_tuple=True)
    buffers.store(recorder, prompts_p[p_n] * num_copies, starts_p[p_n] + s_n, num_copies, p_n * width + s_n)


def padded(sequences: Sequence[Sequence[int]]) -> Int[Tensor, "B S"]:
    """Token sequences as one tensor, padded with zeros on the right."""
    tokens_BS = torch.zeros(len(sequences), max(len(tokens) for tokens in sequences), dtype=torch.int64)
    for b, tokens in enumerate(sequences):
        tokens_BS[b, : len(tokens)] = torch.tensor(tokens)
    return tokens_BS


__all__ = ["padded", "run_prompts"]
