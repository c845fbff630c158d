"""`firstorder filter`: the problems of a file that a model solves sometimes."""

from __future__ import annotations

from typing import Annotated

import typer

from firstorder.options import Debug, Progress, SandboxConfig


def filter(
    context: typer.Context,
    config: SandboxConfig,
    data: Annotated[str, typer.Argument(metavar="DATA", help="Problems, as the config's task block reads them.")],
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Responses drawn for each problem.")] = 16,
    max_pass_rate: Annotated[
        float, typer.Option(metavar="RATE", help="Problems solved more often are dropped; this rate itself is kept.")
    ] = 0.9,
    min_pass_rate: Annotated[
        float, typer.Option(metavar="RATE", help="Problems solved less often are dropped; this rate itself is kept.")
    ] = 0.0,
    progress: Annotated[Progress, typer.Option(help="A live bar, a line every ten problems, or nothing.")] = "bar",
    debug: Debug = False,
) -> None:
    """Keep the problems of DATA whose pass rate under a model lies in a band (R3, arXiv 2510.11370, App. J).

    The model, the engine's defects, the keys and template of a problem, temperature and length are those of CONFIG, a
    run's config with a jsonl or dataset task; any field of it can be set here, as in `firstorder train`.

    \b
    Examples:
      firstorder filter run.yaml problems.jsonl
      firstorder filter run.yaml problems.jsonl --samples 8 --min-pass-rate 0.125 --model.path models/weak
      firstorder filter run.yaml problems.parquet --task.kind dataset --engine.defects '[{kind: weight_precision}]'

    Writes problems.pass_rates.jsonl (one row per problem: id, rate, samples, kept) and problems.filtered.jsonl (the
    kept rows, unchanged). A killed filter continues where it stopped; measured rates are reused for any band.
    """
    from firstorder.train import split
    from firstorder.worlds import sandbox_run
    from lab.config.naming import naming
    from lab.filtering import Band

    path, rest = split([config, data, *context.args])
    data, overrides = split(rest, "DATA, the file of problems")
    run_config = sandbox_run(path, overrides)
    band = Band(min_pass_rate, max_pass_rate)
    from sandbox.measure.filtering import filter_data

    with naming(path, run_config):
        typer.echo(filter_data(run_config, data, num_samples=samples, band=band, progress=progress).line())
