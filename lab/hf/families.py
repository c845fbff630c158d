"""The architectures, a row each: the conventions that a public class fixes and its config.json does not state.

A model is written under the first row that computes exactly the same (`writer.py`), else under our own, the last row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

World = Literal["sandbox", "scaled"]
BOTH: tuple[World, ...] = ("sandbox", "scaled")


@dataclass(frozen=True)
class Family:
    """One architecture. Defaults are those of most rows; defaults for absent config fields are those of transformers.

    worlds: those that open it; a row of `scaled` needs tests on Megatron-core and vLLM.
    qk_norm: RMSNorm of queries and keys per `head`, over the whole `projection`, or `none`; None: as the file states.
    dense: layers without experts: `all`, `none`, the `first` (first_k_dense_replace), or as `listed` (mlp_only_layers,
    decoder_sparse_step).
    num_experts, expert_size: the fields that hold them.
    gate: `qwen` is a softmax over all experts, `deepseek` has groups, a factor and shared experts besides.
    score: that of an expert in a `deepseek` gate; with `states_score` the file's scoring_func takes precedence.
    norm_topk_prob: its value where the file is silent; `always`: whatever the file states. softmax_after: files
    that we write may put the softmax after the choice of experts, which equals the renormalised one but for rounding.
    is_greedy: groups count only where topk_method is group_limited_greedy, and weights are never renormalised.
    absent: the values of other fields that a file does not name.
    window: a sliding window is on where use_sliding_window says so (`switched`), where it has a width (`set`), or in
    the layers above max_window_layers (`layers`).
    block, projections, shared: the names of its weights.
    has_yarn: the cluster world computes YaRN (yarn.py), which needs tests on Megatron-core and vLLM.
    aliases: other types of model that vLLM opens as this one.
    is_own: our own architecture, whose file states every convention.
    """

    model_type: str
    hf_class: str
    qk_norm: Literal["head", "projection", "none"] | None
    worlds: tuple[World, ...] = ("sandbox",)
    dense: Literal["all", "none", "first", "listed"] = "none"
    num_experts: str = "num_experts"
    expert_size: str = "moe_intermediate_size"
    gate: Literal["qwen", "deepseek"] = "qwen"
    score: Literal["softmax", "sigmoid"] = "softmax"
    states_score: bool = False
    norm_topk_prob: bool | Literal["always"] = False
    softmax_after: bool = False
    min_shared_experts: int = 0
    is_greedy: bool = False
    absent: tuple[tuple[str, float], ...] = ()
    window: Literal["switched", "set", "layers"] = "switched"
    is_latent: bool = False
    head_dim: int | None = None
    norm_eps: float = 1e-6
    rope_theta: float = 1e4
    block: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"
    has_yarn: bool = False
    aliases: tuple[str, ...] = ()
    is_own: bool = False

    @property
    def model_types(self) -> tuple[str, ...]:
        """The values of a file's model_type that mean this row."""
        return (self.model_type, *self.aliases)


ROWS = (
    Family("qwen3", "Qwen3ForCausalLM", "head", dense="all", head_dim=128),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", "head", BOTH, dense="listed", softmax_after=True, has_yarn=True),
    Family(
        "olmoe", "OlmoeForCausalLM", "projection", BOTH,
        expert_size="intermediate_size", window="set", norm_eps=1e-5,
    ),
    Family(
        "mixtral", "MixtralForCausalLM", "none",
        num_experts="num_local_experts", expert_size="intermediate_size", norm_topk_prob="always", window="set",
        norm_eps=1e-5, rope_theta=1e6, block="block_sparse_moe", projections=("w1", "w3", "w2"),
    ),
    Family(
        "dots1", "Dots1ForCausalLM", "head",
        dense="first", num_experts="n_routed_experts", gate="deepseek", score="sigmoid", min_shared_experts=1,
        window="layers",
    ),
    Family(
        "deepseek_v2", "DeepseekV2ForCausalLM", "none", ("scaled",), is_latent=True, has_yarn=True,
        dense="first", num_experts="n_routed_experts", gate="deepseek", states_score=True, is_greedy=True,
        absent=(("q_lora_rank", 1536), ("n_shared_experts", 2)),
    ),
    Family(
        "deepseek_v3", "DeepseekV3ForCausalLM", "none", ("scaled",), is_latent=True, has_yarn=True,
        dense="first", num_experts="n_routed_experts", gate="deepseek", score="sigmoid", states_score=True,
        norm_topk_prob=True, aliases=("kimi_k2",),
        absent=(
            ("q_lora_rank", 1536), ("first_k_dense_replace", 3), ("n_shared_experts", 1), ("n_group", 8),
            ("topk_group", 4), ("routed_scaling_factor", 2.5),
        ),
    ),
    Family("firstorder_moe", "FirstOrderMoEForCausalLM", None, dense="listed", shared="shared_expert", is_own=True),
)  # fmt: skip
FAMILIES = {row.model_type: row for row in ROWS}
ROUTERS = tuple(sorted({f".{row.block}.gate." for row in ROWS}))
"""Parts of the names of routers' weights, in every architecture."""
UNQUANTISED = ("embed_tokens", "lm_head", "norm", "shared_expert_gate", *ROUTERS)
"""Parts of the names of the weights that quantised engines leave in the checkpoint's precision."""
OWN = ROWS[-1].model_type
