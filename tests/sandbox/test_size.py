"""Laws of the memory bound: what a run never makes does not count against it."""

from __future__ import annotations

import pytest

import sandbox.size
from firstorder.worlds import Schemas
from lab.config.load import load
from lab.strict import ConfigError
from sandbox.config import SandboxRun
from sandbox.measure.defect_table import Bench
from sandbox.size import check_memory

VOCABULARY = 13


def check(*words: str) -> None:
    """The bound of configs/smoke.yaml after these overrides."""
    config = load("smoke", words, Schemas())
    assert isinstance(config, SandboxRun)
    check_memory(config, config.model.build(VOCABULARY))


def message(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(*words)
    return str(caught.value)


def test_only_problems_that_are_held_out_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """max_prompts beyond the held-out problems adds nothing, below them it counts, and so do training's responses."""
    monkeypatch.setattr(sandbox.size, "memory_bytes", lambda: 0)
    words = ["--task.num_held_out", "100", "--evaluation.num_samples", "4", "--evaluation.max_prompts"]
    assert " for 400 responses " in message(*words, "10000000")
    assert message(*words, "10000000") == message(*words, "100")
    assert " for 240 responses " in message(*words, "60")
    more = ["--algorithm.batch.num_prompts", "50", "--algorithm.batch.num_responses", "10"]
    assert " for 500 responses " in message(*words, "10000000", *more)


def test_where_their_number_is_not_known_max_prompts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem file that is not at hand."""
    monkeypatch.setattr(sandbox.size, "memory_bytes", lambda: 0)
    words = ["--task", "{kind: jsonl, path: nowhere.jsonl, held_out_fraction: 0.1}"]
    words += ["--model.path", "nowhere", "--cold_start", "null"]
    config = load("smoke", [*words, "--evaluation.num_samples", "4", "--evaluation.max_prompts", "1000"], Schemas())
    shape = load("smoke", [], Schemas())
    assert isinstance(config, SandboxRun) and isinstance(shape, SandboxRun)
    with pytest.raises(ConfigError, match=r" for 4,000 responses "):
        check_memory(config, shape.model.build(VOCABULARY))


@pytest.mark.parametrize("field", ["batch.num_prompts", "batch.num_responses", "sampling.max_tokens"])
def test_a_measurement_of_engines_is_refused_as_a_run_is(field: str) -> None:
    """`calibrate` and `defects` make a run's batches, of which as many prompts had no end."""
    config = load("smoke", [f"--algorithm.{field}", "1000000000000"], Schemas())
    assert isinstance(config, SandboxRun)
    with pytest.raises(ConfigError, match=r"^expected a run that fits into .* of memory, got one of at least "):
        Bench(config, num_steps=0)
