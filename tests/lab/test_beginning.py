"""Laws of a run's start: its input files are recorded and compared, and manifest.json keeps every process."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from lab.beginning import PIECE, PIECES, WHOLE, input_hashes, record_process, require_same_inputs
from lab.records import RunFolder
from lab.strict import ConfigError
from lab.tasks.arithmetic import ArithmeticConfig
from lab.tasks.jsonl import JsonlConfig

OWN = ArithmeticConfig.model_validate({"kind": "arithmetic"})
"""A task that makes its own problems."""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", "name", "abc", datetime.now(UTC))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "merges.txt", "chat_template.jinja", "README.md"):
        (folder / name).write_text(name)
    return folder


def test_the_inputs_are_the_files_that_the_config_only_names(tmp_path: Path, model: Path) -> None:
    """Weights, config, tokenizer and template of the model's folder, not its README; both problem files of the task."""
    rows, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    rows.write_text("1")
    held_out.write_text("2")
    task = JsonlConfig.model_validate({"kind": "jsonl", "path": str(rows), "held_out_path": str(held_out)})
    found = input_hashes(str(model), task)
    assert list(found) == [
        *(str(p) for p in sorted(model.glob("*")) if p.name != "README.md"),
        str(rows),
        str(held_out),
    ]
    assert found[str(rows)] == hashlib.sha256(b"1").hexdigest()
    assert input_hashes(None, OWN) == {}


@pytest.mark.parametrize("piece", [0, 1, PIECES - 1])
def test_a_large_file_is_hashed_by_its_size_and_its_pieces(model: Path, piece: int) -> None:
    """A changed byte in a piece, the first and the last of the file among them, and another size change the hash."""
    path, size = model / "model.safetensors", WHOLE + 1
    with open(path, "wb") as file:
        file.truncate(size)  # sparse: no disk is used
    before = input_hashes(str(model), OWN)[str(path)]
    assert re.fullmatch("sampled:[0-9a-f]{64}", before)
    start = (size - PIECE) * piece // (PIECES - 1)
    with open(path, "r+b") as file:
        file.seek(start + PIECE - 1)  # of the last piece: the last byte of the file
        file.write(b"x")
    changed = input_hashes(str(model), OWN)[str(path)]
    with open(path, "wb") as file:
        file.truncate(size + 1)
    longer = input_hashes(str(model), OWN)[str(path)]
    assert len({before, changed, longer}) == 3


@pytest.mark.parametrize(
    ("now", "line"),
    [
        (
            {"a": "11", "b": "33"},
            r"b: expected the file with which the run in \S+ began \(22\), got another \(33\); put",
        ),
        ({"a": "11"}, r"b: .* began \(22\), got another \(no such file\)"),
        ({"a": "11", "b": "22", "c": "33"}, r"c: .* began \(no such file\), got another \(33\)"),
    ],
    ids=["changed", "gone", "new"],
)
def test_a_run_continues_with_the_inputs_that_it_began_with(run: RunFolder, now: dict[str, str], line: str) -> None:
    """A file that is changed, gone or new is named with both hashes; equal ones pass, as do runs without a record."""
    require_same_inputs(run, now)
    record_process(run, {"commit": "1"}, {"a": "11", "b": "22"})
    require_same_inputs(run, {"a": "11", "b": "22"})
    with pytest.raises(ConfigError, match=f"^{line}"):
        require_same_inputs(run, now)


def test_the_manifest_keeps_the_first_process_and_what_differs_later(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """An equal process adds its time alone, without a word; another adds all that differs, and says so."""
    first = {"seed": 0, "commit": "1", "versions": {"torch": "2"}}
    record_process(run, first, {"a": "11"})
    assert run.manifest() == {**first, "inputs": {"a": "11"}}
    record_process(run, first, {"a": "11"})
    assert capsys.readouterr().err == ""
    record_process(run, first | {"commit": "2", "versions": {"torch": "3"}}, {"a": "11"})
    assert "continues with another commit, versions than it began with" in capsys.readouterr().err
    found = run.manifest()
    same, other = found.pop("resumed")
    assert found == {**first, "inputs": {"a": "11"}}
    assert list(same) == ["time"] and same["time"].endswith("Z")
    assert {name: other[name] for name in other if name != "time"} == {"commit": "2", "versions": {"torch": "3"}}


def test_what_a_later_process_no_longer_has_differs_too(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that began on a commit and continues outside a checkout: null for what is gone; inputs, hashes and former
    processes are no environment."""
    first = {"seed": 0, "commit": "1", "has_local_changes": False}
    record_process(run, first, {"a": "11"})
    run.seal()
    for _ in range(2):
        record_process(run, {"seed": 0}, {"a": "11"})
        assert "continues with another commit, has_local_changes than it began with" in capsys.readouterr().err
    record_process(run, first, {"a": "11"})
    assert capsys.readouterr().err == ""
    *outside, same = run.manifest()["resumed"]
    gone = {"commit": None, "has_local_changes": None}
    assert [{name: each[name] for name in each if name != "time"} for each in outside] == [gone, gone]
    assert list(same) == ["time"]
