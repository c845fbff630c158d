"""The process from which Ray's workers are forked; `forked_workers` starts it, worker_request.py asks it for a worker.

It has imported the modules that actors need and those that Ray needs, but not Ray itself, which reads its job's number
from the environment at import.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from tests.scaled.worker_request import received

MODULES = (
    "scaled.config", "sandbox.engines.engine", "sandbox.training.engine", "tests.contracts.worlds",
    "torch._dynamo",  # a second, which the first optimiser of a process would spend
    "google.protobuf.reflection", "jsonschema", "requests", "uvloop",
)  # fmt: skip


def serve(listener: socket.socket) -> None:
    """A copy of this process for every request, until stdin ends."""
    select.select([listener, sys.stdin], [], [])  # imports begin with the first request: until then Ray starts
    for module in MODULES:
        importlib.import_module(module)
    assert "ray" not in sys.modules
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the copies
    gc.freeze()  # a collection would write into every page that they share
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        asker, _ = listener.accept()
        request, descriptors = received(asker)
        if os.fork() == 0:
            listener.close()
            asker.detach()  # closed with this process, after which worker_request.py ends
            become(request, descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        asker.close()


def become(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """This process is the worker that Ray would have started: its setup_worker.py, then the file that it is given."""
    os.setpgid(0, 0)  # Ray kills the group of a worker that has died
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray._private.workers import setup_worker

    words, sys.argv = setup_worker.parser.parse_known_args(request["words"])
    update_envs(RuntimeEnvContext.deserialize(words.serialized_runtime_env_context or "{}").env_vars)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
