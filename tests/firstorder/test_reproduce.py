"""Laws of `firstorder reproduce`: it lists, refuses and resumes in plain words, and a smoke run decides nothing."""

from __future__ import annotations

import importlib.util
import signal
from functools import cache
from pathlib import Path

import pytest

from firstorder.cli import main
from lab.files import exclusive
from sandbox.claims import CLAIMS, REGIMES, RESULTS, chosen_claims, chosen_regimes
from sandbox.ledger import command, queue
from sandbox.ledger.cells import Cells, key
from sandbox.ledger.command import LedgerFolders, Wanted
from tests.firstorder.test_cli import fails


def test_the_list_names_every_claim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--list has a line per claim: home, runs done and needed, and the verdict there; it runs and writes nothing."""
    (tmp_path / "cells.jsonl").touch()
    assert main(["reproduce", "--list", "--results", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CLAIMS) + 2
    for claim, line in zip(CLAIMS, lines[2:], strict=True):
        tried = [regime for regime in REGIMES if regime.name in claim.places]
        # Regimes that differ in the engine alone share the runs of an arm that sets the engine.
        needed = len({key(regime, arm, seed) for regime in tried for arm, seed in claim.runs(regime.name)})
        assert line == f"| {claim.number} | {claim.name} | {claim.home} | 0/{needed} | – |"
    assert list(tmp_path.iterdir()) == [tmp_path / "cells.jsonl"]


def test_the_list_of_many_seeds_asks_for_the_keys_of_few(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--list hashes configs only for seeds that have rows, however many seeds are asked for."""
    asked: list[int] = []
    monkeypatch.setattr(command, "key", lambda *one: asked.append(one[2]) or key(*one))
    (tmp_path / "cells.jsonl").write_text('{"cell": "0", "seed": 7}\n{"cell": "1", "seed": 9}\n')
    words = ["reproduce", "9", "--list", "--regime", "stress", "--results", str(tmp_path)]
    (claim,) = chosen_claims(["9"])
    # The fresh seeds are of its home alone.
    for seeds in (8, 4096):
        asked.clear()
        assert main([*words, "--seeds", str(seeds)]) == 0
        assert f"| 0/{seeds * len(claim.arms)} |" in capsys.readouterr().out
        there = [7] if seeds == 8 else [7, 9]
        assert sorted(asked) == sorted([0, *there] * len(claim.arms))


def test_without_ray_one_line_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray, which the demo's environment lacks, is asked for before anything is written."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ray" else found(name, *a))
    monkeypatch.setattr(command, "run", lambda *a, **k: pytest.fail("a run was begun"))
    line = fails(capsys, "reproduce", "9", "--regime", "paper", "--results", str(tmp_path / "results"))
    assert line == "expected Ray, which queues the runs, got none (pip install -e '.[reproduce]' in the checkout)"
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_queue_says_that_it_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal in the queue is one line and 128 + its number, and no page is written."""
    monkeypatch.setattr(command, "run", lambda *a, **k: signal.raise_signal(signal.SIGTERM))
    assert main(["reproduce", "9", "--regime", "paper", "--results", str(tmp_path)]) == 143
    assert capsys.readouterr().err == "interrupted by SIGTERM; the same command continues the queue\n"
    assert list(tmp_path.iterdir()) == []


KEPT = cache(Cells.rows)


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that the project keeps, 50 MB, are parsed by the first command alone."""
    monkeypatch.setattr(Cells, "rows", lambda store: KEPT(store))


@pytest.mark.usefixtures("read_once")
def test_power_is_listed_before_any_run(capsys: pytest.CaptureFixture[str]) -> None:
    """--power has a line per claim, at the level of the whole ledger whichever are chosen, and the hours below."""
    listed = []
    for words in ([], ["9", "18"]):
        assert main(["reproduce", *words, "--power", "--results", str(RESULTS)]) == 0
        listed.append(capsys.readouterr().out.splitlines())
    whole, own = listed
    assert len([line for line in whole if line.startswith("| ")]) == len(CLAIMS) + 1
    assert own[2:4] == [line for line in whole if line.split(" | ")[0].strip("| ") in ("9", "18")]
    assert own[-1].startswith("Within 40 seeds: ") and " of 2 claims, " in own[-1]


