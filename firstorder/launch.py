"""`firstorder launch`: a Slurm script or a Ray job from a cluster config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from firstorder.options import ClusterConfig, Debug, require_folder_of
from firstorder.plan import LongestTokens, MeanTokens


def launch(
    context: typer.Context,
    config: ClusterConfig,
    kind: Annotated[
        Literal["slurm", "ray"], typer.Option(help="An sbatch script that starts Ray, or a job for a running Ray.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the script; printed if not given.")
    ] = None,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Slurm partition.")] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="Slurm account.")] = None,
    time: Annotated[str | None, typer.Option(metavar="D-HH:MM:SS", help="Slurm time limit.")] = None,
    container: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE", help="Run in this container, by Slurm's pyxis plugin, with the paths of CONFIG mounted."
        ),
    ] = None,
    mean_tokens: MeanTokens = None,
    longest_tokens: LongestTokens = None,
    debug: Debug = False,
) -> None:
    """Write the script that starts the run of CONFIG on a cluster, with the nodes and GPUs that its `cluster:` names.

    slurm: an sbatch script that starts Ray's head on the first node and a worker on each other one, waits for all GPUs,
    and trains; requeued by Slurm, it resumes. ray: a `ray job submit` for the cluster at $RAY_ADDRESS, which takes the
    folder along, without runs/: CONFIG must be elsewhere, and --output a path that all nodes share. With the word
    --resume-if-any after it, a script continues an unfinished run, if there is one. Paths in CONFIG are relative to the
    folder that the script is submitted from. A config that does not fit the cluster is refused, as by `firstorder
    plan`, for sequences of the lengths given. Any field of the config can be set here, as in `firstorder train`.

    \b
    Examples:
      firstorder launch configs/scaled/minirl/n8_r3.yaml --kind slurm --partition gpu --time 2-00:00:00 --out run.sbatch
      firstorder launch configs/scaled/pr2/qwen3_off4.yaml --kind ray --output /shared/runs --out submit.sh
    """
    from firstorder.plan import read_config
    from lab.config.naming import naming
    from lab.files import atomic_write
    from scaled.launch import Options, script
    from scaled.plan.summary import make_plan, require_fit

    _refuse_start_words([config, *context.args], "sbatch" if kind == "slurm" else "bash")
    path, overrides, run_config = read_config([config, *context.args])
    with naming(path, run_config):
        require_fit(make_plan(run_config, mean_tokens, longest_tokens))
        # The command's words, not the resolved config: the job reads CONFIG when it starts.
        text = script(run_config, path, overrides, kind, Options(partition, account, time, container))
    if out is None:
        typer.echo(text, nl=False)
    else:
        require_folder_of("--out", out)
        atomic_write(out, text)
        typer.echo(out)
    # Not refused, as only the nodes need them; but a promoted recipe may name files that are nowhere.
    missing = [name for name in (run_config.model.path, *run_config.task.named_files) if not Path(name).exists()]
    if missing:
        typer.echo(
            f"not on this machine: {', '.join(missing)}; every node needs what model.path and task name", err=True
        )


def _refuse_start_words(words: Sequence[str], program: str) -> None:
    """ConfigError for a word that is the script's: as a field of the config it would take the next one as its value."""
    from lab.strict import ConfigError

    for word in words:
        if word in ("--fresh", "--resume", "--resume-if-any"):
            start = f"{program} FILE --resume-if-any"
            raise ConfigError(f"{word}: expected after the script, as in `{start}`, got it with launch")
