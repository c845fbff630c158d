"""The engine's output: rollouts, made from the buffers of one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sandbox.engines.buffers import Buffers
from sandbox.model.config import ModelConfig
from theory.contracts import Prompt, Response, Rollouts, Sampling
from theory.routing.features import RouterFeatures, draw_sampling_rows, sampling_rows
from theory.routing.packed_rows import offsets_of
from theory.routing.record import RoutingRecord
from theory.streams import stream


def rollouts_of(
    prompts: Sequence[Prompt], sampling: Sampling, buffers: Buffers, config: ModelConfig, version: int
) -> Rollouts:
    """`num_responses` responses per prompt, in buffer order, with their routes and the requested features."""
    lengths = buffers.lengths_B.tolist()
    # One copy of all tokens; each response is a view of it.
    exists_BT = torch.arange(buffers.tokens_BT.shape[1]) < buffers.lengths_B[:, None]
    tokens, logp = (whole_BT[exists_BT].split(lengths) for whole_BT in (buffers.tokens_BT, buffers.logp_BT))
    is_response = torch.ones(sum(lengths), dtype=torch.bool).split(lengths)
    responses = [
        Response(
            prompt=prompts[b // sampling.num_responses],
            tokens=tokens[b],
            logp_mu=logp[b],
            is_response=is_response[b],
            finish="abort" if was_cut else "stop" if is_stop else "length",
            version=version,
        )
        for b, (is_stop, was_cut) in enumerate(
            zip(buffers.has_stopped_B.tolist(), buffers.was_cut_B.tolist(), strict=True)
        )
    ]
    top = None if buffers.top is None else buffers.top.take(buffers.lengths_B)
    if buffers.experts_BWLK is None:
        return Rollouts(tuple(responses), temperature=sampling.scored_temperature, top=top)
    # A record has no row for the last token.
    num_rows = [len(r.prompt.tokens) + length - 1 for r, length in zip(responses, lengths, strict=True)]
    # A mask keeps row order within responses and response order: the packing of a record.
    is_row_BW = torch.arange(buffers.experts_BWLK.shape[1]) < torch.tensor(num_rows)[:, None]
    experts = buffers.experts_BWLK[is_row_BW]
    record = RoutingRecord(experts, offsets_of(num_rows), config.moe_layers, config.num_experts)
    features = _features(responses, sampling, buffers, config.moe_layers)
    return Rollouts(tuple(responses), record, features, sampling.scored_temperature, top)


def _features(
    responses: Sequence[Response], sampling: Sampling, buffers: Buffers, layers: tuple[int, ...]
) -> RouterFeatures | None:
    """Router inputs and logits of randomly drawn rows; a response with its own draw has its own stream for them."""
    if buffers.features is None:
        return None
    rows_B = [sampling_rows(len(r.prompt.tokens), r.is_response) for r in responses]
    # Streams apart from the tokens': asking for features changes no token.
    if sampling.draws:
        generators = [stream(draw.seed, "features") for draw in sampling.draws]
        each = zip(rows_B, generators, strict=True)
        rows = tuple(draw_sampling_rows([own], sampling.num_features, generator)[0] for own, generator in each)
    else:
        rows = draw_sampling_rows(rows_B, sampling.num_features, stream(sampling.seed, "features"))
    hidden_FLD, logits_FLE = buffers.features.take(rows)
    return RouterFeatures(torch.cat(rows), offsets_of([len(r) for r in rows]), hidden_FLD, logits_FLE, layers)
