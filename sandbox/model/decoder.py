"""The decoder: a Qwen3-MoE-shaped transformer whose routers ask a `Routing` which experts to use.

One class covers Qwen3-MoE, OLMoE and Mixtral shapes and their dense twin; sandbox/model/checkpoint.py reads and writes
their Hugging Face folders. The model's kernels (sandbox/kernels/) do all arithmetic, in training, prefill and decoding.

Letters beyond theory/contracts.py: N = B S rows of a flattened batch, O output width, F MLP hidden width, H query
heads, h key heads, d head width, P key slots (padded).
Shapes follow Qwen3 (arXiv 2505.09388), OLMoE (arXiv 2409.02060) and Mixtral (arXiv 2401.04088).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from sandbox.kernels import EAGER, MIN_KEYS, Kernels, rotation, round_up
from sandbox.kernels.numerics import EXACT, Numerics
from sandbox.model.config import ModelConfig
from sandbox.model.kv_cache import KVCache
from sandbox.model.layers import Pass, Products, linear
from sandbox.model.routing import Routing
from sandbox.model.weights import DecoderWeights
from theory.routing.replay import NaturalRouting

if TYPE_CHECKING:
    from sandbox.model.compiled_passes import CompiledPasses


class MoE(DecoderWeights):
    """The decoder: its weights, and forward passes with one set of kernels."""

    def __init__(self, config: ModelConfig, generator: torch.Generator | None = None, kernels: Kernels = EAGER):
        super().__init__(config, generator)
        self.compute_with(kernels)

    def compute_with(self, kernels: Kernels) -> MoE:
        """Switches this model to these kernels and returns it."""
        self.kernels, self.gate = kernels, kernels.gate(self.config.gate)
        self._held: CompiledPasses | None = None
        return self

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which the weights must not change: whole passes pack them only once."""
        before = self._held
        # A context inside another one uses the passes of the outer one.
        if before is None:
            self._held = self._passes()
        try:
            yield
        finally:
            self._held = before

    def forward(
        self,
        tokens_BS: Int[Tensor, "B S"],
        routing: Routing | None = None,
        *,
        numerics: Numerics = EXACT,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "B S V"]:
        """Next-token logits after every token; see `forward_hidden` for the arguments."""
        hidden_BSD = self.forward_hidden(tokens_BS, routing, numerics=numerics, cache=cache)
        return self.logits(hidden_BSD.flatten(0, 1), numerics=numerics).unflatten(0, hidden_BSD.shape[:2])

    def forward_hidden(
        self,
        tokens_BS: Int[Tensor, "B S"],
        routing: Routing | None = None,
        *,
        numerics: Numerics = EXACT,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "B S D"]:
        """The normalised hidden state of every token; `logits` turns the rows that are needed into logits.

        Causal; right padding changes no bit of the tokens before it. With a cache, a row's tokens go after those that
        it holds, and see them; its length advances by S, padding included: `KVCache.truncate` shortens ragged prompts
        again. No gradients with a cache.
        Raises ValueError for tokens outside the vocabulary and positions outside the model or the cache.
        """
        positions_BS = self._positions(tokens_BS, cache)
        x_BSD = self._embedded(tokens_BS)
        whole = self._whole(numerics)
        if whole is not None:
            # It overwrites x_BSD, which the look-up above has copied from the embeddings.
            hidden_BSD = whole.forward(x_BSD, positions_BS, routing or NaturalRouting(), cache, numerics)
        else:
            shared = self.prepare(positions_BS, routing or NaturalRouting(), numerics, cache)
            for layer in self.layers:
                x_BSD = layer(x_BSD, shared)
            hidden_BSD = self.kernels.rms_norm(x_BSD, self.norm, self.config.norm_eps)
        if cache is not None:
            cache.advance(tokens_BS.shape[1])
        return hidden_BSD

    def logits(self, hidden_ND: Float[Tensor, "N D"], *, numerics: Numerics = EXACT) -> Float[Tensor, "N V"]:
        """The next-token logits of these rows."""
        # Only while held: otherwise packing all weights would cost more than this one product.
        whole = self._whole(numerics) if self._held is not None else None
        if whole is not None:
            return numerics.logits(whole.logits(hidden_ND, numerics))
        head_VD = self.embedding if self.head is None else self.head
        return numerics.logits(linear(hidden_ND, head_VD, "head", Products(self.kernels, numerics)))

    def _passes(self) -> CompiledPasses | None:
        """Whole passes at the present weights; None with torch's operators, and for sizes without whole passes."""
        if not self.kernels.has_passes:
            return None
        from sandbox.model.compiled_passes import passes  # loads C++ kernels, which only a model of them needs

        return passes(self, self.gate)

    def _whole(self, numerics: Numerics) -> CompiledPasses | None:
        """Whole passes if this pass can use them: it takes no gradients, and its numerics state their rounding."""
        if not self.kernels.has_passes or torch.is_grad_enabled() or numerics.rounding() is None:
            return None
        # Outside of `held` packed for every pass: weights may have changed in place since the last one.
        return self._held or self._passes()

    def _embedded(self, tokens_BS: Tensor) -> Tensor:
        try:
            return F.embedding(tokens_BS, self.embedding)
        except IndexError:  # torch's look-up checks every id, but names none
            low, high = (int(v) for v in tokens_BS.aminmax())
            wrong = low if low < 0 else high
            raise ValueError(f"expected token ids in [0, {self.config.vocab_size}), got {wrong}") from None

    def _positions(self, tokens_BS: Tensor, cache: KVCache | None) -> Tensor:
        """The position of each token, (1, S) if all rows begin at 0; checks positions and cache."""
        B, S = tokens_BS.shape
        # Without a cache one row for the whole batch: rotations and masks are made once and broadcast.
        first_B = torch.zeros(1, dtype=torch.int64) if cache is None else cache.lengths_B
        end = S if cache is None else cache.longest + S
        if end > self.config.max_positions:
            first = int(first_B.min())
            raise ValueError(f"expected positions in [0, {self.config.max_positions}), got {first} to {end - 1}")
        if cache is not None:
            cache.check(B, end)
        return first_B[:, None] if S == 1 else first_B[:, None] + torch.arange(S)

    def prepare(self, positions_BS: Tensor, routing: Routing, numerics: Numerics, cache: KVCache | None) -> Pass:
        """The state that all layers share in a pass over these positions."""
        S = positions_BS.shape[1]
        if cache is None:
            query_BS, num_keys, slots_M = torch.arange(S)[None], S, None
        else:
            query_BS, num_keys, slots_M = positions_BS, int(positions_BS.max()) + 1, cache.slots(positions_BS)
        # Never more than a cache has, as its capacity is rounded up to the same multiple.
        num_slots = round_up(num_keys, MIN_KEYS)
        # + 1, as a query sees its own key.
        key_mask = self.kernels.key_mask(query_BS + 1, num_slots, self.cos_Pd.dtype)
        num_heads = self.config.num_heads + self.config.num_kv_heads
        cos_BSHd, sin_BSHd = (rotation(table, positions_BS, num_heads) for table in (self.cos_Pd, self.sin_Pd))
        own = self.kernels, numerics, self.gate
        return Pass(*own, routing, cos_BSHd, sin_BSHd, key_mask, num_slots, cache, slots_M)
