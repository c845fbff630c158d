"""A connection to Ray for the length of a block: to a running cluster, or to a private one on this machine."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.ray_constants as ray_constants
import ray._private.worker as ray_worker
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled

from lab.files import RecordError, exclusive
from lab.interrupts import held, kept_handlers
from lab.ray_job import OwnPath

PREFIX = "fo-ray-"  # short: Ray makes sockets inside, and a socket's path may have 107 bytes
CONNECT_S = 10.0
"""Seconds until an address must have answered at all; after three times as many it must have answered as Ray.

Ray itself tries for ten minutes.
"""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""A gRPC connection's opening (RFC 9113, sec. 3.4): the preface and an empty SETTINGS frame, answered by another."""

ASK = r"""
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1])
except Exception as error:
    print(str(error).strip().partition("\n")[0])
    sys.exit(1)
"""
"""Asks for the number of the cluster at an address, as Ray does when it joins one; prints why there is none."""

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_prestart_worker_first_driver": "0",
}
"""Variables that Ray reads when it connects: no usage reports leave the machine; an actor that asks for no GPU keeps
the devices that it was given (colocated engines); workers start as they are needed, since those that Ray starts ahead,
one per CPU, are of no use to actors with variables of their own."""

STARTS = 3
"""Times that a private Ray is started before the machine counts as too busy."""
LATE = "timed out during startup"
"""The words by which Ray says that its processes were late."""

NAMELESS_S = 5.0
"""Seconds to wait for the command line of a process that was just made: the kernel sets it after the process exists."""

SLICE_S = 0.5
"""Seconds that a signal may wait in `wait`."""

LOCK = "owner.lock"  # held by the process that made the folder, for as long as it lives

LOOPBACK = "127.0.0.1"

TOKEN = "where `ray start` asked for a token, RAY_AUTH_MODE=token sends it"


