"""vLLM's own outputs, a line per request: the fields of `RequestOutput` and, in `outputs`, of each `CompletionOutput`.

`vllm/outputs.py`: prompt_token_ids, outputs: [{token_ids, logprobs, routed_experts, ...}]. For each token `logprobs`
maps token ids to {"logprob", "rank", "decoded_token"}; the sampled token's is mu (`SamplingParams(logprobs=0)`;
`logprobs_mode="raw_logprobs"`, the default, is before temperature and masks). `routed_experts`
(`enable_return_routed_experts`) is (rows, layers, slots): a list or, from the HTTP server, a base64-encoded .npy file.
docs/doctor.md has the lines that write the file from Python.

It has mu only: `--old` supplies the trainer's log-probabilities.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from lab.doctor.importers.aligned import listed
from lab.doctor.importers.format import Format, Row


def _is_mine(first: Row) -> bool:
    return {"prompt_token_ids", "outputs"} <= set(first)


def _read(raw: Row, place: str) -> Iterator[Row]:
    prompt = listed(raw, "prompt_token_ids", place)
    for i, output in enumerate(listed(raw, "outputs", place)):
        where = f"{place}: outputs.{i}"
        if not isinstance(output, dict):
            raise ValueError(f"{where}: expected an object, got {type(output).__name__}")
        tokens = listed(output, "token_ids", where)
        logprobs = listed(output, "logprobs", where, len(tokens))
        pairs = enumerate(zip(logprobs, tokens, strict=True))
        mu = [_of_sampled(at, token, f"{where}.logprobs.{t}") for t, (at, token) in pairs]
        experts = output.get("routed_experts")
        if isinstance(experts, str):
            experts = _decoded(experts, where)
        yield {"tokens": [*prompt, *tokens], "num_prompt": len(prompt), "logp_mu": mu, "experts_mu": experts}


def _of_sampled(at: Any, token: Any, where: str) -> Any:
    """The sampled token's log-probability among those of its position."""
    # The keys of a JSON object are text.
    found = at.get(str(token)) if isinstance(at, dict) else None
    value = found.get("logprob") if isinstance(found, dict) else found
    if value is None:
        raise ValueError(f"{where}: expected an object with the sampled token {token}, got {str(at)[:40]}")
    return value


def _decoded(text: str, where: str) -> np.ndarray:
    try:
        return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False).astype(np.int64)
    except Exception as error:  # a torn header or a .npz makes NumPy raise whatever it runs into
        raise ValueError(f"{where}.routed_experts: expected a base64-encoded .npy array, got {text[:16]!r}") from error


FORMAT = Format(
    name="vLLM", files="RequestOutputs as .jsonl", has="tokens, mu, mu's experts (`routed_experts`)",
    lacks="old (pass it with --old), old's experts, entropies, rewards.",
    source="vllm-project/vllm vllm/outputs.py",
    uses=("prompt_token_ids", "outputs"), is_mine=_is_mine, read=_read, has_old=False,
)  # fmt: skip
