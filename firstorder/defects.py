"""`firstorder defects`: every simulated engine defect beside the training engine, on trained weights."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from firstorder.options import Debug, Draws, SandboxConfig, require_folder_of

OWN = ("engine.defects", "num_steps", "algorithm.replay")
"""The fields that `defects` and `calibrate` set themselves, whatever a config's file has."""


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
    weights. Each engine then samples N batches, and the training engine scores them; means with 95% intervals. Any
    field of the config but engine.defects, num_steps and algorithm.replay can be set here.

    \b
    Examples:
      firstorder defects configs/demo_scaled/model.yaml --out docs/engine-defects.md
      firstorder defects configs/arithmetic.yaml --seeds 4 --rung exact --rung 'router noise 0.1'
    """
    from firstorder.train import split
    from firstorder.worlds import sandbox_run
    from lab.config.naming import naming
    from lab.files import atomic_write

    words = [config, *context.args]
    path, overrides = split(words)
    refuse_own(overrides, "defects")
    run_config = sandbox_run(path, overrides)
    require_folder_of("--out", out)
    # Slow to import, hence after all checks of the options.
    from sandbox.measure.defect_page import page
    from sandbox.measure.defect_table import REPEATED, RUNGS, Bench, check_rungs

    chosen = tuple(rung or RUNGS)
    check_rungs(chosen)
    with naming(path, run_config):
        bench = Bench(run_config)
        climbed, repeated = [], []
        for name in chosen:
            climbed.append(step := bench.rung(name, seeds))
            typer.echo(f"{name:<50} k3 {step.metrics['rollout_corr/k3_kl']}", err=True)
        for name in REPEATED if rung is None else ():
            repeated.append(step := bench.repeated(name, seeds))
            typer.echo(f"{name:<50} k3 {step.metrics['rollout_corr/k3_kl']}", err=True)
    shown = ["--seeds", str(seeds), *(word for name in rung or () for word in ("--rung", name))]
    command = shlex.join(["firstorder", "defects", *words, *shown])
    setting = f"{bench.words}; {seeds} draws of about {climbed[0].num_tokens // seeds:,} tokens per engine."
    text = page(climbed, repeated, command, setting)
    typer.echo(text, nl=False)
    if out is not None:
        atomic_write(out, text)


def refuse_own(overrides: Sequence[str], command: str) -> None:
    """ConfigError for an override of a field in OWN, or of a block with one: it would have no effect."""
    from lab.config.load import apply, parse_overrides
    from lab.strict import ConfigError

    for key, text in parse_overrides(overrides):
        raw: dict[str, Any] = {}
        apply(raw, [(key, text)])
        if any(_has(raw, field.split(".")) for field in OWN):
            fields = f"{', '.join(OWN[:-1])} or {OWN[-1]}"
            wanted = f"no override of {fields}, which `firstorder {command}` sets itself"
            raise ConfigError(f"--{key}: expected {wanted}; got {text}")


def _has(raw: Any, names: Sequence[str]) -> bool:
    """Whether the nested mapping has a value at these names."""
    return not names or (isinstance(raw, dict) and names[0] in raw and _has(raw[names[0]], names[1:]))
