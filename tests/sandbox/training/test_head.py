"""Laws of the head in blocks: the same scores, the same gradient, and a block's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sandbox.bench.memory import peak_bytes
from sandbox.model import MoE
from sandbox.training import head
from sandbox.training.head import HeadScores, head_scores
from tests.sandbox import compiled_world
from theory.streams import stream

ROWS, K = 23, 3


def rows(model: MoE, num: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, tokens and other ids of some rows."""
    draws, V = stream(0, "head"), model.config.vocab_size
    hidden_nD = torch.randn(num, model.config.hidden_size, generator=draws).requires_grad_()
    return hidden_nD, torch.randint(V, (num,), generator=draws), torch.randint(V, (num, K), generator=draws)


def scored(model: MoE, temperature: float) -> tuple[HeadScores, list[Tensor]]:
    """The scores of some rows, and the gradient of a weighted sum of their log-probs by inputs and head."""
    hidden_nD, tokens_n, ids_nK = rows(model)
    found = head_scores(model, hidden_nD, tokens_n, ids_nK, temperature=temperature, has_entropy=True)
    assert found.logp_nK is not None
    weight_n = torch.randn(ROWS, generator=stream(0, "weights"))
    total = (found.logp_n * weight_n).sum() + (found.logp_nK * weight_n[:, None]).sum()
    weights = model.embedding if model.head is None else model.head
    return found, list(torch.autograd.grad(total, [hidden_nD, weights]))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])  # with a head of its own, and with the embeddings as head
def test_blocks_are_the_whole(name: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of five rows, the last of three, give the bits of all rows at once; gradients sum in another order."""
    model = compiled_world.model(name)
    whole, of_whole = scored(model, temperature)
    monkeypatch.setattr(head, "BLOCK_BYTES", 5 * 4 * model.config.vocab_size + 3)
    sizes = []
    scores = head._scores
    monkeypatch.setattr(head, "_scores", lambda *given: sizes.append(len(given[4])) or scores(*given))
    blocks, of_blocks = scored(model, temperature)
    # Once forward, and again backward, last block first.
    assert sizes == [5, 5, 5, 5, 3, 3, 5, 5, 5, 5]
    for one, other in zip(blocks, whole, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
    for one, other in zip(of_blocks, of_whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # float32 sums of 23 rows


def test_without_gradients_each_block_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are plain tensors, and entropies and other ids are there only if asked for."""
    model = compiled_world.model("qwen3")
    monkeypatch.setattr(head, "BLOCK_BYTES", 1)
    calls = []
    scores = head._scores
    monkeypatch.setattr(head, "_scores", lambda *given: calls.append(1) or scores(*given))
    hidden_nD, tokens_n, _ = rows(model)
    with torch.no_grad():
        found = head_scores(model, hidden_nD, tokens_n)
    assert len(calls) == ROWS and not found.logp_n.requires_grad
    assert found.entropy_n is None and found.sum_squares_n is None and found.logp_nK is None


def test_the_memory_is_that_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients, too: a sixteenth of the rows at a time takes at most an eighth of the bytes of all at once."""
    model = MoE(replace(compiled_world.MODELS["qwen3"], vocab_size=8192), stream(0, "model"))
    hidden_nD, tokens_n, _ = rows(model, num=1024)

    def step() -> None:
        head_scores(model, hidden_nD, tokens_n, has_entropy=True).logp_n.sum().backward()

    step()  # the gradients are there from now on
    whole = peak_bytes(step)
    assert whole > 3 * 4 * 1024 * 8192
    monkeypatch.setattr(head, "BLOCK_BYTES", 64 * 4 * 8192)
    assert peak_bytes(step) <= whole / 8
