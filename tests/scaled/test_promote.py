"""Laws of promotion: what a sandbox run validated arrives unchanged, what scale changes follows the papers' tables, and
nothing arrives without evidence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch

from firstorder.cli import main
from firstorder.worlds import Schemas
from lab.config.algorithm import AlgorithmConfig
from lab.config.load import config_hash, load
from lab.records import RunFolder
from lab.strict import ConfigError, validate
from lab.verdict import VerdictRules, judge
from scaled.config import ScaledRun
from scaled.promote import promote as promote_runs
from scaled.promotion_checks import Accuracy
from scaled.promotion_runs import Run, read_run

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"

# Four steps are enough for these rules. kl_limit 0 in the second makes any engine gap a collapse: a real one, by rule.
RUN = f"""
base: {SMOKE}
name: run
algorithm:
  objective: {{correction: {{name: icepop, lo: 0.5, hi: 2.0}}, eps_high: 0.3, aggregation: length_norm}}
  replay: {{mode: Pr3, predictor: {{loss: delta}}}}
  dynamic_sampling: {{enabled: true, max_rounds: 2}}
verdict: {{min_steps: 4, window: 2, patience: 1, early_steps: 2}}
"""

TARGET_BASE = """
seed: 3
backend: scaled
num_steps: 1000
task: {kind: arithmetic}
model: {path: models/Qwen3-30B-A3B, shape: qwen3-30b-a3b}
training: {num_ranks: 32, tensor_parallel: 4, expert_parallel: 8, micro_batch_size: 1}
rollout: {num_engines: 8, tensor_parallel: 4, max_model_len: 34816, precision: {weights: fp8_block}}
algorithm:
  objective: {preset: minirl}
  batch: {num_prompts: 64, num_responses: 16}
  sampling: {max_tokens: 32768, temperature: 0.9}
  optimizer: {learning_rate: 3e-6, warmup_steps: 5, max_grad_norm: 0.7}
"""
TARGET = "base: base.yaml\nname: target\nalgorithm: {replay: {predictor: {num_positions: 77}}}\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with real runs of two seeds, one of another rate, one that collapsed, and a target."""
    home = tmp_path_factory.mktemp("promote")
    for name, text in (("run", RUN), ("base", TARGET_BASE), ("target", TARGET)):
        (home / f"{name}.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for words in (
            ["--seed", "0"],
            ["--seed", "1"],
            ["--seed", "1", "--name", "other", "--algorithm.optimizer.learning_rate", "2e-2"],
            ["--seed", "1", "--name", "collapsed", "--verdict.kl_limit", "0"],
        ):
            assert main(["train", "run.yaml", "--progress", "none", *words]) == 0
    return home


