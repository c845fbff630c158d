"""The check after every push: both engines score the same tokens at the same weights and must agree, or the run stops.

A push can go wrong without an error (an expert layout that is not repacked, a tensor that is left out). The engine then
samples from other weights than the trainer scores with, at a distance far beyond its precision's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lab.tensor_files import write_evidence
from scaled.config import PrecisionBlock, ProbeBlock, TrainingBlock
from theory.contracts import Prompt, Response, Rollouts, TrainingEngine
from theory.loop import StepResult
from theory.routing.passes import RoutingPlan
from theory.streams import stream

CAP = 1.0
"""The most that one token counts, nats: without replay a single router that is nearly tied can change by ten."""

# Allowed means of each format: five times those of tiny models with nothing wrong, trained and untrained, measured
# without the bound (fp16 0.005, bf16 0.009, int8 0.024, fp8 0.05, fp32 1e-6). In a trained model of two layers all
# experts of a layer one place on give 0.31 to 0.47, and two experts exchanged 0.14 to 0.24.
COMPUTE_LEVELS = {"fp32": 1e-4, "fp16": 0.025, "bf16": 0.05}
WEIGHT_LEVELS = {"same": 0.0, "int8": 0.1, "fp8_block": 0.25}
CACHE_LEVELS = {"same": 0.0, "fp8": 0.25}


class ProbeError(ArithmeticError):
    """An engine and the trainer disagree beyond the precision's level; the message names engine, numbers and evidence.

    `step` is the global step that made the weights, where a schedule trained it and has not returned it.
    """

    def __init__(self, message: str, step: StepResult | None = None):
        super().__init__(message)
        self.step = step


@runtime_checkable
class Scorer(Protocol):
    """Engines that score: by engine, log-probabilities of tokens 1.. of each sequence."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[Tensor]]:
        """As `RolloutGroup.score`."""
        ...


def allowed(block: ProbeBlock, precision: PrecisionBlock, training: TrainingBlock) -> float:
    """The limit of the mean of min(|log mu - log old|, CAP), nats per token.

    The config's own, else the sum of the levels of compute, weights and cache. The compute level is the coarser of the
    two engines'.
    """
    if block.max_mean_abs_diff is not None:
        return block.max_mean_abs_diff
    compute = max(COMPUTE_LEVELS[precision.compute], COMPUTE_LEVELS[training.precision])
    return compute + WEIGHT_LEVELS[precision.weights] + CACHE_LEVELS[precision.kv_cache]


