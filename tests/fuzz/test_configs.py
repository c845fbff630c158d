"""A config that was edited or torn: it is accepted as it stands, or refused in one line with the file's name."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import sandbox.size
from firstorder.cli import main
from firstorder.worlds import Schemas
from lab.config.load import load, read
from lab.config.shipped import FOLDER
from sandbox.config import SandboxRun
from sandbox.model import MoE
from sandbox.run import build_engine, build_learner, open_task
from sandbox.size import check_memory
from tests.fuzz.mutations import TooLongError, edited, note, num_cases, torn, within
from theory.streams import stream

COMMANDS = {"audit": "audit", "flow": "flow"}
"""Folder of configs to the command that reads them; `train` reads all others."""
CONFIGS = sorted(
    path.relative_to(FOLDER)
    for path in FOLDER.rglob("*.yaml")
    # Fragments without a backend of their own are read through those that name them as their base.
    if path.parts[-2] in COMMANDS or "backend" in read(path)
)
SIZES = (10**7, 10**12, 2**62, 100_000, 1e30, 3, 17)


def spoiled(case: int) -> tuple[Path, bytes]:
    """A shipped config's name, and what it holds after an accident."""
    rng = random.Random(f"config {case}")
    name = CONFIGS[case % len(CONFIGS)]
    if rng.random() < 0.25:
        return name, torn((FOLDER / name).read_bytes(), rng)
    raw = read(FOLDER / name)
    for _ in range(1 + rng.randrange(2)):
        raw = edited(raw, rng, SIZES)
    return name, json.dumps(raw).encode()  # JSON is YAML


def test_a_spoiled_config_is_read_whole_or_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record_property: Any
) -> None:
    """`--print-config` ends with 0 and every value of the file in it, or with 2 and a line that names the file."""
    outcomes = [printed(case, tmp_path / "config.yaml", capsys) for case in range(num_cases(80))]
    note(record_property, outcomes)
    assert not (faults := [each for each in outcomes if each not in ("printed", "refused")]), "\n".join(faults)
    assert 0.3 < outcomes.count("refused") / len(outcomes) < 0.95


def printed(case: int, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """`printed`, `refused`, or what went wrong with the case."""
    name, data = spoiled(case)
    path.write_bytes(data)
    said = f"case {case}, {name}: {data[:2000]!r}: "
    try:
        with within(20):
            code = main([COMMANDS.get(name.parts[0], "train"), str(path), "--print-config"])
    except TooLongError as error:
        return f"{said}{error}"
    out, err = capsys.readouterr()
    if code == 2:
        is_clear = str(path) in err and err.count("\n") == 1 and len(err) <= 310 and out == ""
        return "refused" if is_clear else f"{said}{err}"
    if code != 0:
        return f"{said}{code}, {err}"
    lost = list(differences(read(path), YAML(typ="safe", pure=True).load(out)))
    return f"{said}{lost}" if lost else "printed"


def differences(given: Any, printed: Any, name: str = "") -> Any:
    """Fields of the file that the printed config lacks or holds otherwise: (dotted name, value there, value here)."""
    if name == "objectives" and isinstance(printed, list):
        given = without_all(given, printed)
    if isinstance(given, Mapping) and isinstance(printed, Mapping):
        for key, value in given.items():
            yield from differences(value, printed.get(key), f"{name}.{key}".lstrip("."))
    elif isinstance(given, list) and isinstance(printed, list) and len(given) == len(printed):
        for number, (one, other) in enumerate(zip(given, printed, strict=True)):
            yield from differences(one, other, f"{name}.{number}")
    elif given is not None and (given != printed or isinstance(given, bool) is not isinstance(printed, bool)):
        yield name, given, printed


def without_all(given: Any, printed: list[Any]) -> Any:
    """An audit's objectives with what stands printed in the place of `all`, alone or as one item of a list."""
    given = ["all"] if given == "all" else given
    if not isinstance(given, list) or "all" not in given:
        return given
    place = given.index("all")
    after = given[place + 1 :]
    return [*given[:place], *printed[place : len(printed) - len(after)], *after]


def test_a_config_that_is_accepted_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """Task, model and engines of an accepted sandbox config exist within 20 s, or a line says why they do not fit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sandbox.size, "memory_bytes", lambda: 2**30)
    outcomes = [outcome(case, tmp_path / "config.yaml") for case in range(num_cases(80))]
    note(record_property, outcomes)
    assert not (faults := [each for each in outcomes if each not in ("made", "refused")]), "\n".join(faults)
    assert outcomes.count("made") > 0.2 * len(outcomes)


def outcome(case: int, path: Path) -> str:
    """`made`, `refused`, or what went wrong with the case."""
    path.write_text(json.dumps(edited(read(FOLDER / "smoke.yaml"), random.Random(f"size {case}"), SIZES)))
    try:
        with within(20):
            make(load(path, [], Schemas()))
    except ValueError as error:
        return "refused" if "\n" not in str(error) else f"case {case}: {error}"
    except (Exception, TooLongError) as error:
        return f"case {case}: {type(error).__name__}: {error}, {path.read_text()}"
    return "made"


def make(config: Any) -> None:
    """All that a run makes before its cold start."""
    assert isinstance(config, SandboxRun)
    task = open_task(config)
    shape = config.model.build(task.tokenizer.vocab_size)
    check_memory(config, shape)
    task.prompts(0, config.algorithm.batch.num_prompts)
    learner = build_learner(config, task, MoE(shape, stream(config.seed, "model")))
    build_engine(config, learner.model.config, task, config.engine.defects)


def test_a_system_that_does_not_say_its_memory_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no `os.sysconf`: nothing is refused for its size there, and nothing ends in a traceback."""
    monkeypatch.delattr("os.sysconf")
    config = load("smoke", ["--algorithm.batch.num_prompts", "1000000000"], Schemas())
    assert isinstance(config, SandboxRun)
    check_memory(config, config.model.build(13))
