"""`firstorder train`: one run from a YAML file and overrides to a folder of results."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstorder.options import Debug, PrintConfig, Progress

if TYPE_CHECKING:
    from lab.config.run import RunConfig
    from lab.records import RunFolder


def train(
    context: typer.Context,
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file that describes the run.")],
    print_config: PrintConfig = False,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Continue the newest run of this config, or start one.")
    ] = False,
    resume_if_any: Annotated[
        bool, typer.Option("--resume-if-any", help="As --resume, but start a run where there is none to continue.")
    ] = False,
    progress: Annotated[Progress, typer.Option(help="A live bar, one line per step (for logs), or nothing.")] = "bar",
    debug: Debug = False,
) -> None:
    """Train one model as CONFIG says, in the world (sandbox or scaled) that its `backend:` names.

    Any field of the config can be set here as --dotted.name VALUE, with the value written as in YAML; the last one
    wins. --print-config shows every field with its meaning.

    \b
    Examples:
      firstorder train configs/demo/none.yaml
      firstorder train configs/demo/none.yaml --algorithm.replay.mode R3 --name my-r3 --seed 1
      firstorder train configs/demo/none.yaml --algorithm.optimizer.betas '[0.9, 0.99]' --print-config
      firstorder train configs/demo/none.yaml --resume

    Results go to runs/<name>/<UTC time>-<config hash>/; the last lines say how the run ended and where its page is. A
    killed run continues with --resume, to the same bits as if it had never stopped.
    """
    from firstorder.worlds import Schemas
    from lab.config.load import load, to_yaml
    from lab.config.naming import naming
    from lab.config.presets import kept_numbers
    from lab.strict import ConfigError

    if resume_if_any and not resume and is_given(context, "resume"):
        raise ConfigError("--resume-if-any: expected without --fresh, got it with it")
    # An option before CONFIG is parsed as CONFIG itself, so all words are split again.
    words = [config, *context.args]
    path, overrides = split(words)
    run_config = load(path, overrides, Schemas())
    for line in kept_numbers(run_config.algorithm.objective, overrides):
        typer.echo(line, err=True)
    if print_config:
        typer.echo(to_yaml(run_config), nl=False)
        return
    with naming(path, run_config):
        run_config = run_config.settled()  # --resume looks for the config that ran
        folder = _unfinished(run_config) if resume else _resumable(run_config) if resume_if_any else None
        _run(run_config, folder, words, progress)


def _run(config: RunConfig, folder: RunFolder | None, words: list[str], progress: Progress) -> None:
    """Starts the run, or continues that of the folder, and prints its last words."""
    from firstorder.worlds import runner
    from lab.ending import last_words, write_page
    from lab.interrupts import Interrupted

    for note in config.algorithm.build().notes:
        typer.echo(f"algorithm.{note}", err=True)
    if folder is not None and folder.is_finished:  # killed after its verdict
        with folder.hold():
            write_page(folder)
        ended = folder
    else:
        try:
            ended = runner(config.backend)(config, folder=folder, progress=progress)
        except Interrupted as stop:
            # The same signal, so the same exit code, with the command that continues the run.
            raise Interrupted(stop.signum, _how_to_continue(config, words, progress)) from stop
    typer.echo("\n".join(last_words(ended)))


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the command line has that option, in either form; else its value is the default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def split(words: list[str], wanted: str = "CONFIG, the YAML file that describes the run") -> tuple[str, list[str]]:
    """The first word that is not part of an override, and the other words; `wanted` names it where it is missing."""
    from lab.strict import ConfigError

    position = 0
    # `--key=value` is one word, `--key value` two.
    while position < len(words) and words[position].startswith("--"):
        position += 1 if "=" in words[position] else 2
    if position >= len(words):
        raise ConfigError(f"missing {wanted}")
    return words[position], words[:position] + words[position + 1 :]


def _how_to_continue(config: RunConfig, words: list[str], progress: str) -> str:
    """The state of an interrupted run, and the command that continues it."""
    folder = _resumable(config)
    if folder is None:
        return " before the run began: nothing is recorded"
    rows = folder.metrics()
    step = rows[-1]["step"] if rows else 0
    shown = [] if progress == "bar" else ["--progress", progress]
    command = shlex.join(["firstorder", "train", *words, *shown, "--resume"])
    return f" after step {step} of {config.num_steps}; continue with: {command}"


def _resumable(config: RunConfig) -> RunFolder | None:
    """The newest folder of this config, if its run has not ended."""
    from lab.config.load import config_hash
    from lab.records import RunFolder

    return RunFolder.find_resumable(Path(config.output), config.name, config_hash(config))


def _unfinished(config: RunConfig) -> RunFolder:
    """The same; ConfigError where there is none."""
    from lab.config.load import config_hash
    from lab.strict import ConfigError

    folder = _resumable(config)
    if folder is None:
        wanted = Path(config.output) / config.name / f"*-{config_hash(config)}"
        raise ConfigError(f"--resume: expected an unfinished run of this config as the newest of {wanted}, got none")
    return folder
