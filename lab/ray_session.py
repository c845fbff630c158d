"""A connection to Ray, for as long as it is needed: a cluster that runs already, or one of this machine alone."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import ray

from lab.files import RecordError, exclusive
from lab.interrupts import kept_handlers

PREFIX = "fo-ray-"  # short: Ray makes sockets inside, and a socket's path may have 107 bytes
LOCK = "owner.lock"  # held by the process that made the folder, for as long as it lives


@contextlib.contextmanager
def ray_session(address: str | None, *, num_cpus: int | None, object_store_bytes: int) -> Iterator[None]:
    """Ray at `address`, or (None) a private one with `num_cpus` places, which ends with the block; an open one is kept.

    Raises ValueError where there is no cluster at the address.
    """
    if ray.is_initialized():
        yield
        return
    # Ray reads these when it connects: no usage reports leave the machine, and an actor that asks for no GPU keeps the
    # devices that it was given (colocated engines).
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address is not None:
        try:
            with kept_handlers():  # Ray's own ends the process with exit code 15, from wherever it stands
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise ValueError(
                f"cluster.address: no Ray cluster at {address}: {error} (where `ray start` asked for a token, "
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


__all__ = ["ray_session"]
