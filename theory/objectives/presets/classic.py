"""Fourteen objectives of the literature as compositions of the parts in theory/objectives, one row each.

Differences from the sources. GRPO averages over each response (MiniRL App. A) and GRPO-DAPO over all tokens (DAPO),
with R3's upper bound (Tab. 12; DAPO's own and Pr2's is 0.28). All tokens are the mini-batch's, as in verl; for CISPO
MiniRL App. A prints those of each prompt's group, and then the mean over prompts. Pr2 prints neither length for GRPO
and GRPO-DAPO (Eq. 13 and 14), which is `aggregation="token_sum"`. PPO has no critic here: its advantage is
the group mean. Dr. GRPO divides by the number of responses, not by a constant length. CISPO's papers print no bounds:
there is no lower one, and the weight is capped at 5. `minirl_no_is` leaves out old/mu and keeps sg[pi/old]; on-policy
that factor is 1, which is the equation of MiniRL sec. 4.3. MinPRO's soft clip has CISPO's bounds here. DPPO and CPPO
weigh by pi/mu whole, untruncated, as their papers print it; DPPO's mean baseline and token sum are those of its
authors' recipe in verl (without its constant divisor of the sum), CPPO's advantage and token mean its paper's.
Papers: MiniRL (arXiv 2512.01374), Pr2 (2606.00395), GRPO (2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783),
CISPO (2506.13585), GSPO (2507.18071), MinPRO (2601.22718), DPPO (2602.04879), CPPO (2606.10968).
"""

from __future__ import annotations

from theory.objectives import ratios
from theory.objectives.aggregations import length_norm, token_mean, token_sum
from theory.objectives.corrections import MinPRO, NoCorrection, TokenIS, TokenTIS
from theory.objectives.objective import Objective
from theory.objectives.trust_regions import CPPO, BinaryKL, BinaryTV, MinClip, MiniRLMask, NoRegion, WeightClip

_NONE = NoCorrection()
_MINIRL, _TIS = MiniRLMask(0.2, 0.27), TokenTIS(numerator="pi", cap=5.0)
_WHOLE, _MINPRO = TokenIS(numerator="pi"), MinPRO(numerator="pi", cap=5.0)

PRESETS = (
    Objective("minirl", "group_mean", ratios.token, _MINIRL, _TIS, token_sum, title="MiniRL"),
    Objective(
        "minirl_lengthnorm", "group_mean", ratios.token, _MINIRL, _TIS, length_norm, title="MiniRL with length norm",
    ),
    Objective("minirl_no_is", "group_mean", ratios.token, _MINIRL, _NONE, token_sum, title="MiniRL without its weight"),
    Objective("reinforce", "group_mean", ratios.none, NoRegion(), _NONE, token_sum, title="REINFORCE"),
    Objective("ppo", "group_mean", ratios.token, MinClip(0.2, 0.2), _NONE, token_sum, title="PPO"),
    Objective("grpo", "group_norm", ratios.token, MinClip(0.2, 0.2), _NONE, length_norm, title="GRPO"),
    Objective("grpo_dapo", "group_norm", ratios.token, MinClip(0.2, 0.27), _NONE, token_mean, title="GRPO-DAPO"),
    Objective("dr_grpo", "group_mean", ratios.token, MinClip(0.2, 0.2), _NONE, token_sum, title="Dr. GRPO"),
    Objective("cispo", "group_norm", ratios.token, WeightClip(1.0, 4.0), _NONE, token_mean, title="CISPO"),
    Objective("gspo", "group_norm", ratios.sequence_geometric, MinClip(3e-4, 4e-4), _NONE, length_norm, title="GSPO"),
    Objective("minpro", "group_norm", ratios.token, NoRegion(), _MINPRO, token_mean, title="MinPRO"),
    Objective("dppo_tv", "group_mean", ratios.token, BinaryTV(), _WHOLE, token_sum, title="DPPO-TV"),
    Objective("dppo_kl", "group_mean", ratios.token, BinaryKL(), _WHOLE, token_sum, title="DPPO-KL"),
    Objective("cppo", "group_norm", ratios.token, CPPO(), _WHOLE, token_mean, title="CPPO"),
)  # fmt: skip
"""Name, advantage, ratio, trust region, correction, aggregation; the title is the name as papers spell it."""
