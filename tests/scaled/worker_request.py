"""The script that Ray starts in place of a worker inside `forked_workers`: it asks for a fork, and ends with it."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

ADDRESS = "FORKED_WORKERS"
"""The environment variable with the server's address."""


def send(server: socket.socket) -> None:
    """The words, environment and folder that this process was started with, and its first three descriptors."""
    request = {"words": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}
    socket.send_fds(server, [json.dumps(request).encode() + b"\n"], [0, 1, 2])


def received(asker: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The request of `send`, and the descriptors."""
    text, descriptors, _, _ = socket.recv_fds(asker, 2**16, 3)
    while not text.endswith(b"\n"):
        text += asker.recv(2**16)
    return json.loads(text), descriptors


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[ADDRESS])
        send(connection)
        connection.recv(1)
