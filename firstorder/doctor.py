"""`firstorder doctor`: a diagnosis of a pair of engines, from tokens that one of them sampled and both scored."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Annotated

import typer

from firstorder.options import Debug

FAULT = 3
"""The exit code where a fault is named, or the doctor is undecided."""


def _list_formats(asked: bool) -> None:
    if not asked:
        return
    from lab.doctor.importers import FORMATS
    from lab.doctor.replay_log import FORMAT

    for about in (*FORMATS, FORMAT):
        typer.echo(
            f"{about.name}: {about.files}\n  has    {about.has}\n  lacks  {about.lacks}\n  as in  {about.source}"
        )
    raise typer.Exit


Traces = Annotated[
    list[Path],
    typer.Argument(
        metavar="TRACE_OR_FOLDER...", help="Traces or dumps (.safetensors, .jsonl, .parquet, .pt), or a run's folder."
    ),
]
Page = Annotated[Path | None, typer.Option(metavar="FILE.html", help="Also write a page with pictures.")]
Columns = Annotated[
    str | None, typer.Option(metavar="OURS=THEIRS,...", help="Names of the file's columns, for a dump of any kind.")
]
Old = Annotated[Path | None, typer.Option(metavar="FILE", help="The trainer's side, for a dump of the engine alone.")]
FailOn = Annotated[
    str, typer.Option(metavar="CAUSES", help="Faults that make the exit code 3: any, none, or causes by name.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of words.")]
Localise = Annotated[
    bool,
    typer.Option("--localise", help="Name the first module that departs from the model, or from the other dump."),
]
Model = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="The Hugging Face folder of old's weights: tries replay on it, or rules routers out if it is dense; "
        "with --localise, compares with it.",
    ),
]
Precision = Annotated[
    str | None, typer.Option(metavar="NAME", help="With --localise: fp32, bf16, fp16 or fp8; else the dump's own.")
]
ListFormats = Annotated[
    bool,
    # Eager, so that it is answered where no TRACE is given.
    typer.Option("--list-formats", is_eager=True, callback=_list_formats, help="List the formats, and stop."),
]


def doctor(
    traces: Traces,
    out: Page = None,
    columns: Columns = None,
    old: Old = None,
    fail_on: FailOn = "any",
    as_json: AsJson = False,
    where: Localise = False,
    model: Model = None,
    precision: Precision = None,
    list_formats: ListFormats = False,
    debug: Debug = False,
) -> None:
    """Diagnose a pair of engines, with evidence and a fix: precision, routing, weights of another version, a sampling
    mask, a temperature, values that are shifted, missing or filled with zeros.

    The first line is the verdict, the second the first thing to do. The exit code is 0 if nothing is wrong, 3 if a
    fault is named or the doctor is undecided, and 2 if a file cannot be read.

    A folder is read as the steps of one run: it shows how the gap grows and since which step, and faults that one step
    cannot show (weights that no longer arrive, or only in part; one engine, or one part of the batch, that is off).

    --model scores a trace again with old's weights, on mu's experts and without. A gap that replay removes comes
    through the routers, and one that it leaves does not. `firstorder export RUN --step N` writes a step's weights. The
    folder of a dense model rules routers out, also for a run's folder: of it config.json alone is read.

    --localise compares the files with a model: dumps of hidden states module by module, a trace by its routes and
    log-probabilities. Without --model it compares two dumps with each other.

    \b
    Examples:
      firstorder doctor runs/my-run/*/rollouts/step-000070.safetensors --out doctor.html
      firstorder doctor nemo_logs/train_data_step12.jsonl slime/train_12_0.pt
      firstorder doctor dump.parquet --columns tokens=ids,is_response=mask,logp_mu=gen_logp,logp_old=train_logp
      firstorder doctor step.jsonl --json --fail-on routing,stale
      firstorder doctor runs/my-run/20261124T093000Z-1a2b3c4d --out course.html
      firstorder doctor runs/my-run/*/rollouts/step-000070.safetensors --model step-69
      firstorder doctor mu.states.safetensors --localise --model Qwen3-30B-A3B

    A trace holds one step's tokens and their log-probabilities under mu (the engine that sampled) and old (the trainer
    at the same weights), and if it has them the experts of both. docs/doctor.md has the formats, what each dump lacks,
    and how often the diagnosis is right.
    """
    logs = [] if where else _replay_logs(traces)
    _check_ignored(where, bool(logs), out=out, old=old, columns=columns, model=model, precision=precision)
    if where:
        _localise(traces, model, precision, as_json, fail_on)
    elif logs:
        _replay_log(logs, as_json, fail_on)
    else:
        _check_options(traces, out, old, model)
        _diagnose(traces, columns, old, model, out, as_json, _failing(fail_on))


def _diagnose(
    traces: list[Path], columns: str | None, old: Path | None, model: Path | None, out: Path | None, as_json: bool,
    failing: Container[str],
) -> None:  # fmt: skip
    from firstorder.findings import look, write_page
    from lab.doctor.importers.columns import parse
    from lab.doctor.words import plain

    visit = look(traces, None if columns is None else parse(columns), old, model, as_json)
    if as_json:
        told = plain({name: objects for name, objects in visit.told.items() if objects})
        typer.echo(json.dumps(told, indent=2, allow_nan=False))
    if out is not None:
        write_page(visit, out)
        # On stderr beside JSON, so that stdout stays one object.
        typer.echo(f"page: {out}", err=as_json)
    # Last, so that the page is written whatever the verdict.
    if any(name in failing for name in visit.faults):
        raise typer.Exit(FAULT)


def _check_ignored(is_localise: bool, is_log: bool, **given: object) -> None:
    """Raises ConfigError for a given option that this call would ignore."""
    from lab.strict import ConfigError

    if is_localise or is_log:
        what = "--localise, which writes no page" if is_localise else "NeMo-RL's r3_trace files"
        unread = ("out", "old", "columns") if is_localise else tuple(given)
    else:
        what, unread = "a diagnosis without --localise", ("precision",)
    for name in unread:
        if given[name] is not None:
            raise ConfigError(f"--{name}: expected none with {what}, got {given[name]}")


def _replay_logs(paths: Sequence[Path]) -> list[Path]:
    """NeMo-RL's R3 traces among these files and in these folders; ConfigError where only some paths have them."""
    from lab.doctor.replay_log import is_log
    from lab.strict import ConfigError

    found = [[file for file in (sorted(path.iterdir()) if path.is_dir() else [path]) if is_log(file)] for path in paths]
    if any(found) and not all(found):
        other = paths[found.index([])]
        raise ConfigError(f"expected NeMo-RL's r3_trace files alone, as they hold no log-probabilities, got {other}")
    return [file for files in found for file in files]


