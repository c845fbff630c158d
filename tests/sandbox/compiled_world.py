"""The world of the compiled kernels' tests: one small model per convention, and both sets of kernels."""

from __future__ import annotations

from dataclasses import replace

from sandbox.engines.engine import SandboxEngine
from sandbox.kernels import choose
from sandbox.model import MoE
from sandbox.model.config import ModelConfig
from sandbox.training.engine import SandboxTrainingEngine
from tests.contracts import worlds
from theory.algorithm import OptimizerSettings
from theory.routing.gates import GATES
from theory.routing.predictor import PredictorSettings
from theory.streams import stream

COMPILED = choose(True)

_BASE = worlds.model_config()
MODELS: dict[str, ModelConfig] = {
    "qwen3": _BASE,
    "olmoe": replace(_BASE, gate=GATES["olmoe"], qk_norm="projection", experts_per_token=3),
    "mixtral": replace(_BASE, gate=GATES["mixtral"], qk_norm="none", tied_head=True, num_kv_heads=4),
    "softmax after": replace(_BASE, gate=GATES["softmax_after"], dense_layers=(0, 2)),
    "deepseek_v2": replace(_BASE, gate=GATES["deepseek_v2"], num_experts=16, shared_expert_size=20),
    "deepseek_v3": replace(
        _BASE, gate=GATES["deepseek_v3"], num_experts=16, dense_layers=(0,), shared_expert_size=24, expert_size=13
    ),
    "shared gate": replace(_BASE, shared_expert_size=16, shared_expert_gate=True, dense_layers=(1,)),
    "no experts": replace(_BASE, dense_layers=(0, 1, 2)),
    "narrow heads": replace(_BASE, head_dim=6, hidden_size=30),
    "wide heads": replace(_BASE, head_dim=40, num_heads=3, num_kv_heads=1, hidden_size=33),
}


def model(name: str, seed: int = 0) -> MoE:
    """Fresh weights, with selection biases that change choices."""
    made = MoE(MODELS[name], stream(seed, "compiled-model"), COMPILED)
    for buffer_name, buffer in made.named_buffers():
        if buffer_name.endswith("selection_bias"):
            buffer.uniform_(-0.3, 0.3, generator=stream(seed, "compiled-bias"))
    return made


def copy_of(weights: MoE, kernels=COMPILED) -> MoE:
    """The same weights in another model, with these kernels."""
    made = MoE(weights.config, kernels=kernels)
    made.load_state_dict(weights.state_dict())
    return made


def engine(weights: MoE, **options) -> SandboxEngine:
    """The exact engine with the model's weights and kernels."""
    made = SandboxEngine(weights.config, (), (worlds.STOP,), kernels=weights.kernels, **options)
    made.load_model(weights, version=0)
    return made


def trainer(
    weights: MoE, predictor: PredictorSettings | None = None, kernels=COMPILED, **options
) -> SandboxTrainingEngine:
    """A training engine over a copy of the model."""
    settings = OptimizerSettings(learning_rate=1e-2, weight_decay=0.0)
    return SandboxTrainingEngine(copy_of(weights, kernels), settings, predictor, **options)
