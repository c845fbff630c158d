"""A `firstorder` command for shells, answered by copies of the test's own process, which has imported everything."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from firstorder.cli import main
from tests.forks import begin, end

CLIENT = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b"."], [0, 1, 2])
server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
server.shutdown(socket.SHUT_WR)
sys.exit(int(server.recv(16)))
"""
"""The command: it hands its words, folder, environment and standard streams over, and exits with the code it gets."""


@contextlib.contextmanager
def served(command: Path, to_train: Sequence[str] = ()) -> Iterator[None]:
    """Inside, the file is a `firstorder` that costs no imports; `main` runs in a process of its own for each call.

    `to_train` are overrides that every `firstorder train` gets at its end.
    """
    importlib.import_module("sandbox.run")  # once, rather than in the process of each `firstorder train`
    address = str(command.with_suffix(".socket"))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        command.write_text(CLIENT.format(python=sys.executable, address=address))
        command.chmod(0o755)
        process = begin(lambda: _serve(server, to_train), command.with_suffix(".log"))
        try:
            yield
        finally:
            os.kill(process, signal.SIGTERM)
            end(process)
            Path(address).unlink()


def _serve(server: socket.socket, to_train: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        client, _ = server.accept()
        with client:
            code = end(begin(partial(_answer, client, to_train), Path(os.devnull)))
            client.sendall(str(code).encode())


def _answer(client: socket.socket, to_train: Sequence[str]) -> int:
    _, streams, _, _ = socket.recv_fds(client, 1, 3)
    words, folder, environment = json.loads(b"".join(iter(partial(client.recv, 2**16), b"")))
    for stream, own in zip(streams, (0, 1, 2), strict=True):
        os.dup2(stream, own)
    sys.stdout, sys.stderr = (os.fdopen(own, "w") for own in (1, 2))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    warnings.resetwarnings()  # those of a process without pytest
    code = main([*words, *to_train] if words[0] == "train" else words)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


__all__ = ["served"]
