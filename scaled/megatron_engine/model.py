"""A ModelShape as Megatron-core modules that compute the same as the Hugging Face model of that family.

One configuration serves CPUs and GPUs. Settings that ignore routing replay are refused, and so are models that Megatron
would compute differently.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from lab.hf import ModelShape
from scaled.config import TrainingBlock
from scaled.megatron_engine import cpu_shims, parallel, rotations
from scaled.megatron_engine.parallel import Layout, check_layout
from scaled.megatron_engine.specs import layer_specs

# Field, required value, reason: with another value a replayed row has no effect, or a recomputed pass differs.
REPLAYABLE: tuple[tuple[str, Any, str], ...] = (
    ("moe_enable_routing_replay", True, "the hook that replay uses"),
    ("moe_router_fusion", False, "the fused router returns before the replay hook"),
    ("moe_router_load_balancing_type", "none", "other types choose experts by themselves (sinkhorn, losses)"),
    ("moe_aux_loss_coeff", 0.0, "a balancing loss counts its own top-k, not the replayed one"),
    ("moe_z_loss_coeff", None, "a loss that the objective does not know"),
    ("moe_input_jitter_eps", None, "noise on the router's input"),
    ("moe_router_force_load_balancing", False, "random logits"),
    ("moe_expert_capacity_factor", None, "tokens over capacity lose replayed experts"),
    ("moe_token_dropping", False, "dropped tokens lose replayed experts"),
    ("moe_pad_expert_input_to_capacity", False, "goes with a capacity"),
    ("moe_router_bias_update_rate", 0.0, "the selection bias would learn from replayed counts"),
    ("cuda_graph_impl", "none", "a captured router does not call the hook"),
    ("hidden_dropout", 0.0, "old and gradient passes must compute the same"),
    ("attention_dropout", 0.0, "old and gradient passes must compute the same"),
    ("mtp_num_layers", None, "their routers are in no routing record"),
)


def refuse(config: TransformerConfig) -> None:
    """ValueError, naming the field, where this configuration would ignore or undo a replayed routing decision."""
    for name, plain, reason in REPLAYABLE:
        value = getattr(config, name)
        if value != plain:
            raise ValueError(f"{name}: expected {plain} ({reason}), got {value}")


def transformer_config(shape: ModelShape, training: TrainingBlock) -> TransformerConfig:
    """Megatron's configuration of this model and layout; ValueError for what Megatron would compute differently."""
    dtype = torch.bfloat16 if training.precision == "bf16" else torch.float32
    fields: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.dense_size or shape.expert_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "qk_layernorm": shape.qk_norm == "head",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "cuda_graph_scope": [],
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "bf16": training.precision == "bf16",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "deterministic_mode": bool(training.deterministic),
        # Zeros need no generator: every weight comes from `weights.load_hf`, which names those that do not.
        "init_method": torch.nn.init.zeros_,
        "output_layer_init_method": torch.nn.init.zeros_,
        "embedding_init_method": torch.nn.init.zeros_,
        **_parallel_fields(training),
        **_expert_fields(shape, training),
    }
    if shape.latent_attention is None:
        config = rotations.with_grouped(TransformerConfig(**fields), shape)
    else:
        a = shape.latent_attention
        config = MLATransformerConfig(
            # Megatron's local attention takes its output's width from kv_channels: in MLA that of the values.
            **{**fields, "kv_channels": a.value_dim, "qk_layernorm": True},
            q_lora_rank=a.query_rank,  # type: ignore[arg-type]  # None is a value of this field
            kv_lora_rank=a.key_value_rank,
            qk_head_dim=a.no_position_dim,
            qk_pos_emb_head_dim=a.position_dim,
            v_head_dim=a.value_dim,
            **rotations.latent_fields(shape),
        )
    rotations.check(shape, training)
    refuse(config)
    return config


def _parallel_fields(training: TrainingBlock) -> dict[str, Any]:
    recompute: dict[str, Any] = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }[training.recompute]
    return {
        **parallel.group_sizes(training),
        "num_layers_in_first_pipeline_stage": training.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": training.num_layers_in_last_pipeline_stage,
        "sequence_parallel": training.tensor_parallel > 1,
        # Under a token budget widths differ between micro-batches, so stages first send each other the shapes.
        "variable_seq_lengths": training.max_tokens_per_micro_batch is not None and training.pipeline_parallel > 1,
        **recompute,
    }


def _expert_fields(shape: ModelShape, training: TrainingBlock) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.num_experts or None,  # Megatron refuses 0
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_size if shape.num_experts else None,
        "moe_shared_expert_intermediate_size": shape.shared_expert_size or None,
        "moe_layer_freq": [int(n not in shape.dense_layers) for n in range(shape.num_layers)],
        "moe_token_dispatcher_type": training.token_dispatcher,
        "moe_grouped_gemm": cpu_shims.has_fused_kernels(),
        "moe_enable_routing_replay": True,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_fusion": False,
        **_gate_fields(shape),
    }


