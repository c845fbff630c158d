"""Copies of the test's own process, which need not import torch again, for laws of processes that run or die."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def begin(act: Callable[[], int], log: Path) -> int:
    """The id of a copy of this process that does `act` and exits with its result; what it says goes to the file."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            sys.stdout = sys.stderr = open(log, "a", buffering=1)  # noqa: SIM115 (until the process ends)
            code = act()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def end(child: int) -> int:
    """The exit code of that process, once it has ended; negative: the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


__all__ = ["begin", "end"]
