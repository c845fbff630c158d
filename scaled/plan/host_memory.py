"""CPU memory of one machine in a global step, in bytes, and the routing records in its object store.

Every response counts at full length; memory.py has the memory of the GPUs.
"""

from __future__ import annotations

from lab.hf import ModelShape
from scaled.config import ScaledRun
from scaled.plan import in_progress, payloads
from scaled.plan.memory import Memory
from scaled.plan.parameters import CHECKPOINT_BYTES, ELEMENT_BYTES, most_optimizer_bytes


def stored_routes(config: ScaledRun, shape: ModelShape) -> int:
    """Bytes of routing records in one machine's object store at the end of a step, all responses at full length.

    mu's record is counted whole, since ranks fetch their rows of it, and so are those of the batches that are sampled
    ahead. It has every response in progress: an object with a row that somebody needs stays whole. The ranks' records
    are old's natural experts, the experts that old used if they differ, and pi's: each machine has its share.
    """
    algorithm = config.algorithm.build()
    rows = algorithm.num_prompts * algorithm.num_responses * config.rollout.max_model_len
    rows_of_mu = in_progress.responses_in_progress(config) * config.rollout.max_model_len
    machines = -(-config.training.num_ranks // config.cluster.gpus_per_node)
    of_mu = 1 + config.schedule.steps_off
    of_ranks = 2 if algorithm.passes.old == "natural" else 3
    of_ranks *= payloads.routing_bytes(shape, rows)
    return of_mu * payloads.routing_bytes(shape, rows_of_mu) + -(-of_ranks // machines)


def host_memory(config: ScaledRun, shape: ModelShape) -> Memory:
    """CPU memory of every machine for one global step, in the worst case that every response has full length.

    Routing records are those of `stored_routes`; the driver has none. Old's router scores, the features that train the
    predictor, and mu's likeliest tokens with log pi_old are whole on every machine, once, in memory that its ranks
    share. The driver's own copy of tokens, on its machine, is not counted; of features and scores it has none. Router
    logits that metrics alone compare (pi's, and old's where no predictor learns from them) stay on the machines of the
    ranks that made them, and so do pi's router scores.
    """
    algorithm = config.algorithm.build()
    responses, parts = algorithm.num_prompts * algorithm.num_responses, {}
    machines = -(-config.training.num_ranks // config.cluster.gpus_per_node)
    if shape.moe_layers:
        passes = 1 if algorithm.passes.trains_predictor else 2
        rows = passes * responses * algorithm.num_feature_rows(responses)
        parts["router logits that are compared"] = -(-payloads.router_logit_bytes(shape, rows) // machines)
    if shape.moe_layers:
        # In every mode: engines and ranks record without being asked, and metrics compare the records.
        parts["routing records"] = stored_routes(config, shape)
    if algorithm.passes.trains_predictor:
        b = ELEMENT_BYTES[config.training.precision]
        cached = payloads.feature_bytes(shape, algorithm.predictor.num_positions, responses, b)
        parts["router features"] = cached
    if algorithm.objective.uses_router_shift:
        rows = responses * config.rollout.max_model_len
        scores = payloads.routing_bytes(shape, rows, payloads.SCORE_BYTES)
        # Pi's are of one mini-batch, on the machines of the ranks that made them.
        parts["router scores of old and pi"] = scores + -(-scores // (algorithm.num_minibatches * machines))
    if config.schedule.steps_off > 1:
        precision = config.rollout.precision
        version = payloads.weight_bytes(shape, precision.weights, ELEMENT_BYTES[precision.compute])
        # Without the version that engines hold: every run keeps it in the store for an engine's replacement.
        # It is not counted.
        waiting = (config.schedule.steps_off - 1) * version
        parts["weights that wait for engines"] = -(-waiting // machines)
    num_top, tokens = algorithm.objective.num_top, responses * algorithm.max_tokens
    if num_top > 0:
        old = 4 * min(num_top, shape.vocab_size) * tokens
        parts["mu's likeliest tokens"] = payloads.top_token_bytes(shape, num_top, tokens) + old
    if "optimizer" in (config.training.offload or ()):
        num_ranks = min(config.cluster.gpus_per_node, config.training.num_ranks)
        parts["optimizer states while engines are awake"] = num_ranks * most_optimizer_bytes(shape, config.training)
    if config.checkpoint.asynchronous:
        parts["copy of a checkpoint that is being written"] = -(-CHECKPOINT_BYTES * shape.num_parameters // machines)
    return Memory("host", parts)
