"""Laws of `firstorder doctor`: the words and the page say what the library finds, and an error is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firstorder.cli import main
from lab.doctor.causes import CAUSES
from lab.doctor.importers import FORMATS
from tests.lab.doctor import dumps
from tests.lab.doctor.patients import draw_rows, trace_of
from tests.lab.doctor.test_importers import ROWS


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


GOOD = trace_of(draw_rows(), lambda logp, b: logp)
LATE = trace_of(draw_rows(), lambda logp, b: [logp[0], *logp[:-1]])


def test_the_verdict_is_first_and_then_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first line is the verdict in one sentence, the second the fix of the cause that is named first."""
    LATE.save(tmp_path / "late.safetensors")
    main(["doctor", str(tmp_path / "late.safetensors")])
    first, second, *_ = capsys.readouterr().out.splitlines()
    shifted = next(cause for cause in CAUSES if cause.name == "shifted")
    assert first.startswith(f"late.safetensors: it looks like {shifted.title} (strength ") and first.endswith(").")
    assert second == f"Do first: {shifted.fix}"


@pytest.mark.parametrize(
    ("fail_on", "codes"),
    [(None, (0, 3, 3)), ("any", (0, 3, 3)), ("none", (0, 0, 0)), ("stale, shifted", (0, 3, 3)), ("stale", (0, 0, 0))],
)
def test_the_exit_code_is_3_where_a_fault_is_named(fail_on: str | None, codes: tuple[int, ...], tmp_path: Path) -> None:
    """0 for nothing wrong, 3 for a fault (of those asked for), also where one of two traces has it."""
    good, late = tmp_path / "good.safetensors", tmp_path / "late.safetensors"
    GOOD.save(good)
    LATE.save(late)
    option = [] if fail_on is None else ["--fail-on", fail_on]
    assert tuple(main(["doctor", *map(str, paths), *option]) for paths in ([good], [late], [good, late])) == codes


def test_a_cause_that_is_none_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--fail-on names causes that exist, or any or none."""
    assert main(["doctor", str(tmp_path / "t.safetensors"), "--fail-on", "stail"]) == 2
    assert "--fail-on: 'stail' is no cause; did you mean 'stale'?" in capsys.readouterr().err


def test_rounding_too_small_to_matter_is_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sides that differ by 1e-4 have a k3 below 1e-6: named as precision, with exit code 0."""
    tiny = trace_of(draw_rows(), lambda logp, b: [x * (1 + 1e-4 * (-1) ** t) for t, x in enumerate(logp)])
    tiny.save(tmp_path / "tiny.safetensors")
    assert main(["doctor", str(tmp_path / "tiny.safetensors")]) == 0
    assert "nothing to mend; it looks like different arithmetic" in capsys.readouterr().out


def test_json_has_the_verdict_the_clues_and_what_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object on stdout and nothing else: verdict, fault, all strengths, caveat and unused columns."""
    path = dumps.prime_rl(tmp_path, ROWS)
    code = main(["doctor", str(path), "--json", "--out", str(tmp_path / "page.html")])
    (told,) = json.loads(capsys.readouterr().out)["traces"]
    assert (code == 3) == (told["fault"] is not None)
    assert told["trace"] == "rank_0.jsonl, with pi in place of old" and told["is_pi"]
    assert told["format"] == "prime-rl" and "exports pi" in told["caveat"] and "mismatch_kl" in told["unused"]
    assert told["clues"]["num_tokens"] == sum(sum(row["is_response"]) for row in ROWS)
    assert set(told["strengths"]) == {cause.name for cause in CAUSES} | {"unknown"}


def test_what_is_read_is_listed_without_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """--list-formats needs no file: each format with its files, what it has and lacks, and its source."""
    assert main(["doctor", "--list-formats"]) == 0
    told = capsys.readouterr().out
    assert all(
        f"{about.name}: {about.files}\n  has    {about.has}\n  lacks  {about.lacks}" in told for about in FORMATS
    )


def test_columns_and_the_other_side_are_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--columns reads columns of any name, --old brings the trainer's side; unused columns are named."""
    renamed = [{"ids": r["tokens"], "n": r["num_prompt"], "a": r["logp_mu"], "b": r["logp_old"], "x": 1} for r in ROWS]
    path = dumps.lines(tmp_path / "dump.jsonl", renamed)
    main(["doctor", str(path), "--columns", "tokens=ids,num_prompt=n,logp_mu=a,logp_old=b"])
    assert "Not used: x." in capsys.readouterr().out
    whole = [row | {"is_response": [True] * len(row["logp_mu"])} for row in ROWS]
    main(["doctor", str(dumps.vllm(tmp_path, whole)), "--old", str(dumps.old_side(tmp_path, whole))])
    assert "read as vLLM." in capsys.readouterr().out
