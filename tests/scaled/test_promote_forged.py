"""Refusals of a promotion: records that were made up, whole and with hashes made anew."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from firstorder.cli import main
from firstorder.worlds import Schemas
from lab.config.load import config_hash, load, to_yaml
from lab.records import RunFolder
from lab.strict import ConfigError, validate
from lab.verdict import judge
from scaled.config import ScaledRun
from scaled.promotion_checks import unknown
from scaled.promotion_records import check_traces
from scaled.promotion_runs import read_run
from tests.scaled.promotion_world import RULES, folder_of, refused, rewrite_row

BLOCK = RULES.model_dump()


def fall(folder: Path) -> None:
    """A reward that falls from 0.40 to 0, in every line."""
    for step in range(1, 5):
        rewrite_row(folder, step, **{"reward/mean": 0.4 if step < 3 else 0.0})


def renamed(folder: Path, seed: int, **blocks: dict[str, float | int]) -> Path:
    """The run with another seed or block in its config and manifest, under the name that fits them, sealed."""
    config = load(folder / "config.yaml", [], Schemas())
    config = validate(type(config), config.model_dump(mode="json") | {"seed": seed} | blocks, "run")
    (folder / "config.yaml").write_text(to_yaml(config))
    run = RunFolder(folder)
    run.write_manifest(run.manifest() | {"seed": seed})
    run.seal()
    run.write_verdict(judge(run.metrics(), config.verdict).to_json())
    return folder.rename(folder.with_name(f"{folder.name[:17]}{config_hash(config)}"))


def test_slackened_rules_do_not_judge(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reward that falls from 0.40 to 0 is a collapse, although the runs' own rules have patience with it."""
    slack = {"verdict": {"min_steps": 1000, "patience": 900}}
    folders = [renamed(folder_of("run", seed), seed, **slack) for seed in (0, 1)]
    runs = [read_run(folder, Schemas()) for folder in folders]
    assert [run.verdict.word for run in runs] == ["undecided", "undecided"]  # stricter rules count
    slack = {"verdict": BLOCK | {"reward_min": 1.0}}
    for folder in (renamed(folder, seed, **slack) for seed, folder in enumerate(folders)):
        for path in (folder / "rollouts").iterdir():
            path.unlink()
        fall(folder)
        RunFolder(folder).seal()
    line = refused(capsys, "runs/run")
    assert "rollouts: expected a trace of step 2, got none" in line


def test_a_collapse_by_promotions_own_rules(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs' rules call the fall stable; promotion's do not. The traces, set aside here, would refuse it too."""
    folder = folder_of("run", 0)
    fall(folder)
    folder = renamed(folder, 0, verdict=BLOCK | {"patience": 2})
    monkeypatch.setattr("scaled.promotion_runs.check_traces", lambda *_: 2)
    assert json.loads((folder / "verdict.json").read_text())["verdict"] == "stable"
    verdict = read_run(folder, Schemas()).verdict
    assert verdict.word == "collapsed" and verdict.reasons[0].rule == "reward_fall"


def test_a_step_that_was_not_finite_has_a_trace_beyond_its_row(here: Path) -> None:
    """Where an update ended the run, the row has the gradient alone, and the trace is no sign of an edited one."""
    run = RunFolder(folder_of("run", 0))
    *rows, last = run.metrics()
    ended = {"step": last["step"], "actor/grad_norm": None, "non_finite": ["actor/grad_norm"]}
    config = load(run.path / "config.yaml", [], Schemas())
    assert check_traces(run, config, [*rows, ended]) == len(run.traces()) > 1
    with pytest.raises(ConfigError, match=r"rollouts|metrics"):
        check_traces(run, config, [*rows, {"step": last["step"]}])


@pytest.mark.parametrize("name", ["reward/mean", "rollout_corr/k3_kl", "actor/entropy"])
def test_metrics_that_the_traces_do_not_give(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rewritten number of a traced step is refused by name, also where the hashes were made anew."""
    folder = folder_of("run", 1)
    before = next(row[name] for row in RunFolder(folder).metrics() if row["step"] == 4)
    rewrite_row(folder, 4, **{name: before * 1.01 + 1e-3})
    RunFolder(folder).seal()
    assert f"metrics.jsonl: {name}: expected {before:.6g} at step 4, which is what the trace" in refused(
        capsys, "runs/run"
    )


def move_log_probs(trace: Path) -> None:
    """Changes mu's log-probs by rounding's size, as a forger may who leaves the tokens."""
    with safe_open(trace, "pt") as file:
        words, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors | {"logp_mu": tensors["logp_mu"] * (1 + 1e-6)}, trace, metadata=words)


