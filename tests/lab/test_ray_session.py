"""Laws of the folder that a private Ray gets: it ends with its owner, if not by its own hand then by the next one's."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray

from lab.ray_session import ray_session

OWNER = """
import time
import ray
from lab.ray_session import ray_session
ray.init = lambda **options: print(options["_temp_dir"], flush=True)
with ray_session(None, num_cpus=1, object_store_bytes=2**20):
    time.sleep(600)
"""


def test_the_next_session_removes_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a process that was killed (-9) goes; a living one's stays, and one that names no owner."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "fo-ray-unknown").mkdir()
    owners = [subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        folders = []
        for owner in owners:
            assert owner.stdout is not None
            folders.append(Path(owner.stdout.readline().strip()))
            (folders[-1] / "spilled").write_bytes(b"weights")
        owners[0].kill()
        owners[0].wait()
        made: list[Path] = []
        monkeypatch.setattr(ray, "init", lambda **options: made.append(Path(options["_temp_dir"])))
        with ray_session(None, num_cpus=1, object_store_bytes=2**20):
            left = {*made, folders[1], tmp_path / "fo-ray-unknown"}
            assert set(tmp_path.iterdir()) == left and (folders[1] / "spilled").is_file()
        assert set(tmp_path.iterdir()) == left - {*made}
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()
