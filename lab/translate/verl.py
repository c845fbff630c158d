"""verl 0.9.1: Hydra overrides of its PPO trainer on Megatron-core, whose actor has the routing replay."""

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
from theory.objectives import Correction, Objective
from theory.objectives.corrections.rejections import K3RS, GeoRS, SeqMaxK2, SeqMaxK3, SeqMIS
from theory.objectives.corrections.weights import IcePop, SeqTIS, TokenIS, TokenTIS
from theory.objectives.presets.dual_clip import DualClip
from theory.objectives.presets.gmpo import GeometricClip
from theory.objectives.presets.sapo import SoftGate
from theory.objectives.trust_regions import BinaryKL, BinaryTV, MinClip, WeightClip
from theory.objectives.trust_regions.base import Widths

ACTOR, ROLLOUT, FIX = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.rollout_correction"
AGGREGATIONS = {"token_mean": "token-mean", "length_norm": "seq-mean-token-mean", "token_sum": "seq-mean-token-sum"}
ADVANTAGES = {
    "group_mean": "grpo",
    "group_norm": "grpo",
    "leave_one_out": "rloo",
    "opo": "opo",
    "reinforce_pp": "reinforce_plus_plus",
    "reinforce_pp_baseline": "reinforce_plus_plus_baseline",
    "optimal_token": "tir_optimal_token_baseline",
}
KLS = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "k3+": "k3+"}
REPLAYS = ("R2", "R3")


def to_verl(algorithm: Algorithm) -> Translation:
    """The algorithm as overrides of `python -m verl.trainer.main_ppo`."""
    into, objective = Translation("verl 0.9.1", "overrides of verl.trainer.main_ppo"), algorithm.objective
    refuse_extras(into, algorithm, REPLAYS)
    _add(into, "algorithm", adv_estimator=ADVANTAGES[objective.advantage])
    if ADVANTAGES[objective.advantage] == "grpo":
        _add(into, "algorithm", norm_adv_by_std_in_grpo=objective.advantage == "group_norm")
    if objective.has_token_advantages:
        _add(into, ACTOR, calculate_sum_pi_squared=True)
    _loss(into, objective)
    _add(into, ACTOR, loss_agg_mode=AGGREGATIONS[objective.aggregation.name], entropy_coeff=0)
    _weights(into, objective)
    _penalty(into, objective)
    if algorithm.mode in REPLAYS:
        _add(into, f"{ACTOR}.megatron.router_replay", mode=algorithm.mode)
        _add(into, ROLLOUT, enable_rollout_routing_replay=algorithm.mode == "R3")
    _add(into, ROLLOUT, temperature=algorithm.temperature, top_p=1.0, top_k=-1)
    _add(into, ACTOR, ppo_epochs=1)
    _sizes(into, algorithm)
    return into


def _add(into: Translation, under: str, **options: Any) -> None:
    into.add(**{f"{under}.{name}": value for name, value in options.items()})


def _loss(into: Translation, objective: Objective) -> None:
    """The policy loss and its bounds."""
    region, ratio = objective.trust_region, objective.ratio.name
    numbers: dict[str, Any] = {}
    if isinstance(region, DualClip) and ratio == "token":
        name, numbers = "vanilla", {"clip_ratio_c": region.clip_ratio_c}
    elif is_plain_clip(objective):
        # verl's vanilla loss always has a dual clip, at 3 by default.
        name, numbers = "vanilla", {"clip_ratio_c": NEVER}
        into.notes.append("clip_ratio_c never binds: verl's loss always has a dual clip, this recipe has none.")
    elif type(region) is MinClip and ratio in GEOMETRIC:
        name = "gspo"
        # Its gradient goes through each token's own log pi: the response's only where all its tokens weigh alike.
        if ratio == "sequence_geometric" and objective.correction.weighted and not objective.correction.per_response:
            into.lacks(f"{objective.name} with a weight per token", "verl's gspo is GSPO-token, which differs then")
    elif isinstance(region, WeightClip) and ratio == "token":
        name = "cispo"
    elif isinstance(region, SoftGate) and ratio == "token":
        name, numbers = "sapo", {"tau_pos": region.tau_pos, "tau_neg": region.tau_neg}
        _require_length_norm(into, objective, name)
    elif isinstance(region, GeometricClip) and ratio == "token":
        name = "geo_mean"
        _require_length_norm(into, objective, name)
        weight = objective.correction
        if weight.weighted and not weight.per_response:
            into.lacks(f"{objective.name} with a weight per token", "verl's geo_mean takes the weights' geometric mean")
    else:
        is_dppo = isinstance(region, BinaryTV | BinaryKL)
        why = f"verl's {region.name} compares pi with old instead of mu" if is_dppo else "verl has no such loss"
        into.lacks_loss(objective, why)
        return
    if isinstance(region, Widths):
        numbers |= {"clip_ratio_low": region.eps_low, "clip_ratio_high": region.eps_high}
    _add(into, f"{ACTOR}.policy_loss", loss_mode=name)
    _add(into, ACTOR, **{name: min(value, NEVER) for name, value in numbers.items()})


def _require_length_norm(into: Translation, objective: Objective, loss: str) -> None:
    # Both losses ignore loss_agg_mode.
    if objective.aggregation.name != "length_norm":
        into.lacks(f"aggregation {objective.aggregation.name}", f"verl's {loss} averages over each response")


