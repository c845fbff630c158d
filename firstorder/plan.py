"""`firstorder plan`: what a cluster run would need, and whether it fits, without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from scaled.config import ScaledRun
    from scaled.plan.summary import Plan


def plan(
    context: typer.Context,
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of a run with `backend: scaled`.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run/--no-dry-run", help="Build the ranks with Megatron-core on the meta device (seconds)."),
    ] = True,
    mean_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Mean tokens of a sequence, for time; 30 % of the longest if not given."),
    ] = None,
    longest_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Tokens of a batch's longest sequence, to which training pads; rollout.max_model_len if not given.",
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Say what the run of CONFIG needs of every GPU, what it moves and what it costs, before there is a GPU.

    Memory of a training rank and of an inference GPU, part by part; bytes of routing records, router features and
    weights in a global step; tokens, FLOPs and a time estimate with its assumptions; and the parallel layout, built
    rank by rank with Megatron-core on the meta device. Any field of the config can be set here, as in `firstorder
    train`. Where a layout does not divide or fit, the exit code is 2 and one line says what to change.

    \b
    Examples:
      firstorder plan configs/scaled/minirl/n8_r3.yaml
      firstorder plan configs/scaled/pr2/qwen3_off4.yaml --cluster.gpu H100-80GB --rollout.max_num_seqs 40
      firstorder plan configs/scaled/minirl/n1.yaml --mean-tokens 12000 --json --no-dry-run
    """
    from lab.strict import ConfigError
    from scaled.plan.summary import has_megatron, make_plan

    _, _, run_config = read_config([config, *context.args])
    made = make_plan(run_config, mean_tokens, longest_tokens)
    if dry_run and has_megatron():
        made = _with_dry_run(made)
    elif dry_run:
        typer.echo("the dry run was left out: megatron-core, which builds the ranks, is not installed", err=True)
    _print(made, as_json)
    if made.misfits:
        raise ConfigError("; ".join(made.misfits))


def read_config(words: list[str]) -> tuple[str, list[str], ScaledRun]:
    """The config's path, the overrides around it, and the config; ConfigError where it is not one of the cluster."""
    from firstorder.train import split
    from firstorder.worlds import Schemas
    from lab.config.load import load
    from lab.strict import ConfigError
    from scaled.config import ScaledRun

    path, overrides = split(words)
    config = load(path, overrides, Schemas())
    if not isinstance(config, ScaledRun):
        raise ConfigError(f"{path}: backend: expected a config of the cluster (scaled), got {config.backend}")
    return path, overrides, config


def _with_dry_run(plan: Plan) -> Plan:
    from dataclasses import replace

    from scaled.plan.summary import dry_run_layout

    return replace(plan, ranks=dry_run_layout(plan))


def _print(plan: Plan, as_json: bool) -> None:
    import json

    from scaled.plan.summary import assumptions, tables

    if as_json:
        typer.echo(json.dumps(plan.to_json(), indent=2, allow_nan=False))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for table in tables(plan):
        console.print(table)
    console.print("Assumptions", style="bold")
    for line in assumptions(plan):
        console.print(f"- {line}")
