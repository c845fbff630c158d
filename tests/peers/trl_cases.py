"""Cases of TRL: a name, our function and TRL's own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.peers import trl_code
from tests.peers.cases import Case, Pairs, gradients
from tests.theory.objective_batches import make_batch
from theory.advantages import overlong_penalty
from theory.objectives import Objective, correction, preset

TOKENS, RESPONSES, SUMS = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"
VESPO: dict[str, Any] = {
    "loss_type": "vespo", "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
}  # fmt: skip
FREE = {"clip_ratio_c": float("inf")}
TIS, SEQ = correction("token_tis", cap=1.1), correction("seq_tis", cap=1.1)


def trl_loss(
    _: Any,
    seed: int,
    objective: Objective,
    fresh: bool = False,
    ref: bool = False,
    truncate: tuple[str, float | None, float | None] | None = None,
    **settings: Any,
) -> Pairs:
    """The trainer's loss; with `fresh` no engine gap, with `ref` a KL penalty of 0.1.

    `truncate`: level, clip_min and clip_max of the engine gap's weight, which is computed here as the trainer does
    before its loss.
    """
    batch = make_batch(seed, staleness=0.5)
    batch = replace(batch, mu=batch.old) if fresh else batch
    weights = None
    if truncate is not None:
        level, low, high = truncate
        gap_BT = (batch.old - batch.mu) * batch.mask
        weights = (gap_BT if level == "token" else gap_BT.sum(1, keepdim=True)).exp()
        weights = weights if low is None and high is None else weights.clamp(low, high)
    extra: dict[str, Any] = {"beta": 0.1, "ref": batch.old - 0.3} if ref else {}

    def theirs(pi: Tensor) -> Tensor:
        given = (pi, batch.old, batch.mu, batch.advantages, batch.mask)
        return trl_code.loss(*given, weights=weights, **(settings | extra))

    pairs = gradients(batch, objective, theirs) if not ref else {}
    if ref:
        pi = batch.pi.clone().requires_grad_()
        loss = theirs(pi)
        (grad,) = torch.autograd.grad(loss, pi)
        value = batch(objective, logp_ref_BT=batch.old - 0.3).objective.detach()
        pairs = {"value": (value, -loss.detach())}
        pairs["gradient"] = (batch.gradient(objective, logp_ref_BT=batch.old - 0.3), -grad)
    return pairs


def trl_overlong(_: Any, seed: int) -> Pairs:
    """DAPO's penalty for length."""
    call = trl_code.methods("rewards/other_rewards.py", "_SoftOverlongPunishment", "__init__", "__call__")
    lengths_B = make_batch(seed, T=12).mask.sum(1)
    reward = SimpleNamespace()
    call["__init__"](reward, 10, 6)
    got = call["__call__"](reward, [[0] * n for n in lengths_B.tolist()])
    return {
        "penalty": (overlong_penalty(lengths_B[None].clamp(max=10), 10, 6)[0], torch.tensor(got, dtype=torch.float32))
    }


DAPO = {"loss_type": "dapo", "epsilon_high": 0.27}
TRL = [
    Case("GRPO", partial(trl_loss, objective=preset("grpo"))),
    Case("DAPO", partial(trl_loss, objective=preset("grpo_dapo"), **DAPO)),
    Case(
        "two-sided clip delta",
        partial(
            trl_loss,
            objective=preset("ppo_dual_clip", aggregation="token_mean", clip_ratio_c=1.5),
            loss_type="dapo",
            delta=1.5,
        ),
    ),
    Case(
        "DAPO with token_truncate",
        partial(trl_loss, objective=preset("grpo_dapo", correction=TIS), truncate=("token", None, 1.1), **DAPO),
    ),
    Case(
        "DAPO with token_truncate and clip_min",
        partial(
            trl_loss,
            objective=preset("grpo_dapo", correction=correction("token_clip", lo=0.9, hi=1.1)),
            truncate=("token", 0.9, 1.1),
            **DAPO,
        ),
    ),
    Case(
        "DAPO with sequence_truncate and clip_min",
        partial(
            trl_loss,
            objective=preset("grpo_dapo", correction=correction("seq_clip", lo=0.9, hi=1.1)),
            truncate=("sequence", 0.9, 1.1),
            **DAPO,
        ),
    ),
    Case("CISPO", partial(trl_loss, objective=preset("cispo", eps_high=0.3), loss_type="cispo", epsilon_high=1.3)),
    Case(
        "GSPO",
        partial(
            trl_loss,
            objective=preset("gspo", eps_low=0.1, eps_high=0.2),
            importance_sampling_level="sequence",
            epsilon_low=0.1,
        ),
    ),
    Case(
        "LUSPO",
        partial(
            trl_loss,
            objective=preset("luspo", eps_low=0.1, eps_high=0.2),
            loss_type="luspo",
            importance_sampling_level="sequence",
            epsilon_low=0.1,
        ),
    ),
    Case(
        "SAPO",
        partial(
            trl_loss, objective=preset("sapo"), loss_type="sapo", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05
        ),
    ),
    Case("GMPO", partial(trl_loss, objective=preset("gmpo"), trainer="gmpo", epsilon_low=0.4, epsilon_high=0.4)),
    Case(
        "VESPO",
        partial(
            trl_loss,
            objective=preset("vespo"),
            fresh=True,
            **VESPO,
        ),
    ),
    Case(
        "VESPO across an engine gap",
        partial(
            trl_loss,
            objective=preset("vespo"),
            truncate=("token", None, None),
            **VESPO,
        ),
    ),
    Case(
        "off-policy sequence mask",
        partial(trl_loss, objective=preset("deepseek_v32", delta=0.1), off_policy_mask_threshold=0.1),
    ),
    Case(
        "KL penalty k3",
        partial(trl_loss, objective=preset("grpo", kl_coefficient=0.1), ref=True, use_bias_correction_kl=False),
    ),
    Case(
        "KL penalty (pi/mu) k3",
        partial(trl_loss, objective=preset("grpo", kl_coefficient=0.1, kl_estimator="k3_is"), ref=True, fresh=True),
    ),
    Case("overlong penalty", trl_overlong),
]
