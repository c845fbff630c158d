"""Laws of promotion: what a sandbox run validated arrives unchanged, what scale changes follows the papers' tables, and
nothing arrives without evidence."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from firstorder.cli import main
from firstorder.worlds import Schemas
from lab.config.algorithm import AlgorithmConfig
from lab.config.load import config_hash, load
from lab.records import RunFolder
from lab.strict import validate
from lab.tasks.jsonl import JsonlConfig
from lab.verdict import VerdictRules
from scaled import promotion_runs
from scaled.config import ScaledRun
from scaled.promotion_checks import accuracy
from scaled.promotion_runs import read_run
from tests.scaled.promotion_world import RULES, folder_of, refused


def test_promotion_judges_by_the_written_rules() -> None:
    """Its own rules are the defaults that the documentation prints; these tests' shorter ones are for short runs."""
    assert VerdictRules() == promotion_runs.RULES


# -- what arrives


@pytest.fixture(scope="module")
def promoted(home: Path) -> tuple[ScaledRun, ScaledRun, Path]:
    """The target, what became of it, and the file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(promotion_runs, "RULES", RULES)
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
    assert evidence.verdict_rules == RULES
    assert [line.partition(": ")[2][:44] for line in evidence.unknown if "no trace behind" in line] == [
        "2 of 4 steps have metrics but no trace behin"
    ] * 2
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


def test_help_explains_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """The command's help has examples of itself and a word about each option."""
    assert main(["promote", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.count("firstorder promote ") >= 3 and "--allow-unstable" in text and "--to" in text


def test_the_samples_of_a_file_are_those_of_its_problems(home: Path, tmp_path: Path) -> None:
    """An accuracy over a file of 5 held-out problems is over 5 times num_samples responses, whatever max_prompts
    allows; without the file max_prompts are assumed."""
    for name, num in (("problems", 9), ("held_out", 5)):
        rows = [json.dumps({"problem": f"{name} {i}", "answer": str(i)}) + "\n" for i in range(num)]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setattr(promotion_runs, "RULES", RULES)
        run = read_run(folder_of("run", 0), Schemas())
    evaluation = run.config.evaluation.model_copy(update={"num_samples": 4, "max_prompts": 64})
    rows = [{"step": n, "eval/accuracy": 0.3} for n in (0, 1)]
    for held_out, num in ((None, 1), (str(tmp_path / "held_out.jsonl"), 5), (str(tmp_path / "elsewhere.jsonl"), 64)):
        task = JsonlConfig(path=str(tmp_path / "problems.jsonl"), held_out_path=held_out, held_out_fraction=0.1)
        config = run.config.model_copy(update={"task": task, "evaluation": evaluation})
        found = accuracy(replace(run, metrics=rows, config=config))
        assert found is not None and found.num_samples == 4 * num
