"""Laws of what is kept of vLLM's outputs between steps; they need no vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from scaled.vllm_engine.capture import EngineStep, RouteStore
from scaled.vllm_engine.requests import Request
from theory.contracts import Prompt


def routes(num_rows: int, shift: int = 0) -> np.ndarray:
    """(rows, 2, 2) ids that differ from row to row."""
    first = np.arange(num_rows)[:, None] + np.arange(2) + shift
    return np.stack([first % 8, (first + 3) % 8], -1).astype(np.int8)


def test_taken_routes_are_forgotten() -> None:
    """A request that takes a former one's name finds none of its rows: those it did not run are -1 (sglang #36404)."""
    store = RouteStore(2, 2, 8, 0)
    store.add(EngineStep(["a"], [0], [6]), routes(6), lambda *_: np.zeros(0))
    assert np.array_equal(store.take("a", 6), routes(6))
    store.add(EngineStep(["a"], [2], [2]), routes(2, shift=4), lambda *_: np.zeros(0))
    taken = store.take("a", 6)
    assert np.array_equal(taken[2:4], routes(2, shift=4))
    assert (taken[:2] == -1).all()
    assert (taken[4:] == -1).all()


def delta(tokens: list[int], logprobs: list[dict] | None, finish: str | None = None) -> SimpleNamespace:
    """The result of one engine step of a request."""
    completion = SimpleNamespace(
        token_ids=tokens, logprobs=logprobs, finish_reason=finish, routed_experts=None if finish is None else "routes"
    )
    return SimpleNamespace(outputs=[completion], prompt_logprobs=None, finished=finish is not None)


def entry(token: int, logprob: float) -> dict:
    """A token's log-probability, beside that of a likelier one."""
    return {token: SimpleNamespace(logprob=logprob), 7: SimpleNamespace(logprob=-0.1)}


def test_tokens_come_with_their_own_log_probs() -> None:
    """Every token has the log-probability that came with it; a token without one is never given 0 (vime #70)."""
    request = Request(Prompt("p", (1, 2), ""))
    request.add(delta([3, 4], [entry(3, -1.5), entry(4, -2.5)]))
    request.add(delta([5], [entry(5, -0.5)], finish="stop"))
    response = request.response(version=3)
    assert response.tokens.tolist() == [3, 4, 5]
    assert response.logp_mu.tolist() == [-1.5, -2.5, -0.5]
    assert request.routes == "routes"
    bare = Request(Prompt("p", (1, 2), ""))
    bare.add(delta([], None, finish="abort"))
    assert bare.response(version=0).tokens.tolist() == []
    for wrong in (delta([3, 4], [entry(3, -1.5)]), delta([3], [entry(3, -1.5), entry(4, -2.5)])):
        with pytest.raises(ValueError, match="argument 2"):
            Request(Prompt("p", (1, 2), "")).add(wrong)
    with pytest.raises(RuntimeError, match="expected 1 log-probabilities, vLLM gave none"):
        Request(Prompt("p", (1, 2), "")).add(delta([3], None))
