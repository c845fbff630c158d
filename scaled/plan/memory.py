r"""Memory of one GPU of the training engine, in bytes; `engine_memory` has that of the inference engine.

Activations are counted tensor by tensor, for sequences as long as `rollout.max_model_len` allows, under these
assumptions: fused attention (no S x S matrix is kept), tokens spread evenly over experts, full micro-batches. Ranks and
engines on the same GPU take turns where the schedule is synchronous; `resident_memory` counts the memory that ranks
keep meanwhile.
The counting follows Korthikanti et al. (arXiv 2205.05198) sec. 4, for RMSNorm, grouped queries and experts;
tests/scaled/test_plan_activations.py measures what Megatron-core's layers save.

Letters: D model width, F expert width, H heads, K slots, E experts, S tokens of a sequence, T of them sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.hf import ModelShape
from scaled.config import ScaledRun, TrainingBlock
from scaled.plan import payloads
from scaled.plan.parameters import ELEMENT_BYTES, optimizer_bytes, rank_parameters, stage_layers
from scaled.plan.predictor_memory import predictor_step_bytes

GIB = 2**30
CONTEXT = 3 * GIB
"""Bytes of one process outside its tensors: CUDA context, NCCL buffers, workspaces."""


WORKING = {
    "activations", "logits", "replayed experts, int64", "features of a micro-batch",
    "mu's likeliest tokens of a micro-batch",
}  # fmt: skip
"""The parts of a rank's memory that a micro-batch's backward frees."""

PREDICTOR_STEP = "a predictor's step, beyond a micro-batch"
"""Bytes of a predictor's step beyond those parts."""


@dataclass(frozen=True)
class Memory:
    """Named parts of one GPU's memory, in bytes; `where` says which GPU."""

    where: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(self.parts.values())


def attention_activations(shape: ModelShape, b: int, tensor_parallel: int = 1) -> int:
    """Bytes per token that one layer's attention keeps for backward, `b` bytes per element.

    Inputs of norm and projection 2 D; queries, keys and values as the projection makes them, in one tensor; queries and
    keys after their norm and rotation; and the attention's output, with its fp32 log-sum-exp (4 H bytes). A norm per
    head reads queries out of that tensor, a copy of them where a rank has several groups of them. OLMoE's norm copies
    queries and keys, in fp32, and keeps them normed. MLA keeps the latents before and after their norm instead.
    """
    latent, H, G = shape.latent_attention, shape.num_heads, shape.num_kv_heads
    if latent is None:
        heads = (H + 2 * G) + (H + G) + H
        if shape.qk_norm == "head" and G < H and tensor_parallel < G:
            heads += H
        copies = 0
        if shape.qk_norm == "projection":
            heads += H + G
            copies = 4 * (H + G) * shape.head_dim
        return b * (2 * shape.hidden_size + heads * shape.head_dim) + copies + 4 * H
    # Latents are expanded into as many keys and values as there are query heads.
    width = latent.no_position_dim + latent.position_dim
    latents = 2 * (latent.key_value_rank + (latent.query_rank or 0)) + latent.position_dim
    return b * (2 * shape.hidden_size + latents + H * 2 * (width + latent.value_dim)) + 4 * H


def rotary_activations(shape: ModelShape, b: int) -> int:
    """Bytes per position that one layer's rotation keeps: sine and cosine for queries and for keys.

    The responses of a micro-batch share them, and so do the heads: TP does not divide them.
    """
    latent = shape.latent_attention
    return 4 * b * (shape.head_dim if latent is None else latent.position_dim)


