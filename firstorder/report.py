"""`firstorder report`: one self-contained HTML page for one run, or for several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstorder.options import Debug

if TYPE_CHECKING:
    from lab.records import RunFolder


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where to write the page; report.html in the folder of a single run if not given."
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Rewrite the page as the runs continue, until they end; it refreshes.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write an interactive page of curves and verdicts that needs no network and no other file.

    RUN is a run's folder (runs/<name>/<UTC time>-<config hash>), or runs/<name> for its newest run. Several runs share
    the axes of one page.

    \b
    Examples:
      firstorder report runs/demo-exact
      firstorder report runs/demo-* --out runs/demo.html --open
      firstorder report runs/demo-none --watch --open
    """
    from lab.report.run_page import write_report
    from lab.report.watching import EVERY_S
    from lab.report.watching import watch as watch_runs

    folders = [run_folder(run) for run in runs]
    if out is None and len(folders) > 1:
        raise ValueError(f"--out: expected a file for the page of these {len(folders)} runs, got nothing")
    page = folders[0].path / "report.html" if out is None else out
    write_report(folders, page, refresh_s=EVERY_S if watch else None)
    typer.echo(page)
    if open_page:
        typer.launch(str(page))
    if watch:
        watch_runs(folders, page)


def run_folder(path: Path) -> RunFolder:
    """The run folder at the path, or the newest one inside it. Raises ValueError for records of a study."""
    from lab.records import RunFolder, run_folders

    folder = RunFolder.open(run_folders(path)[-1])
    # cases.jsonl last: it alone is in the folder of an unfinished study, of either kind.
    for name, kind in (("audit.json", "audit"), ("flow.json", "flow"), ("cases.jsonl", "audit or flow")):
        if (folder.path / name).is_file():
            article = "an" if kind.startswith("audit") else "a"
            raise ValueError(
                f"{folder.path}: expected the folder of a run, got that of {article} {kind} ({name}); "
                f"use firstorder {kind}"
            )
    return folder
