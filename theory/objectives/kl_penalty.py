"""The penalty that keeps pi near a frozen reference: the objective less beta times an estimate of KL(pi || ref).

Source: Pr2 (arXiv 2606.00395) Eq. 11; the estimators are those of theory/divergences.py, and two with the gradient of
KL(pi || ref): `k3_is`, DeepSeek-V3.2's (2512.02556, as TRL's use_bias_correction_kl has it), and `k3+`, verl's (0.9.1).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from theory import divergences
from theory.names import unknown_name
from theory.objectives.factors import log_ratio

ESTIMATORS = (*divergences.ESTIMATORS, "k3+", "k3_is")
"""The penalty's estimators by name."""


def kl_pi_ref(
    logp_pi_BT: Float[Tensor, "B T"],
    logp_ref_BT: Float[Tensor, "B T"],
    estimator: str,
    logp_mu_BT: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Per-token estimate of KL(pi || ref), nats; differentiable in pi, ref and mu are constants.

    For a token ~ pi the gradient depends on the estimator:
    k1: 0 (a bare score: a value to watch, not a penalty); k2: that of KL(pi || ref), exactly;
    k3: that of the reverse, KL(ref || pi); k3+: k3 in value with the gradient of k2.
    k3_is is (pi/mu) k3 with the gradient of both factors: value and gradient are KL(pi || ref)'s for a token ~ mu.
    Differs from DeepSeek-V3.2 and TRL: (1) the ratio's denominator is mu, which drew the token; theirs is called old.
    Raises ValueError for another estimator, and for k3_is without mu.
    """
    if estimator not in ESTIMATORS:
        raise unknown_name("KL estimator", estimator, ESTIMATORS)
    logp_ref_BT = logp_ref_BT.detach()
    if estimator == "k3_is":
        if logp_mu_BT is None:
            raise ValueError("k3_is: expected logp_mu_BT, got None")
        # pi is not detached: without the ratio's own gradient the penalty's would not be the KL's.
        ratio_BT = log_ratio(logp_pi_BT, logp_mu_BT.detach()).exp()
        return ratio_BT * divergences.k3(logp_ref_BT, logp_pi_BT)
    if estimator == "k3+":
        # The bracket is 0 in value and carries the gradient.
        k2_BT = divergences.k2(logp_ref_BT, logp_pi_BT)
        return divergences.k3(logp_ref_BT, logp_pi_BT.detach()) + (k2_BT - k2_BT.detach())
    # Estimators take (q, p): p = pi is the policy that the token stands for, q = ref.
    return divergences.ESTIMATORS[estimator](logp_ref_BT, logp_pi_BT)