def test_a_forged_second_seed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy of a run under another seed is refused, whole or with other traces, where the weights are the same."""
    one = folder_of("run", 0)
    forged = renamed(Path(shutil.copytree(one, one.with_name(f"20300101T000000Z-{one.name[-12:]}"))), 7)
    assert "got the same rollouts/step-000002.safetensors in run/" in refused(capsys, one, forged)
    for path in (forged / "rollouts").iterdir():
        move_log_probs(path)
    RunFolder(forged).seal()
    assert "got the same rollouts/step-000002.safetensors in run/" in refused(capsys, one, forged)
    for path in (forged / "rollouts").iterdir():
        shutil.copy(folder_of("run", 1) / "rollouts" / path.name, path)
    shutil.copy(folder_of("run", 1) / "metrics.jsonl", forged)
    RunFolder(forged).seal()
    assert "got the same checkpoints/step-000002/state.json in run/" in refused(capsys, one, forged)


def test_a_run_that_was_continued_elsewhere_says_so(here: Path) -> None:
    """A later process on another commit is in the evidence; one that differs in nothing is not."""
    run = RunFolder(folder_of("run", 0))
    for later in ({}, {"commit": "0" * 40}):
        run.write_manifest(run.manifest() | {"resumed": [{"time": "2026-01-01T00:00:00Z", **later}]})
        assert main(["promote", "runs/run", "--to", "target.yaml", "--out", f"new-{len(later)}.yaml"]) == 0
        result = load(f"new-{len(later)}.yaml", [], Schemas())
        assert isinstance(result, ScaledRun) and result.evidence is not None
        told = [line for line in result.evidence.unknown if "it was continued with another" in line]
        assert [line.endswith("with another commit than it began with.") for line in told] == [True] * len(later)


def test_code_and_files_that_are_not_known_say_so(here: Path) -> None:
    """In the evidence: code that git did not call an unchanged commit, runs of other commits, and a run whose manifest
    lacks the files that its config names."""
    one, two = (read_run(folder_of("run", seed), Schemas()) for seed in (0, 1))

    def told(words: str, first: dict[str, object], second: dict[str, object]) -> list[str]:
        known = {"commit": "a" * 40, "has_local_changes": False, "inputs": {}}
        runs = [replace(run, manifest=known | new) for run, new in ((one, first), (two, second))]
        return [line for line in unknown(runs) if words in line]

    assert told("commit", {}, {}) == told("", {}, {})[:1]  # the general one: "on the same commit"
    for changes in (True, None):
        (line,) = told("not known to be a commit", {"has_local_changes": changes}, {})
        assert line.startswith(f"{one.name}: ")
    assert len(told("not known to be a commit", {"commit": None}, {"commit": None})) == 2
    (line,) = told("different commits", {}, {"commit": "b" * 40})
    assert "aaaaaaaaaaaa" in line and "bbbbbbbbbbbb" in line and one.name in line and two.name in line
    assert told("different commits", {}, {"commit": None}) == []
    (line,) = told("files that its config names", {"inputs": None}, {})
    assert line.startswith(f"{one.name}: ")


def test_a_run_without_hashes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused, unless the reason is put on record; what is not known then is in the evidence."""
    folder = folder_of("run", 0)
    run = RunFolder(folder)
    run.write_manifest({name: value for name, value in run.manifest().items() if name != "sha256"})
    assert "manifest.json: expected the SHA-256 of the run's files, got none" in refused(capsys, "runs/run")
    words = ["promote", "runs/run", "--to", "target.yaml", "--out", "old.yaml", "--allow-unstable", "a former version"]
    assert main(words) == 0
    result = load("old.yaml", [], Schemas())
    assert isinstance(result, ScaledRun) and result.evidence is not None
    assert any("manifest.json has no hashes" in line for line in result.evidence.unknown)
