"""`firstorder plan`: the needs of a cluster run, and whether it fits, without a GPU."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from firstorder.options import ClusterConfig, Debug

if TYPE_CHECKING:
    from scaled.config import ScaledRun
    from scaled.plan.day import Rates

Tokens = tuple[int | None, int | None]
"""The mean and the longest length of a sequence, where they are given."""

DryRun = Annotated[
    bool,
    typer.Option("--dry-run/--no-dry-run", help="Build the ranks with Megatron-core on the meta device (seconds)."),
]
MeanTokens = Annotated[
    int | None,
    typer.Option(min=2, metavar="N", help="Mean tokens of a sequence; 30 % of rollout.max_model_len if not given."),
]
LongestTokens = Annotated[
    int | None,
    typer.Option(
        min=2,
        metavar="N",
        help="Tokens of a batch's longest sequence, to which training pads; rollout.max_model_len if not given.",
    ),
]
Search = Annotated[
    bool,
    typer.Option("--search", help="List the quickest layouts of the config's GPUs that fit, and why others do not."),
]
Simulate = Annotated[
    float | None,
    typer.Option(
        metavar="HOURS",
        help="Simulate that many hours with random lengths, stragglers and failures, then with one thing changed.",
    ),
]
Failures = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="GPU_HOURS",
        help="GPU hours between two failures, for --simulate; 50,677 (Llama 3, arXiv 2407.21783) if not given.",
    ),
]
RatesFrom = Annotated[
    str | None,
    typer.Option(
        metavar="RUN",
        help="Folder of a synchronous run: --simulate uses its recorded times and lengths, not the plan's.",
    ),
]


def plan(
    context: typer.Context,
    config: ClusterConfig,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    dry_run: DryRun = True,
    mean_tokens: MeanTokens = None,
    longest_tokens: LongestTokens = None,
    search: Search = False,
    simulate: Simulate = None,
    failures: Failures = None,
    rates: RatesFrom = None,
    debug: Debug = False,
) -> None:
    """State the memory, transfers and costs of the run of CONFIG, without a GPU.

    Memory of a training rank and of an inference GPU, part by part; bytes of routing records, router features and
    weights in a global step; tokens, FLOPs and a time estimate with its assumptions; and the parallel layout, built
    rank by rank with Megatron-core on the meta device. Any field of the config can be set here, as in `firstorder
    train`. Where a layout does not divide or fit, the exit code is 2 and one line says what to change.

    \b
    Examples:
      firstorder plan configs/scaled/minirl/n8_r3.yaml
      firstorder plan configs/scaled/pr2/qwen3_off4.yaml --cluster.gpu H100-80GB --rollout.max_num_seqs 40
      firstorder plan configs/scaled/minirl/n1.yaml --mean-tokens 12000 --json --no-dry-run
      firstorder plan configs/scaled/minirl/n8_r3.yaml --search --cluster.num_nodes 1
      firstorder plan configs/scaled/minirl/n1.yaml --simulate 24
      firstorder plan configs/demo_scaled/bf16_r3.yaml --simulate 1 --rates runs/scaled-demo-bf16-r3
    """
    from firstorder.train import is_given
    from lab.config.naming import naming
    from lab.strict import ConfigError

    for name, given in (("--rates", rates), ("--failures", failures)):
        if given is not None and simulate is None:
            raise ConfigError(f"{name}: expected with --simulate HOURS, got {given} without it")
    if search and simulate is not None:
        raise ConfigError(f"--simulate: expected without --search, got {simulate:g} with it")
    for name, given in (("--search", search), ("--simulate", simulate is not None)):
        if given and dry_run and is_given(context, "dry_run"):
            raise ConfigError(f"--dry-run: expected without {name}, got it with it")
    path, overrides, run_config = read_config([config, *context.args])
    tokens = mean_tokens, longest_tokens
    with naming(path, run_config):
        if search:
            _search(run_config, [path, *overrides], tokens, as_json)
        elif simulate is not None:
            _simulate(run_config, tokens, simulate, failures, rates, as_json)
        else:
            _plan(run_config, tokens, dry_run, as_json)


def _plan(config: ScaledRun, tokens: Tokens, dry_run: bool, as_json: bool) -> None:
    from scaled.plan.summary import assumptions, dry_run_layout, has_megatron, make_plan, require_fit
    from scaled.plan.tables import tables

    made = make_plan(config, *tokens)
    if dry_run and has_megatron():
        try:
            made = replace(made, ranks=dry_run_layout(made))
        except TimeoutError as error:
            typer.echo(f"the dry run is left out: {error}", err=True)
    elif dry_run:
        typer.echo("the dry run is skipped: megatron-core, which builds the ranks, is not installed", err=True)
    if as_json:
        _echo_json(made.to_json())
    else:
        from rich.console import Console

        console = Console(highlight=False)
        for table in tables(made):
            console.print(table)
        console.print("Assumptions", style="bold")
        for line in assumptions(made):
            console.print(f"- {line}")
    # A plan that does not fit is printed too, before its exit code.
    require_fit(made)


def _search(config: ScaledRun, words: list[str], tokens: Tokens, as_json: bool) -> None:
    from lab.strict import ConfigError
    from scaled.model_shape import load_shape
    from scaled.plan.conditions import check_batch, check_lengths, check_object_store
    from scaled.plan.hardware import gpu_named
    from scaled.plan.search import search
    from scaled.plan.search_page import LEGEND, search_table, to_json

    shape, gpu = load_shape(config.model.path, config.model.shape), gpu_named(config.cluster.gpu)
    check_batch(config)
    check_lengths(config, shape)
    check_object_store(config, shape)  # the same in every layout
    made = search(config, shape, gpu, *tokens)
    if as_json:
        _echo_json(to_json(made))
    else:
        from rich.console import Console

        console = Console(highlight=False)
        if made.found:
            console.print(search_table(config, made))
            console.print(LEGEND)
        else:
            console.print(f"No layout fits: of {made.num_tried} tried, each is left out for one of these reasons.")
        for reason in made.reasons:
            console.print(f"- {reason.count} of {made.num_tried}: {reason}")
        if made.found:
            console.print("The first:", style="bold")
            # Not by rich, which would break the line: it is there to be copied. `firstorder launch` takes it, too.
            given = zip(("--mean-tokens", "--longest-tokens"), tokens, strict=True)
            lengths = [f"{name} {length}" for name, length in given if length is not None]
            typer.echo(" ".join(["firstorder plan", shlex.join(words), *made.found[0].options, *lengths]))
    if not made.found:
        raise ConfigError(f"cluster: expected a layout of its GPUs that fits, got none of {made.num_tried} tried")


def _simulate(
    config: ScaledRun, tokens: Tokens, hours: float, failures: float | None, run: str | None, as_json: bool
) -> None:
    from scaled.model_shape import load_shape
    from scaled.plan import what_if
    from scaled.plan.compute import lengths_of
    from scaled.plan.day import Chance, Rates
    from scaled.plan.hardware import gpu_named
    from scaled.plan.summary import make_plan, require_fit

    shape, gpu = load_shape(config.model.path, config.model.shape), gpu_named(config.cluster.gpu)
    chance = Chance() if failures is None else Chance(gpu_hours_per_failure=failures)
    taken, (mean, longest) = _rates(run) if run is not None else (Rates(), (None, None))
    # Lengths given as options win over the recorded ones.
    lengths = lengths_of(config, tokens[0] or mean, tokens[1] or longest)
    require_fit(make_plan(config, *lengths))  # a run that cannot start has no day
    found = []
    for one, day in what_if.played(config, shape, gpu, hours, lengths, chance, config.seed, taken):
        typer.echo(f"played: {one.words}", err=True)
        found.append((one, day))
    if as_json:
        _echo_json(what_if.to_json(found))
        return
    from rich.console import Console

    typer.echo(what_if.sentence(found[0][1]))
    typer.echo(what_if.assumed(chance))
    Console(highlight=False).print(what_if.table(found))


def _rates(run: str) -> tuple[Rates, tuple[int, int]]:
    """The rates and the lengths of the run in that folder."""
    from firstorder.report import run_folder
    from lab.strict import ConfigError
    from scaled.model_shape import load_shape
    from scaled.plan.hardware import gpu_named
    from scaled.plan.measured import measured, rates_of

    folder = run_folder(Path(run))
    # Measured and planned times are compared for the run's own config, whatever CONFIG is.
    _, _, config = read_config([str(folder.path / "config.yaml")])
    try:
        found = measured(folder, config)
        shape, gpu = load_shape(config.model.path, config.model.shape), gpu_named(config.cluster.gpu)
        return rates_of(config, shape, gpu, found), found.tokens
    except ValueError as error:
        raise ConfigError(f"--rates: {error}") from None


def read_config(words: list[str]) -> tuple[str, list[str], ScaledRun]:
    """The config's path, the overrides around it, and the config; ConfigError where it is not one of the cluster."""
    from firstorder.train import split
    from firstorder.worlds import cluster_run

    path, overrides = split(words)
    return path, overrides, cluster_run(path, overrides)


def _echo_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))
