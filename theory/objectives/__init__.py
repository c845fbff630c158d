"""Objectives are compositions: `preset("minirl")` gives one by name, `Objective(...)` composes a new one.

Source of the formulas: MiniRL (arXiv 2512.01374) and Pr2 (2606.00395); `preset(name).describe()` prints them.
"""

from __future__ import annotations

from theory.objectives.aggregations import AGGREGATIONS, Aggregation, Totals
from theory.objectives.centering import CENTERINGS, Top
from theory.objectives.corrections import CORRECTIONS, Correction, correction
from theory.objectives.metrics import combine_metrics
from theory.objectives.objective import Objective, ObjectiveOutput
from theory.objectives.presets import NUMBERS, OVERRIDES, PRESETS, preset
from theory.objectives.ratios import RATIOS, Ratio
from theory.objectives.trust_regions import TRUST_REGIONS, TrustRegion

__all__ = [
    "AGGREGATIONS", "CENTERINGS", "CORRECTIONS", "NUMBERS", "OVERRIDES", "PRESETS", "RATIOS", "TRUST_REGIONS",
    "Aggregation", "Correction", "Objective", "ObjectiveOutput", "Ratio", "Top", "Totals", "TrustRegion",
    "combine_metrics", "correction", "preset",
]  # fmt: skip
