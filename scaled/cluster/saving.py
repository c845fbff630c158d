"""The checkpoints of a run on a cluster: ranks write them, the driver publishes each once all have finished.

A checkpoint that is written while the run continues is published between two steps, or before the next one begins.
Until then its folder is a temporary one, so that a killed run continues from the checkpoint before. Besides the ranks'
parts it has what is in flight between two steps: responses in progress, and batches sampled ahead of training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from lab.backlog import from_tensors, rollout_tensors, rollouts_of, to_tensors
from lab.files import disk_errors
from lab.records import RunFolder
from theory.collection import Collected
from theory.contracts import Prompt, Task
from theory.oversampling import Backlog


@runtime_checkable
class Saving(Protocol):
    """The part of a group of ranks that writes checkpoints."""

    def save(self, folder: Path) -> None:
        """Writes every rank's part."""
        ...

    def begin_save(self, folder: Path) -> None:
        """Begins to write every rank's part."""
        ...

    def has_saved(self, wait: bool = False) -> bool:
        """Whether all parts are written."""
        ...


BACKLOG = "backlog.safetensors"


def _write_backlog(folder: Path, backlog: Backlog | None) -> None:
    """Writes it after the ranks, which want an empty folder."""
    if backlog is not None:
        with disk_errors(folder):
            safetensors.torch.save_file(to_tensors(backlog), folder / BACKLOG)


def read_backlog(checkpoint: Path, task: Task) -> Backlog | None:
    """The responses in progress at this checkpoint; None where it has none."""
    path = checkpoint / BACKLOG
    return from_tensors(safetensors.torch.load_file(path), task) if path.is_file() else None


def batch_tensors(batch: Collected) -> dict[str, Tensor]:
    """A batch that a later step trains on, by name, with its routes; its backlog is left out."""
    each = batch.rollouts.responses
    places = {prompt: i for i, prompt in enumerate(dict.fromkeys(r.prompt for r in each))}
    words = {"prompts": [asdict(prompt) for prompt in places], "metrics": batch.metrics}
    found = rollout_tensors(batch.rollouts) | {"rewards": batch.rewards_PG}
    found["prompt_of"] = torch.tensor([places[r.prompt] for r in each])
    # safetensors has tensors alone, so words are bytes; copied, as torch wants memory that may be written.
    found["json"] = torch.from_numpy(np.frombuffer(json.dumps(words).encode(), dtype=np.uint8).copy())
    found |= {f"predictor.{n}": W_p for n, W_p in (batch.predictor or {}).items()}
    return {name: tensor.contiguous() for name, tensor in found.items()}  # safetensors refuses strided views


def batch_of(found: Mapping[str, Tensor]) -> Collected:
    """The inverse of `batch_tensors`."""
    words: dict[str, Any] = json.loads(found["json"].numpy().tobytes())
    prompts = [Prompt(**one | {"tokens": tuple(one["tokens"])}) for one in words["prompts"]]
    own = {name.removeprefix("predictor."): W_p for name, W_p in found.items() if name.startswith("predictor.")}
    return Collected(
        rollouts_of(found, [prompts[i] for i in found["prompt_of"].tolist()]),
        found["rewards"],
        words["metrics"],
        predictor={int(n): W_p for n, W_p in sorted(own.items(), key=lambda item: int(item[0]))} or None,
    )


AHEAD = "ahead-{}.safetensors"
"""The file of the i-th batch after the checkpoint, from 0."""


def _write_ahead(folder: Path, ahead: Sequence[Collected]) -> None:
    with disk_errors(folder):
        for i, batch in enumerate(ahead):
            safetensors.torch.save_file(batch_tensors(batch), folder / AHEAD.format(i))


def read_ahead(checkpoint: Path) -> list[Collected]:
    """The batches of the steps after this checkpoint that had been sampled; none in a synchronous run."""
    found: list[Collected] = []
    while (path := checkpoint / AHEAD.format(len(found))).is_file():
        found.append(batch_of(safetensors.torch.load_file(path)))
    return found


class _Abandoned(Exception):
    """A checkpoint that nobody will finish."""


class Checkpoints:
    """Saves into a run's folder and keeps the newest `keep`; at most one is being written.

    Raises the ranks' errors, and RecordError where the disk fails; the checkpoint at hand is then not published.
    """

    def __init__(self, folder: RunFolder, ranks: Saving, keep: int, asynchronous: bool):
        self.folder, self.ranks, self.keep, self.asynchronous = folder, ranks, keep, asynchronous
        self._open: ExitStack | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint has been begun and is neither published nor abandoned."""
        return self._open is not None

    def save(self, step: int, backlog: Backlog | None = None, ahead: Sequence[Collected] = ()) -> None:
        """Saves after that step; where asynchronous, returns once the ranks have copied their parts.

        `backlog` and each batch of the steps `ahead` go into a file of their own, with their routes, which are fetched
        for it.
        """
        if not self.asynchronous:
            with self.folder.sharded(step, self.keep) as folder:
                self.ranks.save(folder)
                _write_backlog(folder, backlog)
                _write_ahead(folder, ahead)
            return
        self.finish()
        with ExitStack() as stack:
            folder = stack.enter_context(self.folder.sharded(step, self.keep))
            self.ranks.begin_save(folder)
            # `begin_save` returns after every rank has seen the folder empty, so these files may lie beside theirs.
            _write_backlog(folder, backlog)
            _write_ahead(folder, ahead)
            self._open = stack.pop_all()  # the folder's context stays open: its exit publishes

    def poll(self) -> None:
        """Publishes the checkpoint if it is written; does not wait."""
        self._settle(wait=False)

    def finish(self) -> None:
        """Waits until all is written and publishes it."""
        self._settle(wait=True)

    def abandon(self) -> None:
        """Removes the unfinished checkpoint; ranks may still be writing it, and must not be used again."""
        stack, self._open = self._open, None
        if stack is not None:
            # An exception makes the folder's context remove it.
            stack.__exit__(_Abandoned, _Abandoned(), None)

    def _settle(self, wait: bool) -> None:
        stack, self._open = self._open, None
        if stack is None:
            return
        with stack:  # its exit publishes, and turns an error of the disk into a RecordError
            # An error of the ranks passes through the folder's context, which removes the folder.
            if not self.ranks.has_saved(wait):
                self._open = stack.pop_all()


__all__ = ["Checkpoints", "Saving", "batch_of", "batch_tensors", "read_ahead", "read_backlog"]