def _weights(into: Translation, objective: Objective) -> None:
    """Weights and rejections of the engine gap; both engines' log-probabilities are kept, and old is computed."""
    _add(into, ROLLOUT, calculate_log_probs=True)
    _add(into, FIX, bypass_mode=False)
    weight = objective.correction
    found = _weight(weight) if require_old_numerator(into, objective) else None
    if weight.weighted and weight.numerator == "old" and found is None:
        into.lacks(f"correction {weight.name}", "verl has no such weight")
    level, threshold = found or (None, None)
    _add(into, FIX, rollout_is=level)
    if level is not None:
        _add(into, FIX, rollout_is_threshold=threshold, rollout_is_batch_normalize=objective.normalise_weights)
    _rejections(into, objective)


def _rejections(into: Translation, objective: Objective) -> None:
    """The rejection, as nearly as verl has it; more than one, and those of tokens, are left out."""
    rejections = [one for one in (objective.correction, objective.rejection) if _rejects(one)]
    rules = [rule for one in rejections if (rule := _rejection(one)) is not None]
    for one in rejections:
        is_token = _rejection(one) is None
        why = (
            "verl takes the token out of the denominators"
            if is_token
            else "verl leaves the response in the denominators"
        )
        into.lacks(f"rejection {one.name}", f"{why}, unlike the objective here")
    if rejections and objective.normalise_weights:
        into.lacks("normalise_weights beside a rejection", "verl's mean weight is over rejected responses, too")
    if len(rules) > 1:
        into.lacks("two rejections", "not translated")
    option, threshold = rules[0] if len(rules) == 1 else (None, None)
    _add(into, FIX, rollout_rs=option)
    if option is not None:
        _add(into, FIX, rollout_rs_threshold=threshold)


def _rejects(one: Correction) -> bool:
    return one.name != "none" and (not one.weighted or one.rejection != "")


def _weight(weight: Correction) -> tuple[str, float | str] | None:
    """verl's level and threshold of a weight on old/mu; None where it has no such weight, or where none is used."""
    match weight:
        case TokenIS():
            return "token", NEVER
        case SeqMIS():
            return "sequence", NEVER
        case TokenTIS():
            return "token", min(weight.cap, NEVER)
        case SeqTIS():
            return "sequence", min(weight.cap, NEVER)
        case IcePop():
            return "token", f"{weight.lo:.10g}_{min(weight.hi, NEVER):.10g}"
        case _:
            return None


def _rejection(one: Correction) -> tuple[str, float | str] | None:
    """verl's name and threshold of a rejection of responses; its k1 is log(mu/old), so that bounds are inverted."""
    match one:
        case SeqMIS() | GeoRS():
            # verl takes the logarithm of both bounds.
            low, high = max(1 / one.hi, 1 / NEVER), NEVER if one.lo == 0 else min(1 / one.lo, NEVER)
            return one.verl_mode, f"{low:.10g}_{high:.10g}"
        case K3RS():
            return "seq_mean_k3", one.max_k3
        case SeqMaxK2():
            return "seq_max_k2", one.max_k2
        case SeqMaxK3():
            return "seq_max_k3", one.max_k3
        case _:
            return None


def _penalty(into: Translation, objective: Objective) -> None:
    """The KL penalty as a part of the loss; none in the reward."""
    into.add(**{"algorithm.use_kl_in_reward": False})
    if objective.kl_coefficient == 0:
        _add(into, ACTOR, use_kl_loss=False)
    elif objective.kl_estimator not in KLS:
        into.lacks(f"KL estimator {objective.kl_estimator}", "verl has no such estimator")
    else:
        kl = {"kl_loss_coef": objective.kl_coefficient, "kl_loss_type": KLS[objective.kl_estimator]}
        _add(into, ACTOR, use_kl_loss=True, **kl)


def _sizes(into: Translation, algorithm: Algorithm) -> None:
    """Batch, lengths and optimiser."""
    P, N, optimizer = algorithm.num_prompts, algorithm.num_minibatches, algorithm.optimizer
    sizes: dict[str, Any] = {
        "data.train_batch_size": P,
        f"{ROLLOUT}.n": algorithm.num_responses,
        f"{ACTOR}.ppo_mini_batch_size": P // N,
        "data.max_response_length": algorithm.max_tokens,
        f"{ACTOR}.optim.lr": optimizer.learning_rate,
        f"{ACTOR}.optim.betas": list(optimizer.betas),
        f"{ACTOR}.optim.weight_decay": optimizer.weight_decay,
        f"{ACTOR}.optim.clip_grad": optimizer.max_grad_norm,
    }
    into.sizes += [Option(name, value) for name, value in sizes.items()]
    share = f"data.train_batch_size / {N}" if N > 1 else "data.train_batch_size"
    into.notes.append(f"N = {N} updates per rollout: {ACTOR}.ppo_mini_batch_size is {share}.")
    if N > 1:
        _add(into, ACTOR, shuffle=algorithm.shuffle == "responses")
        if algorithm.shuffle == "groups":
            into.notes.append(
                "Mini-batches keep groups whole with trainer.balance_batch=false alone; true reorders responses."
            )
    into.notes.append("verl limits log-ratios to 20 nats and its k3 to 10.")
    if optimizer.warmup_steps:
        updates = f"{optimizer.warmup_steps} updates here"
        into.notes.append(f"Warm-up ({updates}) is {ACTOR}.optim.lr_warmup_steps, which counts verl's scheduler steps.")


__all__ = ["to_verl"]
