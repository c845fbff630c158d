"""A run folder for the laws of what is in it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from lab.records import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A fresh run folder with a config."""
    folder = RunFolder.create(tmp_path, "demo", "abc123", datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC))
    folder.write_config("name: demo\n")
    return folder
