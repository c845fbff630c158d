"""LUSPO: GSPO with responses weighed by their length, so that a token of a long response counts as much as any other.

    J = (1/G) sum_i |y_i| min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i),  s the geometric mean of pi/old.

Source: LUSPO (arXiv 2602.05261), by its abstract and TRL's loss_type "luspo" (1.16): GSPO's term times |y|, which is
the sum over tokens, as every token of a response has the same term. Differs from source: (1) the bounds are GSPO's; the
paper's own numbers were not available.
"""

from __future__ import annotations

from theory.objectives import ratios
from theory.objectives.aggregations import token_sum
from theory.objectives.corrections import NoCorrection
from theory.objectives.objective import Objective
from theory.objectives.trust_regions import MinClip

PRESETS = (
    Objective(
        "luspo", "group_norm", ratios.sequence_geometric, MinClip(3e-4, 4e-4), NoCorrection(), token_sum, title="LUSPO"
    ),
)
