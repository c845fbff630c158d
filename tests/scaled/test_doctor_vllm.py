"""The lines of docs/doctor.md on outputs of a real vLLM, read by the doctor beside the trainer's side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.doctor.diagnosis import diagnose
from lab.doctor.importers import load_dump
from tests.lab.doctor.test_batch import code
from tests.scaled import vllm_world
from theory.contracts import Prompt, Response, Rollouts

LENGTHS = (3, 9, 1, 20)


def generated(engine: Any) -> list[Any]:
    """RequestOutputs of a real engine, two completions of 24 tokens for each prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        n=2,
        max_tokens=24,
        seed=0,
        logprobs=0,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    for prompt in vllm_world.prompts(LENGTHS):
        engine._engine.add_request(prompt.id, {"prompt_token_ids": list(prompt.tokens)}, params)
    done = []
    while engine._engine.has_unfinished_requests():
        done += engine._engine.step()
    return done


def old_side(model: Any, outputs: list[Any], path: Path) -> Path:
    """The trainer's log-probabilities of these outputs, a line per completion."""
    responses = []
    for output in outputs:
        for one in output.outputs:
            logp = torch.tensor([at[token].logprob for token, at in zip(one.token_ids, one.logprobs, strict=True)])
            tokens = torch.tensor(list(one.token_ids))
            prompt = Prompt(output.request_id, tuple(output.prompt_token_ids), "")
            responses.append(Response(prompt, tokens, logp, torch.ones(len(tokens), dtype=torch.bool), "length", 0))
    scores = vllm_world.trainer_scores(model, Rollouts(tuple(responses)))
    rows = [{"logp_old": scores.logp_BT[b, : len(one.tokens)].tolist()} for b, one in enumerate(responses)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.filterwarnings(*vllm_world.WARNINGS)
def test_vllms_own_outputs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, by the page's lines: every token is there, log mu is the trainer's. (No routes on a CPU.)"""
    model = vllm_world.model(dense_layers=())
    engine = vllm_world.engine(model, tmp_path / "m")
    try:
        outputs = generated(engine)
    finally:
        engine.close()
    monkeypatch.chdir(tmp_path)
    exec(code("doctor.md", "What to write from vLLM"), {"outputs": outputs})
    dump = load_dump(tmp_path / "engine.jsonl", old=old_side(model, outputs, tmp_path / "old.jsonl"))
    found = diagnose(dump.trace)
    assert dump.format == "vLLM" and len(dump.trace) == 2 * len(LENGTHS)
    assert found.seen["num_tokens"] == 24 * len(dump.trace) and found.fault is None
    assert "router_disagreement" not in found.seen
    # vLLM's float32 kernels sum in another order than the trainer: 1e-5 of a nat at the most.
    assert (dump.trace.logp_mu - dump.trace.logp_old).abs().max() < 1e-4
