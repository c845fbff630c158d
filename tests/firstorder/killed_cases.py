"""An audit or a flow that is killed after some of its cases."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from firstorder.cli import main
from lab import casebook
from lab.records import RunFolder
from tests.forks import begin, end


def goes_on(words: list[str], file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a study of four cases that is killed with -9 after two of them, with a torn line besides.

    Asserts that the same command then computes two cases anew, and that the records in `file` are those of one call.
    """
    assert _run_killed(words, 2) == -signal.SIGKILL
    (folder,) = Path("runs/tiny").iterdir()
    cases = folder / casebook.CASES
    assert len(cases.read_bytes().splitlines()) == 2 and not (folder / file).exists()
    cases.write_bytes(cases.read_bytes() + b'[{"kind": "tab')
    made: list[object] = []
    keep = casebook.keep_case
    with monkeypatch.context() as patch:
        patch.setattr(casebook, "keep_case", lambda *given: made.append(given) or keep(*given))
        assert main(words) == 0 and len(made) == 2
    assert f"continuing in {folder}, where 2 cases are done" in capsys.readouterr().err
    assert not cases.exists()
    assert main([*words, "--output", "whole"]) == 0
    (whole,) = Path("whole/tiny").iterdir()
    resumed, uninterrupted = (json.loads((f / file).read_text()) for f in (folder, whole))
    # As text: NaN is null, and every digit counts.
    assert json.dumps(resumed["columns"]) == json.dumps(uninterrupted["columns"])
    capsys.readouterr()
    return folder


def _run_killed(words: list[str], num_cases: int) -> int:
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


__all__ = ["goes_on"]
