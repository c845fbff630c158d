"""The buffers of one generate call: the routing of every forward pass, and the tokens of growing responses.

Extra letters: W rows of a response's buffer, n rows of one forward pass, F feature rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sandbox.model.config import ModelConfig
from sandbox.model.routing import NaturalRecorder
from theory.contracts import Prompt
from theory.routing.gates import Gate, route
from theory.routing.packed_rows import offsets_of
from theory.routing.record import index_dtype
from theory.top_tokens import TopTokens


class PassRecorder(NaturalRecorder):
    """Natural routing that records one forward pass: experts, router inputs and logits by layer."""

    def __init__(self, keep_features: bool):
        self.keep_features = keep_features
        self.experts: list[Tensor] = []
        self.hidden: list[Tensor] = []
        self.logits: list[Tensor] = []

    def route(
        self,
        layer_number: int,
        hidden_ND: Float[Tensor, "N D"],
        logits_NE: Float[Tensor, "N E"],
        num_slots: int,
        gate: Gate,
        selection_bias_E: Float[Tensor, " E"] | None = None,
    ) -> tuple[Int[Tensor, "N K"], Float[Tensor, "N K"]]:
        experts_NK, weights_NK = route(logits_NE, num_slots, gate, selection_bias_E)
        self.experts.append(experts_NK)
        if self.keep_features:
            # By reference: no layer writes into its router's input or logits afterwards.
            self.hidden.append(hidden_ND)
            self.logits.append(logits_NE)
        return experts_NK, weights_NK

    def take(self, experts_LNK: Tensor, hidden_LND: Tensor | None, logits_LNE: Tensor | None) -> None:
        """Records the natural routing of consecutive layers; router inputs and logits are given if `keep_features`."""
        self.experts.extend(experts_LNK)
        if hidden_LND is not None and logits_LNE is not None:
            self.hidden.extend(hidden_LND)
            self.logits.extend(logits_LNE)


class FeatureLog:
    """Router inputs and logits of every forward pass, kept by reference and copied once, at the end.

    So a decoding step stores only the places of its rows and copies no features.
    """

    def __init__(self, num_responses: int, width: int):
        self._shape = (num_responses, width)
        self._hidden: list[list[Tensor]] = []
        self._logits: list[list[Tensor]] = []
        self._stands: list[tuple[Tensor, Tensor, Tensor]] = []
        self._num_rows = 0

    def add(
        self, recorder: PassRecorder, num_copies: int, rows: Tensor, positions: Tensor, places: Tensor | None
    ) -> None:
        """Keeps a pass; the arguments are those of `Buffers.store`."""
        # Places count rows over all passes of the call, as `take` concatenates the passes.
        where = torch.arange(self._num_rows, self._num_rows + len(rows)) if places is None else self._num_rows + places
        self._stands += [(rows + copy, positions, where) for copy in range(num_copies)]
        self._hidden.append(recorder.hidden)
        self._logits.append(recorder.logits)
        # Padding rows count too: `take` concatenates whole passes.
        self._num_rows += len(recorder.logits[0])

    def repeat(self, num: int) -> FeatureLog:
        """A log with `num` adjacent copies of each response, which shares the tensors kept so far."""
        other = FeatureLog(self._shape[0] * num, self._shape[1])
        # New lists of the same tensors: a pass added later belongs to one log only.
        other._hidden, other._logits, other._num_rows = [*self._hidden], [*self._logits], self._num_rows
        for rows, *where in self._stands:
            copies = (rows[:, None] * num + torch.arange(num)).flatten()
            positions, places = (x.repeat_interleave(num) for x in where)
            other._stands.append((copies, positions, places))
        return other

    def take(self, rows_B: Sequence[Int[Tensor, " _"]]) -> tuple[Float[Tensor, "F L D"], Float[Tensor, "F L E"]]:
        """Router inputs and logits of these input tokens of each response; some pass must have computed them."""
        rows, positions, where = (torch.cat(parts) for parts in zip(*self._stands, strict=True))
        place_BW = torch.full(self._shape, -1)
        place_BW[rows, positions] = where
        response_F = torch.arange(len(rows_B)).repeat_interleave(torch.tensor([len(rows) for rows in rows_B]))
        place_F = place_BW[response_F, torch.cat(list(rows_B))]
        assert bool((place_F >= 0).all()), "features requested for a row that no pass of this call computed"
        return _gathered(self._hidden, place_F), _gathered(self._logits, place_F)


def _gathered(passes: Sequence[Sequence[Tensor]], place_F: Tensor) -> Tensor:
    """(F, L, .): these rows of all passes, concatenated."""
    first = passes[0]
    # One layer at a time, so that no more than one layer is in memory twice.
    out_LFD = first[0].new_empty(len(first), len(place_F), first[0].shape[1])
    for layer, out_FD in enumerate(out_LFD):
        torch.index_select(torch.cat([by_layer[layer] for by_layer in passes]), 0, place_F, out=out_FD)
    return out_LFD.transpose(0, 1)


class TopLog:
    """mu's likeliest tokens of every step, kept as they come and sorted by response once, at the end."""

    def __init__(self, num: int, vocab_size: int):
        self.num, self.vocab_size = num, vocab_size
        self._rows: list[Tensor] = []
        self._steps: list[TopTokens] = []

    def add(self, rows_A: Int[Tensor, " A"], logp_AV: Float[Tensor, "A V"]) -> None:
        """Keeps the top of the distributions under which these responses' next tokens are scored."""
        self._rows.append(rows_A)
        # Packed as one response: `take` puts the rows in order and sets the offsets of the real ones.
        self._steps.append(TopTokens.of(logp_AV, self.num, torch.tensor([0, len(rows_A)])))

    def take(self, lengths_B: Int[Tensor, " B"]) -> TopTokens:
        """The rows of all responses, in response order."""
        t_n = torch.arange(len(self._rows)).repeat_interleave(torch.tensor([len(rows) for rows in self._rows]))
        b_n = torch.cat(self._rows)
        is_there_n = t_n < lengths_B[b_n]  # a response that has ended may still be decoded with the others
        # Rows are in step order: sorting by b * steps + t puts them in response order.
        order = torch.argsort((b_n * len(self._rows) + t_n)[is_there_n])
        whole = TopTokens.concat(self._steps)
        ids, logp = whole.ids[is_there_n][order], whole.logp[is_there_n][order]
        return TopTokens.packed(ids, logp, offsets_of(lengths_B.tolist()), self.vocab_size)


