"""`firstorder doctor`: what is wrong with a pair of engines, from what one of them sampled and both scored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Traces: .safetensors, .jsonl, .parquet, or slime's .pt.")
    ],
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Also write a page with pictures.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
) -> None:
    """Say what is wrong with a pair of engines, with the evidence and the fix: precision, routing, weights of another
    version, a sampling mask, a temperature, values that are shifted, missing or filled with zeros.

    \b
    Examples:
      firstorder doctor runs/my-run/*/rollouts/step-000070.safetensors --out doctor.html
      firstorder doctor verl_dump/12.jsonl slime/train_12_0.pt

    A trace holds one step's tokens and their log-probabilities under mu (the engine that sampled) and old (the trainer
    at the same weights), and if it has them the experts of both. docs/doctor.md has the formats, what verl and slime
    dump and lack, and how often the diagnosis is right.
    """
    from lab.doctor.diagnosis import diagnose
    from lab.doctor.importers import load_trace
    from lab.doctor.page import Patient, render
    from lab.files import atomic_write
    from lab.strict import ConfigError

    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out: expected a file in a folder that exists, got {out}")
    patients = []
    for index, (path, label) in enumerate(zip(traces, _labels(traces), strict=True)):
        trace = load_trace(path)
        patients.append(Patient(label, index, trace, diagnosis := diagnose(trace)))
        typer.echo(f"{label}: {int(diagnosis.seen['num_tokens']):,} sampled tokens of {len(trace)} responses")
        typer.echo("\n".join(diagnosis.lines()))
    if out is not None:
        atomic_write(out, render(patients))
        typer.echo(f"page: {out}")


def _labels(paths: list[Path]) -> list[str]:
    """Each file's name, with as many folders before it as tell the files apart."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(labels)) == len(set(paths)):
            return labels
    return [str(path) for path in paths]
