"""The shape of a cluster run's model: from its Hugging Face folder, or by name where the folder is elsewhere."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from lab.hf import ModelShape, parse_shape, read_json

SHAPES = Path(__file__).parent / "shapes"


def load_shape(path: str | Path, name: str | None = None) -> ModelShape:
    """The shape of the Hugging Face folder `path`; where there is none, of `shapes/<name>.json`.

    Neither has the layers that predict tokens beyond the next (DeepSeek-V3 has one): they are not trained.

    Raises ValueError, naming file and field, for what is missing or not supported, and where folder and name disagree.
    """
    file = Path(path) / "config.json"
    named = None if name is None else _named(name)
    if not file.is_file():
        if named is None:
            raise ValueError(f"model.path: expected a Hugging Face folder with config.json, got {path}")
        return named
    shape = parse_shape(read_json(file), str(file), "scaled")
    if named is not None and named != shape:
        field = next(one.name for one in fields(shape) if getattr(named, one.name) != getattr(shape, one.name))
        theirs, ours = getattr(named, field), getattr(shape, field)
        raise ValueError(
            f"model.shape: expected the shape of {file}, got {name}: {field} is {theirs}, not {ours} (null takes the "
            "folder's own)"
        )
    return shape


def _named(name: str) -> ModelShape:
    file = SHAPES / f"{name}.json"
    if not file.is_file():
        known = sorted(p.stem for p in SHAPES.glob("*.json"))
        raise ValueError(f"model.shape: expected one of {', '.join(known)}, got {name}")
    return parse_shape(read_json(file), file.name, "scaled")