def test_one_queue_at_a_time_works_on_a_results_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one holds it, a second is one line with the folder, before any run; commands that only read still work."""
    monkeypatch.setattr(queue, "work", lambda *a, **k: pytest.fail("a run was begun"))
    (tmp_path / "cells.jsonl").touch()
    folder = ["--results", str(tmp_path)]
    with exclusive(tmp_path / ".lock", "held"):
        line = fails(capsys, "reproduce", "11", "--regime", "stress", *folder, "--runs", str(tmp_path / "runs"))
        assert line == f"cannot add rows in {tmp_path}: another queue is making runs for this folder"
        for alone in (["11", "--regime", "stress", "--list"], ["11", "--power"], ["--page"]):
            assert main(["reproduce", *alone, *folder]) == 0


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("first\nsecond"), "first"),
        (ValueError("\n  second"), "second"),
        (MemoryError(), "MemoryError"),
        (AssertionError(), "AssertionError"),
        (TimeoutError(" \n"), "TimeoutError"),
    ],
)
def test_a_run_that_fails_is_one_line(
    error: Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line of its message, or the error's kind where it has none; the queue counts it and continues."""
    wanted = Wanted(chosen_claims(["11"]), chosen_regimes(["stress"]), 2, smoke=True)
    monkeypatch.setattr(queue, "work", lambda cells, *a, **k: ((one, error) for one in cells[:2]))
    said: list[str] = []
    place = LedgerFolders(tmp_path, tmp_path / "runs")
    assert command.run(wanted, place, address=None, jobs=1, compiled=False, say=said.append) == 2
    assert [line.partition(": ")[2] for line in said[1:]] == [f"failed: {words}"] * 2


def test_pages_are_of_every_claims_own_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--seeds chooses the runs: pages that judged by as few would undo decided claims."""
    judged: list[Wanted] = []
    monkeypatch.setattr(command, "write_pages", lambda everything, place: judged.append(everything) or "")
    monkeypatch.setattr(command, "run", lambda *a, **k: 0)
    assert main(["reproduce", "3", "--seeds", "2", "--results", str(tmp_path)]) == 0
    (everything,) = judged
    assert everything.seeds is None and len(everything.claims) == len(CLAIMS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["3", "10", "--power", "--regime", "stress"], "--regime: expected without --power, got stress with it"),
        (["3", "--power", "--seeds", "5"], "--seeds: expected without --power, got 5 with it"),
        (["--power", "--smoke"], "--smoke: expected without --power, got both"),
        (["--list", "--power"], "--power: expected without --list, got both"),
        (["--power", "--page"], "--page: expected without --power, got both"),
        (["3", "10", "--page"], "CLAIM: expected without --page, got 3, 10 with it"),
        (["--page", "--regime", "hot"], "--regime: expected without --page, got hot with it"),
        (["--page", "--seeds", "4"], "--seeds: expected without --page, got 4 with it"),
        (["--page", "--runs", "runs/claims"], "--runs: expected without --page, got runs/claims with it"),
        (["--list", "--compile"], "--compile: expected without --list, got both"),
        (["--list", "--smoke", "--jobs", "2"], "--jobs: expected without --list, got 2 with it"),
        (["--list", "--address", "a:1"], "--address: expected without --list, got a:1 with it"),
        (["9", "--jobs", "2", "--address", "a:1"], "--jobs: expected without --address, got 2 with it"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside an option under which it says nothing, it is one line, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "run", lambda *a, **k: pytest.fail("a run was begun"))
    assert fails(capsys, "reproduce", *words) == message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("words", "seeds"), [([], 2), (["--seeds", "5"], 5)])
def test_smoke_runs_have_the_seeds_that_are_asked_for(
    words: list[str], seeds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of each cell, or --seeds; the smoke pages judge by the same claims and seeds, with and without runs."""
    asked: list[Wanted] = []
    monkeypatch.setattr(command, "run", lambda wanted, *a, **k: asked.append(wanted) or 0)
    monkeypatch.setattr(command, "write_pages", lambda wanted, place: asked.append(wanted) or "")
    (tmp_path / "smoke").mkdir()
    (tmp_path / "smoke" / "cells.jsonl").touch()
    for alone in ([], ["--page"]):
        assert main(["reproduce", "11", "--smoke", *words, *alone, "--results", str(tmp_path)]) == 0
    assert len(asked) == 3
    assert all(one == Wanted(chosen_claims(["11"]), chosen_regimes(["stress"]), seeds, smoke=True) for one in asked)


