"""`python -m firstorder` in a copy of the test's own process, which need not import torch again."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from firstorder.__main__ import main
from tests.forks import begin

LIMIT_S = 120
IMPORTED = ("sandbox.run", "sandbox.exact.audit", "scaled.plan.summary", "scaled.vllm_engine.quantize")
"""Once, rather than in each copy: what commands that train, audit or plan import."""


def begin_copy(words: Sequence[str], folder: Path, streams: Sequence[int], *, is_unbuffered: bool) -> int:
    """The id of the process (`tests.forks.end` has its code) whose stdout and stderr are the two descriptors.

    Its streams are Python's own, those of `python -u` if `is_unbuffered`, and are flushed at its end as Python does.
    """
    for module in IMPORTED:
        importlib.import_module(module)
    return begin(partial(_run, words, folder, streams, is_unbuffered), Path(os.devnull))


def _run(words: Sequence[str], folder: Path, streams: Sequence[int], is_unbuffered: bool) -> int:
    signal.alarm(LIMIT_S)
    os.chdir(folder)
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # as a new program's would be: a pipe's other end, too
    sys.stdout, sys.stderr = (_opened(number, is_unbuffered) for number in (1, 2))
    sys.argv = ["firstorder", *words]
    warnings.resetwarnings()  # those of a process without pytest
    code = main()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return 120  # with Python's own words
    return code


def _opened(number: int, is_unbuffered: bool) -> TextIO:
    raw = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]  # as in `python -u`
        line_buffering=number == 2,
        write_through=is_unbuffered,
    )


__all__ = ["begin_copy"]
