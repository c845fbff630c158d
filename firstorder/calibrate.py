"""`firstorder calibrate`: the sandbox's dials set so that its engine is as far off as a real one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from firstorder.defects import refuse_own
from firstorder.options import Debug, SandboxConfig, require_folder_of


def calibrate(
    context: typer.Context,
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A trace, as `firstorder doctor` reads it.")],
    config: SandboxConfig,
    seeds: Annotated[
        int,
        typer.Option(min=1, max=1000, metavar="N", help="Draws of the batch that fits are compared on."),
    ] = 4,
    out: Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="Also write the engine block there.")] = None,
    debug: Debug = False,
) -> None:
    """Fit the sandbox's engine to a trace: its KL, its F(tau) and its differing routers, jointly.

    The model of CONFIG is taught its task (from the cache) or opened (`--model.path FOLDER --cold_start null`); any
    field of the config but engine.defects, num_steps and algorithm.replay can be set here. The dials are the format of
    the weights and the noise on router logits and on next-token logits. Prints the engine block, each figure beside the
    trace's, and the quality of the fit.

    \b
    Examples:
      firstorder calibrate slime/train_12_0.pt configs/arithmetic.yaml --out engine.yaml
      firstorder calibrate step-000070.safetensors configs/arithmetic.yaml --algorithm.batch.num_prompts 16
    """
    from firstorder.train import split
    from firstorder.worlds import sandbox_run
    from lab.config.naming import naming
    from lab.doctor.importers import load_trace
    from lab.files import atomic_write
    from lab.markdown import markdown_table
    from lab.strict import ConfigError

    # All words again, as in `train`: an option before TRACE is parsed as TRACE.
    trace, rest = split([trace, config, *context.args])
    path, overrides = split(rest, "CONFIG, the file of a run")
    refuse_own(overrides, "calibrate")
    run_config = sandbox_run(path, overrides)
    require_folder_of("--out", out)
    known = load_trace(Path(trace))
    temperature = run_config.algorithm.sampling.temperature
    if known.temperature is not None and known.temperature != temperature:
        raise ConfigError(
            f"{path}: algorithm.sampling.temperature: expected the trace's {known.temperature:g}, got {temperature:g}"
        )
    # Slow to import, hence after all checks of the options.
    from sandbox.measure.calibrate import Calibration, target_of
    from sandbox.measure.defect_table import Bench

    target = target_of(known)
    with naming(path, run_config):
        fit = Calibration(Bench(run_config, num_steps=0), target).fit(seeds)
    rows = [(f.name, f"{f.target:.3g}", f"{f.fitted:.3g}", f"{f.residual:+.2f}") for f in fit.figures]
    typer.echo(fit.yaml(), nl=False)
    typer.echo(markdown_table(("figure", "trace", "fit", "log(fit / trace)"), rows), nl=False)
    typer.echo(f"{fit.word}.")
    if out is not None:
        atomic_write(out, fit.yaml())
