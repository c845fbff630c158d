"""Checkpoints of a rank's weights, optimiser states, number of updates and predictor, by Megatron's dist_checkpointing.

The folder has the torch_dist format and does not depend on the layout: ranks write pieces of tensors, and the index has
each piece's place in the whole. Ranks write in their own processes, as Megatron's writer would fork processes and leave
a manager behind. With `Saver.begin` a thread of each rank writes a copy, and the threads share a process group of their
own.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_pytorch

from lab.hf import ModelShape
from scaled.config import TrainingBlock
from scaled.megatron_engine.checkpoint_index import check_pickles, read_common
from scaled.megatron_engine.optimizer import RankOptimizer
from scaled.megatron_engine.optimizer_states import load_states, sharded_states, state_trees
from scaled.megatron_engine.parallel import Layout
from scaled.megatron_engine.policy import Policy
from scaled.megatron_engine.predictor import StagePredictor


@runtime_checkable
class Checkpointed(Protocol):
    """The part of a rank that goes into a checkpoint, and the layout that it must fit."""

    shape: ModelShape
    training: TrainingBlock
    layout: Layout
    policy: Policy
    optimizer: RankOptimizer
    predictor: StagePredictor | None
    trains_predictor: bool
    num_updates: int


class _InProcess(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, written by torch's own writer in this process.

    `write` is called with a function that writes the files; it may call it in another thread. With `is_copied`, that
    function writes copies of all tensors on the CPU.
    """

    def __init__(self, write: Callable[[Callable[[], Any]], Any], group: dist.ProcessGroup | None, is_copied: bool):
        super().__init__("torch_dist", 1)
        self.write, self.group, self.is_copied = write, group, is_copied

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        translated, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        if self.is_copied:
            for pieces in translated.values():
                for piece in pieces:
                    if isinstance(piece, ShardedTensor) and piece.data is not None:
                        # Copy on a CPU, too: the next update changes the tensor in place while the thread writes.
                        piece.data = piece.data.detach().to("cpu", copy=True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        writer = FileSystemWriter(str(checkpoint_dir), thread_count=1)
        values = mcore_to_pyt_state_dict(translated, False)
        self.write(partial(save_pytorch, values, storage_writer=writer, planner=planner, process_group=self.group))


def save(rank: Checkpointed, folder: Path) -> None:
    """Writes the checkpoint into `folder`, which must be empty or absent; a collective.

    Raises ValueError where the folder is not empty, OSError where the disk refuses a file, and RuntimeError for other
    errors of torch's writer.
    """
    _save(rank, folder, _InProcess(lambda writing: writing(), None, is_copied=False))


def _save(rank: Checkpointed, folder: Path, strategy: _InProcess) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"expected an empty folder for the checkpoint, got {folder}")
    # All ranks have looked before rank 0 makes the folder, and the folder exists before any rank writes.
    dist.barrier()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with _plain_errors(folder, RuntimeError):
        models = _models(rank)
        dist_checkpointing.save(
            _state(rank, models, state_trees(rank.optimizer, models, is_loading=False)),
            str(folder),
            sharded_strategy=strategy,
        )
    dist.barrier()


class Saver:
    """Checkpoints that a thread writes while the rank continues, one at a time; `begin` is a collective.

    A checkpoint has the values at the time of `begin`, which copies all tensors to the CPU before it returns.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._group: Any = None
        self._writing: tuple[Path, Future[Any]] | None = None

    def begin(self, rank: Checkpointed, folder: Path) -> None:
        """Starts to write the checkpoint into `folder`, as `save` does; first waits for the one before.

        Raises the errors of the one before, as `is_done` does.
        """
        self.is_done(wait=True)
        if self._group is None:
            # A group of its own: in one group the collectives of two threads could pair up wrongly.
            timeout = timedelta(seconds=rank.training.timeout_s)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        found: list[Future[Any]] = []
        _save(rank, folder, _InProcess(lambda writing: found.append(self._thread.submit(writing)), self._group, True))
        self._writing = (folder, found[0])

    def is_done(self, wait: bool) -> bool:
        """Whether no checkpoint is being written; `wait` blocks until then. Raises the writer's errors, as `save`."""
        if self._writing is None:
            return True
        folder, future = self._writing
        if not (wait or future.done()):
            return False
        self._writing = None
        with _plain_errors(folder, RuntimeError):
            future.result()
        return True


@contextmanager
def _plain_errors(folder: Path, otherwise: type[Exception]) -> Iterator[None]:
    """Raises errors of the disk as OSError, and other errors of torch's writer and reader as `otherwise`.

    torch wraps them in CheckpointException, a BaseException that `except Exception` does not catch, or, where the disk
    has no room for a small file, in RuntimeError.
    """
    try:
        yield
    except CheckpointException as error:
        found = [one for one, _ in error.failures.values()]
        for one in found:
            if isinstance(one, OSError):
                raise OSError(one.errno, one.strerror, str(folder)) from None
        reason = str(found[0]).partition("\n")[0]
        raise otherwise(f"{folder}: {type(found[0]).__name__}: {reason}") from found[0]
    except RuntimeError as error:
        if "iostream error" in str(error) or "failed writing" in str(error):
            raise OSError(errno.EIO, f"{error} (no room?)", str(folder)) from error
        raise


