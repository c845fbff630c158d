"""Laws of the manifest: the code that a run ran on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lab import manifest as module
from lab.manifest import manifest
from lab.run_files import StoredManifest


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one commit: code in lab/, and results beside it."""
    for name in ("lab", "results"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("committed\n")
    shutil.copy(module.__file__, tmp_path / "lab" / "manifest.py")
    who = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "lab" / "manifest.py"))
    return tmp_path


def test_results_that_are_written_are_no_change_of_the_code(checkout: Path) -> None:
    """A changed or new file of results leaves the code as committed; one of the code does not, nor does a new one."""
    assert manifest(0)["has_local_changes"] is False
    (checkout / "results" / "file").write_text("other\n")
    (checkout / "notes.txt").write_text("untracked\n")
    assert manifest(0)["has_local_changes"] is False
    (checkout / "lab" / "new.py").write_text("x = 1\n")
    assert manifest(0)["has_local_changes"] is True
    (checkout / "lab" / "new.py").unlink()
    (checkout / "lab" / "file").write_text("changed\n")
    assert manifest(0)["has_local_changes"] is True


def test_a_git_status_that_fails_leaves_open_whether_the_code_changed(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Null, where git gives the commit but times out or fails on the state: no answer is no promise of a commit."""
    run = subprocess.run

    def slow(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "status" in command:
            raise subprocess.TimeoutExpired(command, 5)
        return run(command, **options)

    monkeypatch.setattr(module.subprocess, "run", slow)
    found = manifest(0)
    assert found["commit"] and found["has_local_changes"] is None
    assert StoredManifest.model_validate(found).has_local_changes is None


def test_another_projects_checkout_around_us_lends_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment inside a user's repository, where our files are ignored or untracked."""
    installed = checkout / "venv" / "site-packages" / "lab"
    installed.mkdir(parents=True)
    shutil.copy(module.__file__, installed / "manifest.py")
    monkeypatch.setattr(module, "__file__", str(installed / "manifest.py"))

    assert "commit" not in manifest(0)
    assert "has_local_changes" not in manifest(0)