def _gate_fields(shape: ModelShape) -> dict[str, Any]:
    gate, K = shape.gate, shape.experts_per_token
    # Megatron divides sigmoid scores by their sum wherever K > 1, and has no setting for it.
    if gate.score == "sigmoid" and gate.renormalise != (K > 1):
        raise ValueError(
            f"gate: expected renormalise {K > 1} with sigmoid scores and {K} experts, got {gate.renormalise}"
        )
    # Softmax weights renormalised over the chosen experts are a softmax over the chosen logits.
    is_after = gate.score == "softmax" and (gate.order == "after" or gate.renormalise)
    # A softmax over one logit is 1, so the router would get no gradient; Megatron refuses it, too.
    if is_after and K == 1:
        raise ValueError("gate: expected at least 2 experts per token where weights sum to 1, got 1")
    if shape.has_selection_bias and gate.score != "sigmoid":
        raise ValueError(f"gate: expected sigmoid scores with a selection bias, got {gate.score}")
    fields: dict[str, Any] = {
        "moe_router_score_function": gate.score,
        "moe_router_pre_softmax": gate.score == "softmax" and not is_after,
        "moe_router_topk_scaling_factor": None if gate.scaling == 1.0 else gate.scaling,
        "moe_router_enable_expert_bias": shape.has_selection_bias,
    }
    if gate.num_top_groups < gate.num_groups:
        # Megatron scores a group by its K // num_top_groups best experts.
        summed = K // gate.num_top_groups
        wanted = {"max": 1, "top2_sum": 2}[gate.group_score]
        if summed != wanted:
            raise ValueError(
                f"gate: expected experts_per_token // num_top_groups = {wanted} with group score {gate.group_score} "
                f"(Megatron-core sums that many), got {K} // {gate.num_top_groups}"
            )
        fields |= {"moe_router_num_groups": gate.num_groups, "moe_router_group_topk": gate.num_top_groups}
    return fields


def build_model(shape: ModelShape, training: TrainingBlock, device: str | torch.device | None = None) -> list[GPTModel]:
    """This rank's model chunks, one per virtual stage, in `training.precision`, with zeros for weights.

    `parallel.initialize` must have run. `device` is the current GPU, else the CPU, unless given ("meta" for a dry run).
    Logits of vocabulary rows that only pad to a multiple of the tensor-parallel ranks are the type's lowest number.
    Raises ValueError for a layout that does not divide the model and for what Megatron would compute differently.
    """
    check_layout(shape, training)
    cpu_shims.install()
    config = transformer_config(shape, training)
    layout = parallel.layout(training, shape.num_layers)
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    whole = layer_specs(shape)
    assert whole.layer_specs is not None
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    chunks = []
    # torch's own modules draw initial weights from the global generator: its state is restored.
    with torch.device(device), torch.random.fork_rng(gpus):
        for number, layers in enumerate(layout.layers):
            spec = TransformerBlockSubmodules([whole.layer_specs[n] for n in layers], whole.layer_norm)
            chunks.append(_build_chunk(config, spec, shape, layout, number))
            _mark_gradients(chunks[-1], layout)
            built = tuple(layer.layer_number - 1 for layer in chunks[-1].decoder.layers)
            assert built == layers, (built, layers)
    return chunks


def _mark_gradients(chunk: GPTModel, layout: Layout) -> None:
    """Marks gradients that Megatron would sum over the wrong ranks.

    Without expert parallelism it treats experts as dense weights, though with fewer expert-tensor than tensor-parallel
    ranks they have more replicas (MLP experts: tensor_parallel/layers.py, `allreduce`). An unsplit linear layer sees
    only its rank's positions.
    """
    for name, parameter in chunk.named_parameters():
        if ".mlp.experts." in name and layout.edp_size != layout.num_replicas:
            parameter.allreduce = False  # type: ignore[attr-defined]
        if name.endswith("_down_proj.weight") and ".self_attention." in name:
            parameter.sequence_parallel = layout.sequence_parallel  # type: ignore[attr-defined]


def _build_chunk(
    config: TransformerConfig, spec: TransformerBlockSubmodules, shape: ModelShape, layout: Layout, number: int
) -> GPTModel:
    # Rounded up as in `RankWeight.slices` (weights.py): the surplus rows at the end are padding.
    rows = -(-shape.vocab_size // layout.tp_size)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=spec,  # type: ignore[arg-type]  # its own annotation leaves out block specifications
        vocab_size=rows * layout.tp_size,
        max_sequence_length=shape.max_positions,
        pre_process=layout.has_embedding(number),
        post_process=layout.has_head(number),
        # The vocabulary stays split over ranks: `ResponseHead` (scoring.py) sums over it.
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied_head,
        position_embedding_type=rotations.kind(shape),
        rotary_base=shape.rope_theta,  # type: ignore[arg-type]  # any number does
        vp_stage=number if layout.num_chunks > 1 else None,
    )
    num_real = shape.vocab_size - layout.tp_rank * rows
    if layout.has_head(number) and num_real < rows:
        chunk.output_layer.register_forward_hook(_masks_from(max(0, num_real)))
    return chunk


def _masks_from(num_real: int) -> Any:
    def hook(module: torch.nn.Module, inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = output
        is_padding_V = torch.arange(logits.shape[-1], device=logits.device) >= num_real
        # Not -inf: the probability is 0 as well, and in an entropy 0 times it is 0, not NaN.
        return logits.masked_fill(is_padding_V, torch.finfo(logits.dtype).min), bias

    return hook


__all__ = ["build_model", "refuse", "transformer_config"]
