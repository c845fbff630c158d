"""Cases of verl: a name, our function and verl's own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.peers.cases import Case, Code, Pairs, gradients
from tests.peers.verl_code import Config
from tests.theory.objective_batches import log_gaps, make_batch
from theory.advantages import advantages_of, optimal_token
from theory.objectives import Correction, Objective, correction, preset
from theory.objectives.kl_penalty import kl_pi_ref

TOKENS, RESPONSES, SUMS = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"
FREE = {"clip_ratio_c": float("inf")}
TIS, SEQ = correction("token_tis", cap=1.1), correction("seq_tis", cap=1.1)


def verl_loss(
    code: Code, seed: int, loss: str, mode: str, objective: Objective, numbers: dict[str, Any], fresh: bool = False
) -> Pairs:
    """A policy loss of core_algos; with `fresh`, mu = old, as verl's DPPO has no third policy."""
    batch, region = make_batch(seed, staleness=0.5), vars(objective.trust_region)
    batch = replace(batch, mu=batch.old) if fresh else batch
    config = Config(
        clip_ratio=0.2, clip_ratio_low=region.get("eps_low"), clip_ratio_high=region.get("eps_high"),
        global_batch_info={}, **numbers,
    )  # fmt: skip
    fix, weighs = objective.correction, objective.correction.weighted and objective.correction.numerator == "old"
    weight_BT = fix.weight(log_gaps(batch), batch.mask) if weighs else None

    def theirs(pi: Tensor) -> Tensor:
        advantages_BT, mask_BT = batch.advantages[:, None].expand_as(pi), batch.mask.double()
        call = code[0].POLICY_LOSS_REGISTRY[loss]
        return call(batch.old, pi, advantages_BT, mask_BT, mode, config, weight_BT)[0]

    return gradients(batch, objective, theirs)


def verl_weight(code: Code, seed: int, ours: Correction, level: str, spec: str | float, normal: bool = False) -> Pairs:
    """Weights of rollout_corr_helper, over their mean where asked."""
    batch = make_batch(seed, gap=0.4)
    got, _ = code[1].compute_rollout_correction_weights(
        batch.old - batch.mu, batch.mask.double(), rollout_is=level, rollout_is_threshold=spec,
        rollout_is_batch_normalize=normal,
    )  # fmt: skip
    weight_BT = ours.weight(log_gaps(batch), batch.mask)
    if normal:
        objective = preset("reinforce", correction=ours, normalise_weights=True, aggregation="token_mean")
        alone = replace(batch, advantages=torch.ones_like(batch.advantages))
        weight_BT = alone.gradient(objective) * batch.mask.sum()
    return {"weights": (weight_BT[batch.mask], got[batch.mask])}


def verl_rejection(code: Code, seed: int, ours: Correction, option: str, spec: str | float) -> Pairs:
    """Masks of rollout_corr_helper: a rejected response has none left, a rejected token is out of it."""
    batch = make_batch(seed, gap=0.4)
    got, _ = code[1].compute_rollout_rejection_mask(batch.old - batch.mu, batch.mask.double(), option, spec)
    gap_BT = log_gaps(batch)
    keep_BT = ours.keep(gap_BT, batch.mask)[:, None] & ~ours.truncated(gap_BT, batch.mask) & batch.mask
    return {"mask": (keep_BT.double(), got)}


def verl_pair(code: Code, seed: int) -> Pairs:
    """Geo-RS-Token-TIS: weights, and the mask without rejected responses, through the loss and its denominators."""
    batch = make_batch(seed, gap=0.4, staleness=0.5)
    objective = preset("grpo_dapo", correction=TIS, rejection=correction("geo_rs", lo=0.8, hi=1.25))
    gap, mask = batch.old - batch.mu, batch.mask.double()
    weight_BT, _ = code[1].compute_rollout_correction_weights(gap, mask, "token", 1.1)
    left_BT, _ = code[1].compute_rollout_rejection_mask(gap, mask, "seq_mean_k1", "0.8_1.25")
    config = Config(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.27, global_batch_info={}, **FREE)

    def theirs(pi: Tensor) -> Tensor:
        advantages_BT = batch.advantages[:, None].expand_as(pi)
        call = code[0].POLICY_LOSS_REGISTRY["vanilla"]
        return call(batch.old, pi, advantages_BT, left_BT, TOKENS, config, weight_BT)[0]

    return gradients(batch, objective, theirs)


