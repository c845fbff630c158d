"""Laws of `firstorder translate`: a shell or Python reads its options as they are meant, and never half a recipe."""

from __future__ import annotations

import json
import shlex
from argparse import ArgumentParser
from typing import Any

import pytest
import yaml

from firstorder.cli import main
from firstorder.translate import Framework
from lab.config.load import load
from lab.translate import FRAMEWORKS
from sandbox.config import SandboxRun

CONFIG = "demo/tis"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["translate", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def meant(framework: str, *overrides: str) -> dict[str, Any]:
    config = load(CONFIG, list(overrides), {"sandbox": SandboxRun})
    found = FRAMEWORKS[framework](config.algorithm.build())
    return {option.name: option.value for option in [*found.recipe, *found.sizes]}


def test_the_command_has_every_framework() -> None:
    """Its choices are the rows of the table."""
    assert [one.value for one in Framework] == list(FRAMEWORKS)


@pytest.mark.parametrize("fix", ["{name: token_tis, cap: 2.0}", "{name: icepop, lo: 0.5, hi: 5}"])
def test_a_shell_passes_verls_options_on(fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Words of the shell, whose values YAML reads as the translation has them; a pair of bounds stays a string."""
    override = ["--algorithm.objective.correction", fix]
    code, out, err = run(capsys, CONFIG, "--to", "verl", "--sizes", *override)
    words = dict(word.split("=", 1) for word in shlex.split(out))
    read = {name: yaml.safe_load(value) for name, value in words.items()}
    assert code == 0
    assert read == meant("verl", *override)
    assert "overrides of verl.trainer.main_ppo" in err


def test_python_reads_trls_options(capsys: pytest.CaptureFixture[str]) -> None:
    """They stand in a call of GRPOConfig."""
    code, out, _ = run(capsys, CONFIG, "--to", "trl", "--sizes")
    assert code == 0
    assert eval(f"dict({out})") == meant("trl")


def test_a_shell_passes_slimes_options_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Words for argparse: a name and its value, or a flag alone."""
    override = ["--algorithm.objective.advantage", "group_mean"]
    code, out, err = run(capsys, CONFIG, "--to", "slime", "--sizes", *override)
    expected = meant("slime", *override)
    parser = ArgumentParser()
    for name, value in expected.items():
        parser.add_argument(f"--{name}", **({"action": "store_true"} if value is True else {"type": type(value)}))
    assert code == 0 and "arguments of train.py" in err
    assert vars(parser.parse_args(shlex.split(out))) == {k.replace("-", "_"): v for k, v in expected.items()}
    assert expected["disable-grpo-std-normalization"] is True


def test_sizes_are_left_out_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A note says so."""
    _, out, err = run(capsys, CONFIG, "--to", "verl")
    assert "optim.lr=" not in out and "--sizes adds them" in err


def test_half_a_recipe_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each part is named, the exit code is 3; --partly prints the rest, and --json all of it."""
    words = ["demo/r3", "--to", "trl"]
    code, out, err = run(capsys, *words)
    assert (code, out) == (3, "")
    assert err.splitlines()[0] == "no option in TRL 1.16: replay mode R3: no such option"
    code, out, err = run(capsys, *words, "--partly")
    assert code == 0 and "loss_type='grpo'," in out.splitlines() and "replay mode R3" in err
    code, out, _ = run(capsys, *words, "--json")
    assert code == 3
    assert json.loads(out)["unsaid"] == [{"part": "replay mode R3", "why": "no such option"}]


def test_a_cluster_config_is_a_recipe_too(capsys: pytest.CaptureFixture[str]) -> None:
    """The nearest weight that the message names makes the whole recipe expressible."""
    words = ["scaled/minirl/n8_r3", "--to", "verl"]
    code, _, err = run(capsys, *words)
    assert code == 3
    nearest = shlex.split(next(line for line in err.splitlines() if "nearest: " in line).split("nearest: ")[1])
    code, out, _ = run(capsys, *words, *nearest)
    assert code == 0 and "actor_rollout_ref.actor.megatron.router_replay.mode=R3" in out.splitlines()


def test_fields_may_stand_before_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    """As in every command that takes the fields of its config as options."""
    words = ["--algorithm.objective.eps_high", "0.3"]
    code, out, _ = run(capsys, *words, CONFIG, "--to", "trl")
    assert code == 0 and "epsilon_high=0.3," in out and run(capsys, CONFIG, "--to", "trl", *words)[1] == out
