"""`firstorder defects`: every simulated engine defect beside the training engine, on trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from firstorder.options import Debug, Draws, SandboxConfig, require_folder_of


def defects(
    context: typer.Context,
    config: SandboxConfig,
    seeds: Draws = 8,
    rung: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An engine of the table; all of them if not given.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.md", help="Also write the page, as Markdown, there.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure the effect of each engine defect on a trained model: KL, F(2) and differing routers, at several dials.

    The model of CONFIG is taught its task (or opened) and trained for some steps, so that an engine can hold stale
    weights. Each engine then samples N batches, and the training engine scores them; means with 95% intervals.

    \b
    Examples:
      firstorder defects configs/demo_scaled/model.yaml --out docs/engine-defects.md
      firstorder defects configs/arithmetic.yaml --seeds 4 --rung exact --rung 'router noise 0.1'
    """
    from firstorder.train import split
    from firstorder.worlds import sandbox_run
    from lab.files import atomic_write

    words = [config, *context.args]
    path, overrides = split(words)
    run_config = sandbox_run(path, overrides)
    require_folder_of("--out", out)
    # Slow to import, hence after all checks of the options.
    from sandbox.measure.defect_page import page
    from sandbox.measure.defect_table import REPEATED, RUNGS, Bench, check_rungs

    chosen = tuple(rung or RUNGS)
    check_rungs(chosen)
    bench = Bench(run_config)
    climbed, repeated = [], []
    for name in chosen:
        climbed.append(step := bench.rung(name, seeds))
        typer.echo(f"{name:<50} k3 {step.metrics['rollout_corr/k3_kl']}", err=True)
    for name in REPEATED if rung is None else ():
        repeated.append(step := bench.repeated(name, seeds))
        typer.echo(f"{name:<50} k3 {step.metrics['rollout_corr/k3_kl']}", err=True)
    shown = [f"--seeds {seeds}", *(f"--rung '{name}'" for name in rung or ())]
    command = " ".join(["firstorder defects", *words, *shown])
    setting = f"{bench.words}; {seeds} draws of about {climbed[0].num_tokens // seeds:,} tokens per engine."
    text = page(climbed, repeated, command, setting)
    typer.echo(text, nl=False)
    if out is not None:
        atomic_write(out, text)
