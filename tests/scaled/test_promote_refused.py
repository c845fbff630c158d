"""Refusals of a promotion: unstable and single runs, lost accuracy, runs of other configs, edited records."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from firstorder.cli import main
from firstorder.worlds import Schemas
from lab.config.load import load
from lab.records import RunFolder
from lab.strict import ConfigError, validate
from lab.verdict import VerdictRules, judge
from scaled.config import ScaledRun
from scaled.promote import promote as promote_runs
from scaled.promotion_checks import Accuracy, require_same_config
from scaled.promotion_runs import TrialRun, read_run
from tests.scaled.promotion_world import TARGET_BASE, folder_of, refused


def test_unstable_and_single_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A collapsed run and a single seed are refused with the reason; --allow-unstable records it and lets them pass."""
    line = refused(capsys, "runs/collapsed")
    assert "expected a stable run, got collapsed: The training-inference KL rose to" in line
    one = folder_of("run", 1)
    assert "expected runs of at least 2 seeds, got 1 (seed 1)" in refused(capsys, one)
    assert "--allow-unstable: expected a reason, got an empty text" in refused(capsys, one, "--allow-unstable", " ")
    for source, verdict in ((one, "stable"), ("runs/collapsed", "collapsed")):
        words = ["promote", str(source), "--to", "target.yaml", "--out", f"{verdict}.yaml"]
        assert main([*words, "--allow-unstable", "a: test"]) == 0
        result = load(f"{verdict}.yaml", [], Schemas())
        assert isinstance(result, ScaledRun) and result.evidence is not None
        assert result.evidence.allowed_unstable == "a: test"
        assert [run.verdict for run in result.evidence.runs] == [verdict]
        assert result.evidence.final["rollout_corr/k3_kl"].standard_deviation is None
    assert "KL rose" in result.evidence.runs[0].reasons[0]


def test_undecided_is_not_stable(here: Path) -> None:
    """A run too short for its own rules is refused, with what kept its verdict open."""
    runs = [read_run(folder_of("run", seed), Schemas()) for seed in (0, 1)]
    target = load("target.yaml", [], Schemas())
    assert isinstance(target, ScaledRun)
    undecided = replace(runs[0], verdict=judge(runs[0].metrics, VerdictRules()))
    with pytest.raises(ConfigError, match="got undecided: 4 steps are recorded, and the rules need 20"):
        promote_runs([undecided, runs[1]], target)


def with_accuracy(run: TrialRun, *values: float) -> TrialRun:
    """The run with these accuracies in its first lines and in its last, of 4 samples of each of 64 problems."""
    metrics = [{k: v for k, v in line.items() if k != "eval/accuracy"} for line in run.metrics]
    for line, value in zip([*metrics[: len(values) - 1], metrics[-1]], values, strict=True):
        line["eval/accuracy"] = value
    raw = run.config.model_dump(mode="json")
    raw["evaluation"] |= {"num_samples": 4, "max_prompts": 64}
    raw["task"] |= {"num_held_out": 100, "min_digits": 2, "max_digits": 2}
    return replace(run, metrics=metrics, config=validate(type(run.config), raw, "run"))


def test_a_run_that_lost_accuracy_is_refused(here: Path) -> None:
    """With both numbers, beyond 2 sqrt(2 p (1 - p) / n) at n = 4 x 64 samples, and any of the runs; the reason lets it
    pass, and the evidence has the numbers."""
    target = load("target.yaml", [], Schemas())
    assert isinstance(target, ScaledRun)
    one, two = (with_accuracy(read_run(folder_of("run", seed), Schemas()), 0.3, 0.9, 0.3) for seed in (0, 1))
    promote_runs([one, two], target)
    promote_runs([with_accuracy(one, 0.3, 0.3, 0.23), two], target)  # 0.07 is less than 0.078
    lost = with_accuracy(two, 0.3, 0.9, 0.21)  # and 0.09 more than 0.077; the peak in between is no start
    line = "got 0.210 after 0.300, which is more than 2 standard errors \\(0.077 at 256 samples\\) lower; or --allow"
    with pytest.raises(ConfigError, match=f"^run/.*: eval/accuracy: expected .* {line}"):
        promote_runs([one, lost], target)
    evidence = promote_runs([one, lost], target, "a test")[0].evidence
    assert evidence is not None
    found = [(r.accuracy_first, r.accuracy_final, r.num_samples) for r in evidence.runs]
    assert found == [(0.3, 0.3, 256), (0.3, 0.21, 256)]
    for values in ((0.9,), (0.0, 0.9)):  # one accuracy cannot be compared, and a gain is no loss
        promote_runs([with_accuracy(one, *values), two], target)


