"""`firstorder flow`: whole runs of exact expected updates, for every engine error and remedy, by enumeration."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstorder.options import Debug, PrintConfig, Progress, StudyProgress, require_folder_of

if TYPE_CHECKING:
    import pandas as pd

    from lab.flow.config import FlowConfig
    from lab.records import RunFolder


def flow(
    context: typer.Context,
    config: Annotated[
        str, typer.Argument(metavar="CONFIG_OR_RECORDS", help="YAML file of a flow, or the folder of a finished one.")
    ],
    print_config: PrintConfig = False,
    csv: Annotated[Path | None, typer.Option(metavar="FILE.csv", help="Also write every row there, as CSV.")] = None,
    progress: StudyProgress = "bar",
    debug: Debug = False,
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
    from firstorder.casework import named, naming_records, write_page
    from lab.config.load import to_yaml
    from lab.config.naming import naming
    from lab.files import atomic_write
    from lab.flow.config import load_config
    from lab.flow.records import FILE, PAGE, read

    require_folder_of("--csv", csv)
    path, overrides, folder = named(config, context.args, FILE)
    flow_config = load_config(path, overrides, _sandbox_schema)
    if print_config:
        typer.echo(to_yaml(flow_config), nl=False)
        return
    with naming(path, flow_config):
        folder = folder or _run(flow_config, progress)
    frame = read(folder.path / FILE)
    with naming_records(folder.path / FILE):
        _show(frame)
        # Only now: the tables need no plotly, and are on the screen before it is imported.
        from lab.flow.page import render

        page = write_page(folder, PAGE, partial(render, flow_config), frame)
    if csv is not None:
        atomic_write(csv, frame.to_csv(index=False))
    typer.echo(page)


def _sandbox_schema() -> type[FlowConfig]:
    """The sandbox's schema, imported only where a config's `backend:` names it."""
    from sandbox.exact.flow import SandboxFlow

    return SandboxFlow


def _run(config: FlowConfig, progress: Progress) -> RunFolder:
    """The folder of the records, with every run made; a former call's cases are kept."""
    from firstorder.casework import enumerated
    from lab.flow.records import FILE, write
    from lab.flow.run import flow as train_all

    world = None
    if config.backend == "sandbox":
        from sandbox.exact.flow import MOE

        world = MOE
    return enumerated(config, FILE, write, partial(train_all, config, world=world), progress)


def _show(frame: pd.DataFrame) -> None:
    """Prints the ends of all runs in tables, and the findings in sentences."""
    from firstorder.casework import print_tables
    from lab.flow.table import terminal_tables
    from lab.flow.words import headline, sentences

    console = print_tables(terminal_tables(frame))
    for words in (headline(frame), *sentences(frame)):
        console.print(words, markup=False)
