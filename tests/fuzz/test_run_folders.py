"""A run folder that was edited or torn: its report is drawn, or refused in one line with the file's name.

Never a traceback, and never a page of rows that are not in their order.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import lab.report.page
from firstorder.cli import main
from lab.events import append_event
from lab.records import RunFolder
from lab.run_files import StoredEvent
from tests.fuzz.mutations import num_cases, spoil, torn
from tests.lab.synthetic_runs import DEMO, write_run

FILES = (
    "metrics.jsonl",
    "timing.jsonl",
    "events.jsonl",
    "verdict.json",
    "manifest.json",
    "config.yaml",
    "rollouts/step-000030.safetensors",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a finished run that collapsed, by name."""
    run = write_run(tmp_path_factory.mktemp("whole"), DEMO[1], 1, 30)
    for step in range(1, 31):
        run.append_timing(step, {"timing_s/step": 0.5, "timing_s/gen": 0.2})
        append_event(run.path, StoredEvent(process="rank", step=step, resumed=1, seconds=2.0, reason="ended", index=0))
    folder = run.path
    return {name: (folder / name).read_bytes() for name in FILES}


def spoiled(whole: dict[str, bytes], case: int) -> tuple[str, bytes]:
    """A file's name and what it holds after an accident."""
    rng = random.Random(case)
    name = FILES[case % len(FILES)]
    if name.endswith(".safetensors"):
        return name, torn(whole[name], rng)
    if name == "config.yaml" and rng.random() < 0.7:  # JSON is YAML
        return name, spoil(json.dumps(YAML(typ="safe").load(whole[name])).encode(), rng, is_lines=False)
    return name, torn(whole[name], rng) if name == "config.yaml" else spoil(whole[name], rng, name.endswith("l"))


def write(folder: Path, whole: dict[str, bytes], name: str, data: bytes) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "rollouts").mkdir(parents=True)
    for each, content in {**whole, name: data}.items():
        (folder / each).write_bytes(content)


def test_a_spoiled_run_is_a_page_or_one_line(
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    record_property: Any,
) -> None:
    """Whatever happened to one of its files, `firstorder report` ends with 0, or with 2 and a line naming the file."""
    monkeypatch.setattr(lab.report.page, "get_plotlyjs", lambda: "")  # 5 MB a page
    folder = tmp_path / "run" / "20260304T050607Z-00000001"
    refused = 0
    for case in range(num_cases(49)):
        name, data = spoiled(whole, case)
        write(folder, whole, name, data)
        code = main(["report", str(folder)])
        out, err = capsys.readouterr()
        said = f"case {case}, {name}: {data[:300]!r}: {code}, {err}"
        assert code in (0, 2), said
        if code == 2:
            refused += 1
            assert str(folder / name) in err and err.count("\n") == 1 and len(err) <= 310 and out == "", said
            continue
        steps = [row["step"] for row in RunFolder(folder).metrics()]
        assert steps == sorted(set(steps)), said
    record_property("cases", num_cases(49))
    record_property("refused", refused)
    assert refused > 0.2 * num_cases(49)
