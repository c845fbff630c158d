"""`firstorder report`: one self-contained HTML page for one run, or for several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the page. [default: report.html in the run]")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Write an interactive page of curves and verdicts that needs no network and no other file.

    RUN is a run's folder (runs/<name>/<UTC time>-<config hash>), or runs/<name> for its newest run. Several runs share
    the axes of one page.

    \b
    Examples:
      firstorder report runs/demo-exact
      firstorder report runs/demo-* --out runs/demo.html --open
    """
    from lab.report import write_report

    folders = [_run_folder(run) for run in runs]
    if out is None and len(folders) > 1:
        raise ValueError(f"--out FILE: expected a file to write one page for {len(folders)} runs, got nothing")
    page = write_report(folders, folders[0] / "report.html" if out is None else out)
    typer.echo(page)
    if open_page:
        typer.launch(str(page))


def _run_folder(path: Path) -> Path:
    """The run folder that the path means: itself, or the newest one inside it."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such run folder")
    if (path / "config.yaml").is_file():
        return path
    inside = sorted(folder for folder in path.iterdir() if (folder / "config.yaml").is_file())
    if not inside:
        raise ValueError(f"{path}: expected a run folder (one that holds a config.yaml), got none")
    return inside[-1]
