"""The work of decoding steps that nothing waits for: scores, likeliest tokens and routes, several steps at a time.

Letters beyond theory/contracts.py: A active rows, n steps since the last write, m the rows of all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sandbox.engines.buffers import Buffers, PassRecorder

HELD = 2**19
"""Bytes of logits and routes from which the log is written: no more are held, however large the vocabulary."""


class StepLog:
    """The results of decoding steps of the same rows, by reference until `write` copies them into the buffers.

    `scored`: the logits whose log-softmax is reported, row by row. Every operator here computes a row by itself, so
    that a step's numbers do not depend on the steps beside it.
    """

    def __init__(self, buffers: Buffers, scored: Callable[[Tensor], Tensor]):
        self.buffers, self.scored = buffers, scored
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[Tensor] = []
        self._logits: list[Tensor] = []
        self._passes: list[PassRecorder] = []
        self._bytes = 0

    def sampled(
        self, active_A: Int[Tensor, " A"], t: int, tokens_A: Int[Tensor, " A"], logits_AV: Float[Tensor, "A V"]
    ) -> None:
        """Token t of these responses, and the logits that gave it; the rows are those of the step before, if any."""
        if not self._tokens:
            self._active_A, self._first = active_A, t
        self._tokens.append(tokens_A)
        self._logits.append(logits_AV)
        self._bytes += logits_AV.nbytes
        if self._bytes >= HELD:
            self.write()

    def decoded(self, recorder: PassRecorder, active_A: Int[Tensor, " A"], positions_A: Int[Tensor, " A"]) -> None:
        """The pass over the tokens at these positions, one after those of the step before."""
        if not self._passes:
            self._passed_A, self._positions_A = active_A, positions_A
        self._passes.append(recorder)
        self._bytes += sum(part.nbytes for part in recorder.experts)

    def write(self) -> None:
        """Copies all of it into the buffers; called before the rows change or someone reads the buffers."""
        if self._tokens:
            self._write_tokens()
        if self._passes:
            self.buffers.store_steps(self._passes, self._passed_A, self._positions_A)
        self._clear()

    def _write_tokens(self) -> None:
        n, A = len(self._tokens), len(self._active_A)
        rows, stretch = self._active_A, slice(self._first, self._first + n)
        # Ended rows are written too; `rollouts_of` reads each response only up to its length.
        tokens_m = torch.cat(self._tokens)
        self.buffers.tokens_BT[rows, stretch] = tokens_m.view(n, A).T
        # In the logits' own dtype, as the trainer scores: the draw's float64 would break trainer == engine.
        logp_mV = torch.log_softmax(self.scored(torch.cat(self._logits)), -1)
        self.buffers.logp_BT[rows, stretch] = logp_mV.gather(-1, tokens_m[:, None]).view(n, A).T
        if self.buffers.top is not None:
            for logp_AV in logp_mV.split(A):
                self.buffers.top.add(rows, logp_AV)


__all__ = ["HELD", "StepLog"]
