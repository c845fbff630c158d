"""The command's entry point: it collects the subcommands and turns a user's error into one line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer

from firstorder import __version__
from firstorder.audit import audit
from firstorder.bench import bench
from firstorder.calibrate import calibrate
from firstorder.configs import configs
from firstorder.defects import defects
from firstorder.doctor import doctor
from firstorder.export import export
from firstorder.filter import filter
from firstorder.flow import flow
from firstorder.ladder import ladder
from firstorder.launch import launch
from firstorder.plan import plan
from firstorder.promote import promote
from firstorder.report import report
from firstorder.reproduce import reproduce
from firstorder.train import train
from firstorder.translate import translate
from firstorder.usage import Command, Commands, line
from lab.interrupts import Interrupted, interruptible

MOST = 300
"""Characters of an error's line; --debug shows the rest."""

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: the examples keep their line breaks, and start-up does not import rich
    invoke_without_command=True,
)
command = partial(app.command, cls=Command)
# A command that takes every field of its config as an option; only the config's schema knows which ones exist.
with_fields = partial(command, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
# Each command imports its packages inside its function, so that --help needs neither torch nor Ray.
with_fields(short_help="Train one model as a config says.")(train)
with_fields(short_help="Compare objectives' gradients with the true one, by enumeration.")(audit)
command(short_help="List the configs that come with firstorder.")(configs)
with_fields(short_help="Train by exact expected updates: the effect of bias alone.")(flow)
command(short_help="Write one HTML page for one or several runs.")(report)
command(short_help="Take the algorithm of stable sandbox runs into a cluster config.")(promote)
with_fields(short_help="Print a config's recipe as options of verl, TRL or slime.")(translate)
with_fields(short_help="State the needs of a cluster run, and whether it fits, without a GPU.")(plan)
with_fields(short_help="Write the script that starts a cluster run: Slurm or Ray.")(launch)
with_fields(short_help="Measure vLLM engines of every precision against the training engine.")(ladder)
with_fields(short_help="Measure the sandbox's engine defects against the training engine.")(defects)
command(short_help="Diagnose a pair of engines from a trace.")(doctor)
with_fields(short_help="Set the sandbox's dials so that its engine is as far off as a trace's.")(calibrate)
with_fields(short_help="Keep the problems of a file that a model solves sometimes.")(filter)
command(short_help="Try the papers' findings again, with computed verdicts.")(reproduce)
command(short_help="Write a model of either world as a Hugging Face folder.")(export)
command(short_help="Time the pieces of a global step, side by side with transformers.")(bench)


@app.callback()
def firstorder(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Reinforcement learning of Mixture-of-Experts language models under imperfect inference engines, on a laptop.

    A run is described by one YAML file and ends as one folder: its config, metrics, traces, verdict and report.

    \b
    Start here, in a checkout of the project:
      firstorder train configs/demo/r3.yaml
      firstorder report runs/demo-* --out runs/demo.html
    """
    if version:
        typer.echo(f"firstorder {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; exit code 0, 2 for a user's error, 1 for a run that turned non-finite, 70 for a bug of ours.

    130 after Ctrl-C and 143 after SIGTERM. Errors are one line on stderr; `--debug` shows where they come from. The
    command's own process (`__main__`) keeps these codes where a pipe is closed.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with interruptible():
            # Not standalone: Click would print usage text around an error and exit by itself.
            # A command's typer.Exit, such as doctor's, comes back as its code.
            return app(args=words, prog_name="firstorder", standalone_mode=False) or 0
    except Interrupted as stop:
        typer.echo(stop, err=True)
        return stop.exit_code
    except typer.TyperException as error:
        return _fail(line(error, words))
    except Exception as error:
        # In the words, as the parse itself may have failed. Commands declare --debug so that it is not read as a field.
        if "--debug" in words:
            raise
        return _told(error)


def _told(error: Exception) -> int:
    """The exit code of an error, once its line is on stderr; an error of many rows has a line for each of them."""
    if isinstance(error, ValueError | OSError):
        for line in getattr(error, "told", [_one_line(error)]):
            _fail(line)
        return 2
    if isinstance(error, ArithmeticError):
        return _fail(str(error), code=1)
    where = " (unexpected: --debug shows where)"
    return _fail(_cut(f"{type(error).__name__}: {error}", MOST - len(where)) + where, code=70)


def _one_line(error: ValueError | OSError) -> str:
    """The message of an error; for a file its name, then the system's message."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    return str(error)


def _fail(message: str, code: int = 2) -> int:
    # Pydantic puts this prefix before the message of a validator.
    typer.echo(f"error: {_cut(message.replace('Value error, ', ''), MOST)}", err=True)
    return code


def _cut(text: str, most: int) -> str:
    """The text on one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 4]} ..."
