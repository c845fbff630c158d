"""`firstorder doctor --localise`: the first module at which an engine departs from the model, or from the other one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lab.doctor.layers.reference import Precision, ReferenceModules
    from lab.doctor.layers.words import Departure


def localise(paths: Sequence[Path], model: Path | None, precision: str | None) -> list[Departure]:
    """The place where each file's engine departs from the model, or one of two dumps from the other.

    Raises ValueError for files that are neither dumps of hidden states nor traces, and for missing options.
    """
    from lab.doctor.layers.states import is_states
    from lab.files import require_regular
    from lab.strict import ConfigError

    wanted = _precision(precision)
    folders = [path for path in paths if path.is_dir()]
    if folders:
        raise ConfigError(f"--localise: expected traces or dumps of hidden states, got the folder {folders[0]}")
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: no such file")
        require_regular(path)
    are_states = [path.suffix == ".safetensors" and is_states(path) for path in paths]
    if model is None:
        if len(paths) != 2 or not all(are_states):
            raise ConfigError(
                "--localise: expected --model FOLDER, or two dumps of hidden states (docs/how-to/find-the-layer.md)"
            )
        return [_pair(paths[0], paths[1], wanted)]
    reference = open_reference(model)
    out: list[Departure] = []
    for path, is_dump in zip(paths, are_states, strict=True):
        out += [_dump(path, reference, wanted)] if is_dump else _trace(path, reference, wanted)
    return out


def open_reference(folder: Path) -> ReferenceModules:
    """The model of a folder: the sandbox's exact engine where that opens it, else transformers."""
    from lab.hf import parse_shape, read_json

    fields = read_json(folder / "config.json")
    try:
        parse_shape(fields, str(folder / "config.json"), "sandbox")
    except ValueError:
        # No shape of the sandbox's decoder; transformers may still open it.
        from lab.doctor.layers.hf_model import TransformersReference

        return TransformersReference.load(folder)
    from sandbox.measure.layers import DecoderReference

    return DecoderReference.load(folder)


def _precision(text: str | None) -> Precision | None:
    from lab.doctor.layers.reference import PRECISIONS
    from lab.strict import ConfigError, did_you_mean

    found: list[Precision] = [one for one in PRECISIONS if one == text]
    if text is not None and not found:
        hint = did_you_mean(text, PRECISIONS)
        raise ConfigError(f"--precision: expected one of {', '.join(PRECISIONS)}, got {text!r}{hint}")
    return found[0] if found else None


def _of(text: str) -> Precision:
    known = _precision(text)
    assert known is not None
    return known


def _dump(path: Path, reference: ReferenceModules, precision: Precision | None) -> Departure:
    from lab.doctor.layers.modules import inspect
    from lab.doctor.layers.states import States
    from lab.doctor.layers.words import of_modules

    states = States.load(path)
    wanted = precision or _of(states.precision)
    try:
        checks = inspect(states, reference, wanted)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return of_modules(path.name, checks, wanted, reference.name)


def _pair(mu: Path, old: Path, precision: Precision | None) -> Departure:
    from lab.doctor.layers.pair import compare
    from lab.doctor.layers.states import States
    from lab.doctor.layers.words import of_pair

    first, second = States.load(mu), States.load(old)
    kinds = (first.precision, second.precision)
    # The coarser side decides how much rounding may part the two.
    wanted = precision or _of("bf16" if "bf16" in kinds else "fp16" if "fp16" in kinds else "fp32")
    return of_pair(f"{mu.name} against {old.name}", compare(first, second, wanted), wanted)


def _trace(path: Path, reference: ReferenceModules, precision: Precision | None) -> list[Departure]:
    from lab.doctor.importers import load_trace
    from lab.doctor.layers.routers import trace_routes
    from lab.doctor.layers.words import of_trace

    # A trace does not say in which dtype its engines compute: bf16, unless --precision names another.
    trace, wanted = load_trace(path), precision or _of("bf16")
    try:
        found = {side: trace_routes(trace, side, reference, wanted) for side in ("mu", "old")}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return [of_trace(f"{path.name}, {side}", one, wanted, reference.name) for side, one in found.items()]