@pytest.fixture
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, to be spoilt, as the working folder."""
    copy = tmp_path / "home"
    shutil.copytree(home, copy)
    monkeypatch.chdir(copy)
    return copy


def folder_of(name: str, seed: int) -> Path:
    return next(
        p for p in sorted(Path("runs", name).iterdir()) if f"\nseed: {seed}\n" in (p / "config.yaml").read_text()
    )


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one line with which the command refuses; exit code 2, nothing on stdout."""
    capsys.readouterr()
    assert main(["promote", *map(str, words), "--to", "target.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").rstrip("\n")


# -- what arrives


@pytest.fixture(scope="module")
def promoted(home: Path) -> tuple[ScaledRun, ScaledRun, Path]:
    """The target, what became of it, and the file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(["promote", "runs/run", "--to", "target.yaml", "--out", "promoted.yaml"]) == 0
    target, result = (load(home / f"{name}.yaml", [], Schemas()) for name in ("target", "promoted"))
    assert isinstance(target, ScaledRun) and isinstance(result, ScaledRun)
    return target, result, home / "promoted.yaml"


def test_the_algorithm_is_what_the_rules_say(promoted: tuple[ScaledRun, ScaledRun, Path]) -> None:
    """The round trip through the file: the runs' algorithm, at the scale of the target and the papers' tables."""
    wanted = validate(
        AlgorithmConfig,
        {
            "objective": {
                "preset": "minirl", "eps_high": 0.3, "aggregation": "length_norm",
                "correction": {"name": "icepop", "lo": 0.5, "hi": 2.0},
            },
            # Pr3 on Qwen3-30B at N = 2: 1e2 (Pr2 App. F); T_c = 2K below 32K (App. E.1).
            "replay": {
                "mode": "Pr3",
                "predictor": {"loss": "delta", "learning_rate_multiplier": 100.0, "num_positions": 2048},
            },
            # MiniRL sec. 4.2: mini-batches of 64 prompts x 16, so 128 prompts at N = 2.
            "batch": {"num_prompts": 128, "num_responses": 16, "num_minibatches": 2},
            "sampling": {"max_tokens": 32768, "temperature": 0.9},
            "dynamic_sampling": {"enabled": True, "max_rounds": 2},
            # MiniRL's updates have the same size at every N, so the target's rate stands.
            "optimizer": {"learning_rate": 3e-6, "warmup_steps": 5, "max_grad_norm": 0.7},
        },
        "wanted",
    )  # fmt: skip
    assert promoted[1].algorithm == wanted and promoted[1].algorithm.build()


def test_everything_else_is_the_target(promoted: tuple[ScaledRun, ScaledRun, Path]) -> None:
    """Outside of algorithm and evidence the promoted config is the target, base files resolved into one whole file."""
    target, result, path = promoted
    for field in ScaledRun.model_fields:
        if field not in ("algorithm", "evidence"):
            assert getattr(result, field) == getattr(target, field), field
    assert "base:" not in path.read_text()


def test_the_evidence_is_what_the_runs_recorded(promoted: tuple[ScaledRun, ScaledRun, Path], home: Path) -> None:
    """Runs, hashes, verdicts and dates are the folders' own; final metrics are means with their spread over seeds."""
    evidence = promoted[1].evidence
    assert evidence is not None and evidence.allowed_unstable is None
    folders = [home / "runs" / run.run for run in evidence.runs]
    for seed, (run, folder) in enumerate(zip(evidence.runs, folders, strict=True)):
        manifest = json.loads((folder / "manifest.json").read_text())
        assert (run.seed, run.verdict, run.num_steps, run.reasons) == (seed, "stable", 4, ())
        assert run.config_hash == config_hash(load(folder / "config.yaml", [], Schemas())) == folder.name[-12:]
        assert (run.commit, run.has_local_changes) == (manifest.get("commit"), manifest.get("has_local_changes"))
        assert run.started == f"{datetime.strptime(folder.name[:15], '%Y%m%dT%H%M%S')}"
    lines = [RunFolder(folder).metrics()[-2:] for folder in folders]
    kl = [sum(line["rollout_corr/k3_kl"] for line in last) / 2 for last in lines]
    spread = evidence.final["rollout_corr/k3_kl"]
    assert spread.mean == pytest.approx(sum(kl) / 2, rel=1e-12) and spread.mean > 0
    assert spread.standard_deviation == pytest.approx(abs(kl[0] - kl[1]) / 2**0.5, rel=1e-9)
    assert (spread.lowest, spread.highest, spread.num_runs) == (min(kl), max(kl), 2)
    assert json.loads(evidence.engine)["defects"][0]["kind"] == "weight_precision"
    assert set(evidence.mapped) == {
        "replay.predictor.learning_rate_multiplier", "replay.predictor.num_positions", "batch.num_prompts",
        "batch.num_responses", "sampling.max_tokens", "sampling.temperature", "optimizer.learning_rate",
        "optimizer.warmup_steps", "optimizer.max_grad_norm",
    }  # fmt: skip
    assert evidence.mapped["replay.predictor.learning_rate_multiplier"] == "0.5 -> 100.0: Pr2 App. F"


def test_evidence_changes_no_hash(promoted: tuple[ScaledRun, ScaledRun, Path]) -> None:
    """A config promises the same numbers with its evidence and without."""
    result = promoted[1]
    assert config_hash(result) == config_hash(result.model_copy(update={"evidence": None}))
    assert config_hash(result) != config_hash(promoted[0])


def test_the_diff_is_shown_and_the_file_kept(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The diff and the reasons go to stderr, the config to stdout or the file; the order of runs does not matter."""
    runs = [str(folder_of("run", seed)) for seed in (1, 0)]
    assert main(["promote", *runs, "--to", "target.yaml"]) == 0
    text, shown = capsys.readouterr()
    for line in ("--- target.yaml", "+++ promoted", "-    num_prompts: 64", "+    num_prompts: 128"):
        assert line in shown.splitlines()
    assert "1800" not in shown  # what did not change is not in the diff, and a default is not written in two ways
    assert "128 (runs 4, target 64): the target's mini-batch of 64 prompts, times N = 2" in shown
    for _ in range(2):  # the second time it is there already
        assert main(["promote", "runs/run", "--to", "target.yaml", "--out", "new.yaml"]) == 0
        assert capsys.readouterr().out == "new.yaml\n" and Path("new.yaml").read_text() == text
    Path("taken.yaml").write_text("mine: yes\n")
    assert "taken.yaml, which holds something else" in refused(capsys, "runs/run", "--out", "taken.yaml")
    assert Path("taken.yaml").read_text() == "mine: yes\n"


# -- what is refused


def test_unstable_and_single_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A collapsed run and a single seed are refused with the reason; --allow-unstable records it and lets them pass."""
    line = refused(capsys, "runs/collapsed")
    assert "expected a stable run, got collapsed: The training-inference KL rose to" in line
    one = folder_of("run", 1)
    assert "expected runs of at least 2 seeds, got 1 (seed 1)" in refused(capsys, one)
    assert "--allow-unstable: expected a reason, got an empty text" in refused(capsys, one, "--allow-unstable", " ")
    for source, verdict in ((one, "stable"), ("runs/collapsed", "collapsed")):
        words = [
            "promote",
            str(source),
            "--to",
            "target.yaml",
            "--out",
            f"{verdict}.yaml",
            "--allow-unstable",
            "a: test",
        ]
        assert main(words) == 0
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
    with pytest.raises(ConfigError, match="got undecided: 5 steps are recorded, and the rules need 20"):
        promote_runs([undecided, runs[1]], target)


def with_accuracy(run: Run, *values: float) -> Run:
    """The run with these accuracies in its first lines and in its last, of 4 samples of each of 64 problems."""
    metrics = [{k: v for k, v in line.items() if k != "eval/accuracy"} for line in run.metrics]
    for line, value in zip([*metrics[: len(values) - 1], metrics[-1]], values, strict=True):
        line["eval/accuracy"] = value
    raw = run.config.model_dump(mode="json")
    raw["evaluation"] |= {"num_samples": 4, "max_prompts": 64}
    raw["task"] |= {"num_held_out": 100}
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
    assert [(r.accuracy_first, r.accuracy_final, r.num_samples) for r in evidence.runs] == [
        (0.3, 0.3, 256),
        (0.3, 0.21, 256),
    ]
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
    assert "got 0.01 in run/" in line and "and 0.02 in other/" in line
    one = folder_of("run", 0)
    assert "expected each run once, got it twice" in refused(capsys, one, one)
    again = one.with_name(f"20300101T000000Z-{one.name[-12:]}")
    shutil.copytree(one, again)
    assert refused(capsys, one, again) == "seed: expected runs of different seeds, got 2 runs of seed 0"


def spoil_config(folder: Path) -> None:
    path = folder / "config.yaml"
    path.write_text(path.read_text().replace("learning_rate: 0.01", "learning_rate: 0.001"))


def spoil_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text(json.dumps({"seed": 5}))


def spoil_verdict(folder: Path) -> None:
    path = folder / "verdict.json"
    path.write_text(path.read_text().replace('"verdict": "stable"', '"verdict": "collapsed"'))


def spoil_metrics(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3] + lines[4:]))