@dataclass
class Probe:
    """Scores `num_sequences` sequences of `num_tokens` tokens with every engine and with the trainer.

    A failure leaves the tokens and all scores in the folder `evidence`, if one is given.
    """

    block: ProbeBlock
    limit: float
    precision: str
    seed: int
    is_predicted: bool = False
    evidence: Path | None = None

    def __call__(self, engines: Scorer, learner: TrainingEngine, version: int, recent: Rollouts) -> dict[str, float]:
        """The probe's metrics at weights that both have as `version`. Raises ProbeError beyond the limit, or for NaN.

        Sequences are the ends of `recent` responses, drawn without replacement, and only sampled tokens are compared:
        on those of prompts and of tools the model is far less certain, and one of them can outweigh all others.
        """
        return self.begun(engines, learner, version, recent)()

    def begun(
        self, engines: Scorer, learner: TrainingEngine, version: int, recent: Rollouts
    ) -> Callable[[], dict[str, float]]:
        """The trainer's half now; the engines' half, and the metrics, when the result is called."""
        sequences, masks = self._sequences(version, recent)
        trainer = self._trainer_scores(learner, sequences, version)
        return lambda: self._compared(engines, sequences, masks, trainer, version)

    def _compared(
        self, engines: Scorer, sequences: list[list[int]], masks: list[Tensor], trainer: list[Tensor], version: int
    ) -> dict[str, float]:
        means, largest = [], 0.0
        is_sampled = torch.cat(masks)
        scored = engines.score(sequences)
        for i, scores in enumerate(scored):
            diff = (torch.cat(scores).double() - torch.cat(trainer).double())[is_sampled].abs()
            mean = diff.clamp(max=CAP).mean().item()
            if not mean <= self.limit:  # so that NaN fails too
                raise ProbeError(
                    f"engine {i} ({self.precision}) disagrees with the trainer after the push of version {version}: "
                    f"mean |log mu - log old|, at most {CAP:g} each, is {mean:.3g} nats per token, "
                    f"allowed {self.limit:.3g} (probe.max_mean_abs_diff)"
                    f"{self._kept(version, sequences, is_sampled, trainer, scored)}"
                )
            means.append(mean)
            largest = max(largest, diff.max().item())
        return {"probe/mean_abs_diff": max(means), "probe/max_abs_diff": largest}

    def _kept(
        self,
        version: int,
        sequences: list[list[int]],
        is_sampled: Tensor,
        trainer: list[Tensor],
        engines: list[list[Tensor]],
    ) -> str:
        """Where tokens and scores are now, as a clause; empty without a folder for them.

        `tokens` follow each other, sequence b from offsets[b] on. Of scores each sequence has one less than tokens:
        `logp_old`, and a row of `logp_mu` per engine.
        """
        if self.evidence is None:
            return ""
        path = self.evidence / f"probe-{version:06d}.safetensors"
        tensors = {
            "tokens": torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int32),
            "offsets": torch.tensor([0, *map(len, sequences)]).cumsum(0),
            "is_sampled": is_sampled,
            "logp_old": torch.cat(trainer).float(),
            "logp_mu": torch.stack([torch.cat(scores).float() for scores in engines]),
        }
        return write_evidence(path, tensors, {"version": str(version), "engine": self.precision}, "tokens and scores")

    def _sequences(self, version: int, recent: Rollouts) -> tuple[list[list[int]], list[Tensor]]:
        """The ends of some responses, prompts included, and for tokens 1.. of each whether the engine sampled them."""
        num, length = self.block.num_sequences, self.block.num_tokens
        chosen = torch.randperm(len(recent), generator=stream(self.seed, "probe", version))[:num].tolist()
        sequences, masks = [], []
        for response in (recent.responses[b] for b in chosen):
            prompt = response.prompt.tokens
            is_sampled = torch.cat([torch.zeros(len(prompt), dtype=torch.bool), response.is_response])
            # A conversation may end with a tool's answer, longer than the probe.
            end = int(is_sampled.nonzero().max()) + 1
            sequences.append([*prompt, *response.tokens.tolist()][:end][-length:])
            # Scores begin with a sequence's token 1, as nothing predicts token 0.
            masks.append(is_sampled[:end][-length:][1:])
        return sequences, masks

    def _trainer_scores(self, learner: TrainingEngine, sequences: list[list[int]], version: int) -> list[Tensor]:
        plan = RoutingPlan("natural")
        if self.is_predicted:
            # The engine's gates hold W + W_p: it chooses and weighs by the predicted logits.
            plan = RoutingPlan("predicted", gates="predicted", predictor=learner.predictor_weights())
        logp_BT = learner.score(_as_rollouts(sequences, version), plan).logp_BT
        return [logp_BT[b, : len(tokens) - 1] for b, tokens in enumerate(sequences)]


def describe(precision: PrecisionBlock) -> str:
    """An engine's precision in words."""
    parts = [precision.compute]
    if precision.weights != "same":
        parts.append(f"{precision.weights} weights")
    if precision.kv_cache != "same":
        parts.append(f"{precision.kv_cache} cache")
    return ", ".join(parts)


def _as_rollouts(sequences: list[list[int]], version: int) -> Rollouts:
    """Sequences as responses to a prompt of one token, so that an old pass scores all that follow."""
    responses = []
    for tokens in sequences:
        T = len(tokens) - 1
        responses.append(
            Response(
                prompt=Prompt("probe", tuple(tokens[:1]), ""),
                tokens=torch.tensor(tokens[1:], dtype=torch.int64),
                logp_mu=torch.zeros(T),
                is_response=torch.ones(T, dtype=torch.bool),
                finish="length",
                version=version,
            )
        )
    return Rollouts(tuple(responses))


__all__ = ["Probe", "ProbeError", "allowed", "describe"]
