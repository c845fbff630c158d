"""LUSPO: GSPO whose responses count by their length, so that none is worth less per token for being long.

    J = (1/G) sum_i |y_i| min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i),  s the geometric mean of pi/old.

Source: LUSPO (arXiv 2602.05261), by its abstract and TRL's loss_type "luspo" (1.16): GSPO's term times |y|, which a sum
over tokens is, as every token of a response carries the same term. Differs from source: (1) the bounds are GSPO's; the
paper's own numbers could not be had.
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

__all__ = ["PRESETS"]
