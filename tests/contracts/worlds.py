"""The worlds of the contract suite: a row per rollout engine and one per training engine, over the same tiny model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sandbox.engines import (
    ActivationPrecision,
    ExpertLayout,
    KVPrecision,
    LogitNoise,
    PartialWeights,
    ReductionOrder,
    RoutedScaling,
    RouterNoise,
    SamplingMismatch,
    WeightPrecision,
)
from sandbox.engines.defect import Defect
from sandbox.engines.engine import SandboxEngine
from sandbox.model import MoE
from sandbox.model.config import ModelConfig
from sandbox.training.engine import SandboxTrainingEngine
from theory.algorithm import OptimizerSettings
from theory.contracts import Prompt, Response, Rollouts
from theory.routing.gates import GATES
from theory.routing.predictor import PredictorSettings
from theory.streams import stream

VOCABULARY = 13
STOP = 1
STOPS = (STOP, 7)  # as a model's generation config may name several

DEFECTS: dict[str, tuple[Defect, ...]] = {
    "exact": (),
    "weights-bf16": (WeightPrecision(format="bf16"),),
    "weights-fp8-channel": (WeightPrecision(format="fp8_e4m3", scale="channel"),),
    "weights-fp8-tensor": (WeightPrecision(format="fp8_e4m3", scale="tensor"),),
    "activations-bf16": (ActivationPrecision(format="bf16"),),
    "activations-fp8": (ActivationPrecision(format="fp8_e4m3"),),
    "router-noise": (RouterNoise(std=0.3),),
    "cache-fp8": (KVPrecision(),),
    "reduction-order": (ReductionOrder(),),
    "experts-never-arrive": (PartialWeights(missing="experts"),),
    "experts-one-place-on": (ExpertLayout(),),
    "routed-sum": (RoutedScaling(),),
    "logit-noise": (LogitNoise(std=0.3),),
    "truncated": (SamplingMismatch(top_p=0.95),),
    "processed-scores": (SamplingMismatch(temperature=1.2, score="processed"),),
    "fp8-and-noise": (WeightPrecision(), ActivationPrecision(), RouterNoise(std=0.1)),
}


def model_config(gate: str = "qwen3", num_experts: int = 8, dense_layers: tuple[int, ...] = ()) -> ModelConfig:
    """Three layers, width 32; small enough that a law runs in milliseconds."""
    return ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        num_experts=num_experts,
        experts_per_token=2,
        expert_size=24,
        dense_size=48,
        dense_layers=dense_layers,
        gate=GATES[gate],
    )


def model(seed: int = 0, **kwargs) -> MoE:
    """A fresh model whose weights depend on the seed alone."""
    return MoE(model_config(**kwargs), stream(seed, "contract-model"))


def rollout_engine(name: str, weights: MoE, stop_tokens: Sequence[int] = (STOP,)) -> SandboxEngine:
    """The engine of that name, holding the model's weights as version 0; what it withholds are another model's."""
    engine = SandboxEngine(weights.config, DEFECTS[name], stop_tokens=stop_tokens)
    if any(isinstance(defect, PartialWeights) for defect in DEFECTS[name]):
        engine.load_model(model(seed=1, num_experts=weights.config.num_experts), version=-1)
    engine.load_model(weights, version=0)
    return engine


def training_engine(
    weights: MoE, predictor: PredictorSettings | None = None, learning_rate: float = 1e-2, **options
) -> SandboxTrainingEngine:
    """A training engine over a copy of the model."""
    copy = MoE(weights.config, stream(0, "overwritten"), weights.kernels)
    copy.load_state_dict(weights.state_dict())
    settings = OptimizerSettings(learning_rate=learning_rate, weight_decay=0.0)
    return SandboxTrainingEngine(copy, settings, predictor, **options)


def prompts(num: int = 4) -> list[Prompt]:
    """Prompts of different lengths, shorter than a kernel's smallest row count and longer."""
    draws = stream(0, "contract-prompts")
    lengths = [3, 9, 5, 1, 12, 7]
    return [
        Prompt(str(i), tuple(torch.randint(2, VOCABULARY, (lengths[i % 6],), generator=draws).tolist()), "")
        for i in range(num)
    ]


class EvenTokens:
    """A task with a dense reward: the share of even tokens among those sampled."""

    def prompts(self, step: int, num_prompts: int) -> Sequence[Prompt]:
        draws = stream(step, "even-tokens")
        lengths = torch.randint(2, 8, (num_prompts,), generator=draws).tolist()
        return [
            Prompt(f"{step}-{i}", tuple(torch.randint(2, VOCABULARY, (n,), generator=draws).tolist()), "")
            for i, n in enumerate(lengths)
        ]

    def held_out(self) -> Sequence[Prompt]:
        return self.prompts(-1, 4)

    def reward(self, prompt: Prompt, response: Response) -> float:
        return float((response.tokens % 2 == 0).float().mean())


ROLLOUT_ENGINES: dict[str, Callable[[MoE], SandboxEngine]] = {
    name: (lambda weights, name=name: rollout_engine(name, weights, STOPS)) for name in DEFECTS
}


def same(a: Rollouts, b: Rollouts) -> bool:
    """Whether tokens, log-probs and routes, where they were recorded, are equal bit for bit."""
    if a.experts is None or b.experts is None:
        are_routes_same = a.experts is b.experts
    else:
        are_routes_same = torch.equal(a.experts.experts, b.experts.experts)
    return are_routes_same and all(
        torch.equal(x.tokens, y.tokens) and torch.equal(x.logp_mu, y.logp_mu)
        for x, y in zip(a.responses, b.responses, strict=True)
    )
