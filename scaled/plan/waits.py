"""The longest wait for an engine in a rollout, to which `rollout.timeout_s` applies: it samples a piece of prompts."""

from __future__ import annotations

from dataclasses import dataclass

from lab.hf import ModelShape
from scaled.config import ScaledRun
from scaled.pieces import in_pieces
from scaled.plan import compute
from scaled.plan.conditions import evaluated_prompts
from scaled.plan.hardware import Gpu


@dataclass(frozen=True)
class Wait:
    """An estimated wait, and what is waited for."""

    what: str
    seconds: float


def longest_wait(config: ScaledRun, shape: ModelShape, gpu: Gpu, mean_tokens: int, longest_tokens: int) -> Wait:
    """The time of the largest piece, evaluations included, with a response of `longest_tokens` in every place.

    Meanwhile the engine is full: it decodes `max_num_seqs` responses, whose contexts have the mean length. What it gets
    later does not delay the piece, as vLLM takes requests in their order. Where each engine has one share of the
    prompts, the wait is the whole rollout if that lasts longer.
    """
    rollout = config.rollout
    num, tokens = largest_piece(config), min(config.algorithm.sampling.max_tokens, longest_tokens)
    # More responses than places are decoded in turns.
    steps = -(-num // rollout.max_num_seqs) * tokens
    each = compute.decode_step_seconds(config, shape, gpu, rollout.max_num_seqs, mean_tokens)
    found = [Wait(f"a piece of {num} responses of {tokens:,} tokens", steps * each)]
    if _has_shares(config):
        seconds = compute.rollout_seconds(config, shape, gpu, mean_tokens, longest_tokens)
        found.append(Wait("the rollout, of which each engine has a share", seconds))
    return max(found, key=lambda wait: wait.seconds)


def largest_piece(config: ScaledRun) -> int:
    """The most responses of a piece, in training or in an evaluation."""
    batch, evaluation = config.algorithm.batch, config.evaluation
    asked = [(evaluated_prompts(config), evaluation.num_samples)]
    if not _has_shares(config):
        asked.append((batch.num_prompts, batch.num_responses))
    return max(
        piece.num_responses
        for num_prompts, num_responses in asked
        for piece in in_pieces([None] * num_prompts, num_responses, config.rollout.num_engines)
    )


def _has_shares(config: ScaledRun) -> bool:
    """Whether rollouts end early and record features (Pr3): these go out in shares (`rollout_group`)."""
    algorithm = config.algorithm.build()
    return algorithm.oversampling is not None and algorithm.passes.rollout == "predicted"


__all__ = ["Wait", "largest_piece", "longest_wait"]
