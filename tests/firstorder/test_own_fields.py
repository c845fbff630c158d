"""Laws of the commands that set fields of a config themselves: an option that would have no effect is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstorder.cli import main
from tests.firstorder.test_cli import TINY, fails, tiny

__all__ = ["tiny"]  # a fixture


@pytest.mark.parametrize("command", ["defects", "calibrate trace.jsonl"])
@pytest.mark.parametrize(
    "words",
    [
        ["--engine.defects", "[{kind: router_noise, std: 0.3}]"],
        ["--engine", "{defects: []}"],
        ["--engine.defects.0.std=0.3"],
        ["--num_steps", "3"],
        ["--algorithm.replay.mode", "R3"],
        ["--algorithm", "{replay: {mode: R3}, objective: {preset: minirl}}"],
    ],
    ids=" ".join,
)
def test_a_field_that_a_command_sets_itself_is_no_option(
    command: str, words: list[str], tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`defects` and `calibrate` choose defects, steps and routing: an override is one line before anything is read."""
    monkeypatch.setattr("sandbox.measure.defect_table.Bench", lambda *a, **k: pytest.fail("a model was made"))
    name, (key, _, value) = command.split()[0], "=".join(words).partition("=")
    wanted = f"no override of engine.defects, num_steps or algorithm.replay, which `firstorder {name}` sets itself"
    assert fails(capsys, *command.split(), str(tiny), *words) == f"{key}: expected {wanted}; got {value}"


@pytest.mark.parametrize("command", ["defects", "calibrate"])
def test_a_files_own_field_is_no_override(
    command: str, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run's config may hold these fields, and other fields of their blocks may be set; the help names the three."""
    tiny.write_text(TINY.replace("algorithm:\n", "engine: {defects: [{kind: router_noise}]}\nalgorithm:\n"))
    words = [command, *(["trace.jsonl"] if command == "calibrate" else []), str(tiny)]
    line = fails(capsys, *words, "--algorithm.sampling.temperature", "0.5", "--out", "no/where")
    assert line == "--out: expected a file in a folder that exists, got no/where"
    assert main([command, "--help"]) == 0
    assert "but engine.defects, num_steps and algorithm.replay" in " ".join(capsys.readouterr().out.split())
