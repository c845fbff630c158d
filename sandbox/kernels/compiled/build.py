"""Compiles kernels.cpp with the machine's C++ compiler, once for each source, compiler and processor, and loads it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from lab.files import atomic_write
from lab.strict import ConfigError

CACHE = Path("runs/.cache/kernels")
# The compiler must not contract products and sums; only the source's own `fma` does (lanes.hpp).
# -fno-math-errno changes no bit: square roots need not set errno, and become single instructions.
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
NATIVE = ("-march=native", "-mcpu=native")
"""Flags for the processor's own instructions; the first that the compiler accepts is used (some on ARM lack -march)."""
COMPILERS = ("g++", "clang++", "c++")

SOURCE = Path(__file__).with_name("kernels.cpp")
_TYPES: dict[str, Any] = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float}


def _signatures() -> dict[str, list[Any]]:
    """The types of each function's arguments after the number of threads, read from its declaration."""
    declared = re.findall(r"^void (fo_\w+)\(int64_t threads, ([^)]*)\)", SOURCE.read_text(), re.MULTILINE)
    return {
        name: [ctypes.c_void_p if "*" in one else _TYPES[one.split()[0]] for one in arguments.split(",")]
        for name, arguments in declared
    }


class Library:
    """The compiled functions; tensors are passed as pointers, so they must be contiguous.

    `threads` is the number of threads that they may use, initially one. No bit depends on it.
    """

    def __init__(self, path: Path) -> None:
        self.threads = 1
        self._functions = {}
        # A call releases the GIL, so two Python threads may be inside at once (threads.hpp, `Pool::run`).
        loaded = ctypes.CDLL(str(path.resolve()))
        for name, types in _signatures().items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = [ctypes.c_int64, *types], None
            self._functions[name] = function

    def __call__(self, name: str, *arguments: Any) -> None:
        """Calls a function by name; None is passed as a null pointer."""
        function, num = self._functions[name], len(arguments)
        assert num == len(function.argtypes) - 1, f"{name} takes {len(function.argtypes) - 1}, got {num}"
        # Bare addresses: `arguments` keeps every tensor alive until the function returns.
        function(self.threads, *[pointer(a) if isinstance(a, Tensor) else a for a in arguments])


def pointer(x: Tensor) -> int:
    """The address of a tensor's data, which must be contiguous and of a type that the kernels know."""
    assert x.is_contiguous() and x.dtype in (torch.float32, torch.int32, torch.int64), f"{x.dtype} {x.stride()}"
    return x.data_ptr()


@functools.cache
def library() -> Library:
    """The library of this process, built unless an earlier process did; ConfigError if it cannot be built or loaded."""
    path = build(CACHE)
    try:
        return Library(path)
    except (OSError, AttributeError) as error:  # a cut file, or a file system that lets no program run
        raise ConfigError(
            f"compile: expected kernels that can be loaded, got: {error} (once removed, they are built again)"
        ) from error


def build(cache: Path) -> Path:
    """The path of the compiled library inside `cache`; compiles it (some seconds, a line on stderr) if it is not there.

    Its name is a hash of the sources, the compiler's command and flags, and the macros that it predefines for itself
    and the processor. If processes call at the same time, one compiles and the others wait. Raises ConfigError if
    there is no compiler, or if it fails.
    """
    compiler = _compiler()
    flags, about = _flags(compiler)
    sources = {path.name: path.read_bytes() for path in sorted(SOURCE.parent.glob("*.[ch]pp"))}
    key = hashlib.sha256(repr([*compiler, *flags]).encode() + about.encode() + b"".join(sources.values()))
    target = cache / f"{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if not target.exists():  # else another process built it while we waited
            print(f"compile: building the C++ kernels with {compiler[0]}, once", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                # The bytes that were hashed: an edit meanwhile must not be kept under their name.
                for name, text in sources.items():
                    (Path(folder) / name).write_bytes(text)
                built = Path(folder) / "kernels.so"
                _run([*compiler, *flags, str(Path(folder) / SOURCE.name), "-o", str(built)])
                # Atomic, as the first look at `target` above takes no lock.
                atomic_write(target, built.read_bytes())
    return target


def _flags(compiler: list[str]) -> tuple[tuple[str, ...], str]:
    """The flags that this compiler accepts, and the macros it predefines: its version, the processor's instructions."""
    # -dM -E prints the predefined macros: the cheapest check of a flag, and a name for compiler and processor.
    for native in NATIVE:
        flags = (*FLAGS, native)
        with contextlib.suppress(ConfigError):
            return flags, _run([*compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull])
    return FLAGS, _run([*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull])


def _compiler() -> list[str]:
    """The compiler's command, as words: $CXX may be `ccache g++`."""
    named = os.environ.get("CXX")
    try:
        commands = [shlex.split(named)] if named else [[name] for name in COMPILERS]
    except ValueError as error:
        raise ConfigError(f"compile: expected a C++ compiler in $CXX, got CXX={named} ({error})") from error
    found = [command for command in commands if shutil.which(command[0])]
    if not found:
        got = f"CXX={named}, which is not there" if named else f"none of {', '.join(COMPILERS)} on PATH"
        raise ConfigError(f"compile: expected a C++ compiler for compile: true ($CXX, or one on PATH), got {got}")
    return found[0]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        output, complaint, failed = done.stdout, done.stderr, done.returncode != 0
    except OSError as error:
        output, complaint, failed = "", str(error), True
    if failed:
        first = next((line for line in complaint.splitlines() if "error" in line), complaint.strip()[:200])
        raise ConfigError(f"compile: expected {command[0]} to build the kernels (a C++17 compiler), got: {first}")
    return output
