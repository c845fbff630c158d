"""`lab.doctor.diagnose` in a trainer's environment, which has few of this project's dependencies."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "watch-the-mismatch.md"
TRAINERS = {"torch", "numpy", "pydantic", "safetensors", "filelock"}
ADDED = {"jaxtyping"}
"""The one package that the how-to installs beside this project."""

CODE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from lab.doctor import diagnose

print(diagnose([[7, 4, 4]], [[0, -1.0, -2.0]], [[0, -1.0, -2.0]], [[0, 1, 1]]).seen["k3_kl"])
"""


def dependencies() -> set[str]:
    """The packages that an installation brings, extras included, in lower case."""
    return {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() for line in requires("firstorder") or ()} - {"firstorder"}


def test_a_batch_is_diagnosed_with_the_packages_that_a_trainer_has() -> None:
    """With every other dependency absent, the example of its docstring gives its KL."""
    absent = dependencies() - TRAINERS - ADDED
    assert {"transformers", "lightning", "scipy", "pandas", "plotly", "typer"} <= absent
    # torch itself imports some of them.
    names = {
        module
        for module, distributions in packages_distributions().items()
        if {name.lower() for name in distributions} & (absent - {"jinja2", "packaging"})
    }
    assert "transformers" in names
    command = [sys.executable, "-c", CODE, *sorted(names)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0.0\n"), done.stderr


def test_the_how_to_names_these_packages() -> None:
    """Its first paragraph has the packages that the trainer must have, and the command that adds the other."""
    first = HOW_TO.read_text().partition("\n```python")[0]
    assert all(re.search(rf"\b{name}\b", first) for name in TRAINERS)
    assert f"pip install {' '.join(sorted(ADDED))}" in first and "pip install --no-deps -e ." in first
