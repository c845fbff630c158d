"""vLLM as a run has it: in an actor at its place in a Ray cluster, over several devices or compiled."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from sandbox.model.checkpoint import save, to_hf
from scaled.cluster import ray_cluster
from scaled.cluster.engine_actor import build_vllm
from scaled.cluster.rollout_group import EngineLost, RolloutGroup
from scaled.config import RolloutBlock
from tests.scaled import cluster_world
from tests.scaled import vllm_world as world
from tests.scaled.ray_marks import RAY
from theory.contracts import Sampling

pytestmark = RAY

TOLERANCE = 1e-5  # measured: 1e-6 in log-probs, 2e-6 in features


def kill_a_worker(number: int) -> None:
    """Ends one of the processes that vLLM has started for this engine's devices."""
    workers = [p for p in psutil.Process().children(recursive=True) if "VLLM" in " ".join([p.name(), *p.cmdline()])]
    workers[-1].kill()


# A CPU compiles and captures no graph: that a graph's writes reach the same buffers is not seen here.
@pytest.mark.parametrize("fields", [{"tensor_parallel": 2}, {"enforce_eager": False}], ids=["two devices", "compiled"])
def test_an_engine_in_an_actor_is_the_model(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two workers inside its one bundle, and compiled, mu and its features are the trainer's to rounding."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # workers may share a core
    rollout, model = RolloutBlock(**world.SMALL | fields), world.model()
    save(model, tmp_path / "model")
    config_json = (tmp_path / "model" / "config.json").read_text()
    build = partial(build_vllm, config_json, rollout, world.STOP, not rollout.enforce_eager)
    with ray_cluster.cluster(cluster_world.config(1, 1), tmp_path) as places:
        engines = RolloutGroup(places, build, 1, timeout_s=600.0, max_restarts=0, bucket_bytes=2**20)
        engines.load_weights(to_hf(model), version=0)
        rollouts = engines.generate(world.prompts(), Sampling(max_tokens=8, num_responses=2, seed=5, num_features=3))
        features = rollouts.features
        assert rollouts.experts is not None and features is not None
        # Ray's object store has them, and ends with the cluster.
        rows = [rollouts.experts.rows(b) for b in range(len(rollouts))]
        hidden, logits = features.hidden, features.logits
        if rollout.tensor_parallel > 1:
            # The actor lives on without it: only the engine's own word makes it a lost engine, which is replaced.
            engines.ask(kill_a_worker)
            with pytest.raises(EngineLost, match=r"engine 0 was lost .one of the engine's worker processes ended"):
                engines.generate(world.prompts(), Sampling(max_tokens=8, seed=5))
        engines.close()
    assert (world.abs_diff(model, rollouts) <= TOLERANCE).all()
    trainer = world.trainer_scores(model, rollouts, features.feature_rows).features
    assert trainer is not None
    assert (trainer.logits - logits).abs().max() <= TOLERANCE
    assert (trainer.hidden - hidden).abs().max() <= TOLERANCE
    for b in range(len(rollouts)):
        span = slice(int(features.offsets[b]), int(features.offsets[b + 1]))
        chosen = logits[span].topk(2, -1).indices.sort(-1).values
        assert torch.equal(chosen, rows[b][features.rows_of(b)].long())
