"""vLLM's own return of routes and our capture say the same, expert by expert."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.scaled import vllm_world as world
from tests.scaled.vllm_official import LENGTHS, SAMPLING
from theory.contracts import Prompt, Sampling

pytestmark = [pytest.mark.slow, *(pytest.mark.filterwarnings(w) for w in world.WARNINGS)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The output of an engine with `routes: official`, cold and over a warm prefix cache, in a process of its own."""
    folder = tmp_path_factory.mktemp("vllm-official")
    command = [sys.executable, "-m", "tests.scaled.vllm_official", str(folder)]
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=300, env={**os.environ}, check=False)
    assert done.returncode == 0, (folder / "log").read_text()[-2000:]
    with np.load(folder / "official.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_official_routes_are_the_captured_ones(official, tmp_path, cache):
    """The same tokens give the same experts by either way, in every row; with the prefix cache cold or warm."""
    assert official["routes"] == "official"
    engine = world.engine(world.model(), tmp_path)
    ends = np.cumsum(official[f"{cache}/lengths"])
    responses = np.split(official[f"{cache}/tokens"], ends[:-1])
    prompts = [prompt for prompt in world.prompts(LENGTHS) for _ in range(SAMPLING.num_responses)]
    sequences = [(*p.tokens, *r.tolist()) for p, r in zip(prompts, responses, strict=True)]
    captured = engine.generate([Prompt("", s, "") for s in sequences], Sampling(max_tokens=1))
    scores = engine.score(sequences)
    engine.close()
    expected = np.concatenate([captured.experts.rows(b)[: len(s) - 1].numpy() for b, s in enumerate(sequences)])
    assert official[f"{cache}/num_rows"].tolist() == [len(s) - 1 for s in sequences]
    assert np.array_equal(official[f"{cache}/experts"], expected)
    logp = np.concatenate([s[-n:].numpy() for s, n in zip(scores, official[f"{cache}/lengths"], strict=True)])
    assert np.abs(official[f"{cache}/logp"] - logp).max() <= 1e-5


def test_official_runner_s_features_belong_to_its_routes(official):
    """The second model runner's batch is read in its own order: the top-k of a row's logits are the row's experts."""
    starts = np.cumsum(official["cold/num_rows"]) - official["cold/num_rows"]
    rows = official["cold/rows"].reshape(-1, SAMPLING.num_features) + starts[:, None]
    chosen = np.sort(np.argsort(official["cold/logits"], -1)[..., -2:], -1)
    assert np.array_equal(chosen, official["cold/experts"][rows.ravel()])
