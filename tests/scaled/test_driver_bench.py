"""Bytes in the object store in a step, beside the plan's count: records and features of Qwen3-30B's size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scaled.plan.host_memory import LAST_PUSH, most_stored_bytes, stored_bytes
from tests.scaled import driver_bench
from tests.scaled.plan_world import QWEN
from tests.scaled.ray_marks import RAY

pytestmark = RAY


def test_the_object_store_holds_what_is_counted() -> None:
    """In every replay mode, after the last update and after the push, to 2%: mu's routes, old's own and, where it
    replays or predicts, those that it used, pi's until the push, and the features of each."""
    words = [sys.executable, "-m", driver_bench.__name__, "--stored"]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = json.loads(printed.splitlines()[-1])
    assert list(found) == ["R2", "R3", "Pr2", "Pr3"]
    for kind, measured in found.items():
        config = driver_bench.config(Path("unused"), driver_bench.STORED_PROMPTS, kind)
        for place, count in (("update", most_stored_bytes), ("push", stored_bytes)):
            # A row for every token but the last one; prompts of a few tokens.
            planned = count(config, QWEN, driver_bench.TOKENS + 6)
            planned.pop(LAST_PUSH)  # the idle ranks have no weights
            assert measured[place] == pytest.approx(sum(planned.values()), rel=0.02), (kind, place)
