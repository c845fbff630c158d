"""The KV cache: static buffers with one length per row, so that prompts may be ragged.

Letters beyond theory/contracts.py: h key heads, C capacity in tokens, d head width, M keys and values that
one pass writes to a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sandbox.kernels import MIN_KEYS, round_up
from sandbox.model.config import ModelConfig


class KVCache:
    """Keys and values of every layer in static buffers; row b holds `lengths_B[b]` tokens, then garbage."""

    def __init__(self, config: ModelConfig, batch_size: int, capacity: int, dtype: torch.dtype = torch.float32):
        C = round_up(capacity, MIN_KEYS)
        shape = (config.num_layers, 2, batch_size, config.num_kv_heads, C, config.head_dim)
        # Zeros, not empty: a masked slot has weight 0, and 0 times uninitialised memory may be NaN.
        self._hold(torch.zeros(shape, dtype=dtype), torch.zeros(batch_size, dtype=torch.int64))

    _longest: int | None

    def _hold(self, both_L2BhCd: Tensor, lengths_B: Tensor) -> KVCache:
        self._both_L2BhCd, self.lengths_B = both_L2BhCd, lengths_B
        # Views: one index_copy_ in `write` fills keys and values.
        self.k_LBhCd, self.v_LBhCd = both_L2BhCd.unbind(1)
        return self

    @property
    def lengths_B(self) -> Int[Tensor, " B"]:
        """The number of tokens in each row."""
        return self._lengths_B

    @lengths_B.setter
    def lengths_B(self, lengths_B: Int[Tensor, " B"]) -> None:
        self._lengths_B, self._longest = lengths_B, None

    @property
    def longest(self) -> int:
        """The number of tokens in the longest row."""
        if self._longest is None:
            self._longest = int(self._lengths_B.max()) if self._lengths_B.numel() else 0
        return self._longest

    def advance(self, num: int) -> None:
        """Counts `num` more tokens in every row."""
        longest = self.longest + num
        # A new tensor, not in place: whoever kept the old lengths keeps them.
        self.lengths_B = self._lengths_B + num
        self._longest = longest  # known without a look at the rows, which each decoding step would take

    @property
    def capacity(self) -> int:
        """The number of tokens that a row can hold."""
        return self.k_LBhCd.shape[3]

    def check(self, B: int, end: int) -> None:
        """Raises ValueError if tokens cannot be written to each of B rows, up to place `end` in the longest."""
        # `write` is in place: it would overwrite what a backward pass needs.
        if torch.is_grad_enabled():
            raise ValueError("expected torch.no_grad() with a cache, got a pass with gradients")
        if self.lengths_B.shape != (B,):
            raise ValueError(f"expected {B} rows in the cache, got {self.lengths_B.shape[0]}")
        if end > self.capacity:
            raise ValueError(f"expected at most {self.capacity} tokens (capacity), got {end}")

    def slots(self, positions_BS: Int[Tensor, "B S"]) -> Int[Tensor, " M"]:
        """The slots that `write` fills: keys, then values, head by head; the same in every layer."""
        _, _, B, h, C, _ = self._both_L2BhCd.shape
        first_2B1h = (torch.arange(2 * B * h) * C).view(2, B, 1, h)
        # (2, B, S, h), the order of cat((k, v)) in `write`.
        return (first_2B1h + positions_BS[:, :, None]).flatten()

    def write(
        self, layer: int, slots_M: Int[Tensor, " M"], k_BSHd: Float[Tensor, "B S H d"], v_BSHd: Float[Tensor, "B S H d"]
    ) -> None:
        """Writes keys and values to their slots; the caller advances `lengths_B`."""
        d = k_BSHd.shape[-1]
        self._both_L2BhCd[layer].view(-1, d).index_copy_(0, slots_M, torch.cat((k_BSHd, v_BSHd)).view(-1, d))

    def truncate(self, lengths_B: Int[Tensor, " B"]) -> None:
        """Drops the tokens beyond these lengths, such as the padding of ragged prompts after prefill."""
        if bool((lengths_B > self.lengths_B).any()):
            raise ValueError(f"expected lengths of at most {self.lengths_B.tolist()}, got {lengths_B.tolist()}")
        self.lengths_B = lengths_B.clone()

    def repeat(self, num: int) -> KVCache:
        """A cache with `num` adjacent copies of each row: a prompt is prefilled once for its group of responses."""
        return self.select(torch.arange(self.lengths_B.shape[0]).repeat_interleave(num))

    def select(self, indices_B: Int[Tensor, " B"]) -> KVCache:
        """A cache with these rows in this order (repeats allowed); this is how finished rows are dropped."""
        L, _, _, h, C, d = self._both_L2BhCd.shape
        both = self._both_L2BhCd.new_zeros(L, 2, len(indices_B), h, C, d)
        # Copy only the slots in use; the others stay zero.
        used = slice(self.longest)
        both[:, :, :, :, used] = self._both_L2BhCd[:, :, :, :, used].index_select(2, indices_B)
        # Not by the constructor, which would allocate buffers of its own.
        return object.__new__(KVCache)._hold(both, self.lengths_B[indices_B])

    @staticmethod
    def concat(parts: Sequence[KVCache]) -> KVCache:
        """The rows of all parts, in order; the parts must have equal capacities."""
        if len(parts) == 1:
            return parts[0]
        both = torch.cat([part._both_L2BhCd for part in parts], dim=2)
        return object.__new__(KVCache)._hold(both, torch.cat([part.lengths_B for part in parts]))
