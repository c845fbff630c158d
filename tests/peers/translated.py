"""The gradients of verl's, TRL's and slime's own losses under the options of a translation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lab.translate import Translation
from tests.peers import slime_code, trl_code
from tests.peers.cases import Code
from tests.peers.verl_code import Config
from tests.theory.objective_batches import Batch
from theory.objectives import PRESETS, Correction, Objective, correction, preset

ACTOR, FIX = "actor_rollout_ref.actor", "algorithm.rollout_correction"
CORRECTIONS: tuple[Correction | None, ...] = (
    None,
    correction("token_is"),
    correction("token_tis", cap=1.1),
    correction("seq_tis", cap=1.1),
    correction("token_clip", lo=0.9, hi=1.1),
    correction("seq_clip", lo=0.9, hi=1.1),
    correction("prefix_tis", cap=1.1),
    correction("icepop", lo=0.9, hi=1.1),
    correction("seq_mis", lo=0.5, hi=1.25),
    correction("geo_rs", lo=0.8, hi=1.1),
    correction("k3_rs", max_k3=0.08),
    correction("seq_max_k2", max_k2=0.2),
    correction("seq_max_k3", max_k3=0.2),
    correction("token_k2", max_k2=0.1),
)
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"aggregation": "token_sum"},
    {"aggregation": "length_norm"},
    {"aggregation": "token_mean"},
    {"ratio": "sequence_geometric_token"},
    {"kl_coefficient": 0.1, "kl_estimator": "k1"},
    {"kl_coefficient": 0.1, "kl_estimator": "k2"},
    {"kl_coefficient": 0.1, "kl_estimator": "k3"},
    {"normalise_weights": True},
    {"clip_ratio_c": 1.1},
    {"clip_ratio_c": 1.3},
    {"rejection": correction("geo_rs", lo=0.8, hi=1.1)},
)


def recipes() -> Iterator[tuple[str, Objective]]:
    """Every preset with every correction, and with every change beside three of them, by a name for messages."""
    for name in PRESETS:
        for fix in CORRECTIONS:
            is_changed = fix is None or fix.name in ("token_tis", "seq_mis")
            for change in CHANGES if is_changed else CHANGES[:1]:
                changes = change | ({} if fix is None else {"correction": fix})
                try:
                    yield f"{name} {fix} {change}", preset(name, **changes)
                except ValueError:  # parts that do not fit together
                    continue


def by_verl(code: Code, batch: Batch, translation: Translation, ref: Tensor) -> Tensor:
    """The gradient that verl climbs: its policy loss, weights, rejections and KL loss, as its trainer combines them."""
    given = {option.name: option.value for option in translation.recipe}
    actor = {name.removeprefix(f"{ACTOR}."): value for name, value in given.items() if name.startswith(f"{ACTOR}.")}
    core, helper = code
    gap, mask = batch.old - batch.mu, batch.mask.double()
    weight = None
    if given[f"{FIX}.rollout_is"] is not None:
        weight, _ = helper.compute_rollout_correction_weights(
            gap, mask, rollout_is=given[f"{FIX}.rollout_is"], rollout_is_threshold=given[f"{FIX}.rollout_is_threshold"],
            rollout_is_batch_normalize=given[f"{FIX}.rollout_is_batch_normalize"],
        )  # fmt: skip
    if given[f"{FIX}.rollout_rs"] is not None:
        rule = given[f"{FIX}.rollout_rs"], given[f"{FIX}.rollout_rs_threshold"]
        mask, _ = helper.compute_rollout_rejection_mask(gap, mask, *rule)
    numbers = {name: value for name, value in actor.items() if name.startswith(("clip_", "tau_"))}
    # As verl's trainer gives them (workers/utils/losses.py): the denominators of the batch before rejections.
    whole = {"global_batch_size": len(mask), "batch_num_tokens": batch.mask.sum(), "dp_size": 1}
    config, mode = Config(clip_ratio=0.2, global_batch_info=whole, **numbers), actor["loss_agg_mode"]
    pi = batch.pi.clone().requires_grad_()
    call = core.POLICY_LOSS_REGISTRY[actor["policy_loss.loss_mode"]]
    loss = call(batch.old, pi, batch.advantages[:, None].expand_as(pi), mask, mode, config, weight)[0]
    if actor["use_kl_loss"]:
        kl = core.kl_penalty(pi, ref, actor["kl_loss_type"])
        loss = loss + actor["kl_loss_coef"] * core.agg_loss(kl, mask, mode, **whole)
    return -torch.autograd.grad(loss, pi)[0]


def by_trl(batch: Batch, translation: Translation, ref: Tensor) -> Tensor:
    """The gradient that TRL climbs; the weights of the engine gap are computed here as its trainer does before."""
    given = {option.name: option.value for option in translation.recipe}
    weights, fix = None, "vllm_importance_sampling"
    if given[f"{fix}_correction"]:
        mode, low, high = (given[f"{fix}_{name}"] for name in ("mode", "clip_min", "clip_max"))
        gap_BT = (batch.old - batch.mu) * batch.mask
        weights = (gap_BT.sum(1, keepdim=True) if mode.startswith("sequence") else gap_BT).exp()
        if mode == "token_mask":
            weights = torch.where((weights < low) | (weights > high), 0.0, weights)
        elif low is not None or high is not None:
            weights = weights.clamp(low, high)
    names = ("loss_type", "delta", "importance_sampling_level", "off_policy_mask_threshold", "use_bias_correction_kl")
    taken = {k: v for k, v in given.items() if k in names or k.startswith(("sapo_", "vespo_"))}
    taken |= {"beta": given["beta"], "epsilon_low": given.get("epsilon", 0.2)}
    taken["epsilon_high"] = given.get("epsilon_high", taken["epsilon_low"])
    pi = batch.pi.clone().requires_grad_()
    loss = trl_code.loss(
        pi, batch.old, batch.mu, batch.advantages, batch.mask, weights=weights,
        **taken, **({"ref": ref} if given["beta"] else {}),
    )  # fmt: skip
    return -torch.autograd.grad(loss, pi)[0]


def by_slime(batch: Batch, translation: Translation, ref: Tensor) -> Tensor:
    """The gradient that slime climbs, by its own loss function with its own weights, denominators and KL loss."""
    given = {option.name.replace("-", "_"): option.value for option in translation.recipe}
    pi = batch.pi.clone().requires_grad_()
    loss = slime_code.loss(pi, batch.old, batch.mu, batch.advantages, batch.mask, ref, **given)
    return -torch.autograd.grad(loss, pi)[0]


__all__ = ["by_slime", "by_trl", "by_verl", "recipes"]
