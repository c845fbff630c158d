"""A preset named on the command line does not silently keep the config's numbers."""

from __future__ import annotations

import pytest

from firstorder.cli import main
from lab.config.load import load
from lab.config.presets import kept_numbers
from sandbox.config import SandboxRun

FILE = "configs/demo/none.yaml"
PRESET, HIGH = "--algorithm.objective.preset", "--algorithm.objective.eps_high"
WHOLE = ["--algorithm.objective", "{preset: gspo}"]


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ([PRESET, "gspo"], ["0.27", "0.0004"]),
        ([PRESET, "minirl"], []),  # its own eps_high is 0.27, too
        ([PRESET, "gspo", HIGH, "1e-3"], []),
        ([HIGH, "0.3"], []),
        (["--seed", "1"], []),  # no preset is named, though the file has another number than its preset
        (WHOLE, []),
        ([*WHOLE, PRESET, "gspo"], []),
    ],
)
def test_a_number_that_the_new_preset_has_otherwise_is_named(overrides: list[str], kept: list[str]) -> None:
    objective = load(FILE, overrides, {"sandbox": SandboxRun}).algorithm.objective
    lines = kept_numbers(objective, overrides)
    assert len(lines) == bool(kept)
    assert all(word in line for line in lines for word in kept)


def test_the_command_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", FILE, PRESET, "gspo", "--print-config"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("algorithm.objective.eps_high: the config's 0.27 stays; gspo's own is 0.0004 (")
    assert "stays" not in captured.out
