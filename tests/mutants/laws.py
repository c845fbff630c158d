"""Every law by name, and whether it runs in a world whose engines compute in float32."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.mutants.law import Law
from tests.mutants.laws_exact import EXACT
from tests.mutants.laws_formats import FORMATS
from tests.mutants.laws_objectives import ESTIMATORS, OBJECTIVES
from tests.mutants.laws_replay import PASSES, RECORDS, SANDBOX, VLLM

LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        *RECORDS, *PASSES, *VLLM, *OBJECTIVES, *ESTIMATORS, *FORMATS,
        *(replace(law, dtype=torch.float32) for law in SANDBOX), *EXACT,
    )
}  # fmt: skip
"""All laws; those of the sandbox's worlds last, as they take longest."""
