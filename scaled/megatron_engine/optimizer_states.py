"""Optimiser states of a rank as sharded tensors of a checkpoint, and back; see `checkpoints`."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from scaled.megatron_engine.optimizer import RankOptimizer
from scaled.megatron_engine.optimizer_shards import load_shard, shard_tree


def state_trees(optimizer: RankOptimizer, models: dict[str, Any], is_loading: bool) -> list[Any]:
    """The state of each part of the optimizer, to save or to read into; `models` are the sharded weights of the chunks.

    A distributed optimizer's are its own shard; another one's are Megatron's, and whole.
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
        load = _load_shard if isinstance(one, DistributedOptimizer) else _load_whole
        load(one, _filled(tree, tensors, f"{number}"))
        inner = one.optimizer
        if isinstance(inner, torch.optim.AdamW):
            for parameter, each in inner.state.items():
                each["step"] = torch.tensor(float(num_updates), device=parameter.device)
        else:  # fused optimisers count the steps of a group
            for group in inner.param_groups:
                group["step"] = num_updates


def _parts(optimizer: RankOptimizer) -> list[Any]:
    parts: list[Any] = optimizer.megatron.chained_optimizers
    return [one for one in parts if not one.is_stub_optimizer]


def _state(one: Any, models: dict[str, Any], is_loading: bool) -> Any:
    # AdamW makes its states in its first step; the same zeros made now change nothing, and can be read into.
    one.init_state_fn(one.optimizer, one.config)
    if isinstance(one.optimizer, torch.optim.AdamW):
        for parameter, state in one.optimizer.state.items():
            state.setdefault("step", torch.tensor(0.0, device=parameter.device))
    if isinstance(one, DistributedOptimizer):
        return shard_tree(one, models, is_loading)
    return one.sharded_state_dict(models, is_loading, metadata={"chained_optim_avoid_prefix": True})


def _load_whole(one: Any, state: Any) -> None:
    """Loads the states of an optimizer that has those of all its weights."""
    by_parameter = state.get("optimizer", state).get("state", {})
    # Megatron's key among the parameters: this process's own count of steps, not the checkpoint's.
    by_parameter.pop("common_step", None)
    if isinstance(one.optimizer, torch.optim.AdamW):  # Transformer Engine's takes every name for a tensor of states
        for each in by_parameter.values():
            each["step"] = torch.tensor(0.0)  # a placeholder: the updates are counted afterwards
    one.load_state_dict(state)


def _load_shard(one: Any, tensors: Any) -> None:
    """ValueError unless the masters are the loaded weights: checkpoints of Megatron's own writing may be shifted."""
    if num_wrong := load_shard(one, tensors):
        raise ValueError(
            f"checkpoint: expected optimizer states of its own weights, got shifted ones for {num_wrong} of "
            f"{len(tensors)} tensors (the defect of tied word embeddings with pipeline_parallel above 1 and "
            f"distributed_optimizer; the weights are whole: export them, and start a run from the export)"
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
