"""Numbers of weights of one rank of the training engine, and bytes of its optimizer states.

Exact for the layout, and checked against Megatron's own build (`layout.dry_run`).
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.hf import ModelShape
from scaled.config import TrainingBlock
from scaled.megatron_engine.parallel import layers_of

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

CHECKPOINT_BYTES = 14
"""Bytes per weight of a checkpoint: bf16, its fp32 master and two moments."""


@dataclass(frozen=True)
class RankParameters:
    """Numbers of weights of one rank.

    CP x DP ranks share the optimizer states of `dense`, expert-DP ranks those of `experts`.
    """

    dense: int
    experts: int

    @property
    def total(self) -> int:
        """Number of all weights of the rank."""
        return self.dense + self.experts


def stage_layers(shape: ModelShape, training: TrainingBlock, stage: int) -> tuple[int, ...]:
    """Decoder layers of a pipeline stage, those of all its chunks."""
    return tuple(n for chunk in layers_of(training, shape.num_layers, stage) for n in chunk)


def replicated_attention_parameters(shape: ModelShape) -> int:
    """Number of weights of one layer's attention that every TP rank holds whole: norms of one head, MLA's compressions.

    A norm over all heads (OLMoE) is split like the heads.
    """
    latent = shape.latent_attention
    if latent is None:
        return 2 * shape.head_dim if shape.qk_norm == "head" else 0
    down = shape.hidden_size * (latent.key_value_rank + latent.position_dim) + latent.key_value_rank
    return down if latent.query_rank is None else down + latent.query_rank * (shape.hidden_size + 1)


def rank_parameters(shape: ModelShape, training: TrainingBlock, stage: int = 0) -> RankParameters:
    """Numbers of weights of one rank of pipeline stage `stage`.

    Norms and routers are whole on every rank; experts are split by EP x ETP, and everything else by TP. The first stage
    has the embedding, the last one the final norm and the head (or the tied copy of the embedding).
    """
    tp, last = training.tensor_parallel, training.pipeline_parallel - 1
    replicated = replicated_attention_parameters(shape)
    attention = shape.num_attention_parameters - replicated
    dense = experts = 0
    for number in stage_layers(shape, training, stage):
        # All divisions below are exact (`check_layout`): `summary.dry_run_layout` asks for Megatron's very number.
        whole, split = replicated + 2 * shape.hidden_size, attention
        if number in shape.dense_layers:
            split += 3 * shape.hidden_size * shape.dense_size
        else:
            whole += shape.num_router_parameters
            split += shape.num_shared_parameters
            shares = training.expert_parallel * training.expert_tensor_parallel
            experts += shape.num_experts * shape.num_expert_parameters // shares
        dense += whole + split // tp
    # Rounded up: rows pad the vocabulary to a multiple of TP.
    table = -(-shape.vocab_size // tp) * shape.hidden_size
    # An untied head is a second table, on a single stage as well; a tied one is the same tensor there.
    has_table = int(stage == 0) + int(stage == last and not (shape.tied_head and last == 0))
    return RankParameters(dense + has_table * table + (shape.hidden_size if stage == last else 0), experts)


def optimizer_bytes(parameters: RankParameters, training: TrainingBlock) -> int:
    """Bytes of AdamW on one rank: 8 per weight (two fp32 moments), or 12 under bf16 (fp32 master weights too).

    The distributed optimizer divides this by CP x DP for dense weights, and by ranks / (EP ETP PP) for experts.
    """
    each = 12 if training.precision == "bf16" else 8
    if not training.distributed_optimizer:
        return each * parameters.total
    expert_ranks = training.expert_parallel * training.expert_tensor_parallel * training.pipeline_parallel
    expert_data_parallel = training.num_ranks // expert_ranks
    return each * parameters.dense // training.num_replicas + each * parameters.experts // expert_data_parallel


def most_optimizer_bytes(shape: ModelShape, training: TrainingBlock) -> int:
    """Bytes of AdamW on the rank that has most of them."""
    stages = (rank_parameters(shape, training, stage) for stage in range(training.pipeline_parallel))
    return max(optimizer_bytes(parameters, training) for parameters in stages)
