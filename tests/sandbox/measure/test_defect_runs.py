"""Defects and training numerics in whole runs, the page that measures them, and how the report names them."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from firstorder.cli import app, main
from lab.config.load import config_hash, load, to_yaml
from lab.records import RunFolder
from lab.strict import ConfigError
from sandbox.config import SandboxRun
from sandbox.engines import (
    KINDS,
    ActivationPrecision,
    KVPrecision,
    RouterNoise,
    SamplingMismatch,
    StaleWeights,
    WeightPrecision,
)
from sandbox.measure.defect_table import NUM_STEPS, RUNGS, Bench, check_rungs
from sandbox.run import run
from theory.loop import global_step

DOCS = Path(__file__).parents[3] / "docs"

CONFIG = """
name: defects
backend: sandbox
seed: 3
num_steps: 4
task: {kind: arithmetic, min_digits: 2, max_digits: 3, num_held_out: 8}
model: {num_layers: 2, hidden_size: 32, num_heads: 2, num_kv_heads: 1, num_experts: 4, expert_size: 16}
cold_start: null
algorithm:
  objective: {preset: minirl}
  batch: {num_prompts: 4, num_responses: 2, num_minibatches: 2}
  sampling: {max_tokens: 12}
  optimizer: {learning_rate: 1e-3, warmup_steps: 0, weight_decay: 0.5}
evaluation: {every: 4, num_samples: 1, max_prompts: 4}
checkpoint: {every: 1, keep: 5}
logging: {loggers: []}
"""
PR3 = ("--algorithm.replay.mode", "Pr3")
STALE = ("--engine.defects", "[{kind: stale_weights, versions: 2, switch_at: 0.5}]")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A config file of a small run in an empty folder."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def config(path: Path, *overrides: str) -> SandboxRun:
    """The config in that file, with its runs beside the file."""
    return load(path, ["--output", str(path.parent / "runs"), *overrides], {"sandbox": SandboxRun})


def test_a_stale_run_resumes_with_the_weights_it_remembers(path):
    """Cut after two of four steps, a run with weights two versions behind ends with the bits of one never cut."""
    whole = run(config(path, *STALE), progress="none")
    lags = [row["staleness/version_lag_max"] for row in whole.metrics()[1:]]
    assert lags == [0, 1, 2, 2]
    cut = config(path, *STALE)
    folder = RunFolder.create(path.parent / "runs", "cut", config_hash(cut), datetime.now(UTC))
    folder.write_config(to_yaml(cut))
    run(config(path, *STALE, "--num_steps", "2"), folder=folder, progress="none")
    run(cut, folder=folder, progress="none")
    assert [row for row in folder.metrics() if row["step"] not in (2,)] == [
        row for row in whole.metrics() if row["step"] not in (2,)
    ]  # step 2 was the shorter run's last, which is evaluated
    a, b = whole.latest_checkpoint(), folder.latest_checkpoint()
    assert a.tensors.keys() == b.tensors.keys()
    assert any(name.startswith("rollout_weights.2.") for name in a.tensors)
    assert all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)


def test_withheld_routers_know_no_predictor(path):
    """Routers that never arrive lack the predictor by which Pr3 corrects features; other tensors may stay away."""
    for missing in ("routers", "all"):
        with pytest.raises(ConfigError, match=rf"withhold routers .* got Pr3 with missing: {missing}"):
            config(path, "--engine.defects", f"[{{kind: partial_weights, missing: {missing}}}]", *PR3)
    config(path, "--engine.defects", "[{kind: partial_weights, missing: experts}]", *PR3)


def test_a_run_without_routers_or_room_is_refused_at_once(path):
    """Layers that are all dense have nothing to replay, and a response must fit the model's positions."""
    dense = ("--model.dense_layers", "[0, 1]", "--model.num_layers", "2")
    with pytest.raises(ConfigError, match=r"replay.mode: expected none for a model without routers, got Pr3"):
        config(path, *dense, *PR3)
    shift = ("--algorithm.objective", "{preset: grpo, router_shift_floor: 0.8}")
    with pytest.raises(ConfigError, match=r"router_shift_floor: expected 1 for a model without routers, got 0.8"):
        config(path, *dense, "--algorithm.replay.mode", "none", *shift)
    # The longest of the 8 held-out prompts is "ddd+ddd=", and the last token that is sampled needs no position.
    long = config(path, "--algorithm.sampling.max_tokens", "4090")
    with pytest.raises(ValueError, match=r"max_tokens: expected at most 4089 \(the model's 4096 positions .* got 4090"):
        run(long, progress="none")
    assert not (path.parent / "runs").exists()


