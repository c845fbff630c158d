"""`firstorder doctor`: what is wrong with a pair of engines, from what one of them sampled and both scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from lab.doctor.importers import Dump
    from lab.doctor.page import Patient

FAULT = 3
"""The exit code where a fault is named."""


def _list_formats(asked: bool) -> None:
    if not asked:
        return
    from lab.doctor.importers import FORMATS

    for about in FORMATS:
        typer.echo(
            f"{about.name}: {about.files}\n  has    {about.has}\n  lacks  {about.lacks}\n  as in  {about.source}"
        )
    raise typer.Exit


def doctor(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Traces or dumps: .safetensors, .jsonl, .parquet or .pt.")
    ],
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Also write a page with pictures.")] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="OURS=THEIRS,...", help="Names of the file's columns, for a dump of any kind.")
    ] = None,
    old: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The trainer's side, for a dump of the engine alone.")
    ] = None,
    fail_on: Annotated[
        str, typer.Option(metavar="CAUSES", help="Faults that make the exit code 3: any, none, or causes by name.")
    ] = "any",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of words.")] = False,
    list_formats: Annotated[
        bool,
        typer.Option("--list-formats", is_eager=True, callback=_list_formats, help="List what can be read, and stop."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Say what is wrong with a pair of engines, with the evidence and the fix: precision, routing, weights of another
    version, a sampling mask, a temperature, values that are shifted, missing or filled with zeros.

    The first line is the verdict, the second what to do first. The exit code is 0 where nothing is wrong, 3 where a
    fault is named, 2 where a file cannot be read.

    \b
    Examples:
      firstorder doctor runs/my-run/*/rollouts/step-000070.safetensors --out doctor.html
      firstorder doctor nemo_logs/train_data_step12.jsonl slime/train_12_0.pt
      firstorder doctor dump.parquet --columns tokens=ids,is_response=mask,logp_mu=gen_logp,logp_old=train_logp
      firstorder doctor step.jsonl --json --fail-on routing,stale

    A trace holds one step's tokens and their log-probabilities under mu (the engine that sampled) and old (the trainer
    at the same weights), and if it has them the experts of both. docs/doctor.md has the formats, what each dump lacks,
    and how often the diagnosis is right.
    """
    from lab.doctor.diagnosis import diagnose
    from lab.doctor.importers import load_dump
    from lab.doctor.importers.columns import parse
    from lab.doctor.page import Patient, render
    from lab.files import atomic_write
    from lab.strict import ConfigError

    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out: expected a file in a folder that exists, got {out}")
    failing, names = _failing(fail_on), None if columns is None else parse(columns)
    patients, told = [], []
    for index, (path, label) in enumerate(zip(traces, _labels(traces), strict=True)):
        dump = load_dump(path, names, old)
        label += ", with pi in place of old" if dump.is_pi else ""
        patients.append(patient := Patient(label, index, dump.trace, diagnose(dump.trace), dump.caveat))
        told.append(_object(patient, dump))
        if not as_json:
            typer.echo("\n".join(_lines(patient, dump)))
    if as_json:
        typer.echo(json.dumps({"traces": told}, indent=2))
    if out is not None:
        atomic_write(out, render(patients))
        typer.echo(f"page: {out}", err=as_json)
    faults = [patient.diagnosis.fault for patient in patients]
    if any(fault is not None and fault.name in failing for fault in faults):
        raise typer.Exit(FAULT)


def _failing(text: str) -> set[str]:
    """The names of the causes that make the exit code 3."""
    from lab.doctor.causes import CAUSES, UNKNOWN
    from lab.strict import ConfigError, did_you_mean

    known = [cause.name for cause in (*CAUSES, UNKNOWN) if cause.name != "nothing"]
    if text in ("any", "none"):
        return set(known) if text == "any" else set()
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"--fail-on: {name!r} is no cause{did_you_mean(name, ['any', 'none', *known])}")
    return set(names)


def _lines(patient: Patient, dump: Dump) -> list[str]:
    """The verdict, the first thing to do, the data, the evidence, and where it stands among published figures."""
    from lab.doctor import standing

    verdict, first, *rest = patient.diagnosis.lines()
    num, B = int(patient.diagnosis.seen["num_tokens"]), len(dump.trace)
    read = [f"{num:,} sampled tokens of {B:,} responses, read as {dump.format}."]
    caveat = [f"Caveat: {dump.caveat}"] if dump.caveat else []
    unused = [f"Not used: {', '.join(dump.unused)}."] if dump.unused else []
    stands = standing.lines(standing.figures_of(dump.trace))
    return [f"{patient.label}: {verdict}", first, *caveat, *read, *unused, *rest, *stands]


def _object(patient: Patient, dump: Dump) -> dict[str, Any]:
    """The same for a program."""
    found = patient.diagnosis
    return {
        "trace": patient.label,
        "is_pi": dump.is_pi,
        "verdict": found.verdict,
        "do_first": found.named[0].fix,
        "fault": None if found.fault is None else found.fault.name,
        "strengths": {cause.name: strength for cause, strength in found.strengths.items()},
        "clues": dict(found.seen),
        "num_responses": len(dump.trace),
        "format": dump.format,
        "caveat": dump.caveat or None,
        "caution": found.caution,
        "unused": list(dump.unused),
    }


def _labels(paths: list[Path]) -> list[str]:
    """Each file's name, with as many folders before it as tell the files apart."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(labels)) == len(set(paths)):
            return labels
    return [str(path) for path in paths]
