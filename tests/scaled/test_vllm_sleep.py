"""Turns of a colocated vLLM engine: what its sleep asks vLLM for, and what it needs before it samples again."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from sandbox.model.checkpoint import to_hf
from scaled.vllm_engine.engine import VllmEngine
from tests.contracts.worlds import same
from tests.scaled import vllm_world as world
from theory.contracts import Sampling

pytestmark = [pytest.mark.filterwarnings(w) for w in world.WARNINGS]

SAMPLING = Sampling(max_tokens=8, num_responses=2, seed=5)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    engine = world.engine(world.model(), tmp_path_factory.mktemp("vllm"))
    yield engine
    engine.close()


def test_an_engine_on_a_gpu_keeps_no_weights_asleep(engine: VllmEngine) -> None:
    """vLLM is asked for level 2, which drops weights that the next push replaces, and to wake up as a whole.

    Whether it then frees the memory is measured on a GPU (docs/on-gpu.md).
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    one = object.__new__(VllmEngine)
    one._is_cpu, one._engine, one.version = False, mock.create_autospec(LLMEngine, instance=True), 3
    one.sleep()
    one.wake()
    assert one._engine.mock_calls == [mock.call.sleep(level=2), mock.call.wake_up()]


def test_an_engine_needs_weights_after_its_sleep(engine: VllmEngine) -> None:
    """Asleep and awake again it samples nothing, scores nothing and has no version; pushed to, it samples as before."""
    before = engine.generate(world.prompts(), SAMPLING)
    engine.sleep()
    for _ in range(2):
        for call in (lambda: engine.generate(world.prompts(), SAMPLING), lambda: engine.score([[2, 3]])):
            with pytest.raises(RuntimeError, match=r"expected weights to have been loaded, got none since .* wake"):
                call()
        assert engine.version == -1
        engine.wake()
    engine.load_weights(to_hf(world.model()), version=0)
    assert same(engine.generate(world.prompts(), SAMPLING), before)
