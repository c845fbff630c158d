"""Published figures of training-inference mismatch, each with its source.

docs/reference-ranges.md is written from this file (`python -m tests.pages.reference_ranges`), and `standing.py` ranks
a trace among these figures. Values are as printed, several if the source gives several steps or runs. A value is only
compared with values of the same formula: prime-rl's `mismatch_kl` and NeMo-RL's `gen_kl_error` are k3 as here, verl's
`rollout_corr/kl` is k1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

K3, K1, CHI2, EXTREME = "k3_kl", "k1_kl", "chi2", "extreme_frac_tau2"
PROB_GAP, LOGP_GAP, PEARSON, ROUTERS = "prob_gap", "logp_gap", "prob_pearson", "router_disagreement"
GITHUB = "https://github.com"
R3 = "https://arxiv.org/abs/2510.11370"
BF16, FP8, UNKNOWN = ("bf16", "bf16"), ("fp8", "fp8"), ("", "")
NO_PRECISION = "precision not stated; the framework's default"
R3_PRECISION = "training precision not stated; MiniRL (arXiv 2512.01374), footnote 5, calls the inference bf16"


@dataclass(frozen=True)
class Report:
    """One published measurement: model, engines, formats (mu's, old's; "" if not known), values and source.

    `size` is the number in the model's name, in 1e9 parameters. `fault` is the fault that the source names, if any.
    """

    model: str
    size: float | int | None
    engines: str
    formats: tuple[str, str]
    figures: Mapping[str, tuple[float, ...]]
    source: str
    link: str
    replay: bool = False
    fault: str = ""
    note: str = ""


def _r3(
    model: str, size: float | int | None, where: str, figures: Mapping[str, tuple[float, ...]], replay: bool
) -> Report:
    return Report(model, size, "SGLang, Megatron", BF16, figures, f"R3 {where}", R3, replay, note=R3_PRECISION)


def _hub(thread: str, kind: str = "pull") -> tuple[str, str]:
    """The short name and the address of a thread given as owner/name#number."""
    repository, _, number = thread.partition("#")
    return f"{repository.split('/')[1]}#{number}", f"{GITHUB}/{repository}/{kind}/{number}"