def test_chance_alone_is_refused_in_one_run_of_forty_at_most() -> None:
    """Two evaluations at one true accuracy differ by more than their noise in 2.3% of pairs, in less where it is of
    the same problems."""
    generator = torch.Generator().manual_seed(0)
    for spread in (0.0, 0.25):
        levels = (0.3 + spread * (2 * torch.rand(4000, 64, 1, generator=generator) - 1)).expand(-1, -1, 4)
        first, final = (torch.bernoulli(levels, generator=generator).double().mean((1, 2)).tolist() for _ in "ab")
        found = [Accuracy(a, b, 256) for a, b in zip(first, final, strict=True)]
        refused_ones = sum(one.first - one.final > one.noise for one in found)
        assert 0 < refused_ones / 4000 < 0.03
    assert Accuracy(0.0, 0.0, 4).noise == 0.0 and Accuracy(0.3, 0.3, 256).noise == pytest.approx(0.0810, abs=1e-4)


def test_runs_of_different_configs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that differ in more than the seed are refused by the first field that differs, with both values."""
    line = refused(capsys, folder_of("run", 0), "runs/other")
    assert line.startswith(
        "algorithm.optimizer.learning_rate: expected runs of one config that differ in the seed alone"
    )
    assert "got 0.0001 in run/" in line and "and 0.0002 in other/" in line
    one = folder_of("run", 0)
    assert "expected each run once, got it twice" in refused(capsys, one, one)
    again = one.with_name(f"20300101T000000Z-{one.name[-12:]}")
    shutil.copytree(one, again)
    assert refused(capsys, one, again) == "seed: expected runs of different seeds, got 2 runs of seed 0"


def test_runs_of_other_files(here: Path) -> None:
    """Runs that read other weights or problems under the same path are refused by the first such path, and a file
    that only one had; a run without a record of its files is compared with none."""
    target = load("target.yaml", [], Schemas())
    assert isinstance(target, ScaledRun)
    one, two = (read_run(folder_of("run", seed), Schemas()) for seed in (0, 1))

    def reading(run: TrialRun, **inputs: str) -> TrialRun:
        return replace(run, manifest={**run.manifest, "inputs": inputs})

    promote_runs([reading(one, a="11", b="22"), reading(two, b="22", a="11")], target)
    for theirs, line in (
        ({"a": "11", "b": "33", "c": "44"}, rf"^b: .*, got 22 in {one.name} and 33 in {two.name}$"),
        ({"a": "11"}, rf"^b: .*, got 22 in {one.name} and no such file in {two.name}$"),
        ({"a": "11", "b": "22", "c": "44"}, rf"^c: .*, got no such file in {one.name} and 44 in {two.name}$"),
    ):
        with pytest.raises(ConfigError, match=line):
            promote_runs([reading(one, a="11", b="22"), reading(two, **theirs)], target, "also with a reason")
    old = replace(one, manifest={name: value for name, value in one.manifest.items() if name != "inputs"})
    promote_runs([old, reading(two, a="11")], target)
    last = replace(reading(two, a="33"), name="last", config=two.config.model_copy(update={"seed": 2}))
    with pytest.raises(ConfigError, match=r"^a: .*, got 11 in run/.* and 33 in last$"):
        require_same_config([old, reading(two, a="11"), last])


def spoil_config(folder: Path) -> None:
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace("learning_rate: 0.0001", "learning_rate: 0.001"))


def spoil_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text(json.dumps({"seed": 5}))


def spoil_verdict(folder: Path) -> None:
    path = folder / "verdict.json"
    path.write_text(path.read_text().replace('"verdict": "stable"', '"verdict": "collapsed"'))


def spoil_metrics(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3] + lines[4:]))


def cut(folder: Path) -> None:
    """Without a step, where the verdict and the hashes were made anew."""
    spoil_metrics(folder)
    RunFolder(folder).seal()
    verdict = judge(RunFolder(folder).metrics(), load(folder / "config.yaml", [], Schemas()).verdict)
    (folder / "verdict.json").write_text(json.dumps(verdict.to_json()))


def without_last_weights(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    RunFolder(folder).seal()


def unfinished(folder: Path) -> None:
    (folder / "verdict.json").unlink()
    RunFolder(folder).truncate_metrics(3)


def other_backend(folder: Path) -> None:
    (folder / "config.yaml").write_text(TARGET_BASE + "name: run\n")


SPOILT = [
    (spoil_config, "config.yaml: expected the config that ran, with the hash"),
    (spoil_manifest, "manifest.json: expected the config's seed 0, got 5"),
    (spoil_verdict, "verdict.json: expected stable, which is what metrics.jsonl gives, got collapsed"),
    (spoil_metrics, "metrics.jsonl: expected SHA-256"),
    (cut, "metrics.jsonl: expected every step from 1 to 4, got 4 lines up to step 4"),
    (without_last_weights, "checkpoints: expected one of step 4, got one of step 2"),
    (unfinished, "expected a finished run, got one that stopped after step 3 of 4, without a verdict"),
    (other_backend, "backend: expected runs of the sandbox, got scaled"),
    (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: no such file"),
    (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json: expected a JSON object, got invalid"),
    (lambda folder: (folder / "config.yaml").unlink(), "expected a run folder (with config.yaml)"),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILT, ids=lambda value: getattr(value, "__name__", str(value))[:24])
def test_a_folder_that_does_not_agree_with_itself(
    spoil: Callable[[Path], None], words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An edited, unfinished or foreign folder is refused, whatever the other runs and also with --allow-unstable."""
    spoil(folder_of("run", 0))
    folders = sorted(Path("runs/run").iterdir())
    for more in ([], ["--allow-unstable", "why"]):
        assert words in refused(capsys, *folders, *more)