@pytest.mark.parametrize("alone", ["--list", "--power"])
def test_a_ledger_that_is_not_there_is_no_progress(
    alone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no folder is named one note says that there are no rows, and hours are unknown; a named one is an error."""
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "9", "18", alone]) == 0
    out, err = capsys.readouterr()
    assert err == "no rows in results/claims/cells.jsonl (--results names another folder)\n"
    assert len([line for line in out.splitlines() if line.startswith("| ")]) == 3 and "0.0 h" not in out
    if alone == "--power":
        assert out.splitlines()[-1].endswith(" of 2 claims, –; asked for: –.")
    for folder in ("nowhere", "results/claims"):
        line = fails(capsys, "reproduce", alone, "--results", folder)
        assert line == f"--results: expected a folder with cells.jsonl for {alone}, got {folder}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("read_once")
def test_verdicts_are_those_of_the_whole_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    """Listed by themselves, claims have the words that they have among all: Holm's correction is over the ledger."""
    chosen = ("3", "7", "17")
    listed = []
    for words in ([], list(chosen)):
        assert main(["reproduce", *words, "--list", "--results", str(RESULTS)]) == 0
        listed.append(capsys.readouterr().out.splitlines()[2:])
    whole, own = listed
    assert own == [line for line in whole if line.split(" | ")[0].strip("| ") in chosen]
    assert len(own) == len(chosen)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "missing CLAIM: numbers or names of claims, or all; --list shows them"),
        (["moe_gap"], "unknown claim 'moe_gap': did you mean 'moe_gap_exceeds_dense'?"),
        (["9", "--regime", "papers"], "--regime: unknown regime 'papers': did you mean 'paper'?"),
        (["99"], f"expected a number, 1 to {CLAIMS[-1].number}, or a name; --list shows them"),
        (["9", "--seeds", "1"], "--seeds: expected at least 2, got 1"),
        (["9", "--seeds", "1000000000000"], "--seeds: expected at most 4096, got 1000000000000"),
        (["9", "--jobs", "1000000000000"], "--jobs: expected at most 1024, got 1000000000000"),
        (["33", "--regime", "noisy"], "--regime: claim 33 is tried in paper, stress, hot, border; got noisy"),
        (["--page", "--results", "nowhere"], "--results: expected a folder with cells.jsonl for --page, got nowhere"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A claim or regime that is unknown or missing, and pages without rows, are one line and exit code 2."""
    monkeypatch.chdir(tmp_path)
    assert message in fails(capsys, "reproduce", *words)
    assert list(tmp_path.iterdir()) == []


def test_a_smoke_run_of_a_claim_runs_and_is_not_run_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--smoke makes the claim's runs at two steps and writes both pages; a second call finds them all done."""
    words = ["reproduce", "11", "--smoke", "--jobs", "1"]
    words += ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    assert main(words) == 0
    out, err = capsys.readouterr()
    wanted = Wanted(chosen_claims(["11"]), chosen_regimes(["stress"]), 2, smoke=True)
    number = len(wanted.cells())
    assert err.splitlines()[0] == f"{number} runs, 0 of them done before, {number} to go"
    assert len(err.splitlines()) == number + 1
    assert f"| 11 | repeated_passes_differ | paper | {number}/{number} |" in out
    folder = tmp_path / "results" / "smoke"
    assert {path.name for path in folder.iterdir()} == {".lock", "cells.jsonl", "ledger.md", "ledger.html"}
    rows = (folder / "cells.jsonl").read_bytes()
    assert main(words) == 0
    assert capsys.readouterr().err == f"{number} runs, {number} of them done before, 0 to go\n"
    assert (folder / "cells.jsonl").read_bytes() == rows


def test_smoke_is_of_one_regime(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --regime, --smoke is of `stress` alone: minutes, and no claim that needs the cluster world's packages."""
    (tmp_path / "smoke").mkdir()
    (tmp_path / "smoke" / "cells.jsonl").touch()
    assert main(["reproduce", "--list", "--smoke", "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "| claim | name | home | runs | verdict |"


def test_pages_are_written_from_the_rows_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--page runs nothing: without rows every verdict is open."""
    (tmp_path / "cells.jsonl").touch()
    assert main(["reproduce", "--page", "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(" – |") == len(CLAIMS)
    text = (tmp_path / "ledger.md").read_text()
    assert "No run has been made." in text and "No run has collapsed." in text
