"""`firstorder promote`: the algorithm of stable sandbox runs in a cluster config, with its evidence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstorder.options import Debug

if TYPE_CHECKING:
    from scaled.config import ScaledRun
    from scaled.promote import Mapped


def promote(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders, or folders of runs (all of them).")],
    to: Annotated[Path, typer.Option(metavar="CONFIG", help="The cluster config to start from.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write the promoted config; printed if not given."),
    ] = None,
    allow_unstable: Annotated[
        str | None,
        typer.Option(metavar="WHY", help="Promote runs that would be refused (see above); the reason is recorded."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Take the algorithm of stable sandbox runs, which differ in the seed alone, into the cluster config CONFIG.

    Objective, replay mode, correction and N stay as in the runs; learning rate, batch, lengths and the like come from
    the papers' tables or from CONFIG. The new config carries its evidence: runs, verdicts, final metrics. The
    differences from CONFIG are shown on stderr, with the reason for each field. Runs that are not stable are refused,
    as are a single seed and a run whose held-out accuracy ends below its start by more than two standard errors of
    evaluation.num_samples x max_prompts responses.

    \b
    Examples:
      firstorder promote runs/my-r3 --to configs/scaled/qwen3_30b_a3b.yaml --out my_r3.yaml
      firstorder promote runs/a/*-1f* runs/b/*-2e* --to target.yaml > promoted.yaml
      firstorder promote runs/one --to target.yaml --allow-unstable "a dry run of the launch"
    """
    from firstorder.worlds import Schemas, cluster_run
    from lab.config.load import to_yaml
    from lab.files import atomic_write
    from lab.records import run_folders
    from lab.strict import ConfigError, validate
    from scaled.config import ScaledRun
    from scaled.promote import promote as promoted_by
    from scaled.promotion_runs import read_run

    target = cluster_run(to)
    read = [read_run(folder, Schemas()) for path in runs for folder in run_folders(path)]
    promoted, mapped = promoted_by(read, target, allow_unstable)
    text = to_yaml(promoted)
    # The same config may be written again; anything else is never overwritten.
    if out is not None and out.exists() and out.read_text(encoding="utf-8") != text:
        raise ConfigError(f"--out: expected a file that does not exist yet, got {out}, which holds something else")
    # Validated again, as `promoted` was (600 becomes 600.0), so that the diff shows only changes.
    target = validate(ScaledRun, target.model_dump(mode="json"), str(to))
    _show(target, promoted, mapped, str(to), "promoted" if out is None else str(out))
    if out is None:
        typer.echo(text, nl=False)
    else:
        atomic_write(out, text)
        typer.echo(out)


def _show(before: ScaledRun, after: ScaledRun, mapped: tuple[Mapped, ...], old: str, new: str) -> None:
    """Prints to stderr the diff of both configs, the reason for each of the algorithm's fields, and the evidence."""
    import difflib

    from rich.console import Console
    from rich.text import Text

    from lab.config.load import to_yaml

    console = Console(stderr=True, highlight=False)
    styles = {"+": "green", "-": "red", "@": "cyan"}
    former, latter = (to_yaml(config.model_copy(update={"evidence": None})).splitlines() for config in (before, after))
    for line in difflib.unified_diff(former, latter, old, new, lineterm=""):
        # Text: rich would read the brackets of lists in a config as markup.
        console.print(Text(line, styles.get(line[:1], "")), soft_wrap=True)
    changed = [m for m in mapped if m.promoted != m.target or m.promoted != m.runs]
    width = max((len(m.field) for m in changed), default=0)
    for m in changed:
        values = f"{m.promoted} (runs {m.runs}, target {m.target})"
        console.print(Text(f"{m.field:<{width}}  {m.action:<6}  {values}: {m.source}"), soft_wrap=True)
    assert after.evidence is not None
    for run in after.evidence.runs:
        console.print(Text(f"evidence: {run.run} seed {run.seed} {run.verdict}"), soft_wrap=True)
    if after.evidence.allowed_unstable is not None:
        console.print(Text(f"evidence: allowed regardless: {after.evidence.allowed_unstable}", "yellow"))