def verl_kl(code: Code, seed: int, estimator: str) -> Pairs:
    """The KL penalty of a token and its gradient."""
    batch = make_batch(seed)
    both = []
    for penalty in (
        lambda pi: kl_pi_ref(pi, batch.old, estimator),
        lambda pi: code[0].kl_penalty(pi, batch.old, estimator),
    ):
        pi = batch.pi.clone().requires_grad_()
        value = penalty(pi)
        both.append((value.detach(), torch.autograd.grad(value.sum(), pi)[0]))
    return {"value": (both[0][0], both[1][0]), "gradient": (both[0][1], both[1][1])}


def verl_advantage(code: Code, seed: int, ours: str, theirs: str) -> Pairs:
    """Advantages of groups of three; in verl the reward stands on the last token."""
    batch = make_batch(seed)
    rewards_PG, lengths_PG = batch.advantages.view(2, 3), batch.mask.sum(1).view(2, 3)
    last_B = (torch.arange(batch.mask.shape[1]) * batch.mask).amax(1)
    token_BT = torch.zeros_like(batch.pi)
    token_BT[torch.arange(6), last_B] = batch.advantages
    got, _ = code[0].get_adv_estimator_fn(theirs)(
        token_level_rewards=token_BT.clone(), response_mask=batch.mask.double(), index=np.repeat([0, 1], 3),
        config=Config(gamma=1.0, norm_adv_by_std_in_grpo=True),
    )  # fmt: skip
    wanted_BT = advantages_of(ours, rewards_PG, lengths_PG).reshape(-1)[:, None].expand_as(got)
    return {"advantages": (wanted_BT[batch.mask], got[batch.mask])}


def verl_token_baseline(code: Code, seed: int) -> Pairs:
    """The optimal token baseline of groups of three, of several turns: verl counts sampled tokens alone, as we do.

    Without the 1e-8 that it adds to a sum of weights: where one response alone goes on, our advantage is 0 exactly.
    """
    batch = make_batch(seed)
    squares_BT = batch.old.exp().square() + 0.5 * (1 - batch.old.exp()).square()
    last_B = (torch.arange(batch.mask.shape[1]) * batch.mask).amax(1)
    token_BT = torch.zeros_like(batch.pi)
    token_BT[torch.arange(6), last_B] = batch.advantages
    got, _ = code[0].get_adv_estimator_fn("tir_optimal_token_baseline")(
        token_level_rewards=token_BT, response_mask=batch.mask.double(), index=np.repeat([0, 1], 3),
        old_log_probs=batch.old, sum_pi_squared=squares_BT, handle_zero_tail=False,
        epsilon=1e-300,
    )  # fmt: skip
    wanted_BT = optimal_token(batch.advantages.view(2, 3), batch.old, squares_BT, batch.mask)
    return {"advantages": (wanted_BT[batch.mask], got[batch.mask])}


