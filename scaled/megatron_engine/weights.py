"""Weights from Hugging Face files into this rank's shards, and out again, for every layout.

One view of a parameter for each Hugging Face tensor in it serves both directions: loading writes a slice of the file
into it, exporting gathers it from the tensor-parallel ranks, one parameter at a time. `names.py` has the rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lab.hf import ModelShape, read_json, some
from scaled.megatron_engine.names import WeightRule, rule
from scaled.megatron_engine.parallel import Layout

# Constants that old checkpoints carry and that every engine computes from the config.
DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class RankWeight:
    """A parameter (or the router's selection bias, a buffer) of this rank, its rule, and how many ranks split it."""

    tensor: Tensor
    rule: WeightRule
    num_shards: int
    shard: int
    is_buffer: bool

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """Views of a tensor of the parameter's shape: the rows of each Hugging Face tensor, (blocks, rows, ...)."""
        return self.rule.parts(tensor, self.num_shards)

    def slices(self, part: int) -> tuple[slice, ...]:
        """This rank's piece of the whole tensor of the file; a padded vocabulary's last piece is shorter."""
        whole, axis = self.rule.shapes[part], self.rule.axis
        if axis is None or self.num_shards == 1:
            return tuple(slice(0, size) for size in whole)
        per_rank = -(-whole[axis] // self.num_shards)
        start = min(self.shard * per_rank, whole[axis])
        own = slice(start, min(start + per_rank, whole[axis]))
        return tuple(own if i == axis else slice(0, size) for i, size in enumerate(whole))


# SequentialMLP's names, then TEGroupedMLP's.
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12])\.weight|(linear_fc[12])\.weight(\d+))$")


def weights(chunks: Sequence[torch.nn.Module], shape: ModelShape, layout: Layout) -> Iterator[RankWeight]:
    """The rank's weights in the order of its modules, wrapped (DDP, Float16Module) or not."""
    for chunk in chunks:
        model: Any = chunk
        while hasattr(model, "module"):
            model = model.module
        for name, parameter in model.named_parameters():
            yield _weight(model, name, parameter, shape, layout, is_buffer=False)
        for name, buffer in model.named_buffers():
            if name.endswith("router.expert_bias"):
                yield _weight(model, name, buffer, shape, layout, is_buffer=True)


