"""Laws of the benchmark: both sides do the same work, and every time is on the table. What a time is, no test says."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
import torch

from firstorder.cli import main
from lab.config.load import load
from sandbox.bench import benchmark, exact_training, ledger_work
from sandbox.bench.ledger_work import CONFIG as LEDGERS
from sandbox.bench.ledger_work import LENGTH, LedgerStep
from sandbox.bench.reference_work import MODEL, Sandbox, Transformers, Turns, Work, reference_model
from sandbox.config import SandboxRun
from sandbox.kernels import choose

ROWS = [
    ("generate", "firstorder", None),
    ("generate", "transformers", "firstorder"),
    ("generate, 4 turns", "firstorder", None),
    ("generate, 4 turns", "no prefix cache", "firstorder"),
    ("score", "firstorder", None),
    ("score", "transformers", "firstorder"),
    ("forward + backward", "firstorder", None),
    ("forward + backward", "transformers", "firstorder"),
    ("global step, N = 1", "firstorder", None),
    ("global step, N = 4", "firstorder", None),
    ("global step, N = 4", "R2", "firstorder"),
    ("global step, N = 4", "R3", "firstorder"),
    ("global step, N = 4", "Pr2", "R2"),
    ("global step, N = 4", "Pr3", "R3"),
    ("global step, N = 4", "R2, T_c = 1", "firstorder"),
    ("global step, N = 4", "R3, T_c = 1", "firstorder"),
    ("global step, N = 4", "Pr2, T_c = 1", "R2, T_c = 1"),
    ("global step, N = 4", "Pr3, T_c = 1", "R3, T_c = 1"),
    ("the ledger's update", "firstorder", None),
    ("the ledger's update", "without sampling", "firstorder"),
    ("the ledger's update", "8 of them in a step", "firstorder"),
    ("exact training, 20 updates", "firstorder", None),
    ("exact training, 20 updates", "3 times the responses", "firstorder"),
    ("exact training, 20 updates", "an MoE", "firstorder"),
]
TINY = ["bench", "--num-prompts", "4", "--num-responses", "2", "--max-tokens", "6", "--rounds", "1"]


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less work where no option sets how much: two updates of exact training, 64 responses of its MoE, and responses
    of four tokens in the ledger's update. The rows are the same."""
    monkeypatch.setattr(exact_training, "NUM_UPDATES", 2)
    monkeypatch.setattr(exact_training, "MOE_LENGTH", 3)
    monkeypatch.setattr(ledger_work, "LENGTH", 4)


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("kernels", ["eager", "compiled"])
def test_the_whole_benchmark(kernels: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All pieces are timed on all sides after both computed the same; the table, its remarks and the file say so."""
    path, threads = tmp_path / "bench.json", torch.get_num_threads()
    assert main([*TINY, "--out", str(path), *(["--compile"] if kernels == "compiled" else [])]) == 0
    found = json.loads(path.read_text())
    assert found["kernels"] == kernels
    assert [(row["piece"], row["side"], row["over"]) for row in found["rows"]] == ROWS
    by_side = {(row["piece"], row["side"]): row for row in found["rows"]}
    for row in found["rows"]:
        assert len(row["seconds"]) == 1
        assert (row["min"], row["median"]) == (min(row["seconds"]), median(row["seconds"]))
        if row["over"] is not None:
            other = by_side[row["piece"], row["over"]]
            assert row["ratio_by_min"] == row["min"] / other["min"]
            assert row["ratio_by_median"] == row["median"] / other["median"]
        assert row["peak_bytes"] > 0
    # float32 sums of 128 terms in another order: 1e-6 a log-prob; the norm is a sum over 1.8 million squares.
    assert 0 < found["logp_difference"] < 1e-4
    assert found["grad_norm_difference"] < 1e-4
    assert {"torch", "transformers"} <= set(found["machine"]["versions"]) and found["machine"]["cpu"]
    assert torch.get_num_threads() == threads

    printed = " ".join(capsys.readouterr().out.split())
    assert all(word in printed for row in ROWS for word in row if word is not None)
    assert f"{kernels} kernels" in printed
    peak = by_side["forward + backward", "firstorder"]["peak_bytes"]
    assert f"forward + backward firstorder {peak / 1e6:.1f}" in printed
    assert "pip install -e '.[bench]'" in printed
    assert ("contended" in printed) == found["is_contended"]
    assert f"{found['machine']['cpu']}, {found['machine']['num_cpus']} cores" in printed


@pytest.mark.parametrize("compiled", [False, True])
def test_the_sides_agree_on_work_that_is_ragged(compiled: bool) -> None:
    """Equal log-probs on responses of different lengths, from engine and trainer; other weights give others."""
    work = Work(num_prompts=8, num_responses=2)
    model = reference_model(choose(compiled))
    ours, theirs = Sandbox(work, model), Transformers(work, model)
    rollouts = ours.ragged()
    batch, exists_BT = rollouts.padded(), rollouts.padded().is_response_BT
    assert len({len(r.tokens) for r in rollouts.responses}) > 1
    assert all(len(r.tokens) == work.max_tokens for r in ours.generate().responses)
    assert {ours.engine.model.kernels.name, ours.trainer.model.kernels.name} == {"compiled" if compiled else "eager"}
    assert theirs.generate(ours.prompts).shape == (16, work.prompt_tokens + work.max_tokens)

    theirs_BT = theirs.score(batch)
    for logp_BT in (ours.score(rollouts).logp_BT, batch.logp_mu_BT):
        torch.testing.assert_close(theirs_BT[exists_BT], logp_BT[exists_BT], rtol=0, atol=1e-4)
    with torch.no_grad():
        model.layers[0].mlp.router[0] += 1.0
    assert (theirs_BT - ours.score(rollouts).logp_BT)[exists_BT].abs().max() > 1e-3


def test_the_reference_work_is_the_one_of_the_published_figures() -> None:
    """A model of 1,795,456 parameters, 128 responses of 32 tokens after prompts of 12; N = 4 where it is not 1."""
    assert sum(p.numel() for p in reference_model().parameters()) == 1_795_456
    work = Work()
    assert (work.num_prompts * work.num_responses, work.prompt_tokens, work.max_tokens) == (128, 12, 32)
    assert (MODEL.num_experts, MODEL.experts_per_token, len(MODEL.moe_layers)) == (16, 2, 4)
    assert benchmark.OFF_POLICY == 4


def test_repetitions_do_the_same_work() -> None:
    """A global step can be timed again and again: the weights do not move, so neither does what it samples."""
    ours = Sandbox(Work(num_prompts=4, num_responses=2, max_tokens=6), reference_model())
    step = ours.step("Pr3", 4)
    first, second = step(), step()
    assert first.metrics == second.metrics and first.metrics["actor/num_updates"] == 4
    assert first.metrics["actor/grad_norm"] > 0 and first.metrics["predictor/weight_norm"] == 0
    for a, b in zip(first.rollouts.responses, second.rollouts.responses, strict=True):
        assert torch.equal(a.tokens, b.tokens)


@pytest.mark.parametrize("num_updates", [1, 8])
def test_the_ledgers_step_is_that_of_its_config(num_updates: int) -> None:
    """64 responses of 21 tokens per update under the config's own engine, which is off; a repetition is the same."""
    ledger = LedgerStep(num_updates)
    first, second = ledger.step(), ledger.step()
    assert first.metrics == second.metrics and first.metrics["actor/num_updates"] == num_updates
    assert [len(one.tokens) for one in first.rollouts.responses] == [LENGTH] * 64 * num_updates
    assert first.metrics["rollout_corr/k3_kl"] > 0 and first.metrics["actor/grad_norm"] > 0
    trained = ledger.training()().metrics
    assert all(trained[name] == value for name, value in first.metrics.items() if name.startswith("actor/"))
    config = load(LEDGERS, [], {"sandbox": SandboxRun})
    assert isinstance(config, SandboxRun) and ledger.engine.model.config == config.model.build(25)
    assert ledger.trainer.micro_batch_size == config.training.micro_batch_size


@pytest.mark.parametrize("num", [None, 2])
def test_features_stand_on_as_many_rows_as_asked(num: int | None) -> None:
    """On every row that predicts a response token, or on T_c of them; 4 of the reference work's 32 tokens."""
    ours = Sandbox(Work(num_prompts=4, num_responses=2, max_tokens=6), reference_model())
    features = ours.step("Pr2", 4, num)().scores.features
    assert features is not None and features.offsets.diff().tolist() == [num or 6] * 8
    assert Work().few_positions == 4


def test_turns_with_and_without_the_cache_are_the_same_work() -> None:
    """Both rows roll out the same conversations bit for bit, of 4 turns, whose later prompts the cache knows but for 13
    tokens; each call starts with nothing cached."""
    found = []
    for has_cache in (True, False):
        turns = Turns(Work(num_prompts=4, num_responses=2), has_cache)
        found += [turns.roll_out() for _ in range(1 + has_cache)]
        assert turns.engine.prefixes is None or 0 < len(turns.engine.prefixes) <= 8
    for response, *others in zip(*(rollouts.responses for rollouts in found), strict=True):
        assert int((~response.is_response).sum()) % 12 == 0
        assert all(torch.equal(response.logp_mu, other.logp_mu) for other in others)
    assert max(int((~r.is_response).sum()) for r in found[0].responses) == 36


@pytest.mark.usefixtures("brief")
def test_times_of_different_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sides whose log-probs differ by more than 1e-4 are not compared."""
    score = Transformers.score
    monkeypatch.setattr(Transformers, "score", lambda self, batch: score(self, batch) + 1e-3)
    with pytest.raises(RuntimeError, match=r"at most 0.0001, got 0.001"):
        benchmark.benchmark(Work(num_prompts=4, num_responses=2, max_tokens=4), threads=1, rounds=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-prompts", "6"], "num_prompts: expected a multiple of 4, got 6"),
        (["--rounds", "0"], "--rounds: expected at least 1, got 0"),
        (["--rounds", "1000000000000"], "--rounds: expected at most 10000, got 1000000000000"),
        (["--num-prompts", "1000000000000"], "num_prompts: expected at most 16,384 responses in all, got 10"),
        (["--num-responses", "1000000000000"], "num_prompts: expected at most 16,384 responses in all, got 16 x 10"),
        (["--num-responses", "1"], "--num-responses: expected at least 2, got 1"),
        (["--max-tokens", "53"], "max_tokens: expected 1 to 52 after 12, got 53"),
        (["--out", "nowhere/bench.json"], "--out: expected a file in a folder that exists, got nowhere/bench.json"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request that cannot be measured is refused before anything runs: one line, exit code 2."""
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"error: {message}") and err.count("\n") == 1


def test_work_has_groups() -> None:
    """A group of one response has no advantage: as everywhere, there are at least two."""
    with pytest.raises(ValueError, match="num_responses: expected at least 2, got 1"):
        Work(num_responses=1)


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """The command's help shows how to call it, and says what it times."""
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    examples = text.split("Examples:\n")[1].split("\n\n")[0].splitlines()
    assert len(examples) >= 2 and all(line.strip().startswith("firstorder bench") for line in examples)
    assert "transformers" in text and "--threads" in text
