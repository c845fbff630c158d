"""A preset named on the command line does not silently keep the file's numbers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from firstorder.cli import main
from lab.config.presets import kept_numbers

FILE = "configs/demo/none.yaml"
PRESET, HIGH = "--algorithm.objective.preset", "--algorithm.objective.eps_high"


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ([PRESET, "gspo"], ["0.27", "0.0004"]),
        ([PRESET, "minirl"], []),  # its own eps_high is 0.27, too
        ([PRESET, "grpo"], []),  # the file's own preset
        ([PRESET, "gspo", HIGH, "1e-3"], []),
        ([HIGH, "0.3"], []),
        (["--algorithm.objective", "{preset: gspo}"], []),
        ([PRESET, "nosuch"], []),  # an error, which `load` has
    ],
)
def test_a_number_that_the_new_preset_has_otherwise_is_named(overrides: list[str], kept: list[str]) -> None:
    lines = kept_numbers(FILE, overrides)
    assert bool(lines) == bool(kept)
    assert all(word in line for line in lines for word in kept)


def test_the_command_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", FILE, PRESET, "gspo", "--print-config"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"algorithm.objective.eps_high: 0.27 of {FILE} stays; gspo's own is 0.0004 (")
    assert "stays" not in captured.out


def test_a_pipe_is_not_read_again(tmp_path: Path) -> None:
    """It would give nothing, or wait for a writer."""
    os.mkfifo(tmp_path / "config.yaml")
    assert kept_numbers(tmp_path / "config.yaml", [PRESET, "gspo"]) == []
