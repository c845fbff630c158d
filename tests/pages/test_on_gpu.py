"""The page on GPUs says what the stored measurements say."""

from __future__ import annotations

import itertools

import pandas as pd
import pytest

from tests.pages import deep_ladder
from tests.pages.on_gpu import RESULTS, spans
from tests.pages.study import ROOT


def test_engine_and_rank_take_turns() -> None:
    """The engine comes first, and whoever has the GPU's memory gives it up before the other one takes it."""
    found = spans(pd.read_csv(RESULTS / "memory.csv"))
    assert [words for _, _, words in found] == ["engine", "rank", "engine", "rank"]
    assert all(stop <= start for (_, stop, _), (start, _, _) in itertools.pairwise(found))


def test_a_prediction_can_fail() -> None:
    """Every prediction about the ladder fails where all engines are alike, without replay's gain."""
    alike = deep_ladder.Engine(num_tokens=1, kl=1e-3, replayed_kl=1e-3, tokens=0.5, by_layer=(0.2,) * 24)
    found = dict.fromkeys(deep_ladder.COLOURS, alike)
    assert not any(predicted.test(found)[0] for predicted in deep_ladder.PREDICTIONS)


@pytest.mark.parametrize("page", ["README.md", "docs/on-gpu.md"])
def test_sentences_have_the_numbers_of_the_tables(page: str) -> None:
    """The sentences on half of Qwen3-30B-A3B have its shares of routers, and the shares of KL that R3 removes."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in (deep_ladder.BF16, deep_ladder.FP8):
        engine = deep_ladder.engines()[name]
        assert f"{engine.routers:.0%}" in text and f"{engine.removed:.0%}" in text
