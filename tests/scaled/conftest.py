"""Fixtures that the files of a process share."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import pytest

if TYPE_CHECKING:
    from scaled.cluster.ray_cluster import Cluster


FREEZE = gc.freeze


@pytest.fixture(scope="module", autouse=True)
def imports_stay_frozen() -> Iterator[None]:
    """Keeps imports out of the seven collections by which vLLM starts and ends an engine, 0.7 s each with them.

    vLLM freezes the engine's objects and, at its end, unfreezes all; here they are never frozen.
    """
    FREEZE()  # with what the files before have imported
    with mock.patch.object(gc, "freeze"), mock.patch.object(gc, "unfreeze"):
        yield


@pytest.fixture(scope="module")
def references_are_objects() -> Iterator[None]:
    """An object store without Ray: a reference is its object."""
    from scaled.cluster import sources  # imports Ray

    with mock.patch.object(sources.ray, "get", lambda reference: reference):
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of promotion_world.py and their target, made once; tests work on copies."""
    from tests.scaled.promotion_world import train_runs  # not for the files that have an engine

    folder = tmp_path_factory.mktemp("trained")
    train_runs(folder)
    return folder


@pytest.fixture(scope="module")
def home(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file's own folder with the runs and the target."""
    return Path(shutil.copytree(trained, tmp_path_factory.mktemp("promote") / "home"))


@pytest.fixture
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, to be spoilt, as the working folder."""
    from tests.scaled.promotion_world import enter_copy

    return enter_copy(home, tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def forked() -> Iterator[None]:
    """Every Ray of this process has workers that are forks of one server."""
    from tests.scaled.forked_workers import forked_workers

    with forked_workers():
        yield


@pytest.fixture(scope="session")
def one_ray(forked: None) -> Iterator[None]:
    """A Ray with four places, which every cluster of this process joins: a start takes ten seconds."""
    from lab.ray_session import ray_session

    with ray_session(None, num_cpus=4, object_store_bytes=2**29):
        yield


@pytest.fixture(scope="module")
def cluster(one_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Places for two ranks and two engines."""
    from scaled.cluster import ray_cluster
    from tests.scaled import cluster_world

    with ray_cluster.cluster(cluster_world.config(), tmp_path_factory.mktemp("run")) as made:
        yield made


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sandbox's model of the arithmetic task, as a folder."""
    from tests.scaled.cluster_run_world import save_model

    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


@pytest.fixture(scope="module")
def in_session(one_ray: None) -> Iterator[None]:
    """Cluster runs of this process hold the sandbox's engines."""
    import scaled.session
    from tests.scaled.cluster_run_world import SandboxSession

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaled.session, "Session", SandboxSession)
        yield
