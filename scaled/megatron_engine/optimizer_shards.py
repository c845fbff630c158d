"""A rank's shard of Megatron's distributed optimizer as pieces of whole tensors, which it alone writes and reads.

The optimizer cuts its buffers without regard to parameters, so that the first and last parameter of a shard may be
there in part: a range of their elements in row-major order. Such a range is a few boxes of the parameter's whole tensor
(`boxes`), and a checkpoint has a piece for each of them. The whole tensors are those of Megatron's `fully_reshardable`
format (0.16.1, optimizer/distrib_optimizer.py: sharded_param_state_fully_reshardable), which any layout can read; there
the first data-parallel rank gathers and writes all of them, and every rank reads the whole states of its weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor

from scaled.megatron_engine.boxes import boxes

STATES = ("param", "exp_avg", "exp_avg_sq")
"""The master weights and both moments, as the format names them."""


def shard_tree(one: Any, models: dict[str, Any], is_loading: bool) -> list[dict[str, list[ShardedTensor]]]:
    """The pieces of each parameter of the shard, by state; their data are views of the optimizer's own tensors.

    With `is_loading`, masters in fp32 are new tensors on the CPU, since the optimizer's own are the weights, which
    `load_shard` compares them with. `models` are the sharded weights of the model chunks.
    """
    wholes = _wholes(models)
    return [
        {
            name: list(_pieces(wholes[parameter], parameter, f"optimizer.state.{name}.", start, flat))
            for name, flat in states.items()
        }
        for parameter, start, states in _shards(one, is_loading)
    ]


@torch.no_grad()
def load_shard(one: Any, tensors: list[dict[str, list[Tensor]]]) -> int:
    """Loads what was read for each piece of `shard_tree`; the number of parameters whose masters, rounded, are not the
    loaded weights."""
    num_wrong = 0
    for (parameter, start, states), pieces in zip(_shards(one), tensors, strict=True):
        sizes = [piece.numel() for piece in pieces["param"]]
        weights = parameter.detach().reshape(-1)[start : start + sum(sizes)]
        # Before the copies, as in fp32 they are the weights.
        num_wrong += any(
            not torch.equal(piece.reshape(-1).to(own), own)
            for piece, own in zip(pieces["param"], weights.split(sizes), strict=True)
        )
        for name in STATES:
            for piece, own in zip(pieces[name], states[name].split(sizes), strict=True):
                own.copy_(piece.reshape(-1))  # onto itself where torch has read in place
    return num_wrong


def _shards(one: Any, with_copies: bool = False) -> Iterator[tuple[torch.nn.Parameter, int, dict[str, Tensor]]]:
    """Each parameter of the shard, its first element there, and its states from there on, flat.

    `with_copies`: the master is a copy where it is the weight itself.
    """
    for by_dtype in one.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    own = one._get_main_param_and_optimizer_states(parameter)
                    states = {name: own[name] for name in STATES}
                    if with_copies and _shares_memory(states["param"], parameter):
                        states["param"] = states["param"].detach().to("cpu", copy=True)
                    yield parameter, ranges["param"].start, states


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _wholes(models: dict[str, Any]) -> dict[Any, ShardedTensor | ShardedTensorFactory]:
    """The sharded weight of each parameter."""
    sharded, _ = extract_sharded_tensors_and_factories(models)
    return {each.data: each for each in nested_values(sharded)}


def _pieces(
    whole: ShardedTensor | ShardedTensorFactory, parameter: Tensor, prefix: str, start: int, flat: Tensor
) -> Iterator[ShardedTensor]:
    """The pieces of `flat`, the elements of a parameter from `start` on."""
    stop, done = start + flat.numel(), start
    for part in _parts(whole):
        # A part is a view of the parameter (`_parts`): its own first element says where it is.
        assert part.data is not None
        first = int(part.data.storage_offset() - parameter.storage_offset())
        begin, end = max(start, first), min(stop, first + part.data.numel())
        if begin >= end:
            continue
        for place, size in boxes(tuple(part.local_shape), begin - first, end - first):
            yield _piece(part, prefix, place, size, flat[done - start : (done := done + prod(size)) - start])
    if done != stop:
        raise AssertionError(f"{whole.key}: expected pieces of {flat.numel()} elements, got {done - start}")


def _piece(part: ShardedTensor, prefix: str, place: tuple[int, ...], size: tuple[int, ...], flat: Tensor) -> Any:
    before = part.prepend_axis_num
    offset = (*part.global_offset[:before], *(a + b for a, b in zip(part.global_offset[before:], place, strict=True)))
    # torch's planner takes sizes along every axis, also those that Megatron puts before a parameter's own.
    size = (*(1 for _ in range(before)), *size)
    return replace(
        part,
        key=prefix + part.key,
        data=flat.detach().view(size),
        dtype=flat.dtype,
        local_shape=size,
        global_offset=offset,
        axis_fragmentations=None,  # no regular grid
        prepend_axis_num=0,
        # Shards differ between data-parallel ranks, so that each is the first replica of its own.
        replica_id=(*part.replica_id[:2], 0),  # type: ignore[index]
    )


def _parts(whole: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """The weight's own tensor, or those that its factory cuts it into (gate and up), as contiguous views of it."""
    parts: list[Any] = list(nested_values(whole.build())) if isinstance(whole, ShardedTensorFactory) else [whole]
    for part in parts:
        if not (_shares_memory(part.data, whole.data) and part.data.is_contiguous()):  # type: ignore[arg-type]
            raise AssertionError(f"{part.key}: expected a contiguous view of the weight, got a copy")
    return parts


__all__ = ["load_shard", "shard_tree"]
