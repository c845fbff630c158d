"""Laws of one rank's checkpoints: before the first update, over another model or mode, and what saving leaves."""

from __future__ import annotations

import io
import multiprocessing
import pickle
import resource
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from scaled.megatron_engine.checkpoint_index import COMMON, INDEX
from tests.scaled.rank_world import (
    OneRank,
    algorithm,
    altered,
    batch,
    layers,
    minibatches,
    one_minibatch,
    passes,
    verdicts_on,
    write_model,
)
from tests.scaled.test_checkpoint_index import Exploit
from theory.objectives import preset


def _step(engine: OneRank) -> None:
    rollouts = batch(4)
    routing = altered(rollouts)
    minibatch = one_minibatch(rollouts, engine.score(rollouts, routing).logp_BT)
    engine.update(minibatch, preset("minirl"), routing)


def before_the_first_update(folder: Path) -> None:
    """A checkpoint without moments loads into an engine that has some, which starts over: then both step alike."""
    for fields in ({}, {"distributed_optimizer": True}, {"precision": "bf16"}):
        fresh, used = (OneRank(folder, algorithm(), **fields) for _ in range(2))
        target = folder.parent / f"fresh {len(fields)} {fields.get('precision')}"
        fresh.rank.save(target)
        _step(used)
        used.rank.load(target)
        assert used.rank.num_updates == 0
        for engine in (fresh, used):
            _step(engine)
        for (name, ours), (_, theirs) in zip(used.named_tensors(), fresh.named_tensors(), strict=True):
            assert torch.equal(ours, theirs), name


def _two_updates(engine: OneRank) -> None:
    """Two mini-batches on replayed routes; the predictor learns on the second."""
    rollouts = batch()
    replay = passes(rollouts, layers())["replay"]
    for minibatch, routing in minibatches(rollouts, engine.score(rollouts, replay), replay):
        engine.update(minibatch, preset("minirl"), routing)


def what_does_not_fit_is_refused(folder: Path) -> None:
    """Another model, mode, precision or optimiser is one line that says which; so is a wrong folder."""
    target = folder.parent / "one"
    OneRank(folder, algorithm("Pr2")).rank.save(target)
    with pytest.raises(ValueError, match="has_predictor: expected False, got True"):
        OneRank(folder, algorithm("R3")).rank.load(target)
    with pytest.raises(ValueError, match="precision: expected bf16, got fp32"):
        OneRank(folder, algorithm("Pr2"), precision="bf16").rank.load(target)
    with pytest.raises(ValueError, match="distributed_optimizer: expected True, got False"):
        OneRank(folder, algorithm("Pr2"), distributed_optimizer=True).rank.load(target)
    dense = write_model(folder.parent / "dense", (1,))
    with pytest.raises(ValueError, match="shape: expected ModelShape"):
        OneRank(dense, algorithm("Pr2")).rank.load(target)
    with pytest.raises(ValueError, match="expected an empty folder"):
        OneRank(folder, algorithm("Pr2")).rank.save(target)
    with pytest.raises(ValueError, match="expected a checkpoint folder"):
        OneRank(folder, algorithm("Pr2")).rank.load(folder)


def saving_leaves_no_process(folder: Path) -> None:
    """No child process is there after a save: Megatron's own writer leaves a manager that outlives a killed rank."""
    OneRank(folder, algorithm("R3")).rank.save(folder.parent / "alone")
    assert multiprocessing.active_children() == []
    children = Path(f"/proc/self/task/{multiprocessing.current_process().pid}/children").read_text().split()
    names = [Path(f"/proc/{child}/cmdline").read_text() for child in children]
    assert not any("spawn_main" in name for name in names)