def unfinished(folder: Path) -> None:
    (folder / "verdict.json").unlink()
    RunFolder(folder).truncate_metrics(3)


def other_backend(folder: Path) -> None:
    (folder / "config.yaml").write_text(TARGET_BASE + "name: run\n")


SPOILT = [
    (spoil_config, "config.yaml: expected the config that ran, with the hash"),
    (spoil_manifest, "manifest.json: expected the config's seed 0, got 5"),
    (spoil_verdict, "verdict.json: expected stable, which is what metrics.jsonl gives, got collapsed"),
    (spoil_metrics, "verdict.json: expected undecided, which is what metrics.jsonl gives, got stable"),
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


def test_a_cut_record_is_noticed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that is missing from metrics.jsonl is noticed also where the verdict would be the same without it."""
    folder = folder_of("run", 0)
    spoil_metrics(folder)
    verdict = judge(RunFolder(folder).metrics(), load(folder / "config.yaml", [], Schemas()).verdict)
    (folder / "verdict.json").write_text(json.dumps(verdict.to_json()))
    assert "metrics.jsonl: expected every step from 1 to 4, got 4 lines up to step 4" in refused(capsys, "runs/run")


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


def test_help_explains_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """The command's help has examples of itself and a word about each option."""
    assert main(["promote", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.count("firstorder promote ") >= 3 and "--allow-unstable" in text and "--to" in text
