"""`firstorder reproduce`: the claims of the papers, tried again in the sandbox, with computed verdicts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sandbox.ledger.command import Wanted


def reproduce(
    claims: Annotated[
        list[str] | None, typer.Argument(metavar="[CLAIM]...", help="Numbers or names of claims, or all.")
    ] = None,
    regime: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A regime, of configs/claims/; all of them if not given.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="N", help="Seeds per cell, from 104 on at home; each claim's own number if not given."
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Runs at a time here; one per CPU if not given.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A Ray cluster to run on; a private one here if not given.")
    ] = None,
    results: Annotated[Path, typer.Option(metavar="FOLDER", help="Where rows and pages are kept.")] = Path(
        "results/claims"
    ),
    runs: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the runs' own folders go.")] = Path("runs/claims"),
    smoke: Annotated[
        bool,
        typer.Option(
            "--smoke", help="Every arm at two steps, in `stress` if no regime is named, in folders of their own."
        ),
    ] = False,
    compile: Annotated[
        bool,
        typer.Option("--compile", help="Run with compiled kernels (compile: true); rows say so, and count as others."),
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="Show the claims and their progress, and stop.")] = False,
    power: Annotated[
        bool, typer.Option("--power", help="Show the seeds and hours that each claim needs for 80% power, and stop.")
    ] = False,
    page: Annotated[bool, typer.Option("--page", help="Write the pages from the existing rows, and stop.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
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

    wanted = command.Wanted(
        claims=chosen_claims(claims or (["all"] if smoke or listed or power or page else [])),
        regimes=chosen_regimes(regime or (["stress"] if smoke else [])),
        seeds=2 if smoke else seeds,
        smoke=smoke,
    )
    place = command.LedgerFolders(results / "smoke" if smoke else results, runs / "smoke" if smoke else runs)
    # The pages show the whole ledger on every claim's own seeds, even where the runs are of a few claims or seeds.
    everything = wanted if smoke else command.Wanted(CLAIMS, REGIMES, None, smoke=False)
    if listed:
        typer.echo(command.listing(wanted, place, everything), nl=False)
        return
    if power:
        typer.echo(command.power(wanted, place, everything), nl=False)
        return
    if page and not place.store.path.is_file():
        raise ValueError(f"--results: expected a folder with cells.jsonl for --page, got {place.results}")
    if not page:
        _check_tried(wanted)
        if importlib.util.find_spec("ray") is None:
            raise ValueError("expected Ray, which queues the runs, got none (pip install 'firstorder[reproduce]')")
        failures = command.run(wanted, place, address=address, jobs=jobs, compiled=compile, say=_say)
    typer.echo(command.write_pages(everything, place), nl=False)
    typer.echo(place.results / "ledger.html")
    # Only now: the pages have the rows of the runs that did not fail.
    if not page and failures:
        raise ValueError(f"{failures} of the runs failed (the reasons are above); the others have their rows")


def _check_tried(wanted: Wanted) -> None:
    """ValueError where none of the claims is tried in any of the regimes: there would be no run to make."""
    from sandbox.claims import REGIMES

    tried = [regime.name for regime in REGIMES if any(regime.name in claim.places for claim in wanted.claims)]
    got = [regime.name for regime in wanted.regimes]
    if not set(tried) & set(got):
        numbers = ", ".join(str(claim.number) for claim in wanted.claims)
        words = f"claim {numbers} is" if len(wanted.claims) == 1 else f"claims {numbers} are"
        raise ValueError(f"--regime: {words} tried in {', '.join(tried)}; got {', '.join(got)}")


def _say(line: str) -> None:
    typer.echo(line, err=True)
