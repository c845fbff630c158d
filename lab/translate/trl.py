"""TRL 1.16: arguments of GRPOConfig."""

from __future__ import annotations

import math
from typing import Any

from lab.translate.translation import (
    GEOMETRIC,
    NEVER,
    Option,
    Translation,
    is_plain_clip,
    refuse_extras,
    require_old_numerator,
)
from theory.algorithm import Algorithm
from theory.objectives import Objective
from theory.objectives.corrections.weights import IcePop, SeqClip, SeqTIS, TokenClip, TokenIS, TokenTIS
from theory.objectives.presets.deepseek import SequenceMask
from theory.objectives.presets.dual_clip import DualClip
from theory.objectives.presets.gmpo import GeometricClip
from theory.objectives.presets.sapo import SoftGate
from theory.objectives.presets.vespo import GammaKernel
from theory.objectives.trust_regions import MinClip, WeightClip
from theory.objectives.trust_regions.ratio_bounds import RatioBounds

CLIPPED = {"length_norm": "grpo", "token_mean": "dapo"}
SCALES = {"group_norm": "group", "group_mean": "none"}
FIX = "vllm_importance_sampling"


def to_trl(algorithm: Algorithm) -> Translation:
    """The algorithm as arguments of `trl.GRPOConfig`."""
    into, objective = Translation("TRL 1.16", "arguments of trl.GRPOConfig"), algorithm.objective
    refuse_extras(into, algorithm, replays=())
    if objective.advantage in SCALES:
        into.add(scale_rewards=SCALES[objective.advantage])
    else:
        into.lacks(f"advantage {objective.advantage}", "TRL has the group's mean, with and without its deviation")
    if objective.advantage == "group_norm":
        into.notes.append("TRL adds 1e-4 to the deviation by which it divides.")
    _loss(into, objective)
    _weights(into, objective)
    _penalty(into, objective)
    into.add(num_iterations=1, use_vllm=True, temperature=algorithm.temperature, top_p=1.0, top_k=0)
    # Without it TRL adds the load-balancing loss that the model's config states, for Qwen3-MoE with a factor of 1e-3.
    into.add(router_aux_loss_coef=0.0)
    _sizes(into, algorithm)
    return into


def _loss(into: Translation, objective: Objective) -> None:
    """The loss, its level and its bounds."""
    region, ratio, sums = objective.trust_region, objective.ratio.name, objective.aggregation.name
    if isinstance(region, DualClip) and ratio == "token":
        found = _clip(into, region, sums, CLIPPED) | {"delta": region.clip_ratio_c}
        # TRL's delta holds the ratio of either sign of A; above PPO's own bound it has no effect where A > 0.
        if region.clip_ratio_c < 1 + region.eps_high:
            into.lacks(f"clip_ratio_c {region.clip_ratio_c:g} below 1 + eps_high", "TRL's delta bounds A > 0, too")
    elif isinstance(region, SequenceMask) and ratio == "token":
        found = _clip(into, region, sums, CLIPPED) | {"off_policy_mask_threshold": region.delta}
    elif isinstance(region, RatioBounds) and is_plain_clip(objective):
        found = _clip(into, region, sums, CLIPPED)
    elif type(region) is MinClip and ratio in GEOMETRIC:
        # The sum over tokens is LUSPO's, whose term is |y| times GSPO's.
        found = _clip(into, region, sums, CLIPPED | {"token_sum": "luspo"}) | {"importance_sampling_level": "sequence"}
        # TRL's ratio is the response's: its gradient reaches every token, whatever the token's own weight.
        if ratio == "sequence_geometric_token" and objective.correction.weighted:
            into.lacks("GSPO-token with a weight", "TRL has GSPO, which differs then")
    elif isinstance(region, WeightClip) and ratio == "token" and region.eps_low == 1:
        found = {"loss_type": "cispo", "epsilon_high": min(1 + region.eps_high, NEVER)}
        _require(into, sums, "token_mean", "cispo")
    elif isinstance(region, SoftGate) and ratio == "token":
        taus = {"sapo_temperature_pos": region.tau_pos, "sapo_temperature_neg": region.tau_neg}
        found = {"loss_type": "sapo"} | taus
        _require(into, sums, "length_norm", "sapo")
    elif isinstance(region, GammaKernel) and ratio == "token":
        powers = {"vespo_k_pos": region.k_pos, "vespo_k_neg": region.k_neg}
        decays = {"vespo_lambda_pos": region.lambda_pos, "vespo_lambda_neg": region.lambda_neg}
        found = {"loss_type": "vespo"} | powers | decays
        _require(into, sums, "token_mean", "vespo")
    else:
        is_gmpo = isinstance(region, GeometricClip)
        into.lacks_loss(objective, "it is in GMPOTrainer, not here" if is_gmpo else "GRPOConfig has no such loss")
        return
    into.add(**found)


