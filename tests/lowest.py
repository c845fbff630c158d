"""Constraints for pip that hold each dependency at its oldest release: pyproject.toml's `>=` bounds as `==`.

`make test-lowest` runs the core's tests on them, so that a bound is the oldest release that was seen to work. torch is
left out: its oldest builds for Linux bring gigabytes of CUDA, and requirements/torch.txt names the one for CPUs.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("dev", "data", "reproduce")
"""The optional dependencies of the core's tests."""


def lowest(text: str, extras: tuple[str, ...] = EXTRAS) -> dict[str, str]:
    """The oldest release of each package with a `>=` bound, the highest of its bounds; text is a pyproject.toml's."""
    project = tomllib.loads(text)["project"]
    stated = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    bounds: dict[str, str] = {}
    for required in map(Requirement, stated):
        for bound in required.specifier:
            old = bounds.get(required.name, "0")
            if bound.operator == ">=" and required.name != "torch" and Version(bound.version) > Version(old):
                bounds[required.name] = bound.version
    return bounds


if __name__ == "__main__":
    for name, version in lowest(PYPROJECT.read_text(encoding="utf-8")).items():
        print(f"{name}=={version}")