def load(rank: Checkpointed, folder: Path) -> None:
    """Loads everything from `folder`, written in this layout or another; a collective.

    Raises ValueError where there is no checkpoint, where it is damaged or its pickles name other classes than those of
    a checkpoint, and where it is of another model, precision, optimizer or mode.
    """
    if not (folder / "metadata.json").is_file():
        raise ValueError(f"expected a checkpoint folder with metadata.json, got {folder}")
    check_pickles(folder)
    _check(rank, read_common(folder)["about"])
    if rank.predictor is not None:
        # Look for the tensors: values that are not tensors are rank 0's alone, and its stage may have no routers.
        names = dist_checkpointing.load_tensors_metadata(str(folder))
        _prepare_predictor(rank, any(name.startswith("predictor.") and name.endswith(".step") for name in names))
    models = _models(rank)
    # Made once, to be read into and then loaded from: a second tree would take as much memory again.
    trees = state_trees(rank.optimizer, models, is_loading=True)
    with _plain_errors(folder, ValueError):
        state: Any = dist_checkpointing.load(_in_place(_state(rank, models, trees)), str(folder))
    for number, chunk in enumerate(rank.policy.chunks):
        chunk.load_state_dict(state[f"model{number}"])
    rank.num_updates = int(state["num_updates"])
    load_states(rank.optimizer, trees, state["optimizer"], rank.num_updates)
    if rank.predictor is not None:
        tensors = {
            name: tensor.reshape(()) if name.endswith(".step") else tensor
            for name, tensor in state["predictor"].items()
        }
        rank.predictor.trainer.load_state_tensors(tensors)


def _about(rank: Checkpointed) -> dict[str, Any]:
    return {
        "shape": repr(rank.shape),
        "precision": rank.training.precision,
        "distributed_optimizer": rank.training.distributed_optimizer,
        "has_predictor": rank.trains_predictor,
    }


def _check(rank: Checkpointed, about: dict[str, Any]) -> None:
    for name, own in _about(rank).items():
        if about[name] != own:
            raise ValueError(f"checkpoint does not fit the config: {name}: expected {own}, got {about[name]}")


def _state(rank: Checkpointed, models: dict[str, Any], trees: list[Any]) -> dict[str, Any]:
    state: dict[str, Any] = dict(models)
    state["optimizer"] = sharded_states(trees)
    state["num_updates"] = rank.num_updates
    state["about"] = _about(rank)
    if rank.predictor is not None:
        tensors = rank.predictor.trainer.state_tensors()
        state["predictor"] = {name: _sharded(rank, name, tensor) for name, tensor in tensors.items()}
    return state


def _models(rank: Checkpointed) -> dict[str, Any]:
    return {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(rank.policy.chunks)}


def _in_place(state: dict[str, Any]) -> Any:
    """A state to load into, whose factories (of gate and up matrices) return the tensor that they have cut."""
    return dict_list_map_outplace(lambda one: _uncut(one) if isinstance(one, ShardedTensorFactory) else one, state)


def _uncut(factory: ShardedTensorFactory) -> ShardedTensorFactory:
    whole = factory.data

    def merged(parts: Any) -> Tensor:
        # The reader fills the parts where they lie. Views of the whole fill it, too; Megatron would join a copy.
        own = whole.untyped_storage().data_ptr()
        is_filled = all(part.untyped_storage().data_ptr() == own for part in nested_values(parts))
        return whole if is_filled else factory.merge_fn(parts)

    return replace(factory, merge_fn=merged)


def _sharded(rank: Checkpointed, name: str, tensor: Tensor) -> ShardedTensor:
    # All ranks of a stage hold the same tensor: the one whose numbers are all 0 writes it.
    replica = (0, rank.layout.tp_rank, rank.layout.replica_rank)
    # The number of steps has no axis, but a sharded tensor needs one; `load` takes it off again.
    return ShardedTensor.from_rank_offsets(
        name, torch.as_tensor(tensor).reshape(tensor.shape or (1,)), replica_id=replica
    )


def _prepare_predictor(rank: Checkpointed, has_stepped: bool) -> None:
    """Gives the predictor's trainer optimiser states to read into if the checkpoint has any, else removes them."""
    assert rank.predictor is not None
    trainer = rank.predictor.trainer
    for parameter in trainer.parameters.values():
        trainer.optimizer.state.pop(parameter, None)
        if has_stepped:
            moments = {key: torch.zeros_like(parameter.detach()) for key in ("exp_avg", "exp_avg_sq")}
            trainer.optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}


__all__ = ["Saver", "load", "save"]