@dataclass
class Buffers:
    """The buffers of B growing responses; rows are input tokens, t are response positions."""

    tokens_BT: Tensor
    logp_BT: Tensor
    lengths_B: Tensor
    has_stopped_B: Tensor
    was_cut_B: Tensor
    experts_BWLK: Tensor | None
    features: FeatureLog | None = None
    top: TopLog | None = None

    def end(self, ended: Int[Tensor, " _"], length: int, has_stopped: Bool[Tensor, " _"]) -> None:
        """Ends these responses after `length` tokens; `has_stopped`: the last one is an end token."""
        self.lengths_B[ended] = length
        self.has_stopped_B[ended] = has_stopped

    def cut(self, running: Int[Tensor, " _"], length: int) -> None:
        """Ends these responses, whose call is over, after `length` tokens."""
        self.lengths_B[running] = length
        self.was_cut_B[running] = True

    def repeat(self, num: int) -> Buffers:
        """`num` adjacent copies of each response and of its routes so far, without the likeliest tokens."""
        first = (self.tokens_BT, self.logp_BT, self.lengths_B, self.has_stopped_B, self.was_cut_B)
        copies = (x.repeat_interleave(num, 0) for x in first)
        experts = None if self.experts_BWLK is None else self.experts_BWLK.repeat_interleave(num, 0)
        features = None if self.features is None else self.features.repeat(num)
        return Buffers(*copies, experts_BWLK=experts, features=features)

    def store(
        self,
        recorder: PassRecorder,
        rows: Tensor,
        positions: Tensor,
        num_copies: int = 1,
        places: Tensor | None = None,
    ) -> None:
        """Writes a forward pass: its row places[n] (None: n) is input token positions[n] of `num_copies` responses.

        These responses are rows[n] and the ones after it.
        """
        if self.experts_BWLK is None:
            return
        experts_nLK = torch.stack(recorder.experts, 1)
        if places is not None:
            experts_nLK = experts_nLK[places]
        # The buffer has the narrowest dtype that holds the ids, and index assignment needs equal dtypes.
        experts_nLK = experts_nLK.to(self.experts_BWLK.dtype)
        rows_nC = rows[:, None] + torch.arange(num_copies)
        self.experts_BWLK[rows_nC, positions[:, None]] = experts_nLK[:, None]
        if self.features is not None:
            self.features.add(recorder, num_copies, rows, positions, places)

    def store_steps(self, steps: Sequence[PassRecorder], rows: Int[Tensor, " A"], first: Int[Tensor, " A"]) -> None:
        """Writes decoding steps of the same responses: row a of step i is input token first[a] + i of response rows[a].

        As a `store` of every step, one after the other.
        """
        if self.experts_BWLK is None:
            return
        parts = [part for recorder in steps for part in recorder.experts]
        experts_nLAK = torch.stack(parts).to(self.experts_BWLK.dtype).unflatten(0, (len(steps), -1))
        positions_An = first[:, None] + torch.arange(len(steps))
        self.experts_BWLK[rows[:, None], positions_An] = experts_nLAK.permute(2, 0, 1, 3)
        if self.features is not None:
            for recorder, positions_A in zip(steps, positions_An.unbind(1), strict=True):
                self.features.add(recorder, 1, rows, positions_A, None)


def empty_buffers(
    prompts: Sequence[Prompt],
    G: int,
    T: int,
    config: ModelConfig,
    dtype: torch.dtype,
    keep_features: bool,
    num_top: int = 0,
) -> Buffers:
    """Empty buffers for G responses of at most T tokens per prompt."""
    B, W, L = len(prompts) * G, max(len(p.tokens) for p in prompts) + T, len(config.moe_layers)
    experts = None
    if L > 0:
        # -1 marks a row that no pass has computed; 0 would be an expert.
        experts = torch.full((B, W, L, config.experts_per_token), -1, dtype=index_dtype(config.num_experts))
    return Buffers(
        tokens_BT=torch.zeros(B, T, dtype=torch.int64),
        logp_BT=torch.zeros(B, T, dtype=dtype),
        lengths_B=torch.zeros(B, dtype=torch.int64),
        has_stopped_B=torch.zeros(B, dtype=torch.bool),
        was_cut_B=torch.zeros(B, dtype=torch.bool),
        experts_BWLK=experts,
        features=FeatureLog(B, W) if keep_features and L else None,
        top=TopLog(num_top, config.vocab_size) if num_top else None,
    )
