"""Families and conventions beyond the tests' own model: each is the sandbox's after two pushes, or is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from lab.hf import config_fields
from sandbox.model import MoE
from sandbox.model.checkpoint import save, to_hf
from scaled.config import RolloutBlock
from scaled.model_shape import load_shape
from scaled.vllm_engine import environment
from scaled.vllm_engine.engine import VllmEngine
from tests.scaled import vllm_world as world
from theory.contracts import Sampling
from theory.routing.gates import GATES
from theory.streams import stream

pytestmark = [pytest.mark.filterwarnings(w) for w in world.WARNINGS]

MODELS = {
    "OLMoE": {"qk_norm": "projection", "dense_layers": (), "norm_eps": 1e-5, "gate": GATES["olmoe"]},
    # vLLM's reload leaves a tied head on a CPU with what it was tied to before: 3.8 nats without `push.tie_head`.
    "tied head": {"tied_head": True},
    "grouped queries": {"num_kv_heads": 2, "dense_layers": ()},
}


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_routes_are_the_sandbox_s(name, tmp_path):
    """After pushes of other weights and of its own, the engine is the sandbox's model: log-probs, routes, features."""
    config = replace(world.model_config(), **MODELS[name])
    weights, other = (MoE(config, stream(seed, name)) for seed in (0, 1))
    engine = world.engine(other, tmp_path)
    engine.load_weights(to_hf(weights), version=1)
    rollouts = engine.generate(world.prompts(), Sampling(max_tokens=24, num_responses=2, seed=5, num_features=4))
    engine.close()
    assert (world.abs_diff(weights, rollouts) <= 1e-5).all()
    scores = world.trainer_scores(weights, rollouts, rollouts.features.feature_rows)
    assert torch.equal(scores.natural.experts, rollouts.experts.experts)
    assert (scores.features.logits - rollouts.features.logits).abs().max() <= 1e-5


def test_what_vllm_would_compute_otherwise_is_refused(tmp_path):
    """A config.json that vLLM reads otherwise than it is meant is one clear line."""
    olmoe = replace(world.model_config(), **MODELS["OLMoE"] | {"norm_eps": 1e-6})
    (tmp_path / "config.json").write_text(json.dumps(config_fields(olmoe.shape())))
    with pytest.raises(ValueError, match=r"rms_norm_eps: vLLM computes OLMoE with 1e-05 .* got 1e-06"):
        VllmEngine(tmp_path, RolloutBlock(), (world.STOP,))
    # A norm over the whole projection names a model OLMoE, with the sandbox's default gate, too.
    renormalised = replace(world.model_config(), **MODELS["OLMoE"] | {"gate": GATES["qwen3"]})
    save(MoE(renormalised, stream(0, "renormalised")), tmp_path)
    with pytest.raises(ValueError, match=r"norm_topk_prob: vLLM computes OLMoE without .* got true$") as caught:
        VllmEngine(tmp_path, RolloutBlock(), (world.STOP,))
    assert "\n" not in str(caught.value)
    environment.check_model(replace(world.model_config(), **MODELS["OLMoE"]).shape(), is_cpu=True)
    moonlight = load_shape("nowhere", "moonlight-16b-a3b")
    with pytest.raises(ValueError, match=r"without latent attention on a CPU .* got deepseek_v3"):
        environment.check_model(moonlight, is_cpu=True)
    environment.check_model(moonlight, is_cpu=False)


def test_official_routes_without_triton_are_refused(tmp_path):
    """`routes: official` where vLLM cannot return routes is an error, never a silent capture; no weights, no tokens."""
    save(world.model(), tmp_path)
    with pytest.raises(ValueError, match=r"rollout.routes: official needs a Triton that runs on this platform"):
        VllmEngine(tmp_path, RolloutBlock(routes="official"), (world.STOP,))
    engine = VllmEngine(tmp_path, RolloutBlock(max_model_len=64, kv_cache_gib=0.05), (world.STOP,))
    with pytest.raises(RuntimeError, match="expected weights to have been loaded, got none"):
        engine.generate(world.prompts((3,)), Sampling(max_tokens=4))
    folder = engine._folder
    assert folder.is_dir()
    engine.close()
    engine.close()
    assert not folder.exists()
