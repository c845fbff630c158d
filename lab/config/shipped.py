"""The configs that come with the project: `configs/` of a checkout, and a copy of it inside an installed package."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from lab.strict import ConfigError
from theory.names import did_you_mean

_INSTALLED = Path(__file__).with_name("shipped_files")  # setup.py puts them there
_NUMBER = re.compile(r"^\d+\. ")
# A lookbehind for each abbreviation, because alternatives in one must have the same width.
_FULL_STOP = re.compile(r"(?<!\bsec)(?<!\bApp)(?<!\bFig)(?<!\bEq)\. |(?<=\?) ")
FOLDER = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2] / "configs"


def names() -> list[str]:
    """Every shipped config's name, sorted: its path below `configs/` without the suffix, as in `demo/r3`."""
    return sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml"))


def words(name: str) -> str:
    """The first sentence of the comment at the top of a shipped config."""
    lines = FOLDER.joinpath(f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), lines))
    return _FULL_STOP.split(_NUMBER.sub("", comment))[0].rstrip(".")


def located(path: Path) -> Path:
    """The path itself where it exists, else the shipped config that it names: `demo/r3` or `configs/demo/r3.yaml`.

    Raises ConfigError for any other path.
    """
    if path.exists():
        return path
    name = path.with_suffix("") if path.suffix == ".yaml" else path
    parts = name.parts[1:] if name.parts[:1] == ("configs",) else name.parts
    known = "/".join(parts)
    if known in names():
        return FOLDER / f"{known}.yaml"
    hint = did_you_mean(known, names())
    raise ConfigError(f"{path}: no such file, and no such name in `firstorder configs`{hint and f'; {hint}'}")
