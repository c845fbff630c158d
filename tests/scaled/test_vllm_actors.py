"""vLLM as a run has it: in an actor at its place in a Ray cluster, over several devices or compiled."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from sandbox.model.checkpoint import save, to_hf
from scaled.cluster import ray_cluster, rollout_group
from scaled.cluster.engine_actor import build_vllm
from scaled.cluster.rollout_group import EngineLost, RolloutGroup
from scaled.config import RolloutBlock
from scaled.pieces import PromptPiece
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
    build = partial(build_vllm, config_json, rollout, (world.STOP,), not rollout.enforce_eager)
    with ray_cluster.cluster(cluster_world.config(1, 1), tmp_path) as places:
        engines = RolloutGroup(
            places, build, 1, max_num_seqs=rollout.max_num_seqs, timeout_s=600.0, max_restarts=0, bucket_bytes=2**20
        )
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


def test_pieces_over_two_engines_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that go to two engines as these have room give the responses, routes and features of all prompts as one
    piece of one engine, to the bit in float32."""
    model = world.model()
    save(model, tmp_path / "model")
    build = partial(
        build_vllm, (tmp_path / "model" / "config.json").read_text(), RolloutBlock(**world.SMALL), (world.STOP,)
    )
    sampling, found = Sampling(max_tokens=16, num_responses=4, seed=5, num_features=3), []
    with ray_cluster.cluster(cluster_world.config(1, 2), tmp_path) as places:
        engines = RolloutGroup(places, build, 2, max_num_seqs=2, timeout_s=600.0, max_restarts=0, bucket_bytes=2**20)
        engines.load_weights(to_hf(model), version=0)
        for cut in (rollout_group.in_pieces, lambda homes, G, num: [PromptPiece(0, (0, 1, 2, 3, 4, 5), 6 * G)]):
            monkeypatch.setattr(rollout_group, "in_pieces", cut)
            rollouts = engines.generate(world.prompts(), sampling)
            assert rollouts.experts is not None and rollouts.features is not None
            found.append((rollouts, rollouts.experts.experts, rollouts.features.rows, rollouts.features.logits))
        engines.close()
    (as_room, *parts), (at_once, *others) = found
    assert all(torch.equal(a, b) for a, b in zip(parts, others, strict=True))
    for a, b in zip(at_once.responses, as_room.responses, strict=True):
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.logp_mu, b.logp_mu)
    assert (world.abs_diff(model, as_room) <= TOLERANCE).all()