def mlp_activations(shape: ModelShape, number: int, b: int) -> int:
    """Bytes per token that one layer's MLP keeps for backward. A dense MLP: 2 D + 5 F_dense elements.

    5 F: gate and up in one tensor, up again (Megatron adds an offset to it, here 0), silu(gate), and their product.
    Experts: inputs of norm and router, 2 D; for each of the K slots its token, D, those 5 F and the product weighed by
    its gate, F; and 5 F for each shared expert. Router: fp32 scores twice and a mask, 9 E bytes; fp32 gates, expert ids
    and the slots' order in int64, 20 K.
    """
    D, K = shape.hidden_size, shape.experts_per_token
    if number in shape.dense_layers:
        return b * (2 * D + 5 * shape.dense_size)
    slots = K * (D + 6 * shape.expert_size)
    return b * (2 * D + slots + 5 * shape.shared_expert_size) + 9 * shape.num_experts + 20 * K


def kept_activations(shape: ModelShape, number: int, training: TrainingBlock) -> tuple[int, int]:
    """Bytes per token that one layer keeps until its backward, and those that its recomputation adds while it runs.

    none: all are kept, and nothing is added. selective: experts are recomputed from the MLP's input, and the inputs of
    its norm and router stay, 2 D. full: the layer is recomputed from its input, D.
    """
    b, D = ELEMENT_BYTES[training.precision], shape.hidden_size
    attention, mlp = attention_activations(shape, b, training.tensor_parallel), mlp_activations(shape, number, b)
    if training.recompute == "full":
        return b * D, attention + mlp - b * D
    if training.recompute == "selective" and number not in shape.dense_layers:
        return attention + 2 * b * D, mlp - 2 * b * D
    return attention + mlp, 0


def chunks_in_flight(training: TrainingBlock, stage: int, num_microbatches: int) -> int:
    """The most forward passes of model chunks that wait for their backward on this stage.

    1F1B: min(M, PP - p). Interleaved: min(M VPP, 2 (PP - p - 1) + (VPP - 1) PP + 1), Megatron's warm-up and one more.
    """
    pp, vpp = training.pipeline_parallel, training.virtual_pipeline
    if vpp == 1:
        return min(num_microbatches, pp - stage)
    return min(num_microbatches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1)


def micro_batch_tokens(training: TrainingBlock, S: int) -> int:
    """Positions of the largest micro-batch of sequences of at most S tokens: the budget, or micro_batch_size x S.

    Those of all context-parallel ranks together.
    """
    budget = training.max_tokens_per_micro_batch
    return S * training.micro_batch_size if budget is None else max(budget, S)


