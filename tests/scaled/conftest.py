"""Fixtures that the files of a process share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


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
