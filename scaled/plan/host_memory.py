"""CPU memory of one machine in a global step, in bytes, and the part of it that lies in Ray's object store.

memory.py has the memory of the GPUs.
"""

from __future__ import annotations

from lab.hf import ModelShape
from scaled.config import ScaledRun
from scaled.plan import engine_memory, in_progress, payloads
from scaled.plan.memory import Memory
from scaled.plan.parameters import CHECKPOINT_BYTES, ELEMENT_BYTES, most_optimizer_bytes

STORED = (
    "router logits that are compared", "routing records", "router features", "router scores of old and pi",
    "weights that wait for engines", "mu's likeliest tokens",
)  # fmt: skip
"""The parts of host memory that lie in the object store."""


def stored_bytes(config: ScaledRun, shape: ModelShape, num_tokens: int | None = None) -> dict[str, int]:
    """Bytes in one machine's object store at a push, by name: those of the step, and the weights that engines load.

    Sequences have `num_tokens` tokens on average, by default full length.
    """
    parts = host_memory(config, shape, num_tokens).parts
    found = {name: parts[name] for name in STORED if name in parts}
    return found | {"the weights of the last push": engine_memory.engine_weights(config, shape)}


def stored_routes(config: ScaledRun, shape: ModelShape, num_tokens: int) -> int:
    """Bytes of routing records in one machine's object store at the end of a step, `num_tokens` tokens a sequence.

    mu's record is counted whole, since ranks fetch their rows of it, and so are those of the batches that are sampled
    ahead. It has every response in progress: an object with a row that somebody needs stays whole. The ranks' records
    are old's natural experts, the experts that old used if they differ, and pi's: each machine has its share.
    """
    algorithm = config.algorithm.build()
    rows = algorithm.num_prompts * algorithm.num_responses * num_tokens
    rows_of_mu = in_progress.responses_in_progress(config) * num_tokens
    machines = -(-config.training.num_ranks // config.cluster.gpus_per_node)
    of_mu = 1 + config.schedule.steps_off
    of_ranks = 2 if algorithm.passes.old == "natural" else 3
    of_ranks *= payloads.routing_bytes(shape, rows)
    return of_mu * payloads.routing_bytes(shape, rows_of_mu) + -(-of_ranks // machines)


def host_memory(config: ScaledRun, shape: ModelShape, num_tokens: int | None = None) -> Memory:
    """CPU memory of every machine for one global step whose sequences have `num_tokens` tokens on average.

    By default that is the worst case, rollout.max_model_len.

    Routing records are those of `stored_routes`; the driver has none. Old's router scores, the features that train the
    predictor, and mu's likeliest tokens with log pi_old are whole on every machine, once, in memory that its ranks
    share. The driver's own copy of tokens, on its machine, is not counted; of features and scores it has none. Router
    logits that metrics alone compare (pi's, and old's where no predictor learns from them) stay on the machines of the
    ranks that made them, and so do pi's router scores.
    """
    algorithm, parts = config.algorithm.build(), {}
    responses = algorithm.num_prompts * algorithm.num_responses
    length = config.rollout.max_model_len if num_tokens is None else num_tokens
    machines = -(-config.training.num_ranks // config.cluster.gpus_per_node)
    if shape.moe_layers:
        passes = 1 if algorithm.passes.trains_predictor else 2
        rows = passes * responses * algorithm.num_feature_rows(responses)
        parts["router logits that are compared"] = -(-payloads.router_logit_bytes(shape, rows) // machines)
        # In every mode: engines and ranks record without being asked, and metrics compare the records.
        parts["routing records"] = stored_routes(config, shape, length)
    if algorithm.passes.trains_predictor:
        b = ELEMENT_BYTES[config.training.precision]
        positions = min(algorithm.predictor.num_positions, length)
        parts["router features"] = payloads.feature_bytes(shape, positions, responses, b)
    if algorithm.objective.uses_router_shift:
        scores = payloads.routing_bytes(shape, responses * length, payloads.SCORE_BYTES)
        # Pi's are of one mini-batch, on the machines of the ranks that made them.
        parts["router scores of old and pi"] = scores + -(-scores // (algorithm.num_minibatches * machines))
    if config.schedule.steps_off > 1:
        # Without the version that engines hold, which every run keeps in the store for an engine's replacement.
        waiting = (config.schedule.steps_off - 1) * engine_memory.engine_weights(config, shape)
        parts["weights that wait for engines"] = -(-waiting // machines)
    num_top, tokens = algorithm.objective.num_top, responses * min(algorithm.max_tokens, length)
    if num_top > 0:
        old = 4 * min(num_top, shape.vocab_size) * tokens
        parts["mu's likeliest tokens"] = payloads.top_token_bytes(shape, num_top, tokens) + old
    if "optimizer" in (config.training.offload or ()):
        num_ranks = min(config.cluster.gpus_per_node, config.training.num_ranks)
        parts["optimizer states while engines are awake"] = num_ranks * most_optimizer_bytes(shape, config.training)
    if config.checkpoint.asynchronous:
        parts["copy of a checkpoint that is being written"] = -(-CHECKPOINT_BYTES * shape.num_parameters // machines)
    return Memory("host", parts)
