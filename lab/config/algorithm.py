"""The `algorithm:` block: what a run optimises and how, in words that no engine or model appears in.

It is the part of a configuration that moves from the sandbox to a cluster unchanged; `build()` turns it into
`theory.algorithm.Algorithm`. Papers: MiniRL (arXiv 2512.01374), R3 (2510.11370), Pr2 (2606.00395).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from lab.config.strict import Strict
from theory.algorithm import Algorithm, OptimizerSettings
from theory.objectives import Objective, corrections, preset
from theory.routing.predictor import PredictorSettings

Preset = Literal[
    "minirl", "minirl_lengthnorm", "minirl_no_is", "reinforce", "ppo", "grpo", "grpo_dapo", "dr_grpo", "cispo", "gspo"
]  # fmt: skip
