"""An installed firstorder, outside of any checkout: nothing is missing, and nobody else's package is taken for ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("theory", "lab", "sandbox", "scaled", "firstorder")
FOR_DEVELOPERS = ("scaled/pyrightconfig.json",)


def _tracked(*folders: str) -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    return [path for path in subprocess.check_output(command, text=True).splitlines() if (ROOT / path).is_file()]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel was unpacked."""
    source, built, place = (tmp_path_factory.mktemp(name) for name in ("source", "built", "place"))
    for path in _tracked(*PACKAGES, "configs", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), str(source)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    (wheel,) = built.glob("firstorder-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    return place


def _run(place: Path, folder: Path, *words: str, flags: tuple[str, ...] = ("-P",)) -> subprocess.CompletedProcess[str]:
    """The command as that installation has it, started in the folder."""
    command = [sys.executable, *flags, "-m", "firstorder", *words]
    environment = {**os.environ, "PYTHONPATH": str(place)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_has_every_file_of_the_packages_and_every_config(installed: Path) -> None:
    wanted = {path for path in _tracked(*PACKAGES) if path not in FOR_DEVELOPERS}
    wanted |= {path.replace("configs", "lab/config/shipped_files", 1) for path in _tracked("configs")}

    assert wanted <= {path.relative_to(installed).as_posix() for path in installed.rglob("*") if path.is_file()}


def test_a_run_by_name_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    done = _run(installed, tmp_path, "train", "smoke", "--num_steps", "1", "--progress", "none")

    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("runs/smoke/*/report.html"))
    (found,) = tmp_path.glob("runs/smoke/*/manifest.json")
    assert '"commit"' not in found.read_text()


def test_claims_are_listed_away_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    done = _run(installed, tmp_path, "reproduce", "45", "--list")

    assert done.returncode == 0, done.stderr
    assert "half_the_rate_moves_the_border" in done.stdout


def test_a_module_of_our_name_in_the_working_folder_does_no_harm(installed: Path, tmp_path: Path) -> None:
    """`python -m` puts the working folder first on the path."""
    (tmp_path / "lab.py").write_text("raise RuntimeError('not ours')\n", encoding="utf-8")

    done = _run(installed, tmp_path, "configs", "demo", flags=())

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("demo/base ")


def test_anothers_package_of_that_name_is_one_line(installed: Path, tmp_path: Path) -> None:
    """One that comes first on the path for good, as another project's package in the same environment does."""
    other = tmp_path / "other"
    (other / "sandbox").mkdir(parents=True)
    (other / "sandbox" / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(other), str(installed)))}

    command = [sys.executable, "-P", "-m", "firstorder", "--version"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"error: sandbox: expected firstorder's own package {installed}/sandbox, got {other}/sandbox;"
    )
