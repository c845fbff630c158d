"""A connection to Ray, for as long as it is needed: a cluster that runs already, or one of this machine alone."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ray
import ray._private.worker as ray_worker

from lab.files import RecordError, exclusive
from lab.interrupts import kept_handlers

PREFIX = "fo-ray-"  # short: Ray makes sockets inside, and a socket's path may have 107 bytes
CONNECT_S = 10.0
"""Seconds for a connection to a cluster's address, and again for its first answer. Ray itself tries for ten minutes."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What opens a gRPC connection (RFC 9113, sec. 3.4): the preface and an empty SETTINGS frame, answered by another."""

LOCK = "owner.lock"  # held by the process that made the folder, for as long as it lives


@contextlib.contextmanager
def ray_session(
    address: str | None, *, num_cpus: int | None, object_store_bytes: int, field: str = "cluster.address"
) -> Iterator[None]:
    """Ray at `address`, or (None) a private one with `num_cpus` places, which ends with the block; an open one is kept.

    Raises ValueError, naming `field` and within 2 CONNECT_S, where there is no cluster at the address.
    """
    if ray.is_initialized():
        yield
        return
    # Ray reads these when it connects: no usage reports leave the machine, and an actor that asks for no GPU keeps the
    # devices that it was given (colocated engines).
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A raylet's dozen lines on a dead process, shown whatever `log_to_driver` is: whoever lost it says so in one.
    ray_worker.listen_error_messages = lambda worker, threads_stopped: None
    if address is not None:
        reach(address, field)
        try:
            with kept_handlers():  # Ray's own ends the process with exit code 15, from wherever it stands
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ValueError(
                f"{field}: no Ray cluster at {address}: {error} (where `ray start` asked for a token, "
                "RAY_AUTH_MODE=token sends it)"
            ) from None
        try:
            yield
        finally:
            ray.shutdown()
        return
    with _own_folder() as temporary:
        try:
            with kept_handlers():
                ray.init(
                    address="local",  # None would join a cluster that somebody else has on this machine
                    num_cpus=num_cpus,
                    object_store_memory=object_store_bytes,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(temporary),
                )
            yield
        finally:
            ray.shutdown()


def reach(address: str, field: str) -> None:
    """ValueError, naming the field, where nothing answers at the address, or something that does not speak gRPC.

    `auto` is what RAY_ADDRESS says; where it says nothing Ray looks for a cluster on this machine, and needs no check.
    """
    place = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
    if place in ("auto", "local"):
        return
    host, colon, port = place.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"{field}: expected auto or host:port of a Ray cluster, got {place}")
    try:
        answer = _first_answer(host.strip("[]"), int(port))
    except TimeoutError:
        raise ValueError(f"{field}: no Ray cluster at {place}: no answer within {CONNECT_S:g} s") from None
    except OSError as error:
        raise ValueError(f"{field}: no Ray cluster at {place}: {error.strerror or error}") from None
    # A TLS server speaks after a handshake only: that it listens must do.
    if answer[3:4] != b"\x04" and os.environ.get("RAY_USE_TLS", "0") == "0":
        raise ValueError(f"{field}: no Ray cluster at {place}: what listens there does not speak gRPC")


def _first_answer(host: str, port: int) -> bytes:
    """The start of the frame that comes back for PREFACE, of type SETTINGS (4) in its fourth byte; OSError if none."""
    answer = b""
    with socket.create_connection((host, port), CONNECT_S) as connection:
        connection.sendall(PREFACE)
        while len(answer) < 4 and (more := connection.recv(64)):
            answer += more
    return answer


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """A folder for Ray that ends with the block; those that killed processes left behind (spilled weights) go first."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(RecordError), exclusive(lock, "its owner lives"):
            shutil.rmtree(lock.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    unnamed = folder / "new"
    try:
        with exclusive(unnamed, "nobody else knows it"):
            unnamed.rename(folder / LOCK)  # held before it has the name that others look for
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


__all__ = ["reach", "ray_session"]
