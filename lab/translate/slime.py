"""slime 0.3.1: arguments of its train.py, whose own loss is Megatron's."""

from __future__ import annotations

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
from theory.objectives.corrections.weights import IcePop, TokenClip, TokenIS, TokenTIS
from theory.objectives.presets.dual_clip import DualClip
from theory.objectives.trust_regions import MinClip, WeightClip
from theory.objectives.trust_regions.ratio_bounds import RatioBounds

ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"


def to_slime(algorithm: Algorithm) -> Translation:
    """The algorithm as arguments of slime's train.py; an option whose value is True is a flag."""
    into, objective = Translation("slime 0.3.1", "arguments of train.py"), algorithm.objective
    refuse_extras(into, algorithm, replays=("R2", "R3"))
    _loss(into, objective)
    if objective.advantage == "group_mean":
        into.add(**{"disable-grpo-std-normalization": True})
    elif objective.advantage != "group_norm":
        into.lacks(f"advantage {objective.advantage}", "slime has the group's mean, with and without its deviation")
    _weights(into, objective)
    _penalty(into, objective)
    into.add(**{"entropy-coef": 0.0})
    if algorithm.mode in ("R2", "R3"):
        into.add(**{"use-routing-replay" if algorithm.mode == "R2" else "use-rollout-routing-replay": True})
    into.add(**{"rollout-temperature": algorithm.temperature, "rollout-top-p": 1.0, "rollout-top-k": -1})
    into.notes.append("A model script's --moe-aux-loss-coeff, where it is not 0, adds the load-balancing loss.")
    _sizes(into, algorithm)
    return into


def _loss(into: Translation, objective: Objective) -> None:
    """The estimator, which also names the loss, its bounds and its denominator."""
    region, ratio, sums = objective.trust_region, objective.ratio.name, objective.aggregation.name
    if isinstance(region, DualClip) and ratio == "token":
        if region.clip_ratio_c <= 1:
            into.lacks(f"clip_ratio_c {region.clip_ratio_c:g}", "slime's is above 1")
        found = _bounds("grpo", region.eps_low, region.eps_high) | {"eps-clip-c": region.clip_ratio_c}
    elif isinstance(region, RatioBounds) and is_plain_clip(objective):
        found = _bounds("grpo", region.eps_low, region.eps_high)
    elif type(region) is MinClip and ratio in GEOMETRIC:
        found = _bounds("gspo", region.eps_low, region.eps_high)
        # As in TRL, the ratio is the response's, whose gradient reaches every token, whatever the token's own weight.
        if ratio == "sequence_geometric_token" and objective.correction.weighted:
            into.lacks("GSPO-token with a weight", "slime has GSPO, which differs then")
    elif isinstance(region, WeightClip) and ratio == "token":
        found = _bounds("cispo", region.eps_low, region.eps_high)
    else:
        into.lacks_loss(objective, "slime has the losses of GRPO, GSPO and CISPO")
        return
    into.add(**found)
    if sums == "token_mean":
        into.add(**{"calculate-per-token-loss": True})
    elif sums != "length_norm":
        into.lacks(
            f"aggregation {sums}",
            "slime has means over responses or tokens; --custom-pg-loss-reducer-function-path takes others",
        )


def _bounds(estimator: str, low: float, high: float) -> dict[str, Any]:
    return {"advantage-estimator": estimator, "eps-clip": min(low, NEVER), "eps-clip-high": min(high, NEVER)}


def _weights(into: Translation, objective: Objective) -> None:
    """The weight of the engine gap, on old/mu."""
    weight = objective.correction
    if objective.rejection.name != "none" or (weight.name != "none" and not weight.weighted):
        into.lacks("a rejection", "slime's own functions reject nothing; its example mis.py has some, in its own file")
    if objective.normalise_weights:
        into.lacks("normalise_weights", "no such option")
    if not weight.weighted or not require_old_numerator(into, objective):
        return
    match weight:
        case TokenIS():
            low, high = 0.0, NEVER
        case TokenTIS():
            low, high = 0.0, weight.cap
        case TokenClip() | IcePop():
            low, high = weight.lo, weight.hi
        case _:
            into.lacks(f"correction {weight.name}", "slime's own weights are of tokens; its example mis.py has others")
            return
    into.add(**{"use-tis": True, "tis-clip": min(high, NEVER), "tis-clip-low": low})
    if isinstance(weight, IcePop):
        into.add(**{"custom-tis-function-path": ICEPOP})


def _penalty(into: Translation, objective: Objective) -> None:
    if objective.kl_coefficient == 0:
        return
    if objective.kl_estimator not in ("k1", "k2", "k3"):
        into.lacks(f"KL estimator {objective.kl_estimator}", "slime has k1, k2, k3, and each times pi/old")
    into.add(**{"use-kl-loss": True, "kl-loss-coef": objective.kl_coefficient, "kl-loss-type": objective.kl_estimator})


def _sizes(into: Translation, algorithm: Algorithm) -> None:
    """Batch, lengths and optimiser; the last with Megatron's own arguments."""
    N, optimizer = algorithm.num_minibatches, algorithm.optimizer
    sizes: dict[str, Any] = {
        "rollout-batch-size": algorithm.num_prompts,
        "n-samples-per-prompt": algorithm.num_responses,
        "num-steps-per-rollout": N,
        "rollout-max-response-len": algorithm.max_tokens,
        "optimizer": "adam",
        "lr": optimizer.learning_rate,
        "lr-decay-style": "constant",
        "lr-warmup-iters": optimizer.warmup_steps,
        "weight-decay": optimizer.weight_decay,
        "adam-beta1": optimizer.betas[0],
        "adam-beta2": optimizer.betas[1],
        "adam-eps": optimizer.eps,
        "clip-grad": optimizer.max_grad_norm,
    }
    into.sizes += [Option(name, value) for name, value in sizes.items()]
    into.notes.append(f"N = {N} updates per rollout: --num-steps-per-rollout {N}.")
    if N > 1 and algorithm.shuffle == "responses":
        into.notes.append("slime cuts mini-batches of whole groups (batch.shuffle: groups).")
    if optimizer.warmup_steps:
        into.notes.append("Megatron's warm-up is an update later than ours: the first one has a learning rate of 0.")
    if optimizer.weight_decay:
        into.notes.append("Megatron leaves norms and biases out of weight decay.")


__all__ = ["to_slime"]
