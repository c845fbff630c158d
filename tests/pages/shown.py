"""The commands and code that README and docs/ show: blocks, the output below them, and a shell to run them in."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"^(<!-- run -->\n)?```(\w*)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, whether the page asks for it to be run, and the output that stands below it."""

    language: str
    text: str
    runs: bool
    output: str | None


def blocks(page: Path) -> list[Block]:
    """The page's fenced blocks in order; one of language `text` right below another is that one's output."""
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(one[2], one[3], bool(one[1]), one[4]) for one in found]


def commands(page: Path) -> list[list[str]]:
    """The words of every line that starts a command of ours; a loop's body counts, its variable stays as it stands."""
    lines = [line for block in blocks(page) if block.language in ("", "sh") for line in block.text.splitlines()]
    found = []
    for line in lines:
        for part in re.split(r"; do |; done", line):
            if re.match(r"(firstorder|make|pip|\S*python3?) ", part):
                found.append(shlex.split(part.replace("$seed", "1"), comments=True))
    return found


def run(block: Block, folder: Path) -> str:
    """The output of the block, in a folder that stands for the checkout; an error of any line is an AssertionError."""
    words = ["bash", "-euo", "pipefail", "-c"] if block.language == "sh" else [sys.executable, "-c"]
    done = subprocess.run([*words, block.text], cwd=folder, env=_environment(folder), capture_output=True, text=True)
    assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def checkout(folder: Path) -> Path:
    """A folder with the checkout's configs and results, a `firstorder` of this Python, and no runs yet."""
    for name in ("configs", "results"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "runs").mkdir()
    command = folder / "bin/firstorder"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m firstorder "$@"\n')
    command.chmod(0o755)
    return folder


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "100"}


def same_words(printed: str, shown: str) -> bool:
    """Whether both say the same, a number in one within half of its like in the other: other CPUs round otherwise."""
    number = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
    if number.sub("#", printed).split() != number.sub("#", shown).split():
        return False
    pairs = zip(number.findall(printed), number.findall(shown), strict=True)
    values = [(float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in pairs]
    return all(abs(a - b) <= max(abs(a), abs(b)) / 2 for a, b in values)
