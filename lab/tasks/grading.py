r"""Grading of mathematical answers with Math-Verify, in a separate process, so that a hostile answer ends only that.

The text of a policy is untrusted input: `\boxed{9^{9^{9^{9}}}}` keeps a computer algebra system busy for ever, deep
nesting exhausts its stack. Math-Verify's own limit is an alarm signal, which works in a main thread only and cannot
interrupt arithmetic in C; here the kernel ends the worker, from any thread. The limit is CPU time, so that a busy
machine gives the same rewards. Windows has no timer of CPU time: there the worker is ended after WALL times the limit.

The verifier is that of R3 (arXiv 2510.11370), App. K: the last parseable expression of the response against the answer.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from typing import Any

LIMIT_S = 5.0
"""CPU seconds allowed per answer."""

HAS_CPU_TIMER = hasattr(signal, "setitimer")
WALL = 4.0
"""Seconds of wall time per second of CPU time, where only wall time can be limited."""

OUT_OF_BOUNDS = tuple(-getattr(signal, name) for name in ("SIGPROF", "SIGSEGV", "SIGABRT") if hasattr(signal, name))
"""Exit statuses of a worker that ran out of time, stack or memory."""

TINY, NEAR = 1e-3, 1e-2
"""Below TINY two numbers are equal only within NEAR times the larger one: Math-Verify rounds decimals to six places,
which makes 5e-8 a 0, and all charges and masses of particles equal."""

MEMORY_BYTES = 4 << 30
"""Address space of the worker, where the system can limit it."""


def grade(response_text: str, answer: str, limit_s: float = LIMIT_S) -> float:
    r"""1.0 if the response's final expression equals the answer by Math-Verify, else 0.0.

    The final expression is the content of the last complete `\boxed{...}` that parses; in a response without a box, the
    last expression that Math-Verify finds. Equality is of values, not of text: 1/2, 0.5 and \frac12 are equal, as are
    (x+1)^2 and x^2+2x+1; [0,1) and (0,1) are not. A decimal may be rounded: to six places, as in Math-Verify, and where
    both numbers are below TINY, to NEAR times the larger one. Text that cannot be parsed, or takes longer than
    `limit_s` CPU seconds, earns 0.0. Raises RuntimeError only if the worker process cannot run at all.
    """
    return float(_POOL.ask({"response": response_text, "answer": answer, "limit_s": limit_s}))


_NUMBER = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")
"""Plain numbers, which Math-Verify reads whatever their digits."""


def is_parseable(answer: str, limit_s: float = LIMIT_S) -> bool:
    """Whether Math-Verify can read the answer of a problem, within the limit; plain numbers need no worker."""
    return _NUMBER.fullmatch(answer) is not None or _is_read(answer, limit_s)


@functools.lru_cache(maxsize=1 << 16)  # without plain numbers: as many of them would take 13 MB
def _is_read(answer: str, limit_s: float) -> bool:
    return _POOL.ask({"answer": answer, "limit_s": limit_s})


class _Clock:
    """Kills the process after that many seconds, unless it is stopped before."""

    def __init__(self, process: subprocess.Popen[bytes], limit_s: float) -> None:
        self._rang = False
        self._process = process
        self._timer = threading.Timer(limit_s, self._ring)
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> bool:
        """Stops the clock; False if the time was up. After this nothing is killed."""
        self._timer.cancel()
        self._timer.join()
        return not self._rang

    def _ring(self) -> None:
        self._rang = True
        self._process.kill()


class _Worker:
    """One grading process, started at the first request and again after a limit has ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any]) -> bool:
        """The worker's yes or no; no if the request ended the worker."""
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            process = self._process = self._process or self._start()
            assert process.stdin is not None and process.stdout is not None
            clock = None if HAS_CPU_TIMER else _Clock(process, WALL * request["limit_s"])
            try:
                process.stdin.write(line)
                process.stdin.flush()
                reply = process.stdout.readline()
            except BrokenPipeError:
                reply = b""
            except BaseException:
                # Interrupted between request and reply: the next reply read would be this request's.
                self._end(process)
                raise
            finally:
                in_time = clock is None or clock.stop()
            if reply in (b"0\n", b"1\n"):
                return reply == b"1\n"
            status = self._end(process)
            if not in_time or status in OUT_OF_BOUNDS:
                return False
            raise RuntimeError(f"the grading process ended with status {status}, which no answer should cause")

    def stop(self) -> None:
        """Ends the process, if there is one; the next request starts another."""
        with self._lock:
            if self._process is not None:
                self._end(self._process)

    def forget(self) -> None:
        """After a fork: process and pipes are the parent's, and no thread here could release a lock held there."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._process.returncode = 0  # so that Popen does not wait for the parent's child
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        # -P keeps this folder off the path, or its tokenizers.py would shadow the library of that name. A fixed hash
        # seed: the order of sets inside the algebra system must not decide a reward.
        process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", __file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )  # fmt: skip
        assert process.stdout is not None
        reply = process.stdout.readline()
        if reply != b"ready\n":
            status = self._end(process)
            raise RuntimeError(f"the grading process did not start (status {status}); is math-verify installed?")
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Ends the process, by the end of its input, or by a kill after a second; its exit status."""
        self._process = None
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # buffered bytes for a dead process
            process.stdin.close()
        try:
            status = process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        process.stdout.close()
        return status


