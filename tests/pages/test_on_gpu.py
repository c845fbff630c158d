"""The page on GPUs says what the stored measurements say."""

from __future__ import annotations

import itertools

import pandas as pd

from tests.pages.on_gpu import LADDER, RESULTS, RUNS, ladder, runs, spans


def test_the_tables_are_computed_from_the_measurements() -> None:
    """docs/on-gpu.md is rebuilt from results/on_gpu without a GPU."""
    assert RUNS.read() == runs()
    assert LADDER.read() == ladder()


def test_engine_and_rank_take_turns() -> None:
    """The engine comes first, and whoever has the GPU's memory gives it up before the other one takes it."""
    found = spans(pd.read_csv(RESULTS / "memory.csv"))
    assert [words for _, _, words in found] == ["engine", "rank", "engine", "rank"]
    assert all(stop <= start for (_, stop, _), (start, _, _) in itertools.pairwise(found))
