"""Bytes of a step's records in the object stores of its machines: routes, router features, scores, likeliest tokens.

An object has whole responses of one kind (`cluster.storing`) and travels whole: a machine of ranks fetches those with a
response that is dealt to one of its data-parallel replicas, and of what engines made only the layers of its pipeline
stages. Each of several mini-batches is dealt anew, so that an update reads what other machines made. What is fetched
once lies there until nobody needs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lab.hf import ModelShape
from scaled.config import ScaledRun
from scaled.objects import LEAST_BYTES, OF_ENGINE, OF_RANK
from scaled.pieces import SHARED_BY
from scaled.plan import in_progress, payloads
from scaled.plan.machines import Machine, rank_numbers, with_ranks
from scaled.plan.parameters import ELEMENT_BYTES
from theory.algorithm import Algorithm


def dealt(config: ScaledRun) -> float:
    """The share of a batch's responses that the replicas of a machine of ranks train on, above 0 and at most 1."""
    training = config.training
    # Stages are the slowest index of a rank's number: the ranks of a machine are neighbours at one stage, if it has as
    # many ranks.
    of_replica = training.tensor_parallel * training.context_parallel
    own = -(-max(rank_numbers(config)) // of_replica)
    return min(1.0, own / training.data_parallel)


def routes(machine: Machine, config: ScaledRun, shape: ModelShape, num_tokens: int, has_updates: bool = True) -> int:
    """Bytes of routing records in a machine's object store, `num_tokens` tokens a sequence.

    The ranks' records are old's natural experts, the experts that old used where it replays or predicts, and, after the
    updates, pi's. Updates read mu's or those that old used, whichever they replay; of RSPO the latter in any case.
    """
    algorithm, of_response = config.algorithm.build(), payloads.routing_bytes(shape, num_tokens)
    passes = algorithm.passes
    replays_mu = passes.gradient == "replay_rollout"
    used = _of_old(machine, config, of_response, not replays_mu or algorithm.objective.uses_router_shift)
    # Natural experts are compared where they were made; without replay they are those that old used.
    natural = _of_old(machine, config, of_response, False) * ((passes.old != "natural") + has_updates)
    return _of_mu(machine, config, algorithm, of_response, replays_mu, machine.reads) + used + natural


def features(machine: Machine, config: ScaledRun, shape: ModelShape, num_tokens: int) -> int:
    """Bytes of the router features that the predictor learns from: mu's, where the rollout is predicted, or old's."""
    algorithm = config.algorithm.build()
    positions = min(algorithm.predictor.num_positions, num_tokens)
    logits = payloads.router_logit_bytes(shape, positions)
    hidden = payloads.feature_bytes(shape, positions, 1, ELEMENT_BYTES[config.training.precision]) - logits
    if algorithm.passes.rollout == "predicted":
        # The old pass reads none of mu's.
        return sum(_of_mu(machine, config, algorithm, size, False, machine.reads) for size in (hidden, logits))
    return sum(_of_old(machine, config, size, True) for size in (hidden, logits))


def compared_logits(machine: Machine, config: ScaledRun, shape: ModelShape, has_updates: bool) -> int:
    """Bytes of router logits that metrics alone read: pi's, and old's where no predictor learns from them."""
    algorithm = config.algorithm.build()
    rows = algorithm.num_feature_rows(algorithm.num_prompts * algorithm.num_responses)
    of_response = payloads.router_logit_bytes(shape, rows)
    of_old = 0 if algorithm.passes.trains_predictor else _of_old(machine, config, of_response, True)
    return of_old + _of_old(machine, config, of_response, False) * has_updates


def router_scores(machine: Machine, config: ScaledRun, shape: ModelShape, num_tokens: int, has_updates: bool) -> int:
    """Bytes of old's router scores, which later mini-batches compare with pi's, and of pi's of one mini-batch."""
    of_response = payloads.routing_bytes(shape, num_tokens, payloads.SCORE_BYTES)
    of_pi = -(-_of_old(machine, config, of_response, False) // config.algorithm.batch.num_minibatches)
    return _of_old(machine, config, of_response, True) + of_pi * has_updates


def likeliest_tokens(machine: Machine, config: ScaledRun, shape: ModelShape, num_tokens: int) -> int:
    """Bytes of mu's likeliest tokens, and of log old of them, on the last stage's machines: both passes read them."""
    algorithm = config.algorithm.build()
    num_top, T = algorithm.objective.num_top, min(algorithm.max_tokens, num_tokens)
    size = payloads.top_token_bytes(shape, num_top, T)
    of_mu = _of_mu(machine, config, algorithm, size, True, [(1.0, machine.dealt_last)])
    of_response = 4 * min(num_top, shape.vocab_size) * T
    # One rank of a replica has them all.
    return of_mu + _of_old(machine, config, of_response, True, machine.dealt_last, of_response)


def _of_mu(
    machine: Machine,
    config: ScaledRun,
    algorithm: Algorithm,
    of_response: int,
    is_read_again: bool,
    parts: Sequence[tuple[float, float]],
) -> int:
    """Bytes of a kind of mu's records, `of_response` of each response: what engines made, and what ranks fetched.

    Engines keep what they sample, all responses in progress, also for the batches ahead. Ranks fetch those of the batch
    that they train on: in one pass, or in the updates again.

    parts: the share of the bytes that objects of some layers have, and that of the replicas that read them here.
    """
    made = (1 + config.schedule.steps_off) * machine.engine_share * in_progress.responses_in_progress(config)
    batch, fetched = config.algorithm.batch, 0.0
    # An answer of an engine has mostly one piece.
    piece, most = max(batch.num_responses, SHARED_BY), OF_ENGINE // _kinds_of_engine(algorithm, machine.num_sets)
    for size, own in parts:
        share = _fetched(own, math.ceil(size * of_response), piece, most)
        if is_read_again and batch.num_minibatches > 1:
            share = 1 - (1 - share) ** 2
        fetched += size * (1 - machine.engine_share) * share * batch.num_prompts * batch.num_responses
    return math.ceil((made + fetched) * of_response)


def _of_old(
    machine: Machine,
    config: ScaledRun,
    of_response: int,
    is_read: bool,
    made: float | None = None,
    of_rank: int | None = None,
) -> int:
    """Bytes of a kind of the ranks' records, `of_response` of each response: what a machine's ranks made and, if
    several updates read it, fetched.

    made: the share of all that they made, by default even. of_rank: bytes of a response in one rank's answer, by
    default those of its positions and layers.
    """
    if not machine.has_ranks or made == 0:
        return 0
    own = dealt(config) if made is None else made
    training, batch = config.training, config.algorithm.batch
    share = 1 / with_ranks(config) if made is None else made
    num = batch.num_prompts * batch.num_responses
    if is_read and batch.num_minibatches > 1:
        each = of_response // (training.num_ranks // training.data_parallel) if of_rank is None else of_rank
        # Of its own layers a machine made `own`, and others the rest.
        others = 1 / own - 1
        share *= 1 + others * _fetched(own, each, -(-num // training.data_parallel), OF_RANK // _kinds_of_rank(config))
    return math.ceil(share * num * of_response)


def _fetched(own: float, of_response: int, num: int, most: int) -> float:
    """The share of the objects of others with a response of a machine's own, as if these were drawn at random.

    own: the share of all responses that are dealt to the machine. An answer has `num` responses, of `of_response`
    bytes each, in at most `most` objects.
    """
    together = max(-(-LEAST_BYTES // max(1, of_response)), -(-num // most))
    return 1 - (1 - own) ** min(num, together)


def _kinds_of_engine(algorithm: Algorithm, num_sets: int) -> int:
    """The kinds of objects of an engine's answer: experts, under Pr3 hidden states and logits, each for `num_sets` sets
    of layers; ids and log-probabilities of mu's likeliest tokens."""
    of_layers = 1 + 2 * (algorithm.passes.rollout == "predicted")
    return of_layers * num_sets + 2 * (algorithm.objective.num_top > 0)


def _kinds_of_rank(config: ScaledRun) -> int:
    """The kinds of objects of a rank's old pass: experts and logits, and what only some modes and objectives have."""
    algorithm = config.algorithm.build()
    passes, objective = algorithm.passes, algorithm.objective
    return (
        2 + (passes.old != "natural") + passes.trains_predictor + objective.uses_router_shift + (objective.num_top > 0)
    )


__all__ = ["compared_logits", "dealt", "features", "likeliest_tokens", "router_scores", "routes"]
