"""Laws of log-probs and entropies from a head that is computed a chunk of tokens at a time, its vocabulary split.

Tensor-parallel ranks are real; the reference is torch's log_softmax over all logits at once, in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sandbox.bench.memory import largest_allocation, peak_bytes
from scaled.config import TrainingBlock
from scaled.model_shape import load_shape
from scaled.plan.memory import logit_bytes
from tests.scaled.megatron_world import free_ports, joined, spawn
from tests.scaled.rank_world import (
    OneRank,
    algorithm,
    altered,
    batch,
    farthest,
    one_minibatch,
    training,
    verdicts_on,
    write_model,
)
from theory.objectives import preset
from theory.streams import stream

V, D, N = 97, 32, 50  # an odd vocabulary has a row that only fills it up under TP2
RANGE = 10.0
"""Logits are up to this far from a row's largest: log-probs and entropies are sums of numbers of this size."""

CHUNKS = (1, 7, 25, 49, 50, 1000)


J = 4  # tokens scored at a position: the sampled one, and three that an engine found likely


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, all rows of the head, J tokens a row, some of them twice, and the gradient of each log-prob."""
    draws = stream(0, "scoring")
    hidden = torch.randn(N, D, generator=draws).to(dtype)
    weight = (3 * torch.randn(V, D, generator=draws) / D**0.5).to(dtype)
    tokens = torch.randint(0, V, (N, J), generator=draws)
    tokens[::3, 1] = tokens[::3, 0]  # a sampled token that is among the likeliest
    return hidden, weight, tokens, torch.randn(N, J, generator=draws) / J


def scored(dtype: torch.dtype, chunk: int, num: int = N, temperature: float = 1.0) -> dict[str, Tensor]:
    """This rank's log-probs, entropies and gradients (the hidden states' summed over ranks) of the first tokens."""
    from scaled.megatron_engine.scoring import token_scores

    group = dist.group.WORLD
    assert group is not None
    hidden, weight, tokens, grad = problem(dtype)
    size, rank = -(-V // dist.get_world_size()), dist.get_rank()
    own = torch.full((size, D), 7.0, dtype=dtype)  # what stands in rows that are no tokens must not matter
    mine = weight[rank * size : (rank + 1) * size]
    own[: len(mine)] = mine
    hidden, own = hidden[:num].requires_grad_(), own.requires_grad_()
    logp, entropy, squares = token_scores(hidden, own, tokens[:num], V, group, chunk, temperature)
    assert not entropy.requires_grad and not squares.requires_grad
    (logp * grad[:num]).sum().backward()
    assert hidden.grad is not None and own.grad is not None
    assert (own.grad[len(mine) :] == 0).all()
    grad_hidden = hidden.grad.float()
    dist.all_reduce(grad_hidden)
    found = {"logp": logp.detach(), "entropy": entropy, "squares": squares}
    return found | {"hidden": grad_hidden, "weight": own.grad[: len(mine)].float()}


def reference(dtype: torch.dtype, temperature: float = 1.0) -> dict[str, Tensor]:
    """The same from all logits at once, in float64."""
    hidden, weight, tokens, grad = problem(dtype)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp_NV = (hidden @ weight.t() / temperature).log_softmax(-1)
    logp = logp_NV.gather(1, tokens)
    (logp * grad).sum().backward()
    entropy = -(logp_NV.exp() * logp_NV).sum(-1).detach()
    assert hidden.grad is not None and weight.grad is not None
    squares = logp_NV.exp().square().sum(-1).detach()
    found = {"logp": logp.detach(), "entropy": entropy, "squares": squares}
    return found | {"hidden": hidden.grad, "weight": weight.grad}


def every_chunk_is_the_reference(folder: Path) -> None:
    """In fp32 values and gradients are float64's to 1e-5 (of numbers up to 10 / T), whatever chunk and temperature."""
    size, rank = -(-V // dist.get_world_size()), dist.get_rank()
    for temperature in (1.0, 0.7, 1.3):
        truth = reference(torch.float32, temperature)
        truth["weight"] = truth["weight"][rank * size : (rank + 1) * size]
        for chunk in CHUNKS:
            for name, ours in scored(torch.float32, chunk, temperature=temperature).items():
                assert (ours - truth[name]).abs().max() < 1e-5, (temperature, chunk, name)


def chunks_change_no_row(folder: Path) -> None:
    """Values and the hidden states' gradients belong to a row each: a chunk changes at most their last bits.

    A matrix product may sum a row in another order where it has another number of rows. The head's gradient is a sum
    over chunks: rounding of fp32, and in bf16 at most the rounding of each chunk's part beside that of the whole.
    """
    for dtype in (torch.float32, torch.bfloat16):
        whole = scored(dtype, N)
        again = scored(dtype, 10 * N)
        assert all(torch.equal(again[name], whole[name]) for name in whole), "as many tokens as there are is one chunk"
        eps = torch.finfo(dtype).eps
        for chunk in CHUNKS:
            ours = scored(dtype, chunk)
            for name in whole:
                scale = max(whole[name].abs().max().item(), RANGE)
                assert (ours[name] - whole[name]).abs().max() <= 2 * eps * scale, (dtype, chunk, name)


def no_token_has_no_gradient(folder: Path) -> None:
    """A micro-batch without response tokens gives gradients of zero, for the other ranks wait for its backward."""
    empty = scored(torch.float32, 4, num=0)
    assert empty["logp"].shape == (0, J) and (empty["weight"] == 0).all()


def a_strange_token_is_refused(folder: Path) -> None:
    """A token outside the vocabulary is an error that says so."""
    from scaled.megatron_engine.scoring import token_scores

    group = dist.group.WORLD
    assert group is not None
    hidden, weight, _, _ = problem(torch.float32)
    with pytest.raises(ValueError, match=r"expected tokens in \[0, 97\), got 97"):
        token_scores(hidden[:1], weight, torch.tensor([[5, 97]]), V, group, 1)


def training_agrees_whatever_the_chunk(folder: Path) -> None:
    """A rank that holds 3 tokens' logits scores and trains as one that holds all: log-probs, entropies, gradients."""
    rollouts = batch(4)
    routing = altered(rollouts)
    found = []
    for chunk in (3, 1024):
        engine = OneRank(folder, algorithm("R3"), logit_chunk=chunk, **FIELDS[dist.get_world_size()])
        part = engine.rank.score(rollouts, routing)
        logp_old_BT = torch.full_like(rollouts.padded().logp_mu_BT, -2.0)
        minibatch = one_minibatch(rollouts, logp_old_BT)
        update = engine.rank.update(minibatch, preset("reinforce"), routing)
        for ours, theirs in zip(part.tokens, update.tokens, strict=True):
            assert torch.equal(ours.logp_bT, theirs.logp_bT), "pi is old on weights that did not change"
        found.append((part.tokens, dict(engine.rank.gradients())))
    (ours, our_gradients), (theirs, their_gradients) = found
    for one, other in zip(ours, theirs, strict=True):
        assert (one.logp_bT - other.logp_bT).abs().max() < 2e-6
        assert (one.entropy_bT - other.entropy_bT).abs().max() < 2e-6
    if our_gradients:
        assert farthest(our_gradients, their_gradients) < 2e-6


FIELDS: dict[int, dict[str, Any]] = {1: {}, 2: {"num_ranks": 2, "tensor_parallel": 2}}
LAWS = (
    every_chunk_is_the_reference,
    chunks_change_no_row,
    no_token_has_no_gradient,
    a_strange_token_is_refused,
    training_agrees_whatever_the_chunk,
)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[int, list[dict[str, str | None]]]:
    folder = write_model(tmp_path_factory.mktemp("scoring") / "model")
    return {num: verdicts_on(__name__, folder, **fields) for num, fields in FIELDS.items()}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_head_by_chunks(verdicts, law, num_ranks: int) -> None:
    """Each law (its own docstring) holds on every rank of a world of one and of two tensor-parallel ranks."""
    for verdict in verdicts[num_ranks]:
        assert verdict[law.__name__] is None, verdict[law.__name__]


# Vocabulary, width, tokens, chunk: logits larger than the head and smaller, one chunk and several.
SIZES = [(8000, 64, 600, 100), (8000, 64, 600, 600), (30000, 256, 150, 50), (4000, 512, 300, 1024)]


def measure(rank: int, port: int) -> list[tuple[int, int, int]]:
    """In a world of one rank: peak bytes, planned ones and the largest tensor, for every size and precision."""
    from scaled.megatron_engine.scoring import token_scores

    found = []
    with joined(training(), rank, port):
        group = dist.group.WORLD
        assert group is not None
        for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            for vocabulary, width, num, chunk in SIZES:
                draws = stream(0, "scoring-memory")
                states = torch.randn(num, width, generator=draws).to(dtype)
                weight = torch.randn(vocabulary, width, generator=draws).to(dtype).requires_grad_()
                tokens = torch.randint(0, vocabulary, (num,), generator=draws)

                def call(states=states, weight=weight, tokens=tokens, chunk=chunk, vocabulary=vocabulary) -> Tensor:
                    hidden = states.clone().requires_grad_()
                    logp, *_ = token_scores(hidden, weight, tokens[:, None], vocabulary, group, chunk)
                    return torch.autograd.grad(logp.sum(), (hidden, weight))[1]

                call()
                shape = load_shape("-", "qwen3-30b-a3b")
                sized = type(shape)(**{**vars(shape), "vocab_size": vocabulary, "hidden_size": width})
                block = TrainingBlock(precision=precision, micro_batch_size=1, logit_chunk=chunk)
                found.append((peak_bytes(call), logit_bytes(sized, block, num, num), largest_allocation(call)))
    return found


def test_memory_is_the_plans() -> None:
    """Peak bytes are within 10% of plan's count; no tensor is larger than the logits of a chunk, or than the head."""
    (found,) = spawn(1, measure, free_ports(1)[0])
    for i, (peak, planned, largest) in enumerate(found):
        vocabulary, width, num, chunk = SIZES[i % len(SIZES)]
        assert abs(peak / planned - 1) < 0.1, (SIZES[i % len(SIZES)], peak, planned)
        assert largest <= 4 * vocabulary * max(min(chunk, num), width)