def rank_tokens(training: TrainingBlock, S: int) -> int:
    """Positions of the largest micro-batch that one context-parallel rank has: 1 / CP of them."""
    return -(-micro_batch_tokens(training, S) // training.context_parallel)


def activation_bytes(shape: ModelShape, training: TrainingBlock, stage: int, S: int, num_microbatches: int) -> int:
    """Bytes of activations of one rank at its peak: all chunks in flight, and one layer's recomputation.

    Each rank of a TP group holds 1 / TP of them, but for the rotary tables: sequence parallelism splits tokens outside
    attention and MLP, and heads and widths are split inside. CP splits tokens everywhere. ETP gathers the slots of all
    its ranks, so the slots' inputs count ETP times. The last stage also keeps the input of the norm after all layers.
    """
    tokens = rank_tokens(training, S) / training.tensor_parallel
    b = ELEMENT_BYTES[training.precision]
    gathered = b * shape.experts_per_token * shape.hidden_size * (training.expert_tensor_parallel - 1)
    # Recomputed with the whole layer, else kept.
    rotary = rotary_activations(shape, b) * -(-S // training.context_parallel)
    is_full = training.recompute == "full"
    kept, working = 0.0, 0.0
    for number in stage_layers(shape, training, stage):
        extra = 0 if number in shape.dense_layers else gathered
        layer_kept, layer_working = kept_activations(shape, number, training)
        # Gathered slots go with the experts: kept with them, or gathered again when they are recomputed.
        kept += tokens * (layer_kept + (extra if layer_working == 0 else 0)) + (0 if is_full else rotary)
        adding = tokens * (layer_working + (extra if layer_working else 0)) + (rotary if is_full else 0)
        working = max(working, adding)
    # In flight are chunks, each with 1 / VPP of the stage's layers.
    in_flight = chunks_in_flight(training, stage, num_microbatches) / training.virtual_pipeline
    last = tokens * b * shape.hidden_size if stage == training.pipeline_parallel - 1 else 0
    # The norm's backward, the first, frees its input before any layer is recomputed.
    return round(kept * in_flight + max(working, last))


def logit_bytes(shape: ModelShape, training: TrainingBlock, T: int, S: int) -> int:
    """Peak bytes of the head and log-probs of one micro-batch of responses of T tokens, on a rank of the last stage.

    n are its response tokens (under a token budget, all of its tokens), with CP at most S / CP, its positions.
    Counted are: n hidden states of width D and their gradients; logits of c = min(n, training.logit_chunk) tokens over
    W = V / TP, b bytes per element as the head computes them and 4 in fp32, 8 with their exponentials in forward, and b
    as a gradient in backward; the head's own gradient, W x D, in fp32 while it sums several chunks, in b bytes at the
    end. The peak is the largest moment of
    `megatron_engine.scoring`.
    """
    b, D = ELEMENT_BYTES[training.precision], shape.hidden_size
    n, W = micro_batch_tokens(training, T), -(-shape.vocab_size // training.tensor_parallel)
    n = min(n, rank_tokens(training, S)) if training.context_parallel > 1 else n
    c, is_rounded = min(n, training.logit_chunk), b < 4
    forward = 8 * c * W
    making = (4 + b * is_rounded) * c * W  # logits in b bytes and fp32; later their gradient in both
    # One chunk's product is the head's gradient itself. Several are summed in fp32, with the rounded copy at the end.
    if n == c:
        backward = max(making, b * c * W + b * W * D)
    else:
        backward = 4 * W * D + max(making, b * W * D * is_rounded)
    return b * n * D + max(forward, b * n * D + backward)


def top_bytes(config: ScaledRun, shape: ModelShape) -> int:
    """Bytes of mu's K likeliest tokens of one micro-batch on a rank of the last stage, at the update's peak.

    Each has an id in int64, padded and packed (16 bytes), and eight numbers in fp32 (4 bytes each): log pi packed,
    padded and in the objective, log pi_old and log mu twice each, and a gradient. Together 16 + 32 = 48 bytes. Each
    context-parallel rank has those of whole responses, for the objective.
    """
    algorithm = config.algorithm.build()
    tokens = micro_batch_tokens(config.training, algorithm.max_tokens)
    return 48 * tokens * min(algorithm.objective.num_top, shape.vocab_size)


def replay_bytes(shape: ModelShape, training: TrainingBlock, stage: int, S: int) -> int:
    """Bytes of a micro-batch's replayed experts on a rank: tokens / (CP TP) x L x K in int64, as a gather asks for."""
    layers = sum(number not in shape.dense_layers for number in stage_layers(shape, training, stage))
    return 8 * rank_tokens(training, S) // training.tensor_parallel * layers * shape.experts_per_token


def num_full_microbatches(config: ScaledRun) -> int:
    """Micro-batches with responses of one update on a data-parallel rank; under a token budget one per response, the
    most possible."""
    batch, training = config.algorithm.batch, config.training
    responses = batch.num_prompts // batch.num_minibatches * batch.num_responses
    size = training.micro_batch_size if training.max_tokens_per_micro_batch is None else 1
    # As `micro_batches.arrange` rounds, which would take all of a search's time.
    return -(-responses // (training.data_parallel * size))


def num_microbatches(config: ScaledRun) -> int:
    """The same with the empty ones that interleaved 1F1B adds: it takes micro-batches in multiples of PP."""
    training = config.training
    group = training.pipeline_parallel if training.virtual_pipeline > 1 else 1
    return -(-num_full_microbatches(config) // group) * group


def training_memory(config: ScaledRun, shape: ModelShape, stage: int) -> Memory:
    """Memory of one rank of a pipeline stage in the update, the pass that needs the most."""
    training, algorithm = config.training, config.algorithm.build()
    parameters, S = rank_parameters(shape, training, stage), config.rollout.max_model_len
    b = ELEMENT_BYTES[training.precision]
    moe = sum(number not in shape.dense_layers for number in stage_layers(shape, training, stage))
    # Every rank of a stage has the whole W_p of its layers (`megatron_engine.predictor`): neither TP nor DP divides it.
    share = moe / max(1, len(shape.moe_layers))
    parts = {
        "weights": b * parameters.total,
        "gradients, fp32": 4 * parameters.total,
        "optimizer states": optimizer_bytes(parameters, training),
        "activations": activation_bytes(shape, training, stage, S, num_microbatches(config)),
    }
    if stage == training.pipeline_parallel - 1:
        parts["logits"] = logit_bytes(shape, training, algorithm.max_tokens, S)
        if algorithm.objective.num_top > 0:
            parts["mu's likeliest tokens of a micro-batch"] = top_bytes(config, shape)
    if algorithm.objective.kl_coefficient > 0:
        parts["reference weights"] = b * parameters.total
    if algorithm.mode != "none":
        # A micro-batch needs its record until its backward, where recomputation routes again (`ReplayContext`).
        in_flight = chunks_in_flight(training, stage, num_microbatches(config)) / training.virtual_pipeline
        parts["replayed experts, int64"] = round(replay_bytes(shape, training, stage, S) * in_flight)
    if algorithm.passes.trains_predictor:
        cached = payloads.feature_bytes(shape, cached_rows(config), 1, b)
        # 16 bytes: W_p, its gradient and AdamW's two moments, all in fp32.
        parts["predictor and its optimizer"] = round(16 * payloads.predictor_parameters(shape) * share)
        parts["features of a micro-batch"] = round(cached * share)
        # A predictor learns once a mini-batch's backward has freed its memory: only the larger need counts.
        beyond = predictor_step_bytes(config, shape, stage) - sum(parts.get(name, 0) for name in WORKING)
        if beyond > 0:
            parts[PREDICTOR_STEP] = beyond
    parts["context and buffers"] = CONTEXT
    return Memory(f"training rank, stage {stage}", parts)


def cached_rows(config: ScaledRun) -> int:
    """Feature rows of the largest micro-batch on a rank: T_c per response; under a token budget all rows, of many short
    ones. TP and CP split them as they split positions."""
    training, num = config.training, config.algorithm.build().predictor.num_positions
    rows = micro_batch_tokens(training, config.rollout.max_model_len)
    if training.max_tokens_per_micro_batch is None:
        rows = num * training.micro_batch_size
    return -(-rows // (training.tensor_parallel * training.context_parallel))


def peak_training_memory(config: ScaledRun, shape: ModelShape) -> Memory:
    """Memory of the rank that needs the most."""
    stages = range(config.training.pipeline_parallel)
    return max((training_memory(config, shape, stage) for stage in stages), key=lambda memory: memory.total)


def resident_memory(config: ScaledRun, shape: ModelShape) -> Memory:
    """Memory that the neediest rank keeps on its GPU while engines use it: all but an update's working memory.

    `training.offload` moves gradients and optimizer states off the GPU.
    """
    gone = {"gradients": "gradients, fp32", "optimizer": "optimizer states"}
    # By their names in `training_memory`: a part that is named neither here nor in `gone` counts as kept.
    left_out = WORKING | {PREDICTOR_STEP} | {gone[name] for name in config.training.offload or ()}
    stages = [training_memory(config, shape, stage) for stage in range(config.training.pipeline_parallel)]
    kept = [Memory(one.where, {k: v for k, v in one.parts.items() if k not in left_out}) for one in stages]
    return max(kept, key=lambda memory: memory.total)
