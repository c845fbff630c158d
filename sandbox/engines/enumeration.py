"""Enumeration of every continuation of a prompt, with generation's own passes and routes.

Extra letters: C prompts, n nodes and Y responses of a tree (theory/exact/tree.py), W rows of a response's buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from sandbox.engines.buffers import Buffers, PassRecorder, empty_buffers
from sandbox.engines.defect import Defect
from sandbox.engines.prompt_pass import run_prompts
from sandbox.engines.sampling_mismatch import is_unscored
from sandbox.engines.stale_weights import StaleWeights
from sandbox.kernels.numerics import Numerics
from sandbox.model import MoE
from sandbox.model.kv_cache import KVCache
from theory.contracts import Prompt
from theory.exact.tree import PrefixTree
from theory.routing.features import RouterFeatures
from theory.routing.packed_rows import offsets_of
from theory.routing.record import RoutingRecord


@runtime_checkable
class Decodes(Protocol):
    """The part of an engine that an enumeration uses."""

    model: MoE
    defects: tuple[Defect, ...]
    stop_tokens: tuple[int, ...]

    def numerics(self, seed: int) -> Numerics:
        """The arithmetic of one call."""
        ...

    def scored(self, logits_AV: Float[Tensor, "A V"], temperature: float) -> Float[Tensor, "A V"]:
        """The logits whose log-softmax the engine reports."""
        ...

    def decode(
        self,
        model: MoE,
        tokens_A: Tensor,
        cache: KVCache,
        numerics: Numerics,
        recorder: PassRecorder,
    ) -> Float[Tensor, "A V"]:
        """One decoding step; the recorder takes its routes."""
        ...


@dataclass(frozen=True)
class Walk:
    """All nodes below C prompts: log mu of every edge, by depth and then prompt, and each row's routes.

    A row of the buffers is a node of the last depth: its prompt and the tokens that lead to it.
    """

    logp: list[Float[Tensor, "_n V"]]
    buffers: Buffers
    num_rows: int

    def record(self, model: MoE) -> RoutingRecord:
        """The experts of every deepest node's rows; ValueError for a model without MoE layers."""
        experts_nWLK = self.buffers.experts_BWLK
        if experts_nWLK is None:
            raise ValueError("model: expected at least 1 MoE layer, got 0")
        n, layers = len(experts_nWLK), model.config.moe_layers
        experts_RLK = experts_nWLK[:, : self.num_rows].flatten(0, 1)
        return RoutingRecord(experts_RLK, offsets_of([self.num_rows] * n), layers, model.config.num_experts)

    def features(self, model: MoE, first_row: int) -> RouterFeatures:
        """Router inputs and logits of every deepest node's rows from `first_row` on."""
        assert self.buffers.features is not None and self.buffers.experts_BWLK is not None, "no features were kept"
        rows = (torch.arange(first_row, self.num_rows),) * len(self.buffers.experts_BWLK)
        hidden_FLD, logits_FLE = self.buffers.features.take(rows)
        offsets = offsets_of([len(r) for r in rows])
        return RouterFeatures(torch.cat(rows), offsets, hidden_FLD, logits_FLE, model.config.moe_layers)


def walk(
    engine: Decodes,
    prompts: Sequence[Prompt],
    tree: PrefixTree,
    seed: int = 0,
    temperature: float = 1.0,
    keep_features: bool = False,
) -> Walk:
    """The walk over the whole tree below each prompt, by generation's prefill and decoding steps.

    Each node is one row of one step, so that a defect draws once per node: mu is a function of the prefix and of
    `seed`. A repeated prompt has draws of its own. Raises ValueError unless all prompts have one length, the tree is
    the engine's, and the engine samples from one scored policy.
    """
    _check(engine, tree, temperature)
    lengths = sorted({len(prompt.tokens) for prompt in prompts})
    if len(lengths) != 1:
        raise ValueError(f"prompts: expected one length in tokens, got {lengths}")
    model, numerics, W = engine.model, engine.numerics(seed), tree.num_continuing
    buffers = empty_buffers(prompts, 1, tree.max_length, model.config, model.norm.dtype, keep_features)
    cache, logits_nV = run_prompts(model, prompts, 1, tree.max_length, numerics, buffers)
    logp = [torch.log_softmax(engine.scored(logits_nV, temperature), -1)]
    for _ in range(tree.max_length - 1):
        # All children of a node are adjacent; the end token, the tree's last, has none.
        num_parents = len(logits_nV)
        cache, tokens_n, buffers = cache.repeat(W), torch.arange(W).repeat(num_parents), buffers.repeat(W)
        recorder, positions_n = PassRecorder(buffers.features is not None), cache.lengths_B
        logits_nV = engine.decode(model, tokens_n, cache, numerics, recorder)
        buffers.store(recorder, torch.arange(num_parents * W), positions_n)
        logp.append(torch.log_softmax(engine.scored(logits_nV, temperature), -1))
    # The last token is never an input, so it has no row.
    return Walk(logp, buffers, lengths[0] + tree.max_length - 1)


def _check(engine: Decodes, tree: PrefixTree, temperature: float) -> None:
    ends = (tree.num_tokens - 1,) if tree.has_end else ()
    expected, got = (engine.model.config.vocab_size, engine.stop_tokens), (tree.num_tokens, ends)
    if got != expected:
        raise ValueError(f"expected a tree over (vocabulary, end tokens) {expected} as the engine's, got {got}")
    for defect in engine.defects:
        is_switched = isinstance(defect, StaleWeights) and "prefill" in defect.breaks
        if is_switched or is_unscored(defect, temperature):
            raise ValueError(f"enumerate: expected an engine that samples from one scored policy, got {defect.words}")


def by_response(tree: PrefixTree, of: Walk) -> Buffers:
    """The buffers of all responses of one prompt, from the log-probabilities of nodes and the deepest nodes' rows."""
    paths = tree.paths(0, tree.num_responses)
    last_Y1 = paths.length_B[:, None] - 1
    # A response's rows are the first rows of any deepest node below its last node: the first such node is taken.
    below_Y1 = tree.num_continuing ** (tree.max_length - 1 - last_Y1)
    deepest_Y = (paths.nodes_BT.gather(1, last_Y1) * below_Y1)[:, 0]
    is_end_Y = tree.has_end & (paths.tokens_BT.gather(1, last_Y1)[:, 0] == tree.num_tokens - 1)
    experts_nWLK = of.buffers.experts_BWLK
    return Buffers(
        tokens_BT=paths.tokens_BT,
        logp_BT=tree.gather(of.logp, paths),
        lengths_B=paths.length_B,
        experts_BWLK=None if experts_nWLK is None else experts_nWLK[deepest_Y],
        has_stopped_B=is_end_Y,
        was_cut_B=torch.zeros_like(is_end_Y),
    )


__all__ = ["Decodes", "Walk", "by_response", "walk"]
