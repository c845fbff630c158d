"""Laws of `firstorder flow`: it writes records and a page, continues after a kill, and a mistake is one line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from firstorder.cli import main
from lab.flow import flow, load_config
from lab.flow.records import read
from tests.firstorder.killed_cases import goes_on
from tests.firstorder.test_cli import fails

TINY = """
name: tiny
backend: exact
problems: {count: 2, num_tokens: 2, length: 2, prompts: 1, openings: 2, lost: 1}
errors: [{kind: fixed, token_kl: 0.1}, {kind: exact}]
objectives: [{preset: reinforce, label: none}, {preset: reinforce, label: centred, centred: true}]
num_minibatches: [2]
batch_sizes: [8, .inf]
training: {optimizer: sgd, rate: 0.5, num_updates: 4, observe_every: 2}
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The smallest flow of four cases, in an empty folder that is also the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path / "tiny.yaml"


def test_a_flow_leaves_records(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Config, manifest, flow.json and page are there with the runs' own rows; the folder alone gives the page again."""
    assert main(["flow", str(tiny), "--progress", "lines", "--csv", "rows.csv"]) == 0
    out = capsys.readouterr().out
    page = Path(out.splitlines()[-1])
    names = {path.name for path in page.parent.iterdir() if path.name != ".lock"}
    assert names == {"config.yaml", "manifest.json", "flow.json", "flow.html"}
    frame, text = read(page.parent / "flow.json"), page.read_text()
    wanted = flow(load_config(tiny))
    assert frame.attrs == wanted.attrs and frame.attrs["config_hash"] in page.parent.name
    # JSON keeps every digit of a float64.
    pd.testing.assert_frame_equal(frame, wanted, check_exact=True, check_dtype=False)
    assert len(pd.read_csv("rows.csv")) == len(frame)
    page.unlink()
    assert main(["flow", "runs/tiny"]) == 0
    printed = capsys.readouterr().out
    assert out.endswith(printed) and "ends of runs, means over 2 problems" in printed and page.read_text() == text
    line = fails(capsys, "flow", "runs/tiny", "--seed", "1")
    assert line == f"--seed: expected no field beside the folder of finished records, got {page.parent}"


def test_a_killed_flow_continues(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed with -9 after two cases of four: equal bytes, infinities among them, and two cases computed anew."""
    errors = ["--errors", "[{kind: top_p, scale: 0.6}, {kind: exact}]"]
    folder = goes_on(["flow", str(tiny), "--progress", "none", *errors], "flow.json", capsys, monkeypatch)
    # Of two tokens top-p 0.4 leaves one, and old may take the other.
    rows = read(folder / "flow.json")
    assert set(rows["kl_old_mu"]) == {0.0, math.inf} and (rows["kl_old_mu"] > 0).equals(rows["kind"] == "top_p")
    assert main(["flow", str(folder), "--csv", "rows.csv"]) == 0
    assert pd.read_csv("rows.csv")["kl_old_mu"].equals(rows["kl_old_mu"])


def test_a_flow_where_all_is_rejected_ends(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several draws of an engine, and no update: no error of the draws, a dash for the direction, a page as ever."""
    nothing = "[{preset: reinforce, label: nothing, correction: {name: geo_rs, lo: 20.0, hi: 30.0}}]"
    words = ["flow", str(tiny), "--errors", "[{kind: fresh, scale: 0.3}]", "--batch_sizes", "[.inf]"]
    assert main([*words, "--objectives", nothing, "--progress", "none"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"nothing\s.*\s1\s+–", out)
    rows = read(Path(out.splitlines()[-1]).parent / "flow.json")
    assert (rows["gradient_norm"] == 0).all() and (rows["draw_error"] == 0).all() and rows["cosine"].isna().all()


def test_a_flow_of_one_problem_ranks_nothing(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tables and words have means and no interval."""
    assert main(["flow", str(tiny), "--problems.count", "1", "--progress", "none"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "ends of runs on 1 problem" in out and "8 runs of exact expected updates on 1 problem, so without" in out
    assert "[" not in out and "highest" not in out and "1 problems" not in out


def test_a_finished_flow_is_not_taken_up_again(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given twice, a config has two folders with the same rows."""
    words = ["flow", str(tiny), "--progress", "none", "--batch_sizes", "[.inf]", "--errors", "[{kind: exact}]"]
    pages = []
    for _ in range(2):
        assert main(words) == 0
        pages.append(Path(capsys.readouterr().out.splitlines()[-1]).parent)
    assert pages[0] != pages[1]
    first, second = (json.loads((page / "flow.json").read_text()) for page in pages)
    assert first == second


def test_mistakes_are_one_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong field by its name, a tree that is too large with its count, damaged records; and nothing is written."""
    assert "did you mean 'seed'?" in fails(capsys, "flow", str(tiny), "--sed", "1")
    said = fails(capsys, "flow", str(tiny), "--problems.length", "30")
    assert "problems: expected at most 4,000,000 responses to enumerate" in said
    assert "fixd" in fails(capsys, "flow", str(tiny), "--errors", "[{kind: fixd, scale: 1}]")
    assert fails(capsys, "flow", str(tiny), "--errors", "[]") == f"{tiny}: errors: expected at least 1 item, got []"
    assert "training.lag: expected a value" in fails(capsys, "flow", str(tiny), "--training.lag", str(10**21))
    assert fails(capsys, "flow", str(tiny), "--csv", "no/where.csv").startswith("--csv: expected a file in a folder")
    assert fails(capsys, "flow", str(tiny), "--csv", ".") == "--csv: expected a file, got the folder ."
    assert not Path("runs").exists()
    (folder := tiny.parent / "runs" / "damaged").mkdir(parents=True)
    (folder / "config.yaml").write_text(TINY)
    (folder / "flow.json").write_text('{"name": "x", "config_hash": "y", "columns": {"update": [1]}}')
    assert "flow.json: expected the records of a flow, got none of length, problem" in fails(
        capsys, "flow", str(folder)
    )


def test_a_flow_that_leaves_the_numbers_is_one_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 with the run, the update and the field to change; there are no records that no page can show."""
    words = ["--training.rate", "1e308", "--training.num_updates", "8", "--progress", "none"]
    assert main(["flow", str(tiny), *words]) == 1
    assert capsys.readouterr().err == (
        "error: problem 1, exact, none, N = 2, B = 8: expected a finite reward and entropy, got nan and nan at update "
        "2; a smaller training.rate than 1e+308 may help\n"
    )
    assert not list(Path("runs").rglob("flow.json"))


def _with(column: str, value: object) -> Callable[[dict[str, Any]], None]:
    """A change of flow.json: every row of a column has this value."""
    return lambda told: told["columns"].update({column: [value] * len(told["columns"][column])})


def _without(last: int) -> Callable[[dict[str, Any]], None]:
    """A change of flow.json: every column lacks so many of its last values."""
    return lambda told: told.update(columns={name: values[:-last] for name, values in told["columns"].items()})


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (_with("reward", "abc"), "reward: expected numbers, got others (could not convert string to float: 'abc')"),
        (_with("reward", None), "reward: expected finite numbers, got nan"),
        (_with("entropy", "inf"), "entropy: expected finite numbers, got inf"),
        (_with("objective", 3.5), "objective: expected a text in every row, got 3.5"),
        (_with("error", None), "error: expected a text in every row, got None"),
        (_without(3), "expected as many runs of both, got 3 and 4"),
        (_without(10**6), "expected the records of a flow, got no rows"),
    ],
)  # fmt: skip
def test_damaged_records_are_one_line(
    change: Callable[[dict[str, Any]], object], wanted: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records that no table can show are named by their file, and no page is left."""
    assert main(["flow", str(tiny), "--progress", "none", "--num_minibatches", "[1, 2]"]) == 0
    file = next(Path("runs").rglob("flow.json"))
    told = json.loads(file.read_text())
    change(told)
    file.write_text(json.dumps(told))
    page = file.with_name("flow.html")
    page.unlink()
    capsys.readouterr()
    assert main(["flow", "runs/tiny"]) == 2
    assert capsys.readouterr().err == f"error: {file}: {wanted}\n"
    assert not page.exists()


@pytest.mark.parametrize(
    ("name", "content"), [("manifest.json", b'{"a": '), ("manifest.json", b"[]"), ("flow.json", b"\xff")]
)
def test_a_torn_file_beside_the_records_is_named(
    name: str, content: bytes, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is no JSON object is one line that begins with its path."""
    assert main(["flow", str(tiny), "--progress", "none"]) == 0
    file = next(Path("runs").rglob(name))
    file.write_bytes(content)
    capsys.readouterr()
    assert main(["flow", "runs/tiny"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {file}: ") and err.count("\n") == 1 and err.count(str(file.parent)) == 1


def test_the_config_explains_itself(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--print-config prints a config that loads to the same flow, overrides included, and starts nothing."""
    assert main(["flow", str(tiny), "--seed", "7", "--print-config"]) == 0
    Path("printed.yaml").write_text(capsys.readouterr().out)
    assert load_config("printed.yaml") == load_config(tiny, ["--seed", "7"]) and not Path("runs").exists()