VERL = [
    Case(
        "PPO's clip, token mean",
        partial(verl_loss, loss="vanilla", mode=TOKENS, objective=preset("grpo_dapo"), numbers=FREE),
    ),
    Case(
        "PPO's clip, response mean",
        partial(verl_loss, loss="vanilla", mode=RESPONSES, objective=preset("grpo"), numbers=FREE),
    ),
    Case(
        "PPO's clip, token sum",
        partial(verl_loss, loss="vanilla", mode=SUMS, objective=preset("dr_grpo"), numbers=FREE),
    ),
    Case(
        "dual clip",
        partial(
            verl_loss,
            loss="vanilla",
            mode=TOKENS,
            numbers={"clip_ratio_c": 1.3},
            objective=preset("ppo_dual_clip", aggregation="token_mean", clip_ratio_c=1.3),
        ),
    ),
    Case(
        "PPO's clip with Token-TIS",
        partial(verl_loss, loss="vanilla", mode=RESPONSES, objective=preset("grpo", correction=TIS), numbers=FREE),
    ),
    Case(
        "PPO's clip with Seq-TIS",
        partial(verl_loss, loss="vanilla", mode=RESPONSES, objective=preset("grpo", correction=SEQ), numbers=FREE),
    ),
    Case("Geo-RS-Token-TIS", verl_pair),
    Case(
        "GSPO",
        partial(
            verl_loss,
            loss="gspo",
            mode=RESPONSES,
            numbers={},
            objective=preset("gspo", ratio="sequence_geometric_token", eps_low=0.1, eps_high=0.2),
        ),
    ),
    Case(
        "CISPO",
        partial(verl_loss, loss="cispo", mode=TOKENS, objective=preset("cispo", eps_low=0.1, eps_high=0.2), numbers={}),
    ),
    Case(
        "CISPO with Token-TIS",
        partial(
            verl_loss,
            loss="cispo",
            mode=TOKENS,
            numbers={},
            objective=preset("cispo", eps_low=0.1, eps_high=0.2, correction=TIS),
        ),
    ),
    Case(
        "SAPO",
        partial(
            verl_loss, loss="sapo", mode=RESPONSES, objective=preset("sapo"), numbers={"tau_pos": 1.0, "tau_neg": 1.05}
        ),
    ),
    Case("GMPO", partial(verl_loss, loss="geo_mean", mode=RESPONSES, objective=preset("gmpo"), numbers={})),
    Case(
        "DPPO-TV", partial(verl_loss, loss="dppo_tv", mode=SUMS, objective=preset("dppo_tv"), numbers=FREE, fresh=True)
    ),
    Case(
        "DPPO-KL", partial(verl_loss, loss="dppo_kl", mode=SUMS, objective=preset("dppo_kl"), numbers=FREE, fresh=True)
    ),
    Case("weights Token-TIS", partial(verl_weight, ours=TIS, level="token", spec=1.1)),
    Case("weights Seq-TIS", partial(verl_weight, ours=SEQ, level="sequence", spec=1.1)),
    Case(
        "weights IcePop", partial(verl_weight, ours=correction("icepop", lo=0.8, hi=1.2), level="token", spec="0.8_1.2")
    ),
    Case("Token-TIS over its mean", partial(verl_weight, ours=TIS, level="token", spec=1.1, normal=True)),
    Case("Seq-TIS over its mean", partial(verl_weight, ours=SEQ, level="sequence", spec=1.1, normal=True)),
    Case(
        "Seq-MIS's rejection",
        partial(verl_rejection, ours=correction("seq_mis", lo=0.5, hi=1.25), option="seq_sum_k1", spec="0.8_2.0"),
    ),
    Case(
        "Geo-RS",
        partial(
            verl_rejection, ours=correction("geo_rs", lo=0.8, hi=1.1), option="seq_mean_k1", spec=f"{1 / 1.1}_1.25"
        ),
    ),
    Case("K3-RS", partial(verl_rejection, ours=correction("k3_rs", max_k3=0.08), option="seq_mean_k3", spec=0.08)),
    Case(
        "Seq-Max-K2", partial(verl_rejection, ours=correction("seq_max_k2", max_k2=0.2), option="seq_max_k2", spec=0.2)
    ),
    Case(
        "Seq-Max-K3", partial(verl_rejection, ours=correction("seq_max_k3", max_k3=0.2), option="seq_max_k3", spec=0.2)
    ),
    Case(
        "Token-K1",
        partial(verl_rejection, ours=correction("token_k1", lo=0.8, hi=1.6), option="token_k1", spec="0.625_1.25"),
    ),
    Case("Token-K2", partial(verl_rejection, ours=correction("token_k2", max_k2=0.1), option="token_k2", spec=0.1)),
    Case("Token-K3", partial(verl_rejection, ours=correction("token_k3", max_k3=0.1), option="token_k3", spec=0.1)),
    *(Case(f"KL penalty {name}", partial(verl_kl, estimator=name)) for name in ("k1", "k2", "k3", "k3+")),
    Case("advantage GRPO", partial(verl_advantage, ours="group_norm", theirs="grpo")),
    Case("advantage RLOO", partial(verl_advantage, ours="leave_one_out", theirs="rloo")),
    Case("advantage OPO", partial(verl_advantage, ours="opo", theirs="opo")),
    Case("advantage REINFORCE++", partial(verl_advantage, ours="reinforce_pp", theirs="reinforce_plus_plus")),
    Case(
        "advantage REINFORCE++-baseline",
        partial(verl_advantage, ours="reinforce_pp_baseline", theirs="reinforce_plus_plus_baseline"),
    ),
    Case("advantage optimal token baseline", verl_token_baseline),
]
