"""Laws of numbers far beyond what an audit or a flow can enumerate: each is one line and exit code 2, and soon."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.firstorder.test_audit import TINY
from tests.firstorder.test_cli import fails

SIZES = [
    ("audit", "policies.2.model.hidden_size", 128), ("audit", "policies.2.model.num_layers", 8),
    ("audit", "policies.2.model.num_heads", 64), ("audit", "policies.2.model.num_kv_heads", 64),
    ("audit", "policies.2.model.head_dim", 128), ("audit", "policies.2.model.num_experts", 128),
    ("audit", "policies.2.model.expert_size", 128), ("audit", "groups.0.size", 4096),
    ("audit", "policies.2.engines.fp8 weights.defects.0.block_size", 2**31),
    ("audit", "policies.0.seeds", 10**5), ("flow", "problems.count", 10**5), ("flow", "training.num_updates", 10**7),
]  # fmt: skip


@pytest.mark.parametrize(("command", "field", "most"), SIZES)
def test_sizes_that_cannot_be_enumerated_are_refused(
    command: str, field: str, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is made: they were errors of memory, or work without a first case."""
    # The config alone is read: without its bound, a size would make the test run on instead of fail.
    said = fails(capsys, command, f"{command}/small", f"--{field}", str(10**12), "--print-config")
    assert f": expected a value less than or equal to {most}, got {10**12}" in said
    assert said.startswith(f"{command}/small: {field.partition('.')[0]}")


@pytest.mark.parametrize("words", [("calibrate", "trace.jsonl", "smoke"), ("defects", "smoke")])
def test_draws_without_an_end_are_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Each draw is a rollout of a whole batch."""
    assert fails(capsys, *words, "--seeds", "1001") == "--seeds: expected at most 1000, got 1001"


def test_figures_beyond_the_floats_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of an objective's own numbers: the audit ran to its end, and its page could not be written."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    objectives = "[{preset: minirl}, {preset: vespo, label: no weight, k_neg: 1e+12}]"
    said = fails(capsys, "audit", "tiny.yaml", "--objectives", objectives, "--progress", "none")
    assert re.fullmatch(
        r"tiny\.yaml: objectives: expected a finite bias of no weight, got (inf|nan) \(.*: 0\.\d+\)", said
    )


@pytest.mark.parametrize(
    ("value", "most"),
    [("1e-13", "greater than or equal to 0.000000000001"), ("1e+13", "less than or equal to 1000000000000")],
)
@pytest.mark.parametrize(
    ("command", "field"),
    [
        ("audit", "policies.0.scale"), ("audit", "policies.1.temperature"), ("flow", "problems.policy.scale"),
        ("flow", "training.temperature"),
    ],
)  # fmt: skip
def test_scales_that_leave_no_number_are_refused(
    command: str, field: str, value: str, most: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A logit of scale / temperature beyond the floats made every figure NaN, and the page's error named no field."""
    said = fails(capsys, command, f"{command}/small", f"--{field}", value, "--print-config")
    assert said == f"{command}/small: {field}: expected a value {most}, got {float(value)}"
