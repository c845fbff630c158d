"""The commands and code in README and docs/: blocks, the output below them, and a shell to run them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.pages.served import served

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"^(<!-- run -->\n)?```(\w*)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, whether the page marks it to be run, and the output below it."""

    language: str
    text: str
    runs: bool
    output: str | None


def blocks(page: Path) -> list[Block]:
    """The page's fenced blocks in order; a `text` block right below another is that block's output."""
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(one[2], one[3], bool(one[1]), one[4]) for one in found]


def commands(page: Path) -> list[list[str]]:
    """The words of every line that starts one of our commands, loop bodies included, with $seed set to 1."""
    lines = [line for block in blocks(page) if block.language in ("", "sh") for line in block.text.splitlines()]
    found = []
    for line in lines:
        for part in re.split(r"; do |; done", line):
            if re.match(r"(firstorder|make|pip|\S*python3?) ", part):
                found.append(shlex.split(part.replace("$seed", "1"), comments=True))
    return found


def run(block: Block, folder: Path, to_train: Sequence[str] = ()) -> str:
    """The block's output in a folder that imitates the checkout; AssertionError if any line fails.

    `to_train` are overrides that make its training runs short.
    """
    words = ["bash", "-euo", "pipefail", "-c"] if block.language == "sh" else [sys.executable, "-c"]
    with served(folder / "bin/firstorder", to_train):
        done = subprocess.run(
            [*words, block.text], cwd=folder, env=_environment(folder), capture_output=True, text=True
        )
    assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def checkout(folder: Path) -> Path:
    """A folder with the checkout's configs and results, a place for the `firstorder` command, and no runs."""
    for name in ("configs", "results"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("bin", "runs"):
        (folder / name).mkdir()
    return folder


def installed(folder: Path) -> Path:
    """Such a checkout with the Makefile, for which everything is installed: its commands are those of the checkout."""
    for name in ("Makefile", "pyproject.toml", "requirements"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").mkdir()
    (folder / ".venv/bin").symlink_to(folder / "bin")
    for made in ("bin/python", ".venv/.installed-demo"):
        (folder / made).touch()
    return folder


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "100"}


def same_words(printed: str, shown: str) -> bool:
    """Whether both have the same words and numbers within half of each other, since other CPUs round differently.

    Two numbers of the doctor rest on the few largest deviations of a trace, and a CPU that rounds differently trains
    another model: their lines' numbers are within a factor of 4 (seen on three: 11.7, 15.3, 36.8; 0.33, 0.68, 0.78).
    """
    number = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
    lines, others = printed.strip().splitlines(), shown.strip().splitlines()
    if number.sub("#", printed).split() != number.sub("#", shown).split() or len(lines) != len(others):
        return False
    for one, other in zip(lines, others, strict=True):
        least = 1 / 4 if "unrepeated part" in one or "squared deviation repeats" in one else 1 / 2
        pairs = zip(number.findall(one), number.findall(other), strict=True)
        values = [(float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in pairs]
        if any(min(pair) < least * max(pair) for pair in values):
            return False
    return True
