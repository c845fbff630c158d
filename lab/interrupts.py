"""Ctrl-C and SIGTERM as one exception, so that a run told to stop unwinds, closes its files and says so."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """The process was told to stop; `exit_code` is 128 + the signal, as shells count, `hint` is how to continue.

    It is not a KeyboardInterrupt, which Lightning turns into exit code 1, nor an Exception, which other code might
    catch.
    """

    def __init__(self, signum: int, hint: str = ""):
        self.signum = signum
        self.hint = hint
        super().__init__(f"interrupted by {signal.Signals(signum).name}{hint}")

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.signum


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside the block the first SIGINT or SIGTERM raises Interrupted, and a second one ends the process immediately.

    It has no effect outside the main thread, the only one to which Python delivers signals. A signal that the process
    was started to ignore stays ignored: `nohup` and a shell's `&` do so with SIGINT.
    """
    with kept_handlers():
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    signal.signal(signum, _interrupt)
        yield


@contextlib.contextmanager
def kept_handlers() -> Iterator[None]:
    """Restores the handlers of both signals after the block: libraries that start inside it set their own."""
    is_main = threading.current_thread() is threading.main_thread()
    former = {signum: signal.getsignal(signum) for signum in SIGNALS} if is_main else {}
    try:
        yield
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Defers a signal to the end of a block whose writes belong together."""
    waiting: list[int] = []
    try:
        with kept_handlers():
            if threading.current_thread() is threading.main_thread():
                for signum in SIGNALS:
                    # Noted, not raised: after a handler that returns, Python continues the interrupted system call.
                    signal.signal(signum, lambda number, _: waiting.append(number))
            yield
    finally:
        # The former handlers are back, so that the caller's own takes the signal. The first one raises, unless it is
        # one that the process ignores.
        for number in waiting:
            signal.raise_signal(number)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    for each in SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, signal.SIG_DFL)  # a second signal ends the process
    raise Interrupted(signum)
