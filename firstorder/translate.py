"""`firstorder translate`: the recipe of a config as options of another framework."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from firstorder.options import Debug

if TYPE_CHECKING:
    from lab.translate import Option, Translation


class Framework(StrEnum):
    """The frameworks into whose options recipes are translated (lab/translate)."""

    verl = "verl"
    trl = "trl"
    slime = "slime"


INCOMPLETE = 3
"""The exit code where a part of the recipe has no option."""


def translate(
    context: typer.Context,
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The config of a run, of either world.")],
    to: Annotated[Framework, typer.Option(help="The framework.")],
    sizes: Annotated[
        bool,
        typer.Option(
            "--sizes", help="Add batch, lengths and the optimiser, which a run of the sandbox should not hand on."
        ),
    ] = False,
    partly: Annotated[
        bool, typer.Option("--partly", help="Print the options even if a part of the recipe has none.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Print the recipe of CONFIG as options of verl, TRL or slime, under which their loss has the same gradient.

    The recipe is objective, corrections and replay. Options are printed for copying: overrides of
    verl.trainer.main_ppo, arguments of trl.GRPOConfig, or words for slime's train.py. If a part of the recipe has no
    option there, none is printed, stderr says which part and why, and the exit code is 3. The
    config's own fields can be set here, as in `firstorder train`.

    \b
    Examples:
      firstorder translate configs/demo/tis.yaml --to verl
      firstorder translate configs/demo/none.yaml --to trl --algorithm.objective.preset cispo
      firstorder translate configs/scaled/minirl/n8_r3.yaml --to verl --sizes --json
    """
    from firstorder.train import split
    from firstorder.worlds import Schemas
    from lab.config.load import load
    from lab.translate import FRAMEWORKS

    # An option before CONFIG is parsed as CONFIG itself, so all words are split again.
    path, overrides = split([config, *context.args])
    found = FRAMEWORKS[to](load(path, overrides, Schemas()).algorithm.build())
    is_shown = partly or not found.unsaid
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    elif is_shown:
        typer.echo("\n".join(_lines(to, found.recipe + (found.sizes if sizes else []))))
        _tell(found, sizes)
    for part in found.unsaid:
        typer.echo(f"no option in {found.title}: {part}", err=True)
    if not is_shown:
        typer.echo("--partly prints the options of the rest, which is another recipe", err=True)
        raise typer.Exit(INCOMPLETE)


def _lines(framework: Framework, options: list[Option]) -> list[str]:
    """The options as they are typed: Hydra's for verl, Python's for TRL, argparse's for slime."""
    if framework is Framework.verl:
        return [f"{option.name}={_hydra(option.value)}" for option in options]
    if framework is Framework.slime:
        return [f"--{option.name}" + ("" if option.value is True else f" {option.value}") for option in options]
    return [f"{option.name}={option.value!r}," for option in options]


def _hydra(value: object) -> str:
    """A value in Hydra's grammar; quoted for the shell where that would read it."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, list):
        return f"'[{','.join(map(str, value))}]'"
    # verl's pair of bounds is a string, and Hydra would take "0.5_5" for the number 0.55.
    return f"\"'{value}'\"" if isinstance(value, str) and "_" in value and value[0].isdigit() else str(value)


def _tell(found: Translation, has_sizes: bool) -> None:
    """Writes to stderr the framework and the notes."""
    typer.echo(f"\n{found.title}, {found.kind}.", err=True)
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)
    if not has_sizes:
        typer.echo("note: batch, lengths and the optimiser are left out; --sizes adds them.", err=True)
