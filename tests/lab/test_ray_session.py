"""Laws of the folder that a private Ray gets: it ends with its owner, if not by its own hand then by the next one's."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import ray

from lab import ray_session as module
from lab.interrupts import Interrupted, interruptible
from lab.ray_session import ray_session, reach, wait

CALLS = ("ray.wait", "ray.get")

OWNER = """
import time
import ray
from lab.ray_session import ray_session
ray.init = lambda **options: print(options["_temp_dir"], flush=True)
with ray_session(None, num_cpus=1, object_store_bytes=2**20):
    time.sleep(600)
"""


def test_the_next_session_removes_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of a process that was killed (-9) goes; a living one's stays, and one that names no owner."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "fo-ray-unknown").mkdir()
    owners = [subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        folders = []
        for owner in owners:
            assert owner.stdout is not None
            folders.append(Path(owner.stdout.readline().strip()))
            (folders[-1] / "spilled").write_bytes(b"weights")
        owners[0].kill()
        owners[0].wait()
        made: list[Path] = []
        monkeypatch.setattr(ray, "init", lambda **options: made.append(Path(options["_temp_dir"])))
        with ray_session(None, num_cpus=1, object_store_bytes=2**20):
            left = {*made, folders[1], tmp_path / "fo-ray-unknown"}
            assert set(tmp_path.iterdir()) == left and (folders[1] / "spilled").is_file()
        assert set(tmp_path.iterdir()) == left - {*made}
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()


@pytest.mark.parametrize(("field", "words"), [("cluster.address", {}), ("--address", {"field": "--address"})])
def test_an_address_without_a_cluster_is_one_line(
    field: str, words: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed port, one that is silent, one that speaks something else, one that drips and a word: a line, and Ray is
    not asked."""
    monkeypatch.setattr(module, "CONNECT_S", 0.2)
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("ray.init was called"))
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        ports = [s.getsockname()[1] for s in made]
        closed, _, other, slow = made
        closed.close()

        def speak() -> None:
            connection = other.accept()[0]
            connection.recv(64)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        def drip() -> None:
            connection = slow.accept()[0]
            with contextlib.suppress(OSError):  # the other side is gone
                for letter in b"HTTP":
                    connection.sendall(bytes([letter]))
                    time.sleep(0.15)  # less than what a connection waits for a byte
            connection.close()

        threads = [threading.Thread(target=target) for target in (speak, drip)]
        for thread in threads:
            thread.start()
        reasons = ("Connection refused", "no answer within 0.2 s", "does not speak gRPC", "no answer within 0.2 s")
        for port, reason in zip(ports, reasons, strict=True):
            with (
                pytest.raises(ValueError, match=f"^{field}: no Ray cluster at 127.0.0.1:{port}: .*{reason}$"),
                ray_session(f"127.0.0.1:{port}", num_cpus=1, object_store_bytes=2**20, **words),
            ):
                pass
        for thread in threads:
            thread.join()
    with pytest.raises(ValueError, match=f"^{field}: expected auto or host:port of a Ray cluster, got somewhere$"):
        reach("somewhere", field)


def test_an_address_is_given_up_within_half_a_minute() -> None:
    """`reach` ends within 3 CONNECT_S; Ray by itself would try for ten minutes."""
    assert 0.0 < 3 * module.CONNECT_S <= 30.0


def refusing(listener: socket.socket, asked: list[int]) -> None:
    """An HTTP/2 server of one connection after another (RFC 9113) that answers every request with status 404."""

    def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    while True:
        try:
            connection = listener.accept()[0]
        except OSError:  # closed by the test
            return
        with connection, connection.makefile("rb") as stream, contextlib.suppress(OSError):
            assert isinstance(stream, io.BufferedReader)
            stream.read(24)  # the preface
            connection.sendall(frame(4, 0, 0))
            while head := stream.read(9):
                kind, flags, number = head[3], head[4], int.from_bytes(head[5:], "big")
                payload = stream.read(int.from_bytes(head[:3], "big"))
                if kind in (4, 6) and not flags & 1:  # settings and pings are acknowledged
                    connection.sendall(frame(kind, 1, 0, payload if kind == 6 else b""))
                elif kind == 1:  # a request; the answer is `:status: 404` by its index (RFC 7541, app. A)
                    asked.append(number)
                    connection.sendall(frame(1, 5, number, b"\x8d"))


def test_a_server_that_is_no_ray_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A server that speaks HTTP/2, as a proxy does, but knows no Ray: a line, none of it by Ray's own client."""
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("ray.init was called"))
    asked: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=refusing, args=(listener, asked))
        thread.start()
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        try:
            with (
                pytest.raises(ValueError, match=f"^--address: no Ray cluster at {place}: .* as one: .*404.*$"),
                ray_session(place, num_cpus=1, object_store_bytes=2**20, field="--address"),
            ):
                pass
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which closing alone does not
            thread.join()
    assert asked and capfd.readouterr() == ("", "")