def test_a_folder_of_former_rules(here: Path) -> None:
    """Its verdict lacks what is newer, and may be another than today's rules give: today's is what counts."""
    folder = folder_of("run", 0)
    path = folder / "verdict.json"
    verdict = json.loads(path.read_text())
    former = {name: verdict[name] for name in ("stable", "verdict", "first_step", "reasons", "undecided", "summary")}
    former |= {"rules": verdict["rules"] | {"reward_fall": "as it was"}, "stable": False, "verdict": "collapsed"}
    path.write_text(json.dumps(former))
    assert read_run(folder, Schemas()).verdict.word == "stable"
    path.write_text(json.dumps(former | {"rules": verdict["rules"]}))
    with pytest.raises(ConfigError, match=r"verdict\.json: expected stable, which is what metrics\.jsonl gives"):
        read_run(folder, Schemas())


def test_a_renamed_folder_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder's name holds the hash that the config is checked by; without it there is nothing to check."""
    folder_of("run", 0).rename("runs/mine")
    assert "expected a run folder <UTC time>-<config hash>, got mine" in refused(capsys, "runs/mine")


def test_a_target_that_is_none(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sandbox config, a missing file, a model that is not there, a layout that the batch does not fill: one line."""
    Path("nowhere.yaml").write_text("base: target.yaml\nmodel: {path: nowhere, shape: null}\n")
    # The target's own 64 x 16 responses fill 8 ranks x 128; in N = 2 mini-batches, as GRPO's papers split, they do not.
    Path("wide.yaml").write_text("base: target.yaml\ntraining: {micro_batch_size: 128}\n")
    words = ["--name", "grpo", "--algorithm.objective", "{preset: grpo}", "--num_steps", "1"]
    assert main(["train", "run.yaml", "--progress", "none", *words]) == 0
    for source, target, wanted in (
        ("runs/run", "run.yaml", "run.yaml: backend: expected a config of the cluster (scaled), got sandbox"),
        ("runs/run", "none.yaml", "none.yaml: no such file"),
        ("runs/run", "nowhere.yaml", "model.path: expected a Hugging Face folder with config.json, got nowhere"),
        ("runs/grpo", "wide.yaml", "the promoted config: algorithm.batch: expected mini-batches"),
    ):
        capsys.readouterr()
        assert main(["promote", source, "--to", target, "--allow-unstable", "for some one seed"]) == 2
        assert wanted in capsys.readouterr().err
