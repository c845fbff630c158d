"""Laws of errors found after a config's parse: every command that takes CONFIG names its file and the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstorder.cli import main
from lab.config.naming import naming
from lab.config.run import LoggingBlock
from lab.strict import ConfigError, Strict
from tests.firstorder.test_cli import ROOT, TINY, fails, tiny

__all__ = ["tiny"]  # a fixture

POSITIONS = "algorithm.sampling.max_tokens: expected at most "


class _Config(Strict):
    name: str = "x"
    output: str = "runs"
    path: str | None = None
    logging: LoggingBlock = LoggingBlock()
    parts: tuple[str, ...] = ("a.txt", "b.txt")


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("logging.loggers: expected csv, got tsv", "c.yaml: logging.loggers: expected csv, got tsv"),
        ("logging: expected less", "c.yaml: logging: expected less"),
        ("expected a run that fits", "c.yaml: expected a run that fits"),
        ("m/config.json: no such file", "c.yaml: path: m/config.json: no such file"),
        ("b.txt:3: expected a number", "c.yaml: parts.1: b.txt:3: expected a number"),
        ("b.txt.gz: expected a number", "b.txt.gz: expected a number"),
        ("logging of this kind: none", "logging of this kind: none"),
        ("runs/x/1: another process writes here", "runs/x/1: another process writes here"),
        ("--out: expected a file", "--out: expected a file"),
        ("c.yaml: logging: expected less", "c.yaml: logging: expected less"),
    ],
)
def test_the_config_is_put_before_its_own_fields_alone(message: str, wanted: str) -> None:
    """A field, or a file that the config names, gets the config's file; an option and a run's folder do not."""
    with pytest.raises(ConfigError) as caught, naming("c.yaml", _Config(path="m")):
        raise ConfigError(message)
    assert str(caught.value) == wanted


@pytest.mark.parametrize(
    ("command", "words", "wanted"),
    [
        ("train {}", ["--algorithm.sampling.max_tokens", "5000"], POSITIONS),
        ("train {}", ["--model", "{path: nowhere}"], "model.path: nowhere: no such folder"),
        ("train {}", ["--evaluation.num_samples", "10000000000"], "expected a run that fits into "),
        ("defects {}", ["--model", "{path: nowhere}"], "model.path: nowhere: no such folder"),
        ("calibrate trace.jsonl {}", ["--algorithm.sampling.temperature", "0.5"], "algorithm.sampling.temperature: "),
        ("filter {} data.jsonl", [], "task.kind: expected jsonl or dataset"),
    ],
)
def test_a_sandbox_command_names_the_file(
    command: str, words: list[str], wanted: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As errors of the parse do, so that a list of configs in a script's output says which one is wrong."""
    row = '{"tokens": [1, 2], "num_prompt": 1, "logp_mu": [-1], "logp_old": [-1], "temperature": 1}'
    Path("trace.jsonl").write_text(row)
    assert fails(capsys, *command.format("tiny.yaml").split(), *words).startswith(f"tiny.yaml: {wanted}")
    assert not Path("runs").exists()


def test_export_names_the_file(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config of a model that is opened, not trained."""
    tiny.write_text(TINY.replace("model: {", "model: {path: nowhere} #"))
    line = fails(capsys, "export", "tiny.yaml", "--to", "model")
    assert line == "tiny.yaml: model.path: nowhere: no such folder"


CLUSTER = str(ROOT / "configs" / "scaled" / "minirl" / "n1.yaml")


@pytest.mark.parametrize("command", ["plan", "plan --search", "plan --simulate 1", "launch --kind ray"])
def test_a_cluster_command_names_the_file(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The GPU's name is looked up only as the plan is made; the ladder, which needs vLLM, is in tests/scaled."""
    name, *options = command.split()
    assert main([name, CLUSTER, *options, "--cluster.gpu", "H1OO"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {CLUSTER}: cluster.gpu: ")