class _Pool:
    """One worker per thread that asks at the same time, up to the machine's cores; a thread alone needs one."""

    def __init__(self, first: _Worker) -> None:
        self._first = first
        self.forget()

    def ask(self, request: dict[str, Any]) -> bool:
        """The reply of an idle worker, by preference the first; waits while all are busy."""
        # Not under the lock: a thread that waits for a place would keep the others from giving theirs back.
        with self._places:
            with self._lock:
                worker = self._idle.pop(0) if self._idle else _Worker()
            try:
                return worker.ask(request)
            finally:
                with self._lock:
                    self._idle.append(worker)
                    # The first worker comes first, so that a thread alone reuses it and starts no other.
                    self._idle.sort(key=lambda one: one is not self._first)

    def stop(self) -> None:
        """Ends the processes of idle workers."""
        with self._lock:
            for worker in self._idle:
                worker.stop()

    def forget(self) -> None:
        """After a fork: every worker process belongs to the parent."""
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(os.cpu_count() or 1)
        for worker in getattr(self, "_idle", []):
            worker.forget()
        self._first.forget()
        self._idle = [self._first]


_WORKER = _Worker()
_POOL = _Pool(_WORKER)
atexit.register(_POOL.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_POOL.forget)


def boxed(text: str) -> list[str]:
    r"""The contents of all complete `\boxed{...}` in the order in which they close; braces inside are balanced."""
    found: list[str] = []
    opened: list[int | None] = []
    # `\\.` consumes escaped characters, so that the braces in \{ and \} do not count.
    for match in re.finditer(r"\\boxed\s*\{|\\.|[{}]", text, re.DOTALL):
        token = match.group()
        if token == "}":
            start = opened.pop() if opened else None
            if start is not None:
                found.append(text[start : match.start()])
        elif token.endswith("{") and token != r"\{":
            opened.append(match.end() if token.startswith("\\") else None)
    return found


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    # Without its alarm signals, which work in the main thread only, and without the fallback that compares strings.
    return parse(text, fallback_mode="no_fallback", parsing_timeout=0)


@functools.lru_cache(maxsize=4096)  # all responses of a group have one answer
def _parse_answer(answer: str) -> list[Any]:
    return _parse(answer if boxed(answer) else rf"\boxed{{{answer}}}")


def _reply(request: dict[str, Any]) -> bool:
    """The worker's grade of one request."""
    from math_verify import verify

    answer = _parse_answer(request["answer"])
    if not answer or "response" not in request:
        return bool(answer)
    boxes = boxed(request["response"])
    # Lazy, from the last box back: those before the first that parses cost no time.
    candidates = (_parse(rf"\boxed{{{content}}}") for content in reversed(boxes))
    prediction = next(filter(None, candidates), []) if boxes else _parse(request["response"])
    return bool(prediction) and verify(answer, prediction, timeout_seconds=None) and _is_near(answer, prediction)


def _is_near(answer: list[Any], prediction: list[Any]) -> bool:
    """False where both are numbers below TINY, and none of one is near any of the other."""
    known, found = _numbers(answer), _numbers(prediction)
    if not known or not found or max(abs(x) for x in (*known, *found)) >= TINY:
        return True
    return any(abs(x - y) <= NEAR * max(abs(x), abs(y)) for x in known for y in found)


def _numbers(parsed: list[Any]) -> list[Any]:
    """The numbers among the expressions of a parsed text; their exponents have no bound, unlike a float's."""
    from sympy import Expr, N

    # `doit`, since the parser leaves 50% as an unevaluated product.
    return [N(one.doit()) for one in parsed if isinstance(one, Expr) and one.is_number]


def _serve() -> None:
    """The worker: one line of JSON in, `1` or `0` out, each under its own CPU limit."""
    import math_verify  # noqa: F401  # seconds to import, outside of any answer's limit

    # Libraries may print to stdout; replies have a channel of their own.
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too, whose end closes our input
    if HAS_CPU_TIMER:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also in the middle of arithmetic in C
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dumps of killed workers
    replies.write(b"ready\n")
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if HAS_CPU_TIMER:
            signal.setitimer(signal.ITIMER_PROF, request["limit_s"])
        try:
            verdict = _reply(request)
        except Exception:  # an answer that breaks the parser is not right
            verdict = False
        if HAS_CPU_TIMER:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        replies.write(b"1\n" if verdict else b"0\n")


if __name__ == "__main__":
    _serve()
