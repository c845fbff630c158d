"""The environment of a run: versions, commit, host. Numbers are comparable, and bits equal, only where these agree."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("firstorder", "torch", "lightning", "numpy", "safetensors", "transformers")

CODE = tuple(f":/{name}" for name in ("theory", "lab", "sandbox", "scaled", "firstorder", "configs", "requirements"))
"""The parts of a checkout that a run's numbers depend on, as git pathspecs; written results are no change."""


def manifest(seed: int) -> dict[str, Any]:
    """The environment of a run: seed, package versions, git commit (if in a checkout), Python, platform, CPU."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    found: dict[str, Any] = {"seed": seed, "versions": versions, "python": platform.python_version()}
    # An environment inside another project's checkout must not lend us that project's commit.
    top = _git("rev-parse", "--show-toplevel")
    commit = _git("rev-parse", "HEAD") if top and Path(top).resolve() == Path(__file__).resolve().parents[1] else None
    if commit:
        found["commit"] = commit
        status = _git("status", "--porcelain", "--", *CODE)
        # No answer, as after a timeout on a slow disk, is no promise that nothing changed.
        found["has_local_changes"] = None if status is None else status != ""
    return found | {
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
    }


def _git(*arguments: str) -> str | None:
    """The output of git in the project's own folder, or None without git, a checkout or an answer in time."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_model() -> str:
    """The processor's name from Linux, elsewhere from Python."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
