"""Exact training beside a claim: links to questions of its studies, whose answers are computed from stored rows.

A study's runs are expectations (lab/flow), so its units are problems, not seeds. `python -m tests.pages.verdicts`
writes the answers. They explain a verdict but decide nothing, as their policies are different ones.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sandbox.ledger.statistics import Stand

KEPT = Path(__file__).resolve().parents[2] / "results" / "flow" / "verdicts.csv"
"""The project's stored answers."""

OPPOSITE: dict[str, Stand] = {"holds": "against", "fails": "for", "open": "open"}
SAME: dict[str, Stand] = {"holds": "for", "fails": "against", "open": "open"}


@dataclass(frozen=True)
class Answer:
    """The answer to one question: its sentence, the interval, holds, fails or open, and the number of problems."""

    words: str
    found: str
    verdict: str
    problems: int


@dataclass(frozen=True)
class Link:
    """A question that bears on a claim, which says that it holds (or the opposite), and `why` it does."""

    question: str
    why: str
    is_opposite: bool = False


def answers(path: Path = KEPT) -> Mapping[str, Answer]:
    """The stored answers by question; none if there is no such file."""
    if not path.exists():  # not cached: the file may come later
        return {}
    return _read(path)


@cache
def _read(path: Path) -> Mapping[str, Answer]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        return {row["name"]: Answer(row["words"], row["found"], row["verdict"], int(row["problems"])) for row in rows}


def word(link: Link, of: Mapping[str, Answer]) -> Stand | None:
    """The word of one question on the claim; None if its answer is not stored."""
    if link.question not in of:
        return None
    return (OPPOSITE if link.is_opposite else SAME)[of[link.question].verdict]


def cell(links: Sequence[Link], of: Mapping[str, Answer]) -> str:
    """The column's text: `against` if any question is, `for` if all are, else `open`; with the fewest problems.

    Empty without links, or if an answer is missing.
    """
    words = [word(link, of) for link in links]
    if not words or None in words:
        return ""
    said = "against" if "against" in words else "for" if set(words) == {"for"} else "open"
    return f"{said} ({min(of[link.question].problems for link in links)})"


def lines(links: Sequence[Link], of: Mapping[str, Answer]) -> list[str]:
    """One line per question: its word, its sentence with the interval, and why it bears on the claim."""
    told = []
    for link in links:
        said, answer = word(link, of), of.get(link.question)
        if said is not None and answer is not None:
            told.append(
                f"Exact training, {link.question}, {said}: {answer.words} {answer.found}, {answer.problems} problems. "
                f"{link.why}"
            )
    return told


__all__ = ["KEPT", "Answer", "Link", "answers", "cell", "lines", "word"]
