"""The activations that Megatron-core's layers save for backward, counted as the update of a rank runs.

autograd hands every tensor that it saves to a hook; each storage counts once, while somebody has it, and weights do not
count. Two kernels that a GPU has and a CPU lacks are replaced by what they save: fused attention keeps its inputs, its
output and a log-sum-exp, where Megatron's local one keeps S x S matrices and repeated keys; a fused norm keeps its
input, where torch's keeps the normed input, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from scaled.config import ModelBlock, TrainingBlock
from tests.scaled.megatron_world import in_turn
from tests.scaled.rank_world import algorithm, one_minibatch
from theory.contracts import Prompt, Response, Rollouts
from theory.objectives import preset
from theory.routing.passes import RoutingPlan
from theory.streams import stream


def batch(num: int, tokens: int, vocab_size: int) -> Rollouts:
    """Responses of one length and random tokens, so that every micro-batch is full; a quarter of each is its prompt."""
    draws = stream(0, "saved-activations")
    drawn = torch.randint(2, vocab_size, (num, tokens), generator=draws)
    first = tokens // 4
    return Rollouts(
        tuple(
            Response(
                Prompt(str(i), tuple(row[:first].tolist()), ""), row[first:], torch.full((tokens - first,), -3.0),
                torch.ones(tokens - first, dtype=torch.bool), "stop", 0,
            )
            for i, row in enumerate(drawn)
        )
    )  # fmt: skip


@dataclass
class Kept:
    """Autograd's handle in place of a saved tensor; the count goes down when the last one of a storage is dropped."""

    counts: SavedBytes
    tensor: Tensor
    place: int

    def __del__(self) -> None:
        self.counts.drop(self.place)


class SavedBytes:
    """Bytes of the storages that are saved now, and the most at a time, while `is_on`."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.total = self.peak = 0
        self.is_on = False
        self.path: list[torch.nn.Module] = []
        self.inputs: list[int] = []
        self._weights = {_place(w) for w in weights}
        self._num: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor | Kept:
        """The hook of a saved tensor."""
        place, size = _place(tensor), tensor.untyped_storage().nbytes()
        if not self.is_on or size == 0 or place in self._weights:
            return tensor
        # A fused norm has no normed input to save.
        if self.path and isinstance(self.path[-1], torch.nn.RMSNorm) and place not in self.inputs:
            return tensor
        if self._num[place] == 0:
            self._sizes[place] = size
            self.total += size
        self._num[place] += 1
        self.peak = max(self.peak, self.total)
        return Kept(self, tensor, place)

    def drop(self, place: int) -> None:
        """One saved tensor of this storage is gone."""
        self._num[place] -= 1
        if self._num[place] == 0:
            self.total -= self._sizes.pop(place)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _unpack(kept: Tensor | Kept) -> Tensor:
    return kept.tensor if isinstance(kept, Kept) else kept


class FusedAttention(torch.autograd.Function):
    """Causal attention that saves what a fused kernel saves; its backward computes the forward again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out = _attend(query, key, value, scale)
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, out, out.new_zeros(out.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
            q, k, v = (x.detach().requires_grad_() for x in (query, key, value))
            out = _attend(q, k, v, ctx.scale)
            return *torch.autograd.grad(out, (q, k, v), gradients), None


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.permute(2, 0, 1, 3).contiguous()


def _fuse(attention: Any) -> None:
    def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *_: Any, **__: Any) -> Tensor:
        assert mask is None, "expected causal attention alone"
        out = FusedAttention.apply(query, key, value, attention.softmax_scale)
        assert out is not None  # as torch's stubs allow
        return out.flatten(2)

    attention.forward = forward


@contextmanager
def counted(chunk: Any) -> Iterator[tuple[SavedBytes, list[int]]]:
    """The bytes that the decoder of a model chunk saves meanwhile, and each forward of a layer.

    Recomputation counts; embedding, head and objective do not.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    counts = SavedBytes(chunk.parameters())
    layers: list[int] = []
    decoder = chunk.decoder
    for module in decoder.modules():
        if isinstance(module, DotProductAttention):
            _fuse(module)

    def enter(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        counts.path.append(module)
        counts.inputs = [_place(x) for x in given if isinstance(x, Tensor)]

    def leave(*_: Any) -> None:
        counts.path.pop()

    for module in decoder.modules():
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
    before: list[int] = []
    for layer in decoder.layers:
        layer.register_forward_pre_hook(lambda *_: before.append(counts.total))
        layer.register_forward_hook(lambda *_: layers.append(counts.total - before.pop()))

    def switch(is_on: bool) -> Any:
        def hook(*_: Any) -> None:
            counts.is_on = is_on

        return hook

    def end(module: torch.nn.Module, given: Any, output: Tensor) -> None:
        counts.is_on = False
        if output.requires_grad:
            output.register_hook(switch(True))  # the head's own backward is over

    chunk.register_forward_pre_hook(switch(False))
    decoder.register_forward_pre_hook(switch(True))
    decoder.register_forward_hook(end)
    with saved_tensors_hooks(counts.pack, _unpack):
        yield counts, layers


def measure(folder: Path, block: TrainingBlock, num: int, tokens: int) -> tuple[int, list[int]]:
    """On a rank: the most bytes that the layers of its chunk have saved during an update, and those of each layer."""
    from scaled.megatron_engine.rank import MegatronRank

    engine = MegatronRank(ModelBlock(path=str(folder)), block, algorithm("R3"))
    rollouts = batch(num, tokens, engine.shape.vocab_size)
    (chunk,) = engine.policy.chunks
    minibatch = one_minibatch(rollouts, rollouts.padded().logp_mu_BT)
    with counted(chunk) as (counts, layers):
        engine.update(minibatch, preset("minirl"), RoutingPlan("natural"))
    assert counts.total == 0, "expected every saved tensor to be dropped after backward"
    return counts.peak, layers


def measure_rank(
    rank: int, folders: dict[str, Path], worlds: dict[str, TrainingBlock], ports: list[int], num: int, tokens: int
) -> dict[str, tuple[int, list[int]]]:
    """`measure` on one rank in every world, by its name."""
    return in_turn(rank, worlds, ports, lambda name, block: measure(folders[name], block, num, tokens))
