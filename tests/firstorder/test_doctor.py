"""Laws of `firstorder doctor`: the words and the page say what the library finds, and an error is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstorder.cli import main
from tests.lab.doctor.patients import draw_rows, trace_of


def test_words_and_page_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two traces each is named with its own cause, on the terminal and on a page that loads no address."""
    rows = draw_rows()
    trace_of(rows, lambda logp, b: logp).save(tmp_path / "good.safetensors")
    trace_of(rows, lambda logp, b: [logp[0], *logp[:-1]]).save(tmp_path / "late.safetensors")
    page = tmp_path / "page.html"
    assert (
        main(["doctor", str(tmp_path / "good.safetensors"), str(tmp_path / "late.safetensors"), "--out", str(page)])
        == 3
    )
    told, html = capsys.readouterr().out, page.read_text()
    assert told.index("good.safetensors:") < told.index("nothing wrong") < told.index("late.safetensors:")
    assert told.index("late.safetensors:") < told.index("shifted by one token")
    body = html[html.index("<body>") : html.index('<script type="application/json"')]
    few = "tokens are few: the rules were tried on 2,500 and more"
    assert told.count(few) == body.count(few) == 2
    assert "nothing wrong" in body and "shifted by one token" in body and "http" not in body


def test_a_file_that_is_no_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the file and what was expected, with exit code 2."""
    path = tmp_path / "trace.csv"
    path.write_text("1,2")
    assert main(["doctor", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(path) in error and "expected a trace" in error
