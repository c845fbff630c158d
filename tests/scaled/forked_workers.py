"""Ray workers as forks of one process that has imported torch and the tests' engines; each imports Ray itself.

Ray starts one Python for an actor's environment and another for the actor. Their imports take ten times as long as the
work of most actors here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import ray._private.ray_constants as ray_constants

from tests.scaled import worker_server
from tests.scaled.worker_request import ADDRESS

ROOT = Path(__file__).parents[2]
REQUEST = Path(__file__).with_name("worker_request.py")


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Inside the block, a Ray that this process starts has workers that worker_server.py forks."""
    with tempfile.TemporaryDirectory(prefix="workers-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address := str(Path(folder) / "server"))
        listener.listen(64)
        command = [sys.executable, "-m", worker_server.__name__, str(listener.fileno())]
        server = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )  # fmt: skip
        try:
            with mock.patch.dict(os.environ, {ADDRESS: address}), of_parent():
                yield
        finally:
            server.communicate()  # the end of its stdin ends it


@contextlib.contextmanager
def of_parent() -> Iterator[None]:
    """In a process that was started in such a block: its own Ray has workers of the same server."""
    # Ray joins the name to a path of its own, which an absolute one replaces.
    with mock.patch.object(ray_constants, "SETUP_WORKER_FILENAME", str(REQUEST)):
        yield


__all__ = ["forked_workers", "of_parent"]
