"""YaRN in vLLM: its log-probs are transformers', at positions before and beyond the length of the pretraining.

That Megatron-core's logits are transformers', too, is a law of test_megatron_model_layouts.py.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lab.hf import read_json
from scaled.config import RolloutBlock
from scaled.plan.engine_memory import rotary_bytes
from scaled.vllm_engine import environment
from scaled.vllm_engine.engine import VllmEngine
from tests.scaled import vllm_world as world
from tests.scaled.megatron_world import file_tensors, tiny_folder
from tests.scaled.plan_world import loaded
from theory.contracts import Sampling

pytestmark = [pytest.mark.filterwarnings(w) for w in world.WARNINGS]

# Responses end at position 124. The table has 288, more than the model's 256 positions.
STRETCH: dict[str, Any] = {
    "type": "yarn", "factor": 9.0, "original_max_position_embeddings": 32, "beta_fast": 1.5, "beta_slow": 0.1,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": world.VOCABULARY, "hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256,
    "max_position_embeddings": 256, "rope_parameters": None,
}  # fmt: skip
LATENT = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32, "kv_lora_rank": 32, "q_lora_rank": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": ("qwen3_moe", {"head_dim": 32, "rope_scaling": STRETCH | {"truncate": False}}),
    "DeepSeek-V2": ("deepseek_v2", LATENT | {"rope_scaling": STRETCH}),
    "Kimi-K2": (
        "deepseek_v3",
        LATENT | {"model_type": "kimi_k2", "rope_scaling": STRETCH | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
}


@pytest.fixture
def plain_attention(monkeypatch):
    """Engines expand latents; vLLM keeps the variables that it has read, until told."""
    from vllm import envs

    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    monkeypatch.setattr(environment, "check_model", lambda shape, is_cpu: None)
    envs.disable_envs_cache()
    yield
    monkeypatch.undo()
    envs.disable_envs_cache()


@pytest.mark.usefixtures("plain_attention")
@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_those_of_transformers(name, tmp_path):
    """Every sampled token's log-prob is transformers' to 1e-5, and the table of sines has the planned bytes.

    Latent attention as vLLM's class without its kernels for latents, of which a CPU has none for these widths. Its
    frequencies and scales are by the same lines in both classes, and it has none of the default rotation's fault.
    """
    from transformers import AutoModelForCausalLM

    family, changes = MODELS[name]
    folder = tiny_folder(tmp_path / "model", family, **SIZES | changes)
    with world.loading() as sizes:
        engine = VllmEngine(folder, RolloutBlock(**world.SMALL), (world.STOP,))
    engine.load_weights(file_tensors(folder).items(), version=0)
    rollouts = engine.generate(world.prompts(), Sampling(max_tokens=24, num_responses=2, seed=5))
    engine.close()
    # transformers has no kimi_k2: an export names the type that it has.
    (folder / "config.json").write_text(json.dumps(read_json(folder / "config.json") | {"model_type": family}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for response in rollouts.responses:
        prompt = torch.tensor(response.prompt.tokens)
        with torch.no_grad():
            logp_SV = model(torch.cat([prompt, response.tokens])[None]).logits[0].log_softmax(-1)
        logp_T = logp_SV[len(prompt) - 1 : -1].gather(1, response.tokens[:, None])[:, 0]
        assert (logp_T - response.logp_mu).abs().max() <= 1e-5
    tables = {size for key, size in sizes.items() if key.endswith("cos_sin_cache")}
    config = loaded("minirl/n8_r3").model_copy(update={"rollout": RolloutBlock(**world.SMALL)})
    assert tables == {rotary_bytes(config, engine.shape)}
