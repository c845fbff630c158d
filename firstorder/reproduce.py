"""`firstorder reproduce`: the claims of the papers, tried again in the sandbox, with computed verdicts."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from firstorder.options import Debug

if TYPE_CHECKING:
    from sandbox.ledger.command import LedgerFolders, Wanted


Claims = Annotated[list[str] | None, typer.Argument(metavar="[CLAIM]...", help="Numbers or names of claims, or all.")]
Regimes = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="A regime, of configs/claims/; all of them if not given.")
]
Seeds = Annotated[
    int | None,
    typer.Option(
        min=2,
        max=4096,  # `--power` searches no further
        metavar="N",
        help="Seeds per cell, from 104 on at home; each claim's own number, or 2 with --smoke, if not given.",
    ),
]
Jobs = Annotated[
    int | None, typer.Option(min=1, max=1024, metavar="N", help="Runs at a time here; one per CPU if not given.")
]
Address = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="A Ray cluster to run on; a private one here if not given.")
]
Results = Annotated[Path, typer.Option(metavar="FOLDER", help="Where rows and pages are kept.")]
Runs = Annotated[Path, typer.Option(metavar="FOLDER", help="Where the runs' own folders go.")]
Smoke = Annotated[
    bool,
    typer.Option("--smoke", help="Every arm at two steps, in `stress` if no regime is named, in folders of their own."),
]
Compile = Annotated[
    bool,
    typer.Option("--compile", help="Run with compiled kernels (compile: true); rows say so, and count as others."),
]
List = Annotated[bool, typer.Option("--list", help="Show the claims and their progress, and stop.")]
Power = Annotated[
    bool, typer.Option("--power", help="Show the seeds and hours that each claim needs for 80% power, and stop.")
]
Page = Annotated[bool, typer.Option("--page", help="Write the pages from the existing rows, and stop.")]

READ = {
    "listed": {"claims", "regime", "seeds", "results", "smoke"},
    "power": {"claims", "results"},  # a need is at home, whatever its seeds, and has no smoke runs
    "page": {"results", "smoke"},
    "address": {"claims", "regime", "seeds", "results", "runs", "smoke", "compile"},  # a cluster has its own CPUs
}
"""The parameters that have an effect beside each of these."""


def reproduce(
    context: typer.Context,
    claims: Claims = None,
    regime: Regimes = None,
    seeds: Seeds = None,
    jobs: Jobs = None,
    address: Address = None,
    results: Results = Path("results/claims"),
    runs: Runs = Path("runs/claims"),
    smoke: Smoke = False,
    compile: Compile = False,
    listed: List = False,
    power: Power = False,
    page: Page = False,
    debug: Debug = False,
) -> None:
    """Try the papers' findings again: make the missing runs, then compute every verdict and write the ledger's page.

    A claim's prediction, measure and criterion are in sandbox/claims/, written before its runs. Rows are added to
    cells.jsonl as runs end; a killed queue continues where it stopped, and no run is made twice.

    \b
    Examples:
      firstorder reproduce --list
      firstorder reproduce 3 r3_halves_the_gap --regime paper
      firstorder reproduce all --compile
      firstorder reproduce --power
      firstorder reproduce --page
      firstorder reproduce --smoke
    """
    from sandbox.claims import CLAIMS, REGIMES, chosen_claims, chosen_regimes
    from sandbox.ledger import command

    _check_effect(context)
    wanted = command.Wanted(
        claims=chosen_claims(claims or (["all"] if smoke or listed or power or page else [])),
        regimes=chosen_regimes(regime or (["stress"] if smoke else [])),
        seeds=2 if smoke and seeds is None else seeds,
        smoke=smoke,
    )
    place = command.LedgerFolders(results / "smoke" if smoke else results, runs / "smoke" if smoke else runs)
    # The pages show the whole ledger on every claim's own seeds, even where the runs are of a few claims or seeds.
    everything = wanted if smoke else command.Wanted(CLAIMS, REGIMES, None, smoke=False)
    if listed or power or page:
        _check_rows(context, place)
    if listed or power:
        told = command.listing if listed else command.power
        typer.echo(told(wanted, place, everything), nl=False)
        return
    failures = 0 if page else _run(wanted, place, address, jobs, compile)
    typer.echo(command.write_pages(everything, place), nl=False)
    typer.echo(place.results / "ledger.html")
    # Only now: the pages have the rows of the runs that did not fail.
    if failures:
        raise ValueError(f"{failures} of the runs failed (the reasons are above); the others have their rows")


def _check_effect(context: typer.Context) -> None:
    """ValueError for the first parameter that has no effect beside another one that is given."""
    given = [name for name in context.params if _is_given(context, name)]
    for first in (name for name in READ if name in given):
        read = READ[first] | {first, "debug"}
        if first == "page" and context.params["smoke"]:
            read |= {"claims", "regime", "seeds"}  # a smoke ledger is of what is asked for alone
        for name in (name for name in given if name not in read):
            value = context.params[name]
            words = ", ".join(value) if isinstance(value, list | tuple) else value
            got = "both" if value is True else f"{words} with it"
            raise ValueError(f"{_shown(name)}: expected without {_shown(first)}, got {got}")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _shown(name: str) -> str:
    """A parameter as it stands on the command line."""
    return {"claims": "CLAIM", "listed": "--list"}.get(name, f"--{name}")


def _check_rows(context: typer.Context, place: LedgerFolders) -> None:
    """ValueError where the pages or a folder that is named have no rows; else a note where there are none."""
    path, is_read = place.store.path, place.store.path.is_file()
    asked = next(name for name in ("listed", "power", "page") if context.params[name])
    if not is_read and (asked == "page" or _is_given(context, "results")):
        raise ValueError(f"--results: expected a folder with cells.jsonl for {_shown(asked)}, got {place.results}")
    if not is_read:
        typer.echo(f"no rows in {path} (--results names another folder)", err=True)


def _run(wanted: Wanted, place: LedgerFolders, address: str | None, jobs: int | None, compiled: bool) -> int:
    """Makes the missing runs, and returns how many of them failed."""
    from lab.extras import how_to_install
    from lab.interrupts import Interrupted
    from sandbox.ledger import command

    _check_tried(wanted)
    if importlib.util.find_spec("ray") is None:
        raise ValueError(f"expected Ray, which queues the runs, got none ({how_to_install('reproduce')})")

    say = partial(typer.echo, err=True)
    try:
        return command.run(wanted, place, address=address, jobs=jobs, compiled=compiled, say=say)
    except Interrupted as stop:
        raise Interrupted(stop.signum, "; the same command continues the queue") from stop


def _check_tried(wanted: Wanted) -> None:
    """ValueError where none of the claims is tried in any of the regimes: there would be no run to make."""
    from sandbox.claims import REGIMES

    tried = [regime.name for regime in REGIMES if any(regime.name in claim.places for claim in wanted.claims)]
    got = [regime.name for regime in wanted.regimes]
    if not set(tried) & set(got):
        numbers = ", ".join(str(claim.number) for claim in wanted.claims)
        words = f"claim {numbers} is" if len(wanted.claims) == 1 else f"claims {numbers} are"
        raise ValueError(f"--regime: {words} tried in {', '.join(tried)}; got {', '.join(got)}")
