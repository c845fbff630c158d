"""Optimiser states of a rank as sharded tensors of a checkpoint, and back; see `checkpoints`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

from scaled.megatron_engine.optimizer import RankOptimizer

# The only format of Megatron's distributed optimiser that another tensor or pipeline parallelism can read. Gathered
# over gloo, because the alternative sends through a GPU.
FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}


def state_trees(optimizer: RankOptimizer, models: dict[str, Any], is_loading: bool) -> list[Any]:
    """Megatron's state of each part of the optimizer; `models` are the sharded weights of the chunks.

    With `is_loading`, a distributed optimizer's tensors are new and whole: 12 bytes for each of the rank's weights.
    """
    return [_state(one, models, is_loading) for one in _parts(optimizer)]


def sharded_states(trees: list[Any]) -> dict[str, ShardedBase]:
    """The sharded tensors of these states by path; other state depends on the layout's groups."""
    found: dict[str, ShardedBase] = {}
    for number, tree in enumerate(trees):
        found |= _leaves(tree, f"{number}")
    return found


def load_states(optimizer: RankOptimizer, trees: list[Any], tensors: dict[str, Any], num_updates: int) -> None:
    """Loads what was read into the `sharded_states` of these trees, `tensors` by path.

    Only tensors are read: groups and their settings are the config's, and every parameter has taken every step. The
    weights must be loaded already. Raises ValueError where the masters are not theirs.
    """
    for number, (one, tree) in enumerate(zip(_parts(optimizer), trees, strict=True)):
        state = _filled(tree, tensors, f"{number}")
        _check_masters(one, state)
        by_parameter = state.get("optimizer", state).get("state", {})
        # Megatron's key among the parameters: this process's own count of steps, not the checkpoint's.
        by_parameter.pop("common_step", None)
        inner = one.optimizer
        is_torchs = isinstance(inner, torch.optim.AdamW)
        if is_torchs:  # Transformer Engine's takes every name for a tensor of states
            for each in by_parameter.values():
                each["step"] = torch.tensor(0.0)  # a placeholder: the updates are counted below
        one.load_state_dict(state)
        if is_torchs:
            for parameter, each in inner.state.items():
                each["step"] = torch.tensor(float(num_updates), device=parameter.device)
        else:  # fused optimisers count the steps of a group
            for group in inner.param_groups:
                group["step"] = num_updates


def _parts(optimizer: RankOptimizer) -> list[Any]:
    parts: list[Any] = optimizer.megatron.chained_optimizers
    return [one for one in parts if not one.is_stub_optimizer]


def _state(one: Any, models: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    # AdamW makes its states in its first step; the same zeros made now change nothing, and can be read into.
    one.init_state_fn(one.optimizer, one.config)
    if isinstance(one.optimizer, torch.optim.AdamW):
        for parameter, state in one.optimizer.state.items():
            state.setdefault("step", torch.tensor(0.0, device=parameter.device))
    with _packed(one):
        return one.sharded_state_dict(models, is_loading, metadata=dict(FORMAT))


@contextmanager
def _packed(one: Any) -> Iterator[None]:
    """A context in which the places of a buffer's parameters do not count the padding between its buckets.

    A defect of Megatron: it joins the buckets without their padding, but cuts the parameters out by places that count
    it, so that all states behind a padded bucket are shifted. A buffer has several buckets where the word embeddings
    are tied and the model has stages: a stage's copy has a bucket of its own.
    Upstream: optimizer/distrib_optimizer.py:get_parameter_state_dp_zero, sharded_param_state_fully_reshardable.
    """
    buffers: list[Any] = getattr(one, "buffers", [])
    places = [buffer.param_index_map for buffer in buffers]
    try:
        for buffer in buffers:
            starts = accumulate((bucket.numel_unpadded for bucket in buffer.buckets), initial=0)
            padding = [bucket.offset - start for bucket, start in zip(buffer.buckets, starts, strict=False)]
            buffer.param_index_map = {
                parameter: (start - padding[bucket], stop - padding[bucket], bucket)
                for parameter, (start, stop, bucket) in buffer.param_index_map.items()
            }
        yield
    finally:
        for buffer, own in zip(buffers, places, strict=True):
            buffer.param_index_map = own


def _check_masters(one: Any, state: dict[str, Any]) -> None:
    """ValueError unless the distributed optimiser's masters, rounded, are the loaded weights.

    Checkpoints from before `_packed` may hold shifted states, which only this tells.
    """
    masters = [own["param"] for own in state.get("param_state", {}).values()]
    parameters = [parameter for buffer in getattr(one, "buffers", []) for parameter in buffer.param_index_map]
    wrong = sum(
        not torch.equal(master.to(parameter.dtype), parameter.detach().cpu())
        for master, parameter in zip(masters, parameters, strict=True)
    )
    if wrong:
        raise ValueError(
            f"checkpoint: expected optimizer states of its own weights, got shifted ones for {wrong} of {len(masters)} "
            f"tensors (the defect of tied word embeddings with pipeline_parallel above 1 and distributed_optimizer; "
            f"the weights are whole: export them, and start a run from the export)"
        )


def _leaves(tree: Any, path: str) -> dict[str, ShardedBase]:
    """The sharded tensors of nested dicts and lists, by path."""
    if isinstance(tree, ShardedBase):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found: dict[str, ShardedBase] = {}
    for key, value in items:
        found |= _leaves(value, f"{path}/{key}")
    return found


def _filled(tree: Any, tensors: dict[str, Any], path: str) -> Any:
    """The tree with each sharded tensor replaced by the one that was read for its path."""
    if isinstance(tree, ShardedBase):
        return tensors[path]
    if isinstance(tree, LocalNonpersistentObject):
        return tree.unwrap()
    if isinstance(tree, dict):
        return {key: _filled(value, tensors, f"{path}/{key}") for key, value in tree.items()}
    if isinstance(tree, list):
        return [_filled(value, tensors, f"{path}/{key}") for key, value in enumerate(tree)]
    return tree


__all__ = ["load_states", "sharded_states", "state_trees"]
