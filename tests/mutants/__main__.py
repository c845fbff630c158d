"""`python -m tests.mutants [NAME ...]`: which laws kill which mutants; without names, all, and docs/mutants.md anew."""

from __future__ import annotations

import sys

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.mutants.catalogue import ABSENT, MUTANTS
from tests.mutants.law import verdict
from tests.mutants.laws import LAWS
from tests.mutants.matrix import PAGE, kill_matrix, page


def main(names: list[str]) -> int:
    """Prints the matrix; 1 where a law fails on the unchanged code, or a mutant survives."""
    console = Console()
    torch.set_num_threads(1)
    unknown = [name for name in names if name not in MUTANTS]
    if unknown:
        console.print(f"expected names of mutants, got {', '.join(unknown)}")
        return 2
    broken = {name: why for name, law in LAWS.items() if (why := verdict(law)) is not None}
    if broken:
        console.print("laws that do not hold on the unchanged code:", broken)
        return 1
    rows: dict[str, tuple[str, ...]] = {}
    table = Table("row", "mutant", "killed by", title="Historic bugs", title_justify="left")
    chosen = {name: MUTANTS[name] for name in names or MUTANTS}
    for mutant, killed_by in track(kill_matrix(chosen), "mutants", total=len(chosen), console=console):
        rows[mutant.name] = killed_by
        table.add_row(mutant.row, mutant.name, ", ".join(killed_by) or "[red]nothing")
    console.print(table)
    if not names:
        absent = Table(
            "row", "bug", "why it cannot be built here", title="Bugs without a place here", title_justify="left"
        )
        for bug in ABSENT:
            absent.add_row(bug.row, bug.bug, bug.reason)
        console.print(absent)
        PAGE.write_text(page(rows), encoding="utf-8")
        console.print(f"written: {PAGE}")
    survivors = [name for name, killed_by in rows.items() if not killed_by]
    console.print(f"{len(rows) - len(survivors)} of {len(rows)} killed by {len(LAWS)} laws")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
