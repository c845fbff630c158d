"""The penalty that keeps pi near a frozen reference: beta times an estimate of KL(pi || ref), taken off the objective.

Source: Pr2 (arXiv 2606.00395) Eq. 11; the estimators are those of theory/divergences.py.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from theory import divergences
from theory.names import unknown_name


def kl_pi_ref(
    logp_pi_BT: Float[Tensor, "B T"], logp_ref_BT: Float[Tensor, "B T"], estimator: str
) -> Float[Tensor, "B T"]:
    """Per-token estimate of KL(pi || ref), nats, for a token ~ pi; differentiable in pi, ref is a constant.

    The gradient, in expectation over tokens from pi itself, depends on the estimator:
    k1: 0 (a bare score: a value to watch, not a penalty); k2: that of KL(pi || ref), exactly;
    k3: that of the reverse, KL(ref || pi). Raises ValueError for another estimator.
    """
    if estimator not in divergences.ESTIMATORS:
        raise unknown_name("KL estimator", estimator, divergences.ESTIMATORS)
    return divergences.ESTIMATORS[estimator](logp_ref_BT.detach(), logp_pi_BT)


__all__ = ["kl_pi_ref"]