def _clip(into: Translation, region: RatioBounds, sums: str, losses: dict[str, str]) -> dict[str, Any]:
    if sums not in losses:
        into.lacks(f"aggregation {sums}", 'TRL\'s "dr_grpo" divides by max_completion_length as well')
    bounds = {"epsilon": region.eps_low, "epsilon_high": min(region.eps_high, NEVER)}
    return {"loss_type": losses.get(sums, "dr_grpo")} | bounds


def _require(into: Translation, sums: str, wanted: str, loss: str) -> None:
    if sums != wanted:
        into.lacks(f"aggregation {sums}", f"TRL's {loss} has {wanted} alone")


def _weights(into: Translation, objective: Objective) -> None:
    """The weight of the engine gap. TRL's VESPO reads the ratios themselves, so that they must not be cut."""
    weight = objective.correction
    if objective.rejection.name != "none" or (weight.name != "none" and not weight.weighted):
        into.lacks("a rejection", "TRL gives a rejected response the weight 0, and leaves it in the denominators")
    if objective.normalise_weights:
        into.lacks("normalise_weights", "no such option")
    if isinstance(objective.trust_region, GammaKernel):
        into.add(**{f"{FIX}_correction": True, f"{FIX}_mode": "token_truncate"})
        into.add(**{f"{FIX}_clip_min": None, f"{FIX}_clip_max": None})
        return
    if not weight.weighted:
        into.add(**{f"{FIX}_correction": False})
        return
    if not require_old_numerator(into, objective):
        return
    match weight:
        case TokenIS():
            mode, low, high = "token_truncate", None, None
        case TokenTIS():
            mode, low, high = "token_truncate", None, weight.cap
        case TokenClip():
            mode, low, high = "token_truncate", weight.lo, weight.hi
        case SeqTIS():
            mode, low, high = "sequence_truncate", None, weight.cap
        case SeqClip():
            mode, low, high = "sequence_truncate", weight.lo, weight.hi
        case IcePop():
            mode, low, high = "token_mask", weight.lo, weight.hi
        case _:
            into.lacks(f"correction {weight.name}", "TRL has no such weight")
            return
    bounds = {f"{FIX}_clip_min": low, f"{FIX}_clip_max": None if high == math.inf else high}
    into.add(**{f"{FIX}_correction": True, f"{FIX}_mode": mode}, **bounds)


def _penalty(into: Translation, objective: Objective) -> None:
    into.add(beta=objective.kl_coefficient)
    if objective.kl_coefficient == 0:
        return
    if objective.kl_estimator != "k3":
        into.lacks(f"KL estimator {objective.kl_estimator}", "TRL has k3, and k3 times pi/old")
    into.add(use_bias_correction_kl=False)


def _sizes(into: Translation, algorithm: Algorithm) -> None:
    """Batch, lengths and optimiser."""
    N, optimizer = algorithm.num_minibatches, algorithm.optimizer
    sizes: dict[str, Any] = {
        "generation_batch_size": algorithm.num_prompts * algorithm.num_responses,
        "num_generations": algorithm.num_responses,
        "max_completion_length": algorithm.max_tokens,
        "learning_rate": optimizer.learning_rate,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "warmup_steps": optimizer.warmup_steps,
        "lr_scheduler_type": "constant_with_warmup" if optimizer.warmup_steps else "constant",
    }
    into.sizes += [Option(name, value) for name, value in sizes.items()]
    into.notes.append(f"N = {N} updates per rollout: steps_per_generation is {N} x gradient_accumulation_steps.")
    if N > 1:
        if algorithm.shuffle == "groups":
            into.notes.append(
                "TRL shuffles responses, so mini-batches do not keep groups whole (batch.shuffle: responses)."
            )
        if algorithm.objective.aggregation.name == "token_mean":
            into.notes.append("TRL divides by an Nth of the rollout's tokens, not by the mini-batch's own.")
    if optimizer.warmup_steps:
        into.notes.append("TRL's warm-up is an update later than ours: the first one has a learning rate of 0.")
    if optimizer.weight_decay:
        into.notes.append("TRL leaves norms out of weight decay.")


__all__ = ["to_trl"]
