"""The Hypothesis profile of mutation runs: a few examples, the same every time, and no shrinking of what failed.

A plugin of pytest (`-p tests.mutants.profile`), as it must be registered before tests/conftest.py loads it by name.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "mutants",
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
os.environ["HYPOTHESIS_PROFILE"] = "mutants"
