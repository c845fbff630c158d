"""An audit or a flow that is killed after some of its cases."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from firstorder.cli import main
from lab import casebook
from lab.records import RunFolder
from tests.forks import begin, end


def run_killed(words: list[str], num_cases: int) -> int:
    """The command's exit code in a process of its own, which kills itself with -9 once it has kept that many cases."""
    keep, left = casebook.keep_case, num_cases

    def keep_and_die(folder: RunFolder, rows: casebook.Rows) -> None:
        nonlocal left
        keep(folder, rows)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def act() -> int:
        casebook.keep_case = keep_and_die
        return main(words)

    return end(begin(act, Path(os.devnull)))


__all__ = ["run_killed"]
