"""Laws of configs of another kind: a run's, an audit's or a flow's is named, with the command that takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.config.kinds import KINDS
from lab.config.load import read
from lab.config.shipped import FOLDER, names
from tests.firstorder.test_cli import TINY, fails, tiny

__all__ = ["tiny"]  # a fixture

OF_A_RUN = ["train {}", "plan {}", "launch {} --kind ray", "ladder {}", "defects {}", "filter {} data.jsonl",
            "calibrate trace.jsonl {}", "export {} --to model", "promote runs/x --to {}"]  # fmt: skip


@pytest.mark.parametrize("command", OF_A_RUN)
@pytest.mark.parametrize(
    ("config", "got"),
    [
        ("audit/small", "that of an audit (policies); use firstorder audit"),
        ("audit/league_tokens", "that of an audit (policies); use firstorder audit"),
        ("flow/small", "that of a flow (problems); use firstorder flow"),
        ("flow/moe_small", "that of a flow (problems); use firstorder flow"),
    ],
)
def test_a_study_given_to_a_command_of_runs(
    command: str, config: str, got: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its backend, the line does not speak of the backend or of an unknown key."""
    assert fails(capsys, *command.format(config).split()) == f"{config}: expected the config of a run, got {got}"


def test_a_run_or_the_other_study_given_to_a_study(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both ways round, and between the two kinds of study."""
    run = "got that of a run (algorithm); use firstorder train"
    assert fails(capsys, "audit", "tiny.yaml") == f"tiny.yaml: expected the config of an audit, {run}"
    assert fails(capsys, "flow", "tiny.yaml") == f"tiny.yaml: expected the config of a flow, {run}"
    wanted = "audit/small: expected the config of a flow, got that of an audit (policies); use firstorder audit"
    assert fails(capsys, "flow", "audit/small") == wanted


def test_a_misspelt_key_is_no_other_kind(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run's config with a key of a study, or an override of one, is a run's with an unknown key."""
    assert fails(capsys, "train", "tiny.yaml", "--policies", "[]").startswith("tiny.yaml: policies: unknown key")
    tiny.write_text(f"{TINY}\nproblems: 3\n")
    assert fails(capsys, "train", "tiny.yaml").startswith("tiny.yaml: problems: unknown key")


def test_every_shipped_config_has_one_kind() -> None:
    """The keys that tell the kinds apart are in every config, one of them in each."""
    found = [[key for key in KINDS if key in read(FOLDER / f"{name}.yaml")] for name in names()]
    assert len(found) > 40 and all(len(keys) == 1 for keys in found)
