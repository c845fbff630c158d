"""The models that open here, as transformers makes them at tiny sizes."""

from __future__ import annotations

import transformers

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 3, "num_experts": 6}
QWEN = SIZES | EXPERTS | {"intermediate_size": 48, "moe_intermediate_size": 24}
# DeepSeek-V3's experts under grouped-query attention: sigmoid gate, groups, a bias of the choice, shared experts.
DOTS1 = SIZES | {
    "num_experts_per_tok": 3, "n_routed_experts": 8, "intermediate_size": 48, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "head_dim": 8,
}  # fmt: skip
T = transformers
SHAPES = {
    "qwen3_moe": lambda: T.Qwen3MoeForCausalLM(T.Qwen3MoeConfig(**QWEN, norm_topk_prob=True, head_dim=16)),
    "qwen3_moe, weights as they are": lambda: T.Qwen3MoeForCausalLM(
        T.Qwen3MoeConfig(**QWEN, norm_topk_prob=False, head_dim=8, tie_word_embeddings=True)
    ),
    "qwen3_moe, every second layer": lambda: T.Qwen3MoeForCausalLM(
        T.Qwen3MoeConfig(**QWEN, decoder_sparse_step=2, head_dim=8, rope_parameters=rope(5e5))
    ),
    "qwen3_moe, one dense layer": lambda: T.Qwen3MoeForCausalLM(
        T.Qwen3MoeConfig(**QWEN, mlp_only_layers=[1], norm_topk_prob=True, head_dim=8)
    ),
    "olmoe": lambda: T.OlmoeForCausalLM(T.OlmoeConfig(**SIZES, **EXPERTS, intermediate_size=24)),
    "olmoe, renormalised": lambda: T.OlmoeForCausalLM(
        T.OlmoeConfig(**SIZES | {"num_key_value_heads": 4}, **EXPERTS, intermediate_size=24, norm_topk_prob=True)
    ),
    "mixtral": lambda: T.MixtralForCausalLM(
        T.MixtralConfig(**SIZES, intermediate_size=24, num_local_experts=6, num_experts_per_tok=2)
    ),
    "dots1": lambda: T.Dots1ForCausalLM(T.Dots1Config(**DOTS1, n_group=4, topk_group=2, n_shared_experts=2)),
    "dots1, no groups": lambda: T.Dots1ForCausalLM(
        T.Dots1Config(**DOTS1 | {"norm_topk_prob": False, "first_k_dense_replace": 0}, n_shared_experts=1)
    ),
    "qwen3": lambda: T.Qwen3ForCausalLM(T.Qwen3Config(**SIZES, intermediate_size=48, head_dim=16)),
    "qwen3, tied": lambda: T.Qwen3ForCausalLM(
        T.Qwen3Config(**SIZES, intermediate_size=48, head_dim=8, tie_word_embeddings=True)
    ),
}


def rope(theta: float) -> dict:
    return {"rope_type": "default", "rope_theta": theta}