def _replay_log(files: Sequence[Path], as_json: bool, fail_on: str) -> None:
    from lab.doctor.replay_log import read

    _require_any_or_none(fail_on, "NeMo-RL's r3_trace files")
    log = read(files)
    typer.echo(json.dumps({"replay": log.as_object()}, indent=2) if as_json else "\n".join(log.lines()))
    if log.fault is not None and fail_on != "none":
        raise typer.Exit(FAULT)


def _require_any_or_none(fail_on: str, what: str) -> None:
    """ConfigError for causes by name where there are none to name."""
    from lab.strict import ConfigError

    if fail_on not in ("any", "none"):
        raise ConfigError(f"--fail-on: expected any or none with {what}, got {fail_on!r}")


def _localise(paths: Sequence[Path], model: Path | None, precision: str | None, as_json: bool, fail_on: str) -> None:
    from firstorder.localise import localise

    _require_any_or_none(fail_on, "--localise")
    places = localise(paths, model, precision)
    if as_json:
        typer.echo(json.dumps({"places": [place.as_object() for place in places]}, indent=2))
    else:
        typer.echo("\n".join(line for place in places for line in place.lines()))
    if fail_on == "any" and any(place.module is not None for place in places):
        raise typer.Exit(FAULT)


def _check_options(paths: Sequence[Path], out: Path | None, old: Path | None, model: Path | None) -> None:
    """Raises ConfigError for options that do not fit the named paths."""
    from firstorder.findings import has_no_experts
    from firstorder.options import require_folder_of
    from lab.strict import ConfigError

    require_folder_of("--out", out)
    folders = [path for path in paths if path.is_dir()]
    if out is not None and folders and len(paths) > 1:
        raise ConfigError(f"--out: expected one folder, or traces alone, got {folders[0]} among {len(paths)} paths")
    if old is not None and len(paths) > 1:
        raise ConfigError(f"--old: expected one dump beside it, got {len(paths)}")
    if old is not None and folders:
        raise ConfigError(f"--old: expected one file beside a dump of one step, got the folder {folders[0]}")
    if model is not None and folders and not has_no_experts(model):
        raise ConfigError(f"--model: expected the trace of one step beside it, got the folder {folders[0]}")


def _failing(text: str) -> set[str]:
    """The names of the causes that make the exit code 3."""
    from lab.doctor.steps.course import BY_NAME
    from lab.strict import ConfigError, did_you_mean

    known = [name for name in BY_NAME if name != "nothing"]
    if text in ("any", "none"):
        return set(known) if text == "any" else set()
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name in ("any", "none"):
            raise ConfigError(f"--fail-on: expected {name} alone, got {text!r}")
        if name not in known:
            raise ConfigError(f"--fail-on: {name!r} is no cause{did_you_mean(name, ['any', 'none', *known])}")
    return set(names)
