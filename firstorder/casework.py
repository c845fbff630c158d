"""Shared parts of commands that enumerate case by case: progress, and records from which killed work continues."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer

from firstorder.options import Progress

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table

    from lab.casebook import Recorded, Rows
    from lab.records import RunFolder


class Enumerate(Protocol):
    """A function that makes every case that `former` lacks, and returns all of them."""

    def __call__(
        self, *, report: Callable[[int, int, str], None], former: list[Rows], keep: Callable[[Rows], None]
    ) -> pd.DataFrame: ...


def enumerated(
    config: Recorded,
    file: str,
    write: Callable[[RunFolder, pd.DataFrame], Path],
    enumerate_all: Enumerate,
    progress: Progress,
) -> RunFolder:
    """The folder of the records, with every case enumerated; one that still lacks `file` is continued."""
    from lab import casebook
    from lab.progress import progress_of

    shown = None

    def report(done: int, total: int, words: str) -> None:
        # Made at the first report, which knows the total.
        nonlocal shown
        shown = shown or progress_of(progress, config.name, total, 0, unit="case")
        if shown is not None:
            shown.show(done, words)

    unfinished = casebook.resumable(config, file)
    folder = unfinished or casebook.create(config)
    # Held before the former cases are read, so that no other process adds one in between.
    with folder.hold():
        former = casebook.kept_cases(folder)
        if unfinished is not None:
            typer.echo(f"continuing in {folder.path}, where {len(former)} cases are done", err=True)
        try:
            frame = enumerate_all(report=report, former=former, keep=partial(casebook.keep_case, folder))
        finally:
            if shown is not None:
                shown.close()
        # Still held, as this removes the cases (`casebook.write`).
        write(folder, frame)
    return folder


def print_tables(tables: Iterable[Table]) -> Console:
    """Prints the tables, and returns the console for the words below them."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe has no width of its own
        console = Console(highlight=False, width=140)
    for table in tables:
        console.print(table)
    return console


@contextlib.contextmanager
def naming_records(path: Path) -> Iterator[None]:
    """Puts the path of the records before what the block finds wrong with their rows; other files name themselves."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(str(path.parent)):
            raise
        raise ValueError(f"{path}: {error}") from error


def write_page(
    folder: RunFolder, name: str, render: Callable[[pd.DataFrame, Mapping[str, Any], str], str], frame: pd.DataFrame
) -> Path:
    """Writes the page of that name into the folder of its records, and returns its path."""
    from lab.files import atomic_write

    page = folder.path / name
    atomic_write(page, render(frame, folder.manifest(), (folder.path / "config.yaml").read_text(encoding="utf-8")))
    return page


def named(config: str, fields: Sequence[str], file: str) -> tuple[str, list[str], RunFolder | None]:
    """The path of a config and its overrides; of finished records, which have `file`, also their folder.

    ConfigError where the command sets a field of finished records, which no case would follow.
    """
    from firstorder.train import split
    from lab.casebook import newest
    from lab.records import RunFolder
    from lab.strict import ConfigError

    finished = newest(Path(config), file) if Path(config).is_dir() else None
    if finished is None:
        return (*split([config, *fields]), None)
    if fields:
        raise ConfigError(
            f"{fields[0]}: expected no field beside the folder of finished records, got {finished.parent}"
        )
    return str(finished.parent / "config.yaml"), [], RunFolder(finished.parent)