STRANGER = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1])
except AuthenticationError as error:
    print("refused")
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_ray_of_ones_own_is_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers as a cluster does, listens on loopback alone, refuses whoever has not its token, leaves no token file.

    A signal ends a wait for it at once, whose task runs on. What the process and the environment were told of it is
    taken back.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    before = dict(os.environ)
    with ray_session(None, num_cpus=1, object_store_bytes=100 * 2**20):
        address = ray.get_runtime_context().gcs_address
        reach(address, "cluster.address")
        assert ray.get(ray.remote(lambda: os.getpid()).remote()) != os.getpid()
        listening = listening_addresses(psutil.Process())
        assert len(listening) >= 4 and {one.removeprefix("::ffff:") for one in listening} == {"127.0.0.1"}
        stranger = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        asked = subprocess.run([sys.executable, "-c", STRANGER, address], env=stranger, capture_output=True, text=True)
        assert asked.stdout == "refused\n", asked.stderr
        running = ray.remote(lambda: time.sleep(60)).remote()
        with interruptible():
            signalled(signal.SIGTERM)  # tests that `nohup` or a shell's `&` started ignore SIGINT
            with pytest.raises(Interrupted, match="SIGTERM"):
                wait([running])
        assert wait([running], timeout=0.0) == [] and wait([ray.put(i) for i in range(3)], num=2, timeout=60.0)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        assert os.environ.get(name) == before.get(name)
    assert not (tmp_path / ".ray").exists()


def test_whoever_takes_signals_waits_by_wait() -> None:
    """`ray.wait` stands in `wait` alone, and `ray.get` only where ranks and engines read stored tensors."""
    root = Path(module.__file__).parents[1]
    files = [path for room in ("lab", "sandbox", "scaled", "firstorder") for path in (root / room).rglob("*.py")]
    found = {call: {str(path.relative_to(root)) for path in files if f"{call}(" in path.read_text()} for call in CALLS}
    assert found["ray.wait"] == {"lab/ray_session.py"}
    assert found["ray.get"] == {"lab/ray_session.py", "scaled/cluster/sources.py", "scaled/cluster/weights.py"}


def signalled(signum: int) -> None:
    """Sends the signal to this process once it waits for Ray in C++, half a second from now."""
    threading.Timer(0.5, os.kill, (os.getpid(), signum)).start()


def listening_addresses(process: psutil.Process) -> list[str]:
    """The addresses on which a process and all its children listen."""
    family = [process, *process.children(recursive=True)]
    sockets = [one for member in family for one in member.net_connections(kind="inet")]
    return [one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN]


def test_a_late_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray whose processes are late is started anew, its processes killed; after STARTS times it is one line, and any
    other error is raised as it is. One that has no command line yet when it is first seen is killed, too."""
    children: list[subprocess.Popen[bytes]] = []
    unnamed: set[int] = set()
    read = psutil.Process.cmdline

    def cmdline(process: psutil.Process) -> list[str]:
        if process.pid in unnamed:
            unnamed.remove(process.pid)
            return []
        return read(process)

    monkeypatch.setattr(psutil.Process, "cmdline", cmdline)
    errors: list[Exception] = []

    def init(**options: object) -> None:
        command = [sys.executable, "-c", "import time; time.sleep(600)", f"--dir={options['_temp_dir']}"]
        children.append(subprocess.Popen(command))
        unnamed.add(children[-1].pid)
        if errors:
            raise errors.pop()

    monkeypatch.setattr(ray, "init", init)
    late = Exception("The current node timed out during startup. This could happen because ...")
    try:
        errors += [late] * (module.STARTS - 1)
        with ray_session(None, num_cpus=1, object_store_bytes=2**20):
            assert [child.wait(30) for child in children[:-1]] == [-signal.SIGKILL] * (module.STARTS - 1)
            assert len(children) == module.STARTS and children[-1].poll() is None
        errors += [late] * module.STARTS
        with (
            pytest.raises(ValueError, match=rf"^--jobs: Ray did not start on this machine, {module.STARTS} times: "),
            ray_session(None, num_cpus=1, object_store_bytes=2**20, field="--jobs"),
        ):
            pass
        assert errors == [] and len(children) == 2 * module.STARTS
        errors += [OSError("No space left on device")]
        with pytest.raises(OSError, match="No space left"), ray_session(None, num_cpus=1, object_store_bytes=2**20):
            pass
        assert len(children) == 2 * module.STARTS + 1
    finally:
        for child in children:
            child.kill()
            child.wait()
