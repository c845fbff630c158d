"""Bytes in the object store at a push, beside the plan's count: records and features of Qwen3-30B's size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scaled.plan import payloads
from scaled.plan.host_memory import LAST_PUSH, stored_bytes
from tests.scaled import driver_bench
from tests.scaled.plan_world import QWEN
from tests.scaled.ray_marks import RAY

pytestmark = RAY


def test_the_object_store_at_a_push() -> None:
    """Mu's and old's routes and the features, to 2%; the plan, whose count is of the whole step, has room for them.

    The step's other records are gone by then: the plan counts four of routes, and pi's logits.
    """
    words = [sys.executable, "-m", driver_bench.__name__, "--one", "1", "--kind", "Pr2"]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = json.loads(printed.splitlines()[-1])["stored"] * 1e6
    num = driver_bench.PROMPTS * driver_bench.RESPONSES
    features = payloads.feature_bytes(QWEN, driver_bench.POSITIONS, num)
    # A row for every sampled token at least; prompts of a few tokens.
    routes = payloads.routing_bytes(QWEN, num * driver_bench.TOKENS)
    assert found == pytest.approx(features + 2 * routes, rel=0.02)
    planned = stored_bytes(driver_bench.config(Path("unused"), 1, "Pr2"), QWEN, driver_bench.TOKENS + 6)
    assert found < sum(size for name, size in planned.items() if name != LAST_PUSH) < 1.3 * found
