"""Exact training beside a claim: links to questions of its studies, whose answers are computed from kept rows.

A study's runs are expectations (lab/flow), so that its units are problems and not seeds. `python -m
tests.pages.verdicts` writes the answers. Beside a verdict they explain; they decide nothing: their policies are others.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

KEPT = Path(__file__).resolve().parents[2] / "results" / "flow" / "verdicts.csv"
"""The answers that the project keeps."""

Word = Literal["for", "against", "open"]
OPPOSITE: dict[str, Word] = {"holds": "against", "fails": "for", "open": "open"}
SAME: dict[str, Word] = {"holds": "for", "fails": "against", "open": "open"}


@dataclass(frozen=True)
class Answer:
    """The answer to one question: its sentence, the interval found, holds, fails or open, and how many problems."""

    name: str
    words: str
    found: str
    verdict: str
    problems: int


@dataclass(frozen=True)
class Link:
    """A question that bears on a claim. The claim says that it holds, or the opposite; `why` it bears on it."""

    question: str
    why: str
    is_opposite: bool = False


def answers(path: Path = KEPT) -> Mapping[str, Answer]:
    """The kept answers by question; none where there is no such file."""
    if not path.exists():
        return {}
    return _read(path)


@cache
def _read(path: Path) -> Mapping[str, Answer]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        return {
            row["name"]: Answer(row["name"], row["words"], row["found"], row["verdict"], int(row["problems"]))
            for row in rows
        }


def word(link: Link, of: Mapping[str, Answer]) -> Word | None:
    """The word of one question on the claim; None where its answer is not kept."""
    if link.question not in of:
        return None
    return (OPPOSITE if link.is_opposite else SAME)[of[link.question].verdict]


def cell(links: Sequence[Link], of: Mapping[str, Answer]) -> str:
    """The column's text: against where one question is, for where all are, else open; with the fewest problems.

    Empty without a link, and where an answer is not kept.
    """
    words = [word(link, of) for link in links]
    if not words or None in words:
        return ""
    said = "against" if "against" in words else "for" if set(words) == {"for"} else "open"
    return f"{said} ({min(of[link.question].problems for link in links)})"


def lines(links: Sequence[Link], of: Mapping[str, Answer]) -> list[str]:
    """One line per question: its word, its sentence with what was found, and why it bears on the claim."""
    told = []
    for link in links:
        said, answer = word(link, of), of.get(link.question)
        if said is not None and answer is not None:
            told.append(
                f"Exact training, {link.question}, {said}: {answer.words} {answer.found}, {answer.problems} problems. "
                f"{link.why}"
            )
    return told


__all__ = ["KEPT", "Answer", "Link", "Word", "answers", "cell", "lines", "word"]
