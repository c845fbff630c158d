"""The entry point of the command, as `firstorder` and as `python -m firstorder`.

The project's packages have plain names, so another `lab` may shadow ours: a user's lab.py in the working folder, which
`python -m` puts first on the path, or another project's package. See docs/decisions/0011-package-names.md.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import FrameType

HOME = Path(__file__).resolve().parents[1]
NEIGHBOURS = ("theory", "lab", "sandbox", "scaled")


def main() -> int:
    """Runs the command and returns its exit code; 2, with one line, where one of NEIGHBOURS is not this project's."""
    # Until the command has handlers of its own (lab/interrupts.py).
    for signum in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _stop)
    # Not in the project's own folder: an uninstalled checkout is found through it.
    # `python -m` puts the working folder first, under -P it does not; the installed script never does.
    if __name__ == "__main__" and not sys.flags.safe_path and Path(sys.path[0]).resolve() != HOME:
        del sys.path[0]
    for name in NEIGHBOURS:
        found = _place(name)
        if found != HOME / name:
            print(
                f"error: {name}: expected firstorder's own package {HOME / name}, got {found or 'none'}; "
                "firstorder needs its own environment, without another package of that name",
                file=sys.stderr,
            )
            return 2
    from firstorder.cli import main as command
    from firstorder.pipes import outlive_readers

    outlive_readers()
    return command()


def _stop(signum: int, frame: FrameType | None) -> None:
    """Ends the process with a line and 128 + the signal: an exception in the midst of an import is a long traceback."""
    os.write(2, f"interrupted by {signal.Signals(signum).name}\n".encode())
    os._exit(128 + signum)


def _place(name: str) -> Path | None:
    """The path that an import of the name finds: a package's folder or a module's file; None where there is none."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None


if __name__ == "__main__":
    sys.exit(main())
