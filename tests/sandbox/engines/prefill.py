"""A prefill of finished responses: the prompt log-probabilities that inference engines offer.

Held against what was decoded it tests the link prefill == decode, and it scores any text under an engine's policy.
Extra letter: n, all response tokens, packed.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sandbox.engines.engine import SandboxEngine
from sandbox.model.kv_cache import KVCache
from theory.contracts import Rollouts
from theory.routing.passes import RoutingPlan
from theory.routing.replay import ReplayContext


@torch.no_grad()
def prefilled(engine: SandboxEngine, rollouts: Rollouts, *, seed: int = 0) -> Rollouts:
    """The same responses with the log-probabilities and routes of one prefill of them all, in nats; 0 on observations.

    They are of the rollouts' temperature. `seed` names the draws of noisy defects. Weights that are stale and switched
    prefill as they start: with the older ones. Raises ValueError where the engine holds no weights.
    """
    engine.check_loaded("prefilled")
    with engine.model.held():
        return _prefilled(engine, rollouts, seed)


def _prefilled(engine: SandboxEngine, rollouts: Rollouts, seed: int) -> Rollouts:
    batch, model, numerics = rollouts.padded(), engine.model, engine.numerics(seed)
    num_rows = [response.num_tokens - 1 for response in rollouts.responses]
    cache = KVCache(model.config, len(rollouts), max(num_rows), model.norm.dtype)
    with ReplayContext(RoutingPlan("natural"), num_rows, max(num_rows), model.config.moe_layers) as context:
        hidden_BSD = model.forward_hidden(batch.tokens_BS[:, :-1], context, numerics=numerics, cache=cache)
    responses = []
    for b, response in enumerate(rollouts.responses):
        rows = torch.arange(len(response.prompt.tokens) - 1, response.num_tokens - 1)
        logits_nV = engine.scored(model.logits(hidden_BSD[b, rows], numerics=numerics), rollouts.temperature)
        logp_n = torch.log_softmax(logits_nV, -1).gather(-1, response.tokens[:, None])[:, 0]
        responses.append(replace(response, logp_mu=logp_n.where(response.is_response, 0.0)))
    return Rollouts(tuple(responses), context.used, temperature=rollouts.temperature)