@contextlib.contextmanager
def ray_session(
    address: str | None,
    *,
    num_cpus: int | None,
    object_store_bytes: int,
    field: str = "cluster.address",
    own_address: str = LOOPBACK,
) -> Iterator[None]:
    """Ray at `address`, or (None) a private one with `num_cpus` CPUs, which ends with the block; an open one is kept.

    A private one requires the token that it was started with, and listens on loopback alone; with another
    `own_address`, Ray listens on all interfaces.
    Raises ValueError, naming `field`: within 3 CONNECT_S where there is no cluster at the address, and where a private
    one did not start.
    """
    if ray.is_initialized():
        yield
        return
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    # Silences a raylet's dozen lines on a dead process, which `log_to_driver` does not; its owner reports it in one.
    ray_worker.listen_error_messages = lambda worker, threads_stopped: None
    if address is not None:
        reach(address, field)
        try:
            with kept_handlers():  # Ray's own SIGTERM handler ends the process with exit code 15
                ray.init(address=address, job_config=OwnPath(), log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ValueError(f"{field}: no Ray cluster at {address}: {error} ({TOKEN})") from None
        try:
            yield
        finally:
            ray.shutdown()
        return
    with _own_folder() as temporary, _guarded(is_local=own_address == LOOPBACK):
        try:
            _start(
                field,
                num_cpus=num_cpus,
                object_store_memory=object_store_bytes,
                _temp_dir=str(temporary),
                _node_ip_address=own_address,
            )
            yield
        finally:
            # Inside the other two blocks: this ends the processes that write into the folder.
            ray.shutdown()


def wait(references: Sequence[Any], timeout: float | None = None, num: int = 1, *, is_read: bool = True) -> list[Any]:
    """The references that are ready once `num` of them are, or after `timeout` seconds (None: no limit).

    With `is_read` their values come to this machine first: say False for what this process only passes on.

    `ray.wait` and `ray.get` take no exception from a signal's handler but KeyboardInterrupt: with another they go on to
    the end of their wait, hours perhaps, and then raise a SystemError.
    """
    end = math.inf if timeout is None else time.monotonic() + timeout
    while True:
        left = end - time.monotonic()
        with held():
            done, _ = ray.wait(
                list(references), num_returns=num, timeout=max(0.0, min(SLICE_S, left)), fetch_local=is_read
            )
        if len(done) >= num or left <= SLICE_S:
            return done


def fetch(references: Any, timeout: float | None = None) -> Any:
    """`ray.get` of answers that are ready or nearly so; a signal counts once it returns (see `wait`)."""
    with held():
        return ray.get(references, timeout=timeout)


def _start(field: str, **words: Any) -> None:
    """Starts Ray, again where it is late: it gives its own processes half a minute, too little on a busy machine."""
    for left in reversed(range(STARTS)):
        try:
            with kept_handlers():
                ray.init(
                    address="local",  # None would join a cluster that somebody else has on this machine
                    job_config=OwnPath(),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    **words,
                )
            return
        except Exception as error:  # Ray's class for it is Exception itself
            if LATE not in str(error):
                raise
            ray.shutdown()
            _kill_all_of(words["_temp_dir"])  # they would compete with the next start
            if not left:
                raise ValueError(f"{field}: Ray did not start on this machine, {STARTS} times: {error}") from None


def _kill_all_of(folder: str) -> None:
    """Kills the processes below this one whose command line names the folder."""
    end = time.monotonic() + NAMELESS_S
    nameless = True
    while nameless:
        nameless = False
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended
                words = process.cmdline()
                if any(folder in word for word in words):
                    process.kill()
                nameless |= not words and time.monotonic() < end
        time.sleep(0.01 if nameless else 0.0)


@contextlib.contextmanager
def _guarded(is_local: bool) -> Iterator[None]:
    """Inside the block a new Ray requires a token of its own, kept in no file, and (`is_local`) listens on loopback.

    Ray replaces loopback by the public address unless it is told that this machine has no clusters.
    """
    changed = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    if is_local:
        changed[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    before = {name: os.environ.get(name) for name in changed}
    has_clusters = ray_constants.ENABLE_RAY_CLUSTER
    os.environ.update(changed)
    # Ray reads the variable at import: the constant is for this process, the variable for those that it starts.
    ray_constants.ENABLE_RAY_CLUSTER = not is_local
    _read_again()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        ray_constants.ENABLE_RAY_CLUSTER = has_clusters
        _read_again()


def _read_again() -> None:
    """Makes Ray read mode and token from the environment again, which it caches at import."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def reach(address: str, field: str) -> None:
    """Raises ValueError, naming the field, within 3 CONNECT_S where no Ray cluster answers at the address.

    `auto` means RAY_ADDRESS; where that is unset, Ray looks for a cluster on this machine, and no check is needed. At
    ray:// any gRPC server passes: a Ray client's server has no number of a cluster to tell.
    """
    started = time.monotonic()
    place = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
    if place in ("auto", "local"):
        return
    host, colon, port = place.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"{field}: expected auto or host:port of a Ray cluster, got {place}")
    try:
        answer = _first_answer_in_time(host.strip("[]"), int(port))
    except TimeoutError:
        raise ValueError(f"{field}: no Ray cluster at {place}: no answer within {CONNECT_S:g} s") from None
    except OSError as error:
        raise ValueError(f"{field}: no Ray cluster at {place}: {error.strerror or error}") from None
    # A TLS server answers after a handshake only, so an open port must do.
    if answer[3:4] != b"\x04" and os.environ.get("RAY_USE_TLS", "0") == "0":
        raise ValueError(f"{field}: no Ray cluster at {place}: the server there does not speak gRPC")
    if not place.startswith("ray://") and (reason := _refusal(place, 3 * CONNECT_S - (time.monotonic() - started))):
        raise ValueError(f"{field}: no Ray cluster at {place}: the server there {reason}")


def _refusal(place: str, seconds: float) -> str | None:
    """The way in which the server there fails to answer as a Ray cluster; None where it answers as one.

    Asked by another process: Ray's client writes lines of its own to stderr, and may end its process.
    """
    # -P: a folder named ray in the working directory is not Ray.
    command = [sys.executable, "-P", "-c", ASK, place]
    try:
        asked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "does not answer as one"
    if asked.returncode == 0:
        return None
    why = asked.stdout.strip()
    return f"does not answer as one{f': {why}' if why else ''} ({TOKEN})"


def _first_answer_in_time(host: str, port: int) -> bytes:
    """`_first_answer`, or TimeoutError after CONNECT_S, however many addresses the host's name has or however long its
    resolution takes."""
    found: queue.Queue[bytes | OSError] = queue.Queue()

    def ask() -> None:
        try:
            found.put(_first_answer(host, port))
        except (OSError, UnicodeError) as error:  # UnicodeError: a host that cannot be a name
            found.put(error if isinstance(error, OSError) else OSError(str(error)))

    # Nobody waits for the thread, since the system's resolution of a name cannot be ended.
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = found.get(timeout=CONNECT_S)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, OSError):
        raise answer
    return answer


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
    """A folder for Ray, removed after the block; those that killed processes left (spilled weights) go first."""
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
