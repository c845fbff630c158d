"""`firstorder audit`: the exact bias, variance and direction of objectives' gradients, by enumeration."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstorder.options import Debug, PrintConfig, Progress, StudyProgress, require_folder_of

if TYPE_CHECKING:
    import pandas as pd

    from lab.audit.config import AuditConfig
    from lab.records import RunFolder


def audit(
    context: typer.Context,
    config: Annotated[
        str, typer.Argument(metavar="CONFIG_OR_RECORDS", help="YAML file of an audit, or the folder of a finished one.")
    ],
    print_config: PrintConfig = False,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE.md", help="Also write the comparison of `compare:` there, as Markdown.")
    ] = None,
    progress: StudyProgress = "bar",
    debug: Debug = False,
) -> None:
    """Compare the expected gradient of objectives with the true gradient of the expected reward.

    Vocabulary and responses are small enough to enumerate: bias, variance and cosine are sums over all responses, not
    estimates. CONFIG sets the policies, the distances between mu, old and pi, the rewards, groups and objectives; any
    of its fields can be set here as in `firstorder train`. Given the folder of a finished audit, the command writes its
    page and tables again.

    \b
    Examples:
      firstorder audit configs/audit/small.yaml
      firstorder audit configs/audit/small.yaml --seed 1 --discrepancy.token_kl '[1e-3, 1e-2]' --name mine
      firstorder audit runs/audit-small

    Records go to runs/<name>/<UTC time>-<config hash>/: config.yaml, manifest.json, audit.json, audit.html. The same
    command continues a killed audit after its last case.
    """
    from firstorder.casework import named, naming_records, write_page
    from lab.audit.records import FILE, PAGE, read
    from lab.config.load import to_yaml
    from lab.config.naming import naming
    from lab.files import atomic_write
    from lab.strict import ConfigError

    require_folder_of("--markdown", markdown)
    path, overrides, folder = named(config, context.args, FILE)
    audit_config = _config(path, overrides)
    if print_config:
        typer.echo(to_yaml(audit_config), nl=False)
        return
    if markdown is not None and audit_config.compare is None:
        raise ConfigError("--markdown: expected a config with compare, got none")
    with naming(path, audit_config):
        folder = folder or _run(audit_config, progress)
    frame = read(folder.path / FILE)
    with naming_records(folder.path / FILE):
        _show(frame)
        # Only now: the tables need no plotly, and are on the screen before it is imported.
        from lab.audit.page import render

        page = write_page(folder, PAGE, partial(render, audit_config), frame)
    if markdown is not None:
        from lab.audit.study import study

        atomic_write(markdown, study(audit_config, frame))
    typer.echo(page)


def _config(path: str, overrides: list[str]) -> AuditConfig:
    """The config; the sandbox is imported only where its `backend:` names it."""
    from lab.audit.config import load_config

    def sandbox() -> type[AuditConfig]:
        from sandbox.exact.cases import SandboxAudit

        return SandboxAudit

    return load_config(path, overrides, sandbox)


def _run(config: AuditConfig, progress: Progress) -> RunFolder:
    """The folder of the records, with every case enumerated; a former call's cases are kept."""
    from firstorder.casework import enumerated
    from lab.audit.records import FILE, write
    from lab.audit.run import audit as enumerate_all

    builders = {}
    if config.backend == "sandbox":
        from sandbox.exact.cases import moe_cases

        builders = {"moe": moe_cases}
    return enumerated(config, FILE, write, partial(enumerate_all, config, builders), progress)


def _show(frame: pd.DataFrame) -> None:
    """Prints the tables, and a line on the rows that they leave out."""
    from firstorder.casework import print_tables
    from lab.audit.table import shown, terminal_tables

    console = print_tables(terminal_tables(frame))
    if words := shown(frame)[1]:
        console.print(words)
