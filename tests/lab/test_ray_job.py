"""A worker of Ray finds the modules that this process finds, whatever the working folder has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import lab

SCRIPT = """
import helper
import ray
from lab.ray_session import ray_session

@ray.remote
def places():
    import lab
    from helper import PLACE
    return lab.__file__, PLACE

with ray_session(None, num_cpus=1, object_store_bytes=128 * 2**20):
    print(*ray.get(places.remote()), sep="\\n")
"""


def test_workers_look_where_this_process_looks(tmp_path: Path) -> None:
    """In the folder of a script, as Python does; not in the working folder, where a lab.py would hide ours."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (tmp_path / "lab.py").write_text("raise RuntimeError('not ours')\n", encoding="utf-8")
    (scripts / "helper.py").write_text("PLACE = __file__\n", encoding="utf-8")
    (scripts / "script.py").write_text(SCRIPT, encoding="utf-8")
    root = Path(lab.__file__).resolve().parents[1]
    command = [sys.executable, str(scripts / "script.py")]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(root / "lab" / "__init__.py"), str(scripts / "helper.py")]
