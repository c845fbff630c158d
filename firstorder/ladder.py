"""`firstorder ladder`: real inference engines of falling precision beside one training engine, on trained weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstorder.options import ClusterConfig, Debug, Draws, require_folder_of

if TYPE_CHECKING:
    from scaled.ladder import Missing, Rung


def ladder(
    context: typer.Context,
    config: ClusterConfig,
    seeds: Draws = 8,
    rung: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An engine of the ladder; all of them if not given.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the table, as Markdown, there.")] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Also write every draw's measurements there, after each engine."),
    ] = None,
    traces: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also keep a trace of every draw there, for doctor and calibrate."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure how far vLLM engines of every precision depart from the training engine of CONFIG, without training.

    Each engine gets the weights of `model.path` in its own precision and samples N batches. The training engine scores
    them, with its own routes and with the engine's (R3). It holds no gradients or optimizer states, so a model fits on
    far fewer GPUs than its training takes. All figures are means over the draws, with 95% intervals.

    \b
    Examples:
      firstorder ladder configs/demo_scaled/base.yaml --seeds 8 --training.precision fp32
      firstorder ladder configs/demo_scaled/base.yaml --rung bf16 --rung 'bf16, fp8 weights'
    """
    from firstorder.plan import read_config
    from lab.config.naming import naming
    from lab.files import atomic_write

    path, _, run_config = read_config([config, *context.args])
    require_folder_of("--out", out)
    require_folder_of("--json", json_file)
    # Slow to import, hence after all checks of the options.
    from scaled.ladder import RUNGS, Rung, climb, markdown

    climbed = []
    with naming(path, run_config):
        for step in climb(run_config, seeds, rung or tuple(RUNGS), traces):
            climbed.append(step)
            if json_file is not None:
                rungs = [one.to_json() for one in climbed if isinstance(one, Rung)]
                atomic_write(json_file, json.dumps(rungs, indent=1) + "\n")
            typer.echo(f"{step.name:<36} {_told(step)}", err=True)
    table = markdown(climbed)
    typer.echo(table, nl=False)
    if out is not None:
        atomic_write(out, table)


def _told(step: Rung | Missing) -> str:
    from scaled.ladder import REPLAYED, Missing

    if isinstance(step, Missing):
        return step.reason
    kl, replayed = step.metrics["rollout_corr/k3_kl"], step.metrics.get(REPLAYED)
    line = f"{step.num_tokens:>8} tokens  k3 {kl.mean:.2e} +- {kl.half_width:.0e}"
    return line if replayed is None else f"{line}, under R3 {replayed.mean:.2e}"
