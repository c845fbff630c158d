"""Bytes in the object store in a step, beside the plan's count, and the driver's own: records, features and likeliest
tokens of Qwen3-30B's size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scaled.plan.host_memory import LAST_PUSH, most_stored_bytes, stored_bytes
from tests.scaled import driver_bench
from tests.scaled.plan_world import QWEN
from tests.scaled.ray_marks import RAY

pytestmark = RAY


def printed(*words: str) -> dict[str, Any]:
    """The last line that the bench prints, as JSON."""
    command = [sys.executable, "-m", driver_bench.__name__, *words]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def test_the_driver_has_no_likeliest_tokens() -> None:
    """Beside the same routes, those of the largest batch add less than half of their 31 MB to its own pages in
    training, the last trace included."""
    factor = driver_bench.FACTORS[-1]
    own = {kind: printed("--one", str(factor), "--kind", kind)["trained"] for kind in ("R3", "centred")}
    tokens = factor * driver_bench.PROMPTS * driver_bench.RESPONSES * driver_bench.TOKENS
    assert own["centred"] - own["R3"] < driver_bench.TOP * (4 + 4 + 4) * tokens / 1e6 / 2, own


def test_the_object_store_holds_what_is_counted() -> None:
    """In every replay mode, after the last update and after the push, to 2%: mu's routes, old's own and, where it
    replays or predicts, those that it used, pi's until the push, and the features of each; under score centering mu's
    likeliest tokens, with log old."""
    found = printed("--stored")
    assert list(found) == ["R2", "R3", "Pr2", "Pr3", "centred"]
    for kind, measured in found.items():
        config = driver_bench.config(Path("unused"), driver_bench.STORED_PROMPTS, kind)
        for place, count in (("update", most_stored_bytes), ("push", stored_bytes)):
            # A row for every token but the last one; prompts of a few tokens.
            planned = count(config, QWEN, driver_bench.TOKENS + 6)
            planned.pop(LAST_PUSH)  # the idle ranks have no weights
            assert measured[place] == pytest.approx(sum(planned.values()), rel=0.02), (kind, place)
