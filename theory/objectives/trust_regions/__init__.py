"""Trust regions keep pi near old or mu: each turns ratio, advantage and log-probabilities into the term of a token.

Score regions weigh `A log pi` by a constant, the *whole* weight pi/mu (ratio times engine gap). Ratio regions take the
ratio as it is, and only the engine gap old/mu from a correction. Weights come in as constants.
Papers: MiniRL (arXiv 2512.01374) Eq. 7 and App. A, Pr2 (2606.00395) Eq. 10, 14, PPO (1707.06347), CISPO (2506.13585),
DPPO (2602.04879), CPPO (2606.10968).
"""

from __future__ import annotations

from theory.objectives.trust_regions.base import TRUST_REGIONS, Tokens, TrustRegion
from theory.objectives.trust_regions.divergence_masks import CPPO, BinaryKL, BinaryTV, binary_kl, binary_tv
from theory.objectives.trust_regions.ratio_bounds import MinClip, MiniRLMask, NoRegion, WeightClip

__all__ = [
    "CPPO", "TRUST_REGIONS", "BinaryKL", "BinaryTV", "MinClip", "MiniRLMask", "NoRegion", "Tokens", "TrustRegion",
    "WeightClip", "binary_kl", "binary_tv",
]  # fmt: skip
