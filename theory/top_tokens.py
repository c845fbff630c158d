"""The likeliest tokens of mu at every sampled position: the recorded part of its distribution.

Letters: A all response-part tokens of the B responses, packed; K tokens of each position; T positions of the padded
batch. Source of the use: score centering (arXiv 2609.20807).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from theory.routing.packed_rows import offsets_of, selected_rows


@dataclass(frozen=True, eq=False)
class TopTokens:
    """Ids in [0, vocab_size), each once in its row, and log mu in nats; -inf where mu samples no such token, or nothing
    (an observation). Response b has rows offsets[b]:offsets[b + 1]. K = vocab_size is all of mu.
    """

    ids: Int[Tensor, "_A _K"]
    logp: Float[Tensor, "_A _K"]
    offsets: Int[Tensor, " _B_plus_1"]
    vocab_size: int

    def __post_init__(self) -> None:
        if self.ids.shape != self.logp.shape or len(self.ids) != int(self.offsets[-1]):
            raise ValueError(
                f"top tokens: expected {int(self.offsets[-1])} rows of ids and of log-probabilities alike, got "
                f"{tuple(self.ids.shape)} and {tuple(self.logp.shape)}"
            )

    @staticmethod
    def of(logp_AV: Float[Tensor, "A V"], num: int, offsets: Int[Tensor, " B_plus_1"]) -> TopTokens:
        """The `num` likeliest tokens of every distribution (all of a smaller vocabulary); ids in the narrowest type."""
        V = logp_AV.shape[1]
        logp, ids = logp_AV.topk(min(num, V), dim=1)
        return TopTokens(ids.to(id_dtype(V)), logp, offsets, V)

    @property
    def is_complete(self) -> bool:
        """Whether every row holds the whole vocabulary."""
        return self.ids.shape[1] == self.vocab_size

    @property
    def num_bytes(self) -> int:
        """Bytes of ids and log-probabilities."""
        return self.ids.nbytes + self.logp.nbytes

    def rows(self, b: int) -> tuple[Int[Tensor, "_T _K"], Float[Tensor, "_T _K"]]:
        """Ids and log-probabilities of response b."""
        part = slice(int(self.offsets[b]), int(self.offsets[b + 1]))
        return self.ids[part], self.logp[part]

    def select(self, indices: Sequence[int]) -> TopTokens:
        """The rows of these responses, in this order."""
        which, offsets = selected_rows(self.offsets, indices)
        return TopTokens(self.ids[which], self.logp[which], offsets, self.vocab_size)

    @staticmethod
    def concat(parts: Sequence[TopTokens]) -> TopTokens:
        """The parts one after the other; ValueError for parts of other widths."""
        sizes = sorted({(part.ids.shape[1], part.vocab_size) for part in parts})
        if len(sizes) > 1:
            raise ValueError(f"top tokens: expected one (tokens, vocabulary) in all parts, got {sizes}")
        lengths = [int(n) for part in parts for n in part.offsets.diff()]
        ids, logp = torch.cat([part.ids for part in parts]), torch.cat([part.logp for part in parts])
        return TopTokens(ids, logp, offsets_of(lengths), parts[0].vocab_size)

    def padded(self) -> tuple[Int[Tensor, "B T K"], Float[Tensor, "B T K"]]:
        """Right-padded to the longest response: ids 0 and log-probabilities -inf there."""
        length_B = self.offsets.diff()
        shape = (len(length_B), int(length_B.max()), self.ids.shape[1])
        exists_BT = torch.arange(shape[1]) < length_B[:, None]
        # Scorers gather by these ids on observations, too, so that a filler must be a token: -inf marks it instead.
        ids_BTK, logp_BTK = torch.zeros(shape, dtype=torch.int64), self.logp.new_full(shape, -torch.inf)
        ids_BTK[exists_BT], logp_BTK[exists_BT] = self.ids.long(), self.logp
        return ids_BTK, logp_BTK


def id_dtype(vocab_size: int) -> torch.dtype:
    """The narrowest signed integer type that holds every token."""
    # + 1, as ids end at vocab_size - 1.
    return torch.int16 if vocab_size <= torch.iinfo(torch.int16).max + 1 else torch.int32
