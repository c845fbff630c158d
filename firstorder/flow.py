"""`firstorder flow`: whole runs of exact expected updates, for every engine error and remedy, by enumeration."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    import pandas as pd

    from lab.flow.config import FlowConfig
    from lab.flow.run import World


def flow(
    context: typer.Context,
    config: Annotated[
        str, typer.Argument(metavar="CONFIG_OR_RECORDS", help="YAML file of a flow, or the folder of a finished one.")
    ],
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the complete config, every field explained, and stop.")
    ] = False,
    csv: Annotated[Path | None, typer.Option(metavar="FILE.csv", help="Also write every row there, as CSV.")] = None,
    progress: Annotated[
        Literal["bar", "lines", "none"], typer.Option(help="A live bar, lines (for logs), or nothing.")
    ] = "bar",
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Train policies by expected updates: the effect of bias alone on a run, under each engine error and remedy.

    Vocabulary and responses are small enough to enumerate: an update is a sum over all responses, so that a run has no
    sample and no seed. CONFIG sets the problems, engine errors, objectives, updates per rollout (N) and batch sizes;
    any of its fields can be set here as in `firstorder train`. Given the folder of a finished flow, the command writes
    its page and tables again.

    \b
    Examples:
      firstorder flow configs/flow/small.yaml
      firstorder flow configs/flow/small.yaml --problems.count 20 --num_minibatches '[1, 2, 8]' --name mine
      firstorder flow runs/flow-small --csv rows.csv

    Records go to runs/<name>/<UTC time>-<config hash>/: config.yaml, manifest.json, flow.json, flow.html. The same
    command continues a killed flow after its last case (a problem under an engine error).
    """
    from firstorder.casework import enumerated, stored_config, write_page
    from firstorder.options import require_folder_of
    from firstorder.train import split
    from lab.casebook import newest
    from lab.config.load import to_yaml
    from lab.files import atomic_write
    from lab.flow import records
    from lab.flow.config import load_config
    from lab.flow.run import flow as train_all
    from lab.records import RunFolder

    require_folder_of("--csv", csv)
    finished = newest(Path(config), records.FILE) if Path(config).is_dir() else None
    if finished is None:
        flow_config = load_config(*split([config, *context.args]), sandbox=_sandbox_schema)
    else:
        flow_config = load_config(stored_config(finished, context.args), sandbox=_sandbox_schema)
    if print_config:
        typer.echo(to_yaml(flow_config), nl=False)
        return
    if finished is None:
        folder = enumerated(flow_config, records, partial(train_all, flow_config, world=_world(flow_config)), progress)
    else:
        folder = RunFolder.open(finished.parent)
    frame = records.read(folder.path / records.FILE)
    _show(frame)
    # Only now: the tables need no plotly, and are on the screen before it is imported.
    from lab.flow.page import render

    page = folder.path / records.PAGE
    write_page(page, partial(render, flow_config), frame)
    if csv is not None:
        atomic_write(csv, frame.to_csv(index=False))
    typer.echo(page)


def _sandbox_schema() -> type[FlowConfig]:
    """The sandbox's schema, imported only where a config's `backend:` names it."""
    from sandbox.exact.flow import SandboxFlow

    return SandboxFlow


def _world(config: FlowConfig) -> World | None:
    if config.backend != "sandbox":
        return None
    from sandbox.exact.flow import MOE

    return MOE


def _show(frame: pd.DataFrame) -> None:
    """Prints the ends of all runs in tables, and the findings in sentences."""
    from firstorder.casework import print_tables
    from lab.flow.table import terminal_tables
    from lab.flow.words import headline, sentences

    console = print_tables(terminal_tables(frame))
    for words in (headline(frame), *sentences(frame)):
        console.print(words, markup=False)
