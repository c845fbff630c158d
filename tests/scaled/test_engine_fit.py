"""Laws of claim 31's real half: a model of the sandbox goes to vLLM and Megatron-core, and traces come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.claims import REGIMES, chosen_claims
from sandbox.ledger import engine_fit
from sandbox.ledger.cells import cell
from sandbox.ledger.engine_fit import sampled
from theory.divergences import k3_kl_mu_old

(CLAIM,) = chosen_claims(["31"])
(REGIME,) = (regime for regime in REGIMES if regime.name == "vllm")
SMALL = (("algorithm.batch.num_prompts", "16"), ("cold_start.target_accuracy", "0.1"))
CONFIG = cell(REGIME, CLAIM.arms[0], 0, SMALL).config


def test_a_real_engine_samples_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace a draw: other tokens each, experts of both engines, and a KL that FP8 weights have and float32 has not.

    Between the two engines in float32 it is 1e-13 (docs/mismatch-ladder.md).
    """
    monkeypatch.setattr(engine_fit, "NUM_DRAWS", 2)
    found = sampled(CONFIG, 5, tmp_path)
    assert found.config.seed == 5 and found.config.cold_start is not None and found.config.cold_start.seed == 5
    files = sorted(path.name for path in (tmp_path / "traces-5").iterdir())
    assert files == [f"bf16-fp8-weights-{draw}.safetensors" for draw in (0, 1)]
    first, second = found.traces
    assert first.tokens.tolist() != second.tokens.tolist()
    for trace in found.traces:
        assert len(trace) == 128 and 0 < trace.rewards.mean() < 1
        assert trace.experts_mu is not None and trace.experts_old is not None
        assert k3_kl_mu_old(trace.logp_old, trace.logp_mu)[trace.is_response].mean() > 1e-6


def test_a_ladder_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the other process ends with an error, its last line is the message."""
    monkeypatch.setattr(engine_fit, "RUNG", "bf17")
    with pytest.raises(RuntimeError, match=r"--rung: expected some of fp32; .* got bf17"):
        sampled(CONFIG, 5, tmp_path)