def a_full_disk_is_an_error_of_the_disk(folder: Path) -> None:
    """Where a file of tensors, or the first small file, has no room, the error is one that `except Exception` meets and
    says what the system said; with room again the rank saves, into another folder."""
    engine = OneRank(folder, algorithm("R3"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for num_bytes, wanted in ((20_000, "File too large"), (100, "iostream error")):
        target = folder.parent / f"full {num_bytes}"
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            with pytest.raises(OSError, match=f"{wanted}.*full {num_bytes}"):
                engine.rank.save(target)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    engine.rank.save(folder.parent / "roomy")
    engine.rank.load(folder.parent / "roomy")


def a_copy_is_of_the_moment_when_it_was_asked_for(folder: Path) -> None:
    """Saved by a thread while the rank trains on, values and files are those of a save at that moment, bit for bit; a
    second one waits for the first."""
    for fields in ({}, {"distributed_optimizer": True}, {"precision": "bf16"}):
        engine, fresh = (OneRank(folder, algorithm("Pr2"), **fields) for _ in range(2))
        _two_updates(engine)
        name = f"{len(fields)} {fields.get('precision')}"
        plain, target, second = (folder.parent / f"{word} {name}" for word in ("plain", "thread", "second"))
        engine.rank.save(plain)
        with Held() as held:
            engine.rank.begin_save(target)
            assert not engine.rank.has_saved(wait=False)
            _two_updates(engine)  # in which everything that is saved changes
            held.release()
            engine.rank.begin_save(second)
            assert list(target.glob("*.distcp")) and (target / ".metadata").is_file()
        assert engine.rank.has_saved(wait=True) and engine.rank.has_saved(wait=False)
        (ours,), (theirs,) = target.glob("*.distcp"), plain.glob("*.distcp")
        assert ours.read_bytes() == theirs.read_bytes()
        fresh.rank.load(target)
        assert fresh.rank.num_updates == 2
        _two_updates(fresh)
        for (key, one), (_, other) in zip(fresh.named_tensors(), engine.named_tensors(), strict=True):
            assert torch.equal(one, other), key
        for number, W_p in engine.predictor_weights().items():
            assert torch.equal(fresh.predictor_weights()[number], W_p) and W_p.abs().max() > 1e-3


class Held:
    """Threads that write checkpoints wait until they are released."""

    def __enter__(self) -> Held:
        from scaled.megatron_engine import checkpoints

        self.event, real = threading.Event(), checkpoints.save_pytorch

        def waiting(*args: Any, **kwargs: Any) -> object:
            assert self.event.wait(60)
            return real(*args, **kwargs)

        self.patch = mock.patch.object(checkpoints, "save_pytorch", waiting)
        self.patch.start()
        return self

    def release(self) -> None:
        self.event.set()

    def __exit__(self, *error: object) -> None:
        self.event.set()
        self.patch.stop()


def a_full_disk_in_a_thread_is_told(folder: Path) -> None:
    """The error of the disk comes with the question whether all is written, once; then the rank saves again."""
    engine, target = OneRank(folder, algorithm("R3")), folder.parent / "full thread"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Held() as held:
        engine.rank.begin_save(target)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        held.release()
        try:
            with pytest.raises(OSError, match=r"File too large.*full thread"):
                engine.rank.has_saved(wait=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert engine.rank.has_saved(wait=False)
    engine.rank.begin_save(folder.parent / "room again")
    assert engine.rank.has_saved(wait=True)
    engine.rank.load(folder.parent / "room again")


def a_torn_file_of_tensors_is_refused(folder: Path) -> None:
    """Half a file of tensors is one line that names the folder, and an error that `except Exception` meets."""
    engine, target = OneRank(folder, algorithm("R3")), folder.parent / "torn"
    engine.rank.save(target)
    (file,) = target.glob("*.distcp")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=f"^{target}: [^\n]+$"):
        engine.rank.load(target)


def a_checkpoint_that_runs_code_is_refused(folder: Path) -> None:
    """A resumed rank reads neither an index nor common values that would run code, which torch's readers do."""
    engine = OneRank(folder, algorithm("R3"))
    for number, file in enumerate((INDEX, COMMON)):
        target, mark = folder.parent / f"crafted {number}", folder.parent / f"code ran {number}"
        engine.rank.save(target)
        assert (target / file).is_file()
        crafted = pickle.dumps(Exploit(mark))
        if file == COMMON:
            torch.save(Exploit(mark), buffer := io.BytesIO())
            crafted = buffer.getvalue()
        (target / file).write_bytes(crafted)
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            engine.rank.load(target)
        assert not mark.exists()


LAWS = (
    a_checkpoint_that_runs_code_is_refused,
    a_copy_is_of_the_moment_when_it_was_asked_for,
    a_full_disk_in_a_thread_is_told,
    a_torn_file_of_tensors_is_refused,
    a_full_disk_is_an_error_of_the_disk,
    before_the_first_update,
    what_does_not_fit_is_refused,
    saving_leaves_no_process,
)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[str, str | None]:
    return verdicts_on(__name__, write_model(tmp_path_factory.mktemp("rank-checkpoints") / "model"))[0]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_checkpoints_of_one_rank(verdicts, law):
    """Each law (its own docstring) holds in a real world of one rank."""
    assert verdicts[law.__name__] is None, verdicts[law.__name__]