def _weight(model: Any, name: str, tensor: Tensor, shape: ModelShape, layout: Layout, is_buffer: bool) -> RankWeight:
    if not name.startswith("decoder.layers."):
        found = rule(shape, name)
    else:
        position, inner = name.removeprefix("decoder.layers.").split(".", 1)
        layer = model.decoder.layers[int(position)].layer_number - 1
        if match := _EXPERT.match(inner):
            local = int(match[1] or match[4])  # a rank numbers its own experts from 0
            first = layout.ep_rank * (shape.num_experts // layout.ep_size)
            found = rule(shape, f"{match[2] or match[3]}.weight", layer, first + local)
        else:
            found = rule(shape, inner, layer)
    size, rank = (layout.etp_size, layout.etp_rank) if found.is_expert else (layout.tp_size, layout.tp_rank)
    # By size and not by rule: MLA's down-projections have an axis, but are whole on every rank (`specs`).
    is_split = found.axis is not None and tensor.shape[found.axis] != sum(part[found.axis] for part in found.shapes)
    return RankWeight(tensor, found, size if is_split else 1, rank if is_split else 0, is_buffer)


@torch.no_grad()
def load_hf(chunks: Sequence[torch.nn.Module], shape: ModelShape, layout: Layout, folder: str | Path) -> None:
    """Fills the rank's weights from a Hugging Face folder; types are converted.

    Only the rows and experts of this rank are read, and no layers that predict tokens beyond the next. Rows that pad
    the vocabulary become 0. fp32 masters of an existing optimiser are not updated: call its `reload_model_params`.
    Raises ValueError, naming them, for tensors that are missing, unexpected or of another shape.
    """
    places: dict[str, list[tuple[RankWeight, int]]] = {}
    for weight in weights(chunks, shape, layout):
        if not weight.is_buffer:
            weight.tensor.data.zero_()  # for the rows that pad a vocabulary, which are in no file
        for part, name in enumerate(weight.rule.names):
            places.setdefault(name, []).append((weight, part))
    expected = shape.weights()
    seen: set[str] = set()
    unexpected: list[str] = []
    untrained = _predicting(shape, folder)
    for name, size, read in _entries(folder):
        if DERIVED.search(name) or name.startswith(untrained):
            continue
        if name not in expected or name in seen:
            unexpected.append(name if name not in expected else f"{name} (twice)")
            continue
        seen.add(name)
        if tuple(size) != expected[name]:
            raise ValueError(f"{name}: expected shape {list(expected[name])}, got {list(size)}")
        for weight, part in places.get(name, ()):
            _fill(weight, part, read(weight.slices(part)))
    if unexpected:
        raise ValueError(f"expected the tensors of a {shape.family} model, got besides them {some(unexpected)}")
    if missing := [name for name in expected if name not in seen]:
        raise ValueError(f"expected {len(expected)} tensors, missing {some(missing)}")


def _predicting(shape: ModelShape, folder: str | Path) -> tuple[str, ...]:
    """Prefixes of the layers that predict tokens beyond the next: they follow the model's own, and are not trained."""
    file = Path(folder) / "config.json"
    number = read_json(file).get("num_nextn_predict_layers") if file.is_file() else None
    return tuple(f"model.layers.{shape.num_layers + n}." for n in range(number or 0))


def _fill(weight: RankWeight, part: int, piece: Tensor) -> None:
    place = weight.parts(weight.tensor.data)[part]
    if len(weight.rule.names) == 1:
        # The place may be longer than the piece: the rows that pad a vocabulary, which `load_hf` has zeroed.
        place[tuple(slice(0, size) for size in piece.shape)].copy_(piece)
    else:
        place.copy_(piece.reshape(place.shape))


Read = Callable[[tuple[slice, ...]], Tensor]


def _entries(folder: str | Path) -> Iterator[tuple[str, Sequence[int], Read]]:
    """(name, shape, read), where `read` takes slices and reads only them from the file."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"expected a folder with safetensors files, got {folder}")
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # not a mapping: it cannot be iterated
                    view = opened.get_slice(name)
                    yield name, view.get_shape(), view.__getitem__
        except SafetensorError as error:
            raise ValueError(f"{file}: not a valid safetensors file ({error})") from None


@torch.no_grad()
def export_hf(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    layout: Layout,
    tensors: Callable[[torch.nn.Parameter], Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The present weights under their Hugging Face names: a collective that every rank must iterate to its end.

    Every tensor is yielded whole, by exactly one rank: the first of its tensor-parallel group in the replica that
    `_shared_out` gives it to. Only one parameter is gathered at a time.
    `tensors` maps a parameter to another tensor of its shape (`lambda p: p.main_grad`), whole on every replica; the
    selection bias, no parameter, is left out then.
    """
    for weight in _shared_out(weights(chunks, shape, layout), layout):
        if weight.is_buffer and tensors is not None:
            continue
        if weight.rule.is_expert:
            group, rank = parallel_state.get_expert_tensor_parallel_group(), layout.etp_rank
        else:
            group, rank = parallel_state.get_tensor_model_parallel_group(), layout.tp_rank
        local = weight.tensor.data if tensors is None else tensors(weight.tensor)  # type: ignore[arg-type]
        for part, view in enumerate(weight.parts(local)):
            whole = _gathered(view, weight, part, group)
            if rank == 0:
                yield weight.rule.names[part], whole


def _shared_out(found: Iterable[RankWeight], layout: Layout) -> Iterator[RankWeight]:
    """The weights that this replica yields: about as many elements as the others do, so that all work during a push.

    Replicas hold the same bits and compute the same shares, so no message is needed. Routers are the first replica's,
    which folds the predictor into them.
    """
    # Experts are counted apart, as they have replicas of their own (edp).
    loads = {True: [0] * layout.edp_size, False: [0] * layout.num_replicas}
    for weight in found:
        if weight.rule.is_copy:
            continue
        load, own = loads[weight.rule.is_expert], layout.edp_rank if weight.rule.is_expert else layout.replica_rank
        replica = 0 if weight.rule.is_router else load.index(min(load))
        load[replica] += weight.tensor.numel()
        if replica == own:
            yield weight


def _gathered(view: Tensor, weight: RankWeight, part: int, group: Any) -> Tensor:
    size, axis = weight.rule.shapes[part], weight.rule.axis
    if weight.num_shards == 1 or axis is None:
        return view.reshape(size).clone()  # the next update changes the parameter in place
    # A part's blocks are adjacent rows of the whole tensor, so the shards join along its axis.
    own = view.reshape(-1, *size[1:]).contiguous() if len(weight.rule.names) > 1 else view.contiguous()
    shards = [torch.empty_like(own) for _ in range(weight.num_shards)] if weight.shard == 0 else None
    dist.gather(own, shards, group=group, group_dst=0)
    if shards is None:
        return own  # not yielded: only the first rank of the group has all shards
    # narrow: without the rows that pad the vocabulary.
    return torch.cat(shards, dim=axis).narrow(axis, 0, size[axis])


__all__ = ["RankWeight", "export_hf", "load_hf", "weights"]