def test_stale_weights_know_no_predictor(path):
    """Pr3's features hold the predictor that mu was handed: with older weights they are refused, in one line."""
    with pytest.raises(ConfigError, match=r"expected a mode other than Pr3 with stale_weights .* got Pr3"):
        config(path, *STALE, "--algorithm.replay.mode", "Pr3")


@pytest.mark.parametrize(
    ("overrides", "is_zero"),
    [
        (["--training.precision", "bf16"], True),
        (["--training.precision", "bf16", "--training.micro_batch_size", "3"], True),
        (["--training.reduction_order.units", "8"], False),
    ],
)
def test_the_exact_engine_shares_the_precision_of_training(path, overrides, is_zero):
    """KL(mu || old) is exactly 0 in bf16 too, whatever the micro-batches; a varying order of summation ends that.

    A reduction in another order is a matter of 1e-7 of a log-probability: KL around its square.
    """
    made = run(config(path, "--num_steps", "2", *overrides), progress="none")
    values = [row["rollout_corr/k3_kl"] for row in made.metrics()[1:]]
    assert [value == 0 for value in values] == [is_zero] * 2
    assert max(values) < 1e-9


def test_bf16_training_keeps_fp32_master_weights(path):
    """Products are rounded, the weights that the optimiser moves are not: steps far below bf16's are kept."""
    made = run(config(path, "--training.precision", "bf16", "--num_steps", "1"), progress="none")
    weights = made.latest_checkpoint().tensors["model.layers.0.attention.qkv"]
    assert weights.dtype == torch.float32
    assert not torch.equal(weights, weights.bfloat16().float())


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_page_of_the_rungs_that_were_asked_for(path):
    """One section a defect with its own words, one row a rung; the exact engine's KL is 0 and a defect's is not."""
    page = path.parent / "page.md"
    rungs = ["exact", "weights bf16", "weights fp8, a scale per tensor", "4 versions behind", "top-k 2"]
    words = ["defects", str(path), "--algorithm.optimizer.betas", "[0.9, 0.99]", "--seeds", "2"]
    words += [word for name in rungs for word in ("--rung", name)]
    shown = CliRunner().invoke(app, [*words, "--out", str(page)])
    assert shown.exit_code == 0, shown.output
    text = page.read_text()
    # In a shell, the command that the page states is the one that was given.
    assert shlex.split(text.split("```")[1]) == ["firstorder", *words]
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## exact", "## weight_precision", "## stale_weights", "## sampling_mismatch",
    ]  # fmt: skip
    cells = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[1:] for row in text.splitlines() if " | " in row}
    assert [name for name in cells if name in rungs] == rungs
    assert cells["exact"][:4] == ["none", "0 ± 0", "0 ± 0", "0 ± 0"]
    assert cells["top-k 2"][:2] == ["sampler == scorer", "0 ± 0"]
    for name in ("weights bf16", "4 versions behind"):
        assert cells[name][0] == "trainer == engine" and float(cells[name][1].split(" ± ")[0]) > 0
    # Random weights: of some 70 tokens only the two most likely are drawn.
    assert float(cells["top-k 2"][4].split(" ± ")[0]) < -0.1


