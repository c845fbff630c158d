"""The network interface on which a run's ranks listen, and a Ray that it starts.

torch's store listens on all interfaces unless it is given a bound socket; gloo and NCCL take interface names.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import psutil
from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"

FIELD = "cluster.interface"


def addresses() -> dict[str, str]:
    """The first IPv4 address of each of this machine's interfaces, by name."""
    found: dict[str, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        own = [entry.address for entry in entries if entry.family == socket.AF_INET]
        if own:
            found[name] = own[0]
    return found


def address_of(interface: str) -> str:
    """The interface's IPv4 address on this machine; ValueError, listing all that have one, for an interface without."""
    found = addresses()
    if interface not in found:
        raise ValueError(f"{FIELD}: expected an interface with an IPv4 address ({', '.join(found)}), got {interface}")
    return found[interface]


def variables(interface: str | None, is_alone: bool) -> dict[str, str]:
    """The environment that keeps gloo and NCCL on the interface, or on loopback where the run has Ray for itself."""
    if interface is None and is_alone:
        # By address: loopback is lo on Linux, lo0 on macOS.
        interface = next((name for name, address in addresses().items() if address == LOOPBACK), None)
    return {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def listening(address: str) -> socket.socket:
    """A socket that listens on this address only, at a free port."""
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        made.bind((address, 0))
        made.listen(socket.SOMAXCONN)
    except OSError as error:
        made.close()
        raise ValueError(f"{FIELD}: cannot listen on {address}: {error.strerror or error}") from None
    return made


def store(address: str, port: int, num_ranks: int, timeout_s: float, own: socket.socket | None) -> TCPStore:
    """torch's store, where the ranks meet: over the rank's `own` listening socket, or that of another rank."""
    # detach: the store owns the descriptor from here on and closes it.
    timeout, fd = timedelta(seconds=timeout_s), None if own is None else own.detach()
    return TCPStore(address, port, num_ranks, own is not None, timeout, master_listen_fd=fd)


__all__ = ["FIELD", "LOOPBACK", "address_of", "addresses", "listening", "store", "variables"]
