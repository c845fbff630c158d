"""The kill matrix, mutant by law, and the page that keeps it: docs/mutants.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from lab.markdown import markdown_table
from tests.mutants.catalogue import ABSENT, MUTANTS
from tests.mutants.law import verdict
from tests.mutants.laws import LAWS
from tests.mutants.laws_exact import EXACT
from tests.mutants.mutant import Mutant

OWN = {law.name for law in EXACT}
PAGE = Path(__file__).parents[2] / "docs" / "mutants.md"

HEAD = """# Mutants: the bugs that the field has already had

Would the tests notice a bug of routing replay that verl, slime, vLLM or SGLang once had? Each mutant on this page is
such a bug, put into our own code in memory by an edit of a function's text (`tests/mutants/`); bugs without a thread
("no thread") are misreadings near a paper's formula. Each law is one of the suite's own tests, on a few fixed examples.
A law that no longer holds kills the mutant. `make mutants` writes this page; do not edit it.

Rows B5.1 to B5.26 are bugs of routing replay; rows C are bugs of corrections, estimators and the order of a step, some
with the number of the bug on the project's list of users' threads; rows F are bugs of number formats; rows E are bugs
of drift, centring and exact training, and only they are tried on the laws of exact training.
"""


def tried_on(mutant: Mutant) -> tuple[str, ...]:
    """The laws that the matrix tries on a mutant: those of exact training, which take seconds, on their own row."""
    return tuple(LAWS) if mutant.row == "E" else tuple(name for name in LAWS if name not in OWN)


def killers(mutant: Mutant, names: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """The laws, among those named, that do not hold on the mutant; without names those that are tried on it."""
    names = tried_on(mutant) if names is None else names
    with mutant.applied():
        return tuple(name for name in names if verdict(LAWS[name]) is not None)


def kill_matrix(mutants: Mapping[str, Mutant] = MUTANTS) -> Iterator[tuple[Mutant, tuple[str, ...]]]:
    """Each mutant with all the laws that kill it. Takes some three seconds a mutant."""
    for mutant in mutants.values():
        yield mutant, killers(mutant)


def page(rows: Mapping[str, tuple[str, ...]]) -> str:
    """docs/mutants.md for the killers of every mutant."""
    lines = [HEAD, f"{len(rows)} mutants, {sum(map(bool, rows.values()))} killed, by {len(LAWS)} laws.", ""]
    found = []
    for mutant in _in_order(MUTANTS):
        killed_by = ", ".join(f"**{n}**" if n == mutant.killer else n for n in rows[mutant.name]) or "nothing"
        found.append((mutant.row, f"`{mutant.name}`", mutant.bug, mutant.reference, killed_by))
    lines.append(markdown_table(("row", "mutant", "what went wrong", "reference", "killed by"), found))
    lines += ["The law in bold is the one that has to find it.", "", "## Bugs without a place here", ""]
    absent = [(a.row, a.bug, a.reference, a.reason) for a in ABSENT]
    lines.append(markdown_table(("row", "what went wrong", "reference", "why it cannot be built"), absent))
    lines += [
        "## Mutant by law",
        "",
        "A row per mutant, a column per law; x where the law kills the mutant.",
        "",
        "```",
    ]
    lines += [f"{i:3} {name}" for i, name in enumerate(LAWS)]
    lines += ["", *_ruler(), *(_matrix_line(name, rows[name]) for name in rows), "```", ""]
    return "\n".join(lines)


def documented(text: str) -> dict[str, tuple[str, ...]]:
    """The killers of each mutant as the page has them."""
    rows: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 7 and cells[2].startswith("`"):
            rows[cells[2].strip("`")] = tuple(name.strip("* ") for name in cells[5].split(","))
    return rows


def _in_order(mutants: Mapping[str, Mutant]) -> list[Mutant]:
    def key(mutant: Mutant) -> tuple[str, int]:
        group, _, number = mutant.row.partition(".")
        return group, int(number or 0)

    return sorted(mutants.values(), key=key)


def _ruler() -> list[str]:
    tens = "".join(str(i // 10) if i % 10 == 0 else " " for i in range(len(LAWS)))
    return [tens, "".join(str(i % 10) for i in range(len(LAWS)))]


def _matrix_line(name: str, killed_by: tuple[str, ...]) -> str:
    return "".join("x" if law in killed_by else "." for law in LAWS) + f"  {name}"