REPORTS: tuple[Report, ...] = (
    _r3("Qwen3-30B-A3B", 30, "sec. 3.1, 3.2", {K3: (1.535e-3,), ROUTERS: (0.10,)}, False),
    _r3("Qwen3-8B, dense", 8, "sec. 3.1", {K3: (6.4e-4,)}, False),
    _r3("Qwen3-30B-A3B", 30, "sec. 4.3", {K3: (7.5e-4,)}, True),
    _r3("Qwen3-30B-A3B", 30, "Table 4", {EXTREME: (2.54e-4,), K3: (1.37e-3,)}, False),
    _r3("Qwen3-30B-A3B", 30, "Table 4", {EXTREME: (5.83e-6,), K3: (7.03e-4,)}, True),
    _r3("Deepseek-V2-Lite, SFT", None, "Table 4", {EXTREME: (2.25e-3,), K3: (4.06e-3,)}, False),
    _r3("Deepseek-V2-Lite, SFT", None, "Table 4", {EXTREME: (2.16e-4,), K3: (1.17e-3,)}, True),
    _r3("Mixtral-8x7B, SFT", None, "Table 4", {EXTREME: (9.77e-5,), K3: (1.03e-3,)}, False),
    _r3("Mixtral-8x7B, SFT", None, "Table 4", {EXTREME: (1.08e-6,), K3: (4.98e-4,)}, True),
    _r3("Moonlight-16B-A3B-Instruct", 16, "Table 4", {EXTREME: (1.73e-5,), K3: (3.67e-4,)}, False),
    _r3("Moonlight-16B-A3B-Instruct", 16, "Table 4", {EXTREME: (6.94e-7,), K3: (1.92e-4,)}, True),
    Report(
        "model of R3 sec. 3.3", None, "Megatron, Megatron again", BF16, {K3: (8.4e-4,)}, "R3 sec. 3.3", R3,
        note="two passes of one framework; precision not stated",
    ),
    Report(
        "Qwen3-30B-A3B", 30, "vLLM, prime-rl", BF16, {K3: (0.0015, 0.0015, 0.0005)},
        *_hub("PrimeIntellect-ai/prime-rl#2808"), note=NO_PRECISION + "; steps 0 to 2",
    ),
    Report(
        "Qwen3-30B-A3B", 30, "vLLM, prime-rl", BF16, {K3: (0.0005, 0.0002, 0.0002)},
        *_hub("PrimeIntellect-ai/prime-rl#2808"), replay=True, note=NO_PRECISION + "; steps 0 to 2",
    ),
    Report(
        "DeepSeek V4 Flash", None, "vLLM 0.29, prime-rl", BF16, {K3: (0.00065, 0.00110)},
        *_hub("PrimeIntellect-ai/prime-rl#3543"), note="least and largest of 20 steps at learning rate 0",
    ),
    Report(
        "DeepSeek V4 Flash", None, "vLLM 0.29, prime-rl", BF16, {K3: (0.00025, 0.00040)},
        *_hub("PrimeIntellect-ai/prime-rl#3543"), replay=True, note="least and largest of 20 steps at learning rate 0",
    ),
    Report(
        "DeepSeek V4 Flash", None, "vLLM 0.28, prime-rl", BF16, {K3: (0.194, 0.490)},
        *_hub("PrimeIntellect-ai/prime-rl#3543"),
        fault="CUDA graphs that read freed weights after a reload", note="mean and largest of 20 steps",
    ),
    Report(
        "AFMoE (Trinity)", None, "vLLM, prime-rl", BF16, {K3: (0.005,)}, *_hub("PrimeIntellect-ai/prime-rl#1515"),
        note=NO_PRECISION + "; 'about', called the expected range",
    ),
    Report(
        "Qwen3.5 4B", 4, "vLLM, prime-rl", BF16, {K3: (0.03,)}, *_hub("PrimeIntellect-ai/prime-rl#2671", "issues"),
        fault="called too large; cause open", note=NO_PRECISION + "; 'around', step 0",
    ),
    Report(
        "glm4_moe, miniature", None, "vLLM, prime-rl", UNKNOWN, {K3: (2.9e-5,)},
        *_hub("PrimeIntellect-ai/prime-rl#3414"),
    ),
    Report(
        "GLM-5.2", None, "vLLM, prime-rl", FP8, {K3: (0.0038,)}, *_hub("PrimeIntellect-ai/prime-rl#3112"),
        note="H200; float scales",
    ),
    Report(
        "GLM-5.2", None, "vLLM, prime-rl", FP8, {K3: (0.0059,)}, *_hub("PrimeIntellect-ai/prime-rl#3112"),
        fault="UE8M0 scales in the trainer alone", note="the same batch",
    ),
    Report(
        "Qwen3.5-35B-A3B", 35, "rollout and training of XTuner", FP8, {K3: (3.324241e-4, 3.729346e-4)},
        *_hub("InternLM/xtuner#2044"), note="steps 1 and 2",
    ),
    Report(
        "Qwen3.5-35B-A3B", 35, "rollout and training of XTuner", FP8, {K3: (3.414027e-4, 8.691058e-3)},
        *_hub("InternLM/xtuner#2044"), fault="training quantises float32 weights, the rollout a bf16 export",
        note="steps 1 and 2",
    ),
    Report(
        "Qwen3.5-35B-A3B", 35, "vLLM, Megatron (NeMo-RL)", FP8, {K3: (0.0024, 0.0031, 0.0050)},
        *_hub("NVIDIA-NeMo/RL#2744"), note="mean of 20 steps; mean and largest of 126",
    ),
    Report(
        "Qwen3.5 9B, dense", 9, "vLLM, Megatron (NeMo-RL)", FP8, {K3: (0.0014, 0.0018)},
        *_hub("NVIDIA-NeMo/RL#2744"), note="means of 20 and of 586 steps",
    ),
    Report(
        "Qwen3.5-35B-A3B", 35, "vLLM, Megatron (NeMo-RL)", ("mxfp8", "mxfp8"), {K3: (0.00130165,)},
        *_hub("NVIDIA-NeMo/Megatron-Bridge#5917"), note="step 2",
    ),
    Report(
        "Qwen3-VL-2B-Instruct", 2, "vLLM, DTensor (NeMo-RL)", UNKNOWN, {K3: (0.14, 0.45, 1.75)},
        *_hub("NVIDIA-NeMo/RL#2260", "issues"), fault="reported as too high; cause open",
        note="least, typical in steps 1 to 20, largest",
    ),
    Report(
        "DeepSeek V4", None, "rollout of verl, VeOmni", UNKNOWN,
        {
            K3: (0.005191931966692209,), K1: (0.005346724297851324,), CHI2: (0.010833024978637695,),
            PEARSON: (0.9924913048744202,), PROB_GAP: (0.014773058705031872,),
        },
        *_hub("verl-project/verl#7242"), note="before R3 and before quantised training",
    ),
    Report(
        "Qwen3.8-Flash-Next, LoRA", None, "rollout of verl, FSDP", BF16,
        {K3: (0.00159, 0.00165), PROB_GAP: (0.00637, 0.00645)}, *_hub("verl-project/verl#7749"),
        note="means of steps 31 to 40 and 150 to 159",
    ),
    Report(
        "model of verl#7519", None, "rollout of verl, Megatron", BF16,
        {K1: (0.0063, 0.0072, 0.0081, 0.0089), PROB_GAP: (0.0156,)}, *_hub("verl-project/verl#7519"),
        note="DAPO; means of 8 steps",
    ),
    Report(
        "model of verl#7519", None, "rollout of verl, Megatron", ("mxfp8", "mxfp8"),
        {K1: (0.0095, 0.0097, 0.0092, 0.0087), PEARSON: (0.988, 0.990), CHI2: (0.023, 0.019), PROB_GAP: (0.0179,)},
        *_hub("verl-project/verl#7519"), note="DAPO; means of 8 steps, first and last; chi2: medians",
    ),
    Report(
        "model of verl#7519", None, "rollout of verl, Megatron", FP8,
        {K1: (0.0100, 0.0142, 0.0208, 0.0313), PEARSON: (0.986, 0.874), CHI2: (0.025, 0.319)},
        *_hub("verl-project/verl#7519"), fault="a scale per tensor: grows by 40 to 50 % every 8 steps",
        note="DAPO; means of 8 steps, first and last; chi2: medians",
    ),
    Report(
        "Qwen3-Omni-30B-A3B, 4 layers of it", None, "vLLM-Omni, HF with FSDP2", BF16,
        {LOGP_GAP: (0.064,), PROB_GAP: (0.004,), PEARSON: (0.998,)}, *_hub("verl-project/verl-omni#637", "issues"),
    ),
    Report(
        "Qwen3-4B, dense", 4, "vLLM, Megatron (vime)", BF16, {LOGP_GAP: (0.011,)},
        *_hub("vllm-project/vime#64", "issues"), note=NO_PRECISION + "; 30 steps, flat",
    ),
    Report(
        "Qwen3-4B, dense", 4, "SGLang, Megatron (slime)", BF16, {LOGP_GAP: (0.011, 0.036)},
        *_hub("vllm-project/vime#64", "issues"), fault="grows over 30 steps; cause open",
        note=NO_PRECISION + "; first and last step",
    ),
    Report(
        "DeepSeek-V4-Flash-0731", None, "SGLang, Megatron (miles)", UNKNOWN, {K3: (2.718e-5,), LOGP_GAP: (0.0052195,)},
        *_hub("radixark/miles#2722", "issues"), note="two-token answers that the model had overfit",
    ),
    Report(
        "DeepSeek-V4", None, "SGLang, Megatron (miles)", UNKNOWN, {LOGP_GAP: (0.045,)}, *_hub("radixark/miles#2040"),
        note="ROCm, 4 nodes",
    ),
    Report(
        "DeepSeek-V4", None, "SGLang, Megatron (miles)", UNKNOWN, {LOGP_GAP: (0.213,)}, *_hub("radixark/miles#2040"),
        fault="a scale that is transposed twice, another norm path", note="ROCm, 4 nodes",
    ),
)  # fmt: skip
"""Every report, in the order of the page."""
