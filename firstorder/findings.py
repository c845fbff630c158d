"""The findings of `firstorder doctor` in traces and folders: in words, as JSON and on a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from lab.doctor.diagnosis import Diagnosis
    from lab.doctor.importers import Dump
    from lab.doctor.layers.reference import ReferenceModules
    from lab.doctor.page import Patient
    from lab.doctor.steps.page import Ward


@dataclass
class Visit:
    """The named traces (patients) and folders (wards), the JSON on them, and the faults found in them."""

    patients: list[Patient]
    wards: list[Ward]
    told: dict[str, list[dict[str, Any]]]
    faults: list[str]


def look(
    paths: Sequence[Path], columns: Mapping[str, str] | None, old: Path | None, model: Path | None, is_quiet: bool
) -> Visit:
    """The visit of all paths, with the model of old's weights if one is named; prints findings unless `is_quiet`."""
    from firstorder.localise import open_reference
    from lab.doctor.importers import load_dump
    from lab.doctor.page import Patient
    from lab.doctor.steps import words

    # A dense model has no routes to replay, so that its weights need not be opened.
    is_dense = model is not None and has_no_experts(model)
    reference = None if model is None or is_dense else open_reference(model)
    visit = Visit([], [], {"traces": [], "runs": []}, [])
    for path, label in zip(paths, _labels(list(paths)), strict=True):
        if path.is_dir():
            ward = _ward(path, label, columns, is_dense)
            visit.wards.append(ward)
            visit.told["runs"].append({"run": label} | words.as_object(ward.course, ward.num_shared) | ward.about)
            said, fault = words.lines(ward.course, ward.num_shared), ward.course.fault
            said = [f"{label}: {said[0]}", said[1], *ward.lines(), *said[2:]]
        else:
            dump = load_dump(path, columns, old)
            name = label + (", with pi in place of old" if dump.is_pi else "")
            found = _diagnosed(path, dump, reference, is_dense)
            patient = Patient(name, len(visit.patients), dump.trace, found, dump.caveat)
            visit.patients.append(patient)
            visit.told["traces"].append(_object(patient, dump))
            said, fault = _lines(patient, dump), patient.diagnosis.fault
        visit.faults += [] if fault is None else [fault.name]
        if not is_quiet:
            typer.echo("\n".join(said))
    return visit


def has_no_experts(folder: Path) -> bool:
    """Whether a Hugging Face folder's config.json is that of a dense model: none of its fields counts experts."""
    from lab.hf import read_json

    def experts(fields: Mapping[str, Any]) -> bool:
        # Nested, as in text_config of models that also see.
        return any(
            experts(value) if isinstance(value, Mapping) else bool(value) and "expert" in name
            for name, value in fields.items()
        )

    return not experts(read_json(folder / "config.json"))


def _diagnosed(path: Path, dump: Dump, reference: ReferenceModules | None, is_dense: bool) -> Diagnosis:
    from lab.doctor.diagnosis import diagnose

    try:
        return diagnose(dump.trace, reference, is_dense)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _ward(folder: Path, label: str, columns: Mapping[str, str] | None, is_dense: bool) -> Ward:
    """The course of a folder's steps, read one at a time."""
    from lab.doctor.importers.folders import load_steps, step_files
    from lab.doctor.steps.course import Watch
    from lab.doctor.steps.page import Ward

    # `watch` keeps figures and the worst trace alone: all traces of a run may be more than memory holds.
    watch, notes = Watch(is_dense), defaultdict[str, list[int]](list)
    form, unused, is_pi = "", (), False
    for dump in load_steps(step_files(folder, columns), columns):
        form, unused, is_pi = dump.format, unused or dump.unused, is_pi or dump.is_pi
        watch.add(dump.trace)
        for note in filter(None, (dump.caveat, *dump.left_out)):
            notes[note].append(dump.trace.step)
    return Ward(label, watch.course(), watch.num_shared, watch.worst, form, notes, unused, is_pi)


def write_page(visit: Visit, out: Path) -> None:
    """The page of a folder, or of all traces together."""
    from lab.doctor.page import render
    from lab.doctor.steps.page import render as render_steps
    from lab.files import atomic_write

    atomic_write(out, render_steps(visit.wards[0]) if visit.wards else render(visit.patients))


def _lines(patient: Patient, dump: Dump) -> list[str]:
    """The verdict, the first thing to do, the data, the evidence, and its place among published figures."""
    from lab.doctor import standing
    from lab.doctor.words import counted

    verdict, first, *rest = patient.diagnosis.lines()
    tokens = counted(int(patient.diagnosis.seen["num_tokens"]), "sampled token")
    read = f"{tokens} of {counted(len(dump.trace), 'response')}, read as {dump.format}."
    caveat = [f"Caveat: {dump.caveat}"] if dump.caveat else []
    unused = [f"Not used: {', '.join(dump.unused)}."] if dump.unused else []
    stands = standing.lines(standing.figures_of(dump.trace))
    return [f"{patient.label}: {verdict}", first, *caveat, read, *unused, *rest, *stands]


def _object(patient: Patient, dump: Dump) -> dict[str, Any]:
    """The same as JSON fields."""
    found = patient.diagnosis
    return {
        "trace": patient.label,
        "is_pi": dump.is_pi,
        "verdict": found.verdict,
        "do_first": found.named[0].fix,
        "fault": None if found.fault is None else found.fault.name,
        "share_right": found.share_right,
        "replay": None if found.trial is None else asdict(found.trial) | {"removed": found.trial.removed},
        "candidates": [cause.name for cause in found.candidates],
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
        # Distinct paths, as a file may be named twice.
        if len(set(labels)) == len(set(paths)):
            return labels
    return [str(path) for path in paths]
