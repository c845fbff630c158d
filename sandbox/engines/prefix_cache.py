"""The prefix cache: keys, values and routes of earlier sequences, found by their tokens.

Each turn of a conversation has all of the earlier ones in its prompt. The cache holds their keys and values together
with the experts of every row, so that a rollout of several turns has its whole routing record without a second prefill
(R3, arXiv 2510.11370, sec. 4.2). Router features are not kept: a call returns them only on rows that predict its own
tokens, and it computes all of those.

Letters beyond theory/contracts.py: h key heads, d head width, A rows of a call's KV cache, W rows of a response's
buffer.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from sandbox.engines.buffers import Buffers
from sandbox.model.kv_cache import KVCache
from theory.contracts import Prompt

MAX_BYTES = 256 * 2**20
"""The default limit, in bytes: 256 MiB."""


@dataclass(frozen=True)
class CachedPrefix:
    """Keys, values and routes of a sequence's S tokens; no routes if the model has no routers."""

    k_LhSd: Float[Tensor, "layers h S d"]
    v_LhSd: Float[Tensor, "layers h S d"]
    experts_SLK: Int[Tensor, "S L K"] | None

    @property
    def length(self) -> int:
        """S, the number of tokens."""
        return self.k_LhSd.shape[2]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        tensors = [self.k_LhSd, self.v_LhSd, *([] if self.experts_SLK is None else [self.experts_SLK])]
        return sum(t.numel() * t.element_size() for t in tensors)

    def first(self, length: int) -> CachedPrefix:
        """The entry of the first `length` tokens, as views of this one."""
        experts = None if self.experts_SLK is None else self.experts_SLK[:length]
        return CachedPrefix(self.k_LhSd[:, :, :length], self.v_LhSd[:, :, :length], experts)

    def copy(self) -> CachedPrefix:
        """A copy with its own memory; a view would keep a whole batch's buffers alive."""
        experts = None if self.experts_SLK is None else self.experts_SLK.clone()
        return CachedPrefix(self.k_LhSd.clone(), self.v_LhSd.clone(), experts)


class PrefixCache:
    """Sequences of at most `max_bytes` together, all computed with the engine's current weights.

    The engine calls `clear` when its weights change. The least recently used sequences are dropped to make room. No
    sequence is a prefix of another: a longer one replaces its own prefix, since it serves every use of the shorter one.
    Laws: tests/sandbox/engines/test_prefix_cache.py.
    """

    def __init__(self, max_bytes: int = MAX_BYTES):
        self.max_bytes = max_bytes
        self.clear()

    def clear(self) -> None:
        """Drops all sequences."""
        self._kept: OrderedDict[tuple[int, ...], CachedPrefix] = OrderedDict()
        self._sorted: list[tuple[int, ...]] = []
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, prompt: tuple[int, ...]) -> CachedPrefix | None:
        """The longest known prefix of a prompt without its last token, or None.

        The last token is always computed, as its logits give the first sampled token.
        """
        wanted = prompt[:-1]
        place = bisect_left(self._sorted, wanted)
        # In lexicographic order one of the two neighbours of `wanted` shares the longest prefix with it.
        shared = {known: _num_shared(known, wanted) for known in self._sorted[max(0, place - 1) : place + 1]}
        best = max(shared, key=lambda known: shared[known], default=())
        if shared.get(best, 0) == 0:
            return None
        self._kept.move_to_end(best)
        return self._kept[best].first(shared[best])  # views: callers copy them into their own cache

    def keep(
        self,
        cache: KVCache,
        is_kept_A: Bool[Tensor, " A"],
        active_A: Int[Tensor, " A"],
        prompts: Sequence[Prompt],
        buffers: Buffers,
    ) -> None:
        """Stores the sequences in the chosen rows of a generate call's KV cache, each without its last token.

        Row a belongs to response active_A[a]. A last token that ended the call was never an input: it has no keys,
        values or routes.
        """
        num_copies = len(buffers.lengths_B) // len(prompts)
        for row in is_kept_A.nonzero()[:, 0].tolist():
            b = int(active_A[row])
            sampled = buffers.tokens_BT[b, : int(buffers.lengths_B[b]) - 1].tolist()
            tokens = (*prompts[b // num_copies].tokens, *sampled)
            S = len(tokens)
            experts = None if buffers.experts_BWLK is None else buffers.experts_BWLK[b, :S]
            self.put(tokens, CachedPrefix(cache.k_LBhCd[:, row, :, :S], cache.v_LBhCd[:, row, :, :S], experts))

    def put(self, tokens: tuple[int, ...], found: CachedPrefix) -> None:
        """Stores a copy of the entry of these tokens, unless they are a prefix of a stored sequence."""
        place = bisect_left(self._sorted, tokens)
        # The first stored sequence that is not below these tokens begins with them if any does.
        if place < len(self._sorted) and self._sorted[place][: len(tokens)] == tokens:
            self._kept.move_to_end(self._sorted[place])
            return
        # Only the one just before can be a prefix of these tokens: whatever sorts between a prefix and them begins with
        # that prefix, and no stored sequence is a prefix of another.
        if place > 0 and tokens[: len(self._sorted[place - 1])] == self._sorted[place - 1]:
            self._drop(self._sorted[place - 1])
        insort(self._sorted, tokens)
        self._kept[tokens] = found.copy()
        self.nbytes += found.nbytes
        # The new entry is the last to go: it is dropped, too, if it alone exceeds the limit.
        while self.nbytes > self.max_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, tokens: tuple[int, ...]) -> None:
        self.nbytes -= self._kept.pop(tokens).nbytes
        del self._sorted[bisect_left(self._sorted, tokens)]


def _num_shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """The length of the longest common prefix."""
    num = min(len(a), len(b))
    return next((i for i in range(num) if a[i] != b[i]), num)


__all__ = ["CachedPrefix", "PrefixCache"]
