"""What every test shares: how hard Hypothesis looks, and one thread, so that test processes do not fight for cores."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

# dev: a quick look while working. ci: the same examples every time, so a red run can be repeated from its printed blob.
# thorough: for a night, when a law is new. No deadlines: the first call under the shape checks is slow by nature.
settings.register_profile("dev", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), max_examples=50, derandomize=True, print_blob=True)
settings.register_profile("thorough", parent=settings.get_profile("dev"), max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

torch.set_num_threads(1)