def test_rungs_and_configs_that_are_not_there_are_one_line(path, capsys):
    """An unknown rung, a folder that is not there, a misspelt field and a cluster config are a user's errors."""
    for words, message in (
        (["--rung", "weights fp2"], "--rung: expected some of exact; "),
        (["--out", str(path.parent / "none" / "page.md")], "--out: expected a file in a folder that exists"),
        (["--num_step", "3"], "num_step: unknown key"),
    ):
        assert main(["defects", str(path), *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert message in error
    cluster = str(DOCS.parent / "configs" / "demo_scaled" / "bf16_r3.yaml")
    assert main(["defects", cluster]) == 2
    assert "expected a config of the sandbox, got scaled" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"--rung: expected some of exact; .* got weights fp2"):
        check_rungs(["exact", "weights fp2"])


def test_the_committed_page_has_every_defect():
    """docs/engine-defects.md is of this code: every rung and kind is in it, with the links that it declares."""
    text = (DOCS / "engine-defects.md").read_text()
    for name, defect in RUNGS.items():
        assert f"| {name} |" in text
        assert defect is None or f"## {defect.model_dump()['kind']}" in text
    assert {type(defect) for defect in RUNGS.values() if defect is not None} == set(KINDS)


# ---- the report's words ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("defect", "words"),
    [
        (WeightPrecision(), "FP8 weights, scaled per channel"),
        (WeightPrecision(format="bf16"), "BF16 weights"),
        (WeightPrecision(scale="block", block_size=32), "FP8 weights, scaled per block of 32"),
        (ActivationPrecision(format="int8"), "INT8 activations, scaled per token"),
        (KVPrecision(), "FP8 KV cache without a scale"),
        (RouterNoise(std=0.5), "router noise 0.5"),
        (StaleWeights(versions=3), "stale weights by 3"),
        (StaleWeights(versions=3, switch_at=0.5), "stale weights by 3, newest from 0.5 on, cache kept"),
        (SamplingMismatch(top_p=0.9), "sampling mismatch top_p 0.9, raw scores"),
    ],
)
def test_the_report_names_a_defect_by_the_dials_that_act(defect, words):
    """Settings that do nothing at this setting of the others are left out."""
    assert defect.words == words


def test_every_dial_of_every_kind_has_words():
    """No kind's words fail on its defaults, and no two kinds have the same."""
    assert len({kind().words for kind in KINDS}) == len(KINDS)


def test_engines_sample_problems_that_the_model_has_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number that training takes, with three rounds per step, comes before those of the draws."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    config = load(path, ["--algorithm.dynamic_sampling", "{enabled: true, max_rounds: 3}"], {"sandbox": SandboxRun})
    assert isinstance(config, SandboxRun)
    bench = Bench(config, num_steps=0)
    numbers: list[int] = []
    prompts = bench.task.prompts
    monkeypatch.setattr(bench.task, "prompts", lambda number, size: numbers.append(number) or prompts(number, size))
    for step in (0, NUM_STEPS - 1):
        global_step(step, bench.algorithm, bench.engine(), bench.trainer, bench.task, config.seed)
    last_seen = max(numbers)
    numbers.clear()
    bench.sample(bench.engine(), draw=0)
    assert NUM_STEPS <= last_seen < min(numbers)


def test_engines_sample_all_turns() -> None:
    """A bench's responses are those of the loop's rollout: conversations with the task's observations."""
    words = ("--cold_start", "null", "--model.num_layers", "1", "--algorithm.batch.num_prompts", "16")
    config = load("configs/calculator.yaml", words, {"sandbox": SandboxRun})
    assert isinstance(config, SandboxRun) and config.algorithm.sampling.max_turns > 1
    bench = Bench(config, num_steps=0)
    engine = bench.engine()
    assert engine.prefixes is not None
    for draw in (0, 1):  # a draw begins without the cache of the one before
        found = bench.sample(engine, draw)
        assert any(not response.is_response.all() for response in found.responses)
        again = bench.sample(bench.engine(), draw)
        pairs = zip(found.responses, again.responses, strict=True)
        assert all(torch.equal(a.tokens, b.tokens) and torch.equal(a.logp_mu, b.logp_mu) for a, b in pairs)
    row = bench.rung("exact", num_seeds=1)
    assert row.metrics["rollout_corr/k3_kl"].mean == 0
    assert row.num_tokens == sum(int(r.is_response.sum()) for r in bench.sample(engine, 0).responses)


def test_a_frozen_router_stays(path: Path) -> None:
    """The bench's own steps train what the config's run would: with `freeze_router` everything but the routers."""
    bench = Bench(config(path, "--algorithm.freeze_router", "true", "--algorithm.label_noise", "0.4"), num_steps=2)
    first, last = dict(bench.versions[0]), dict(bench.versions[-1])
    moved = {name for name in first if not torch.equal(first[name], last[name])}
    assert moved and moved.isdisjoint(name for name in first if ".mlp.gate." in name)
    assert any(".experts." in name for name in moved)
