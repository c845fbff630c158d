"""Laws of the command line's own mistakes: each is one line with the option, what was expected, and what came."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstorder.cli import app
from tests.firstorder.test_cli import TINY, fails

MISTAKES = [
    (["doctor", "a.jsonl", "--column", "b"], "--column: unknown option; did you mean '--columns'? (expected one of: "),
    (["report", "a", "--foo"], "--foo: unknown option (expected one of: --out, --open, --watch, --debug, --help)"),
    (["--foo"], "--foo: unknown option (expected one of: --version, --help)"),
    (["bench", "more"], "expected no further argument, got more"),
    (["trian"], "unknown command 'trian'; did you mean 'train'? (expected one of: "),
    (["report", "a", "--out"], "--out: expected a value after it, got nothing"),
    (["report", "a", "--out", "--open"], "--out: expected a value after it, got --open"),
    (["reproduce", "9", "--regime", "--list"], "--regime: expected a value after it, got --list"),
    (["train", "a", "--print-config=3"], "--print-config: expected no value, got 3"),
    (["filter", "a", "b", "--samples", "x"], "--samples: expected an integer, got x"),
    (["filter", "a", "b", "--samples", "1e3"], "--samples: expected an integer, got 1e3"),
    (["filter", "a", "b", "--samples", ""], "--samples: expected an integer, got ''"),
    (["filter", "a", "b", "--samples", "9" * 5000], f"--samples: expected an integer, got {'9' * 57}..."),
    (["filter", "a", "b", "--samples", "0"], "--samples: expected at least 1, got 0"),
    (["filter", "a", "b", "--max-pass-rate", "x"], "--max-pass-rate: expected a number, got x"),
    (["plan", "a", "--failures", "-1"], "--failures: expected at least 0, got -1"),
    (["plan", "a", "--failures", "nan"], "--failures: expected at least 0, got nan"),
    (["launch", "a", "--kind", "pbs"], "--kind: expected one of slurm, ray, got pbs"),
    (["launch", "a"], "--kind: expected one of slurm, ray, got nothing"),
    (["translate", "a", "--to", "nemo"], "--to: expected one of verl, trl, slime, got nemo"),
    (["export", "a"], "missing --to: where to write the Hugging Face folder"),
    (["calibrate", "a"], "missing CONFIG: YAML file of a run with `backend: sandbox`"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "wanted"), MISTAKES, ids=[" ".join(words)[:40] for words, _ in MISTAKES])
def test_a_mistake_names_the_option_and_both_values(
    words: list[str], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown, without a value, of a wrong type or out of range: one line, and no file of an option's name."""
    monkeypatch.chdir(tmp_path)
    said = fails(capsys, *words)
    assert said.startswith(wanted) if wanted.endswith(" ") else said == wanted
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--prgoress", "none"], "--prgoress: unknown option; did you mean '--progress'?"),
        (["--print_config"], "--print_config: expected a value after it, got nothing; did you mean '--print-config'?"),
        (["--sed", "3"], "tiny.yaml: sed: unknown key; did you mean 'seed'? (expected one of: "),
        (["--seed"], "--seed: expected a value after it, got nothing"),
        (
            ["--sampling.max_tokens", "3"],
            "tiny.yaml: sampling: unknown key; did you mean 'logging'? (expected one of: ",
        ),
    ],
)
def test_an_option_of_the_command_is_recognised_beside_the_fields(
    words: list[str], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where every field of the config is an option, a misspelt one of the command is not told as a field alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    said = fails(capsys, "train", "tiny.yaml", *words)
    assert said.startswith(wanted) if wanted.endswith(" ") else said == wanted


def test_every_command_tells_its_mistakes_so() -> None:
    """Each has the class that does it, and each argument and option the words that are shown where it is missing."""
    from typer.main import get_command

    from firstorder.usage import Command

    commands = get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    assert len(commands) > 15
    for command in commands.values():
        assert isinstance(command, Command)
        assert all(getattr(parameter, "help", None) for parameter in command.params)
