"""README and docs/ show no command that fails, no sample that is not its output, no test or file that is not there."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from firstorder.cli import app
from firstorder.train import split
from firstorder.worlds import Schemas
from lab.config.load import load
from tests.pages.commands import PAGES as REFERENCE_PAGES
from tests.pages.commands import REFERENCE
from tests.pages.shown import PAGES, ROOT, Block, blocks, checkout, commands, installed, run, same_words

SHOWING = [page for page in PAGES if commands(page)]
RUNNING = [page for page in PAGES if any(block.runs for block in blocks(page))]
MAKE = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
CONFIGURED = {"train", "plan", "launch", "ladder", "filter", "calibrate", "translate"}
"""Commands whose other options are fields of a run's config."""
SHORT = shlex.split(
    "--num_steps 2 --cold_start null --compile null --algorithm.batch.num_prompts 8 --evaluation.max_prompts 8"
)
"""Overrides after which a run of the demo takes seconds."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", SHOWING, ids=name_of)
def test_every_command_is_understood(page: Path) -> None:
    """Subcommand, options and arguments are the command's own, overrides are fields; configs and targets are there."""
    for words in commands(page):
        if words[0] == "firstorder":
            check_firstorder(words[1:])
        elif words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= MAKE, words
        else:
            check_python(words)


READING = {"--print-config", "--resume", "--progress"}
"""Options of `train` that make no other run."""


@pytest.mark.parametrize("page", SHOWING, ids=name_of)
def test_another_run_of_the_demo_has_a_name_of_its_own(page: Path) -> None:
    """Later commands read runs/demo-*/*, which must remain the runs of `make demo` alone."""
    for words in commands(page):
        if words[:2] == ["firstorder", "train"] and words[2].startswith(("configs/demo/", "demo/")):
            options = {word for word in words[3:] if word.startswith("--")}
            assert options <= READING or options & {"--name", "--output"}, words


def check_firstorder(words: list[str]) -> None:
    group: Any = typer.main.get_command(app)
    name, command, rest = group.resolve_command(group.make_context("firstorder", []), list(words))
    context = command.make_context(name, rest)
    assert all((ROOT / word).exists() for word in words if word.startswith("configs/")), words
    if name in CONFIGURED:
        values = [str(one) for key, one in context.params.items() if key in ("config", "trace") and one is not None]
        config, overrides = split([*[one for one in values if one.endswith(".yaml")], *context.args])
        if (ROOT / config).is_file():
            load(ROOT / config, overrides, Schemas())


def check_python(words: list[str]) -> None:
    if words[1:2] != ["-m"]:
        return
    assert words[0] == "pip" or importlib.util.find_spec(words[2]) is not None, words
    assert all((ROOT / word).exists() for word in words[3:] if word.startswith("tests/")), words


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNING, ids=name_of)
def test_what_is_printed_is_the_output(page: Path, tmp_path: Path) -> None:
    """The blocks that a page marks run one after the other as they stand, and print the samples below them."""
    folder = checkout(tmp_path)
    for block in blocks(page):
        if block.runs:
            printed = run(block, folder)
            assert block.output is None or same_words(printed, block.output), f"{block.text}\nprints\n{printed}"


@pytest.mark.slow
def test_the_commands_of_the_readme_run(tmp_path: Path) -> None:
    """As printed, in order, on shorter runs: `make demo`, the reader's own run, and both pages; but `make test`."""
    folder = installed(checkout(tmp_path))
    for block in blocks(ROOT / "README.md"):
        assert block.language == "sh"
        lines = [line for line in block.text.splitlines() if not line.startswith("make test ")]
        run(Block("sh", "\n".join(lines), block.runs, block.output), folder, SHORT)
    names = {path.name for path in (folder / "runs").iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert names == {"my-first", *(f"demo-{path.stem}" for path in (ROOT / "configs/demo").glob("[!b]*.yaml"))}
    for page, shown in (("demo.html", names - {"my-first"}), ("mine.html", {"demo-none", "my-first"})):
        text = (folder / "runs" / page).read_text(encoding="utf-8")
        assert {name for name in names if name in text} == shown, page


def test_make_test_runs_every_test_once() -> None:
    """The files of tests/scaled are in one list each; `test-core` leaves out these and the pages' tests, no others."""
    alone = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    asked = ["make", "--dry-run", "test"]
    printed = subprocess.run(asked, cwd=ROOT, env=alone, capture_output=True, text=True, check=True).stdout
    calls = [line.replace("'", " ").split() for line in printed.splitlines() if re.search(r"\bpytest\b", line)]
    given = [[word for word in words if re.match(r"tests/", word)] for words in calls]
    core, pages, *scaled = given
    assert "--ignore" in calls[0] and sorted(core) == sorted(["tests/scaled", *pages])
    listed = [file for files in scaled for file in files]
    assert sorted(listed) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/scaled").glob("test_*.py"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_sample_belongs_to_a_block_that_runs(page: Path) -> None:
    """No output is shown that no test compares, but in the pages that a command writes."""
    if page.parent != REFERENCE:
        assert [block for block in blocks(page) if block.output is not None and not block.runs] == []


def test_samples_differ_by_words_and_by_more_than_half() -> None:
    """A changed word, a missing number, and a number that is off by more than half are all differences."""
    shown = "kept 37 of 100 problems (0.0625)\n"
    assert same_words("kept 40 of 100 problems (6.25e-2)", shown)
    for other in ("kept 37 of 100 tasks (0.0625)", "kept 37 of 100 problems", "kept 90 of 100 problems (0.0625)"):
        assert not same_words(other, shown)
    # Of a trace's few largest deviations other CPUs' models may have four times as much, and no more.
    assert same_words("tail of the unrepeated part 36.8", "tail of the unrepeated part 11.7")
    assert not same_words("tail of the unrepeated part 36.8", "tail of the unrepeated part 9.1")
    assert not same_words("routers that differ 36.8", "routers that differ 11.7")


def test_an_unknown_option_field_or_target_is_seen(tmp_path: Path) -> None:
    """The check of commands is no formality: each of these lines is refused."""
    wrong = (
        "firstorder trian configs/smoke.yaml",
        "firstorder report --oot x y",
        "firstorder train configs/smoke.yaml --sead 1",
    )
    for line in (*wrong, "make demmo", "python -m tests.nowhere", "firstorder train configs/none.yaml"):
        page = tmp_path / "page.md"
        page.write_text(f"```sh\n{line}\n```\n")
        with pytest.raises((AssertionError, typer.TyperException, ValueError, ModuleNotFoundError)):
            test_every_command_is_understood(page)


def test_a_block_that_fails_is_seen(tmp_path: Path) -> None:
    """An error in the middle of a block is not hidden by the lines after it."""
    with pytest.raises(AssertionError, match="false"):
        run(Block("sh", "false\ntrue\n", runs=True, output=None), checkout(tmp_path))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_test_that_is_named_is_there(page: Path) -> None:
    """`tests/file.py::name` is a function of that file."""
    for file, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text(encoding="utf-8")):
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), f"{file}::{name}"


@pytest.mark.parametrize("name", REFERENCE_PAGES)
def test_the_reference_is_current(name: str) -> None:
    """docs/reference/ has the present help and the present schema; `python -m tests.pages.commands` writes it."""
    assert (REFERENCE / name).read_text(encoding="utf-8") == REFERENCE_PAGES[name]()
