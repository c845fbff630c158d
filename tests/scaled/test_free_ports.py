"""Laws of `free_ports`: tests that run side by side never share a port."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from tests import forks
from tests.scaled.megatron_world import free_ports


def test_no_port_is_given_twice(tmp_path: Path) -> None:
    """Not by later calls, which come before the first ports are used, nor in another process; nor one in use."""
    log = tmp_path / "log"
    with socket.socket() as used:
        for port in range(max(free_ports(1)) + 1, 30000):
            with contextlib.suppress(OSError):  # another test's
                used.bind(("127.0.0.1", port))
                break
        used.listen()
        mine = [used.getsockname()[1], *free_ports(3), *free_ports(2)]

        def ask() -> int:
            log.write_text(" ".join(map(str, free_ports(3))))
            return 0

        assert forks.end(forks.begin(ask, tmp_path / "said")) == 0
    theirs = [int(word) for word in log.read_text().split()]
    assert len(theirs) == 3 and len({*mine, *theirs}) == 9
    assert all(20000 <= port < 30000 for port in (*mine, *theirs))
