"""What the engine hands out: rollouts, made of the buffers of one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sandbox.engines.buffers import Buffers
from sandbox.model_config import ModelConfig
from theory.contracts import Prompt, Response, Rollouts, Sampling
from theory.routing.features import RouterFeatures, draw_sampling_rows, sampling_rows
from theory.routing.record import RoutingRecord, offsets_of
from theory.streams import stream


def rollouts_of(
    prompts: Sequence[Prompt], sampling: Sampling, buffers: Buffers, config: ModelConfig, version: int
) -> Rollouts:
    """`num_responses` responses a prompt, in the buffers' order, with their routes and the features asked for."""
    responses = []
    for b, (length, is_stop) in enumerate(zip(buffers.lengths_B.tolist(), buffers.has_stopped_B.tolist(), strict=True)):
        responses.append(
            Response(
                prompt=prompts[b // sampling.num_responses],
                tokens=buffers.tokens_BT[b, :length].clone(),
                logp_mu=buffers.logp_BT[b, :length].clone(),
                is_response=torch.ones(length, dtype=torch.bool),
                finish="stop" if is_stop else "length",
                version=version,
            )
        )
    if buffers.experts_BWLK is None:
        return Rollouts(tuple(responses))
    num_rows = [r.num_tokens - 1 for r in responses]
    experts = torch.cat([buffers.experts_BWLK[b, :n] for b, n in enumerate(num_rows)])
    record = RoutingRecord(experts, offsets_of(num_rows), config.moe_layers, config.num_experts)
    return Rollouts(tuple(responses), record, _features(responses, sampling, buffers, config.moe_layers))


def _features(
    responses: Sequence[Response], sampling: Sampling, buffers: Buffers, layers: tuple[int, ...]
) -> RouterFeatures | None:
    """Router inputs and logits of drawn rows; a response with its own draw has its own stream for them."""
    if buffers.features is None:
        return None
    rows_B = [sampling_rows(len(r.prompt.tokens), r.is_response) for r in responses]
    if sampling.draws:
        generators = [stream(draw.seed, "features") for draw in sampling.draws]
        each = zip(rows_B, generators, strict=True)
        rows = tuple(draw_sampling_rows([own], sampling.num_features, generator)[0] for own, generator in each)
    else:
        rows = draw_sampling_rows(rows_B, sampling.num_features, stream(sampling.seed, "features"))
    hidden_FLD, logits_FLE = buffers.features.take(rows)
    return RouterFeatures(torch.cat(rows), offsets_of([len(r) for r in rows]), hidden_FLD, logits_FLE, layers)
