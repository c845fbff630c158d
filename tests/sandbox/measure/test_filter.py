"""Laws of `firstorder filter`: rates are those of the model's own samples, the band has both its ends, rows are kept as
they stand, and a killed filter continues to the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from firstorder.cli import main
from lab.files import exclusive
from lab.tasks.grading import grade
from lab.tasks.tokenizers import load_tokenizer
from sandbox.engines.engine import SandboxEngine
from sandbox.engines.weight_precision import WeightPrecision
from sandbox.model import load
from tests.forks import begin, end
from tests.sandbox.tiny_hf import DIGITS, guesses, write_qwen3_moe
from theory.contracts import Prompt, Sampling
from theory.streams import derive_seed

CONFIG = """
name: filter
backend: sandbox
seed: 3
num_steps: 1
task: {{kind: jsonl, path: none, prompt_template: "{{problem}}"}}
model: {{path: {model}}}
cold_start: null
engine: {{defects: [{{kind: weight_precision}}]}}
algorithm: {{objective: {{preset: minirl}}, sampling: {{max_tokens: 1, temperature: 0.7}}}}
"""
NUM_PROBLEMS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers in one digit, and is surer of some digits than of others."""
    return write_qwen3_moe(tmp_path_factory.mktemp("model"), DIGITS, sharpness=30.0)


@pytest.fixture(scope="module")
def lines(model: Path) -> list[str]:
    """Problems whose answer is, in turn, the model's first, second or third guess: rates from 0 to 1.

    The rows have spaces and an extra key, which a rewriting of them would lose.
    """
    problems = [f"{i}+{i % 3}" for i in range(NUM_PROBLEMS)]
    answers = [guesses(model, problem)[i % 3] for i, problem in enumerate(problems)]
    rows = enumerate(zip(problems, answers, strict=True))
    return [f'{{"problem":  "{problem}", "answer": "{answer}", "level": {i / 7}}}' for i, (problem, answer) in rows]


@pytest.fixture
def data(tmp_path: Path, model: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A problem file beside the config of its filter, in the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG.format(model=model))
    Path("data").mkdir()
    path = Path("data/problems.jsonl")
    path.write_text("\n\n".join(lines))
    return path


def run_filter(data: Path, *words: str, samples: int = 8) -> int:
    return main(["filter", "config.yaml", str(data), "--samples", str(samples), "--progress", "none", *words])


def rows(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def fails(capsys: pytest.CaptureFixture[str], data: Path, *words: str, samples: int = 8) -> str:
    """The one line on stderr with which the command ends in exit code 2."""
    capsys.readouterr()
    assert run_filter(data, *words, samples=samples) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def by_hand(model: Path, lines: list[str], num_samples: int) -> list[float]:
    """The rates by a loop of our own: an FP8 engine, one problem at a time, graded from the text."""
    tokenizer = load_tokenizer(model)
    ours = load(model)
    engine = SandboxEngine(ours.config, (WeightPrecision(),), tokenizer.end_ids)
    engine.load_model(ours, version=0)
    rates = []
    for line in lines:
        problem = json.loads(line)
        tokens = tokenizer.encode(problem["problem"])
        seed = derive_seed(3, "pass_rate", *tokens)
        sampling = Sampling(max_tokens=1, num_responses=num_samples, temperature=0.7, seed=seed)
        responses = engine.generate([Prompt("", tokens, "")], sampling).responses
        texts = [tokenizer.decode(r.tokens.tolist()) for r in responses]
        rates.append(sum(grade(text, problem["answer"]) for text in texts) / num_samples)
    return rates


def test_rates_are_those_of_the_models_own_samples(
    data: Path, model: Path, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each row's rate is the mean reward of its own samples under the config's engine, and ids are the file's lines."""
    assert run_filter(data) == 0
    found, expected = rows("data/problems.pass_rates.jsonl"), by_hand(model, lines, 8)
    assert [row["rate"] for row in found] == expected
    assert len(set(expected)) >= 4 and 0.0 in expected  # a constant would prove little
    assert [row["id"] for row in found] == [f"problems.jsonl:{2 * i + 1}" for i in range(NUM_PROBLEMS)]
    assert {row["samples"] for row in found} == {8}
    kept = [line for line, rate in zip(lines, expected, strict=True) if rate <= 0.9]
    assert Path("data/problems.filtered.jsonl").read_text().splitlines() == kept
    assert f"kept {len(kept)} of 12 problems, with pass rates of 0 to 0.9 over 8 samples" in capsys.readouterr().out


def test_the_band_has_both_its_ends(data: Path, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A rate equal to either end is kept, the next one beyond is not; another band draws no sample anew."""
    assert run_filter(data) == 0
    rates = [row["rate"] for row in rows("data/problems.pass_rates.jsonl")]
    low, high = sorted(set(rates))[1], sorted(set(rates))[-2]
    assert low < high < max(rates)
    for lowest, highest in ((low, high), (low, low), (high, 1.0), (0.0, 1.0), (1.0, 1.0)):
        assert run_filter(data, "--min-pass-rate", str(lowest), "--max-pass-rate", str(highest)) == 0
        found = rows("data/problems.pass_rates.jsonl")
        assert [row["kept"] for row in found] == [lowest <= rate <= highest for rate in rates]
        kept = [line for line, row in zip(lines, found, strict=True) if row["kept"]]
        assert Path("data/problems.filtered.jsonl").read_text().splitlines() == kept
        assert [row["rate"] for row in found] == rates
    for words, message in (
        (["--min-pass-rate", "0.95"], "--max-pass-rate: expected a rate in [0.95, 1], got 0.9"),
        (["--min-pass-rate", "-0.1"], "--min-pass-rate: expected a rate in [0, 1], got -0.1"),
        (["--max-pass-rate", "nan"], "--max-pass-rate: expected a rate in [0.0, 1], got nan"),
    ):
        assert message in fails(capsys, data, *words)


def test_a_measured_rate_is_not_sampled_again(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter that was cut after n rows, the last one torn, samples the other problems alone and ends with the bytes
    of one that was never cut."""
    assert run_filter(data) == 0
    paths = [Path("data/problems.pass_rates.jsonl"), Path("data/problems.filtered.jsonl")]
    whole = [path.read_bytes() for path in paths]
    sampled = []
    real = SandboxEngine.generate
    monkeypatch.setattr(
        SandboxEngine, "generate", lambda self, prompts, s: sampled.append(prompts[0].id) or real(self, prompts, s)
    )
    measured = whole[0].splitlines(keepends=True)
    paths[0].write_bytes(b"".join(measured[:5]) + measured[5][:17])
    paths[1].unlink()
    assert run_filter(data) == 0
    assert sampled == [f"data/problems.jsonl:{2 * i + 1}" for i in range(5, NUM_PROBLEMS)]
    assert [path.read_bytes() for path in paths] == whole
    lock = Path("data/.problems.pass_rates.jsonl.lock")
    assert sorted(p.name for p in Path("data").iterdir()) == sorted(p.name for p in (data, lock, *paths))


def test_a_killed_filter_goes_on_to_the_same_bytes(data: Path) -> None:
    """A real process killed (-9) in the middle and started again ends with the bytes of one that was not killed."""
    assert run_filter(data, samples=16) == 0
    paths = [Path("data/problems.pass_rates.jsonl"), Path("data/problems.filtered.jsonl")]
    whole = [path.read_bytes() for path in paths]
    for path in paths:
        path.unlink()
    words = ["filter", "config.yaml", str(data), "--samples", "16", "--progress", "none"]
    generate = SandboxEngine.generate

    def act() -> int:
        # Sampling is fast here, so the process waits before every problem: it must be killed between two of them.
        SandboxEngine.generate = lambda *given: time.sleep(0.05) or generate(*given)
        return main(words)

    process = begin(act, Path("log"))
    try:
        while not paths[0].is_file() or paths[0].read_bytes().count(b"\n") < 3:
            assert os.waitpid(process, os.WNOHANG) == (0, 0), Path("log").read_text()
            time.sleep(0.01)
    finally:
        os.kill(process, signal.SIGKILL)
    assert end(process) == -signal.SIGKILL
    assert 3 <= paths[0].read_bytes().count(b"\n") < NUM_PROBLEMS and not paths[1].exists()
    assert run_filter(data, samples=16) == 0
    assert [path.read_bytes() for path in paths] == whole


def test_rates_of_another_setting_are_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rates that were measured under another engine, sampling, seed or prompt are one line, and stay as they are."""
    assert run_filter(data) == 0
    before = Path("data/problems.pass_rates.jsonl").read_bytes()
    for words in (
        ["--engine.defects", "[]"],
        ["--algorithm.sampling.temperature", "1.0"],
        ["--algorithm.sampling.max_tokens", "3"],
        ["--seed", "4"],
        ["--training.precision", "bf16"],
        ["--task.prompt_template", "'{problem}+'"],
        ["--samples", "9"],
    ):
        message = fails(capsys, data, *words)
        assert "problems.pass_rates.jsonl:1: expected a rate of these problems under this model" in message, words
        assert "move the file away" in message
        assert Path("data/problems.pass_rates.jsonl").read_bytes() == before


def test_rates_of_other_problems_or_weights_are_refused(
    data: Path, lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A changed answer, a row more and other weights are refused; a damaged row is named."""
    assert run_filter(data) == 0
    other = write_qwen3_moe(tmp_path / "other", DIGITS, sharpness=41.0)
    assert "rates.jsonl:1: expected a rate of these problems" in fails(capsys, data, "--model.path", str(other))
    data.write_text("\n\n".join([*lines, '{"problem": "9+9", "answer": "18"}']))
    assert "rates.jsonl:1: expected a rate of these problems" in fails(capsys, data)
    data.write_text("\n\n".join([lines[0].replace('"answer": "', '"answer": "1'), *lines[1:]]))
    assert "rates.jsonl:1: expected a rate of these problems" in fails(capsys, data)
    data.write_text("\n\n".join(lines))
    path = Path("data/problems.pass_rates.jsonl")
    measured = path.read_text().splitlines()
    for number, line in ((3, "{}"), (4, "[1]"), (5, "what")):
        path.write_text("\n".join([*measured[: number - 1], line, *measured[number:]]) + "\n")
        assert f"rates.jsonl:{number}: expected a row with id, rate and sampled_by" in fails(capsys, data)
    path.write_text("\n".join([measured[1], measured[0]]) + "\n")
    assert "rates.jsonl:1: expected problems.jsonl:1, got the rate of problems.jsonl:3" in fails(capsys, data)


def test_a_table_is_filtered_to_json_rows(data: Path, lines: list[str]) -> None:
    """The rows of a Parquet file, and of a datasets folder, have the rates of the same rows in JSON Lines."""
    assert run_filter(data) == 0
    expected = [(row["rate"], row["kept"]) for row in rows("data/problems.pass_rates.jsonl")]
    table = [json.loads(line) for line in lines]
    pq.write_table(pa.Table.from_pylist(table), "data/table.parquet")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(table).save_to_disk("data/saved")
    for path, first in (("data/table.parquet", "table.parquet:1"), ("data/saved", "saved:1")):
        assert run_filter(Path(path), "--task.kind", "dataset") == 0
        stem = path.removesuffix(".parquet")
        found = rows(f"{stem}.pass_rates.jsonl")
        assert found[0]["id"] == first
        assert [(row["rate"], row["kept"]) for row in found] == expected
        assert rows(f"{stem}.filtered.jsonl") == [row for row, (_, kept) in zip(table, expected, strict=True) if kept]


def test_what_cannot_be_filtered_is_one_line(data: Path, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A bad row (with its number), a task without a file, no DATA, a missing file, a folder in use: nothing is left."""
    data.write_text("\n\n".join([*lines, '{"problem": "1"}']))
    assert f"{data}:{2 * NUM_PROBLEMS + 1}: expected the key 'answer', got 'problem'" in fails(capsys, data)
    assert [p.name for p in Path("data").iterdir()] == ["problems.jsonl"]
    data.write_text("\n\n".join(lines))
    assert "none.jsonl: expected a file of problems, got: No such file" in fails(capsys, Path("none.jsonl"))
    assert "task.kind: expected jsonl or dataset (the format of DATA), got arithmetic" in fails(
        capsys, data, "--task", "{kind: arithmetic}"
    )
    assert main(["filter", "config.yaml"]) == 2
    assert "DATA" in capsys.readouterr().err
    assert main(["filter", "config.yaml", "--seed", "3"]) == 2
    assert "missing DATA, the file of problems" in capsys.readouterr().err
    with exclusive(Path("data/.problems.pass_rates.jsonl.lock"), "held"):
        assert "another process is filtering data/problems.jsonl" in fails(capsys, data)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "qwen3_moe", "num_hidden_layers": "x"}'])
def test_a_broken_config_is_not_called_the_tokenizers_fault(
    text: str, data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers reads config.json to find the tokenizer's class: where that fails, the line names config.json."""
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "config.json").write_text(text)
    assert main(["filter", "config.yaml", str(data), "--progress", "none", "--model.path", str(broken)]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: config.yaml: model.path: {broken / 'config.json'}: expected a model's config, got: "
    )


@pytest.mark.parametrize("gone", ["config.yaml", "data/problems.jsonl", "copy/config.json", "copy/tokenizer.json"])
def test_a_file_that_is_missing_is_named(
    gone: str, data: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Config, problems and each part of the model: the line begins with what is not there, or with its folder."""
    shutil.copytree(model, "copy")
    Path(gone).unlink()
    assert main(["filter", "config.yaml", str(data), "--progress", "none", "--model.path", "copy"]) == 2
    err = capsys.readouterr().err
    where = f"config.yaml: model.path: {gone}" if gone.startswith("copy") else gone
    assert (err.count("\n") == 1 and err.startswith(f"error: {where}: ")) or "copy: expected a tokenizer (one of" in err


def test_a_response_that_does_not_fit_is_refused(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompt and response must fit into the model's 256 positions; no rate is measured before that is known."""
    message = fails(capsys, data, "--algorithm.sampling.max_tokens", "254")
    expected = "max_tokens: expected at most 253 (the model's 256 positions + 1, less the 4 tokens of the longest"
    assert expected in message and not Path("data/problems.pass_rates.jsonl").exists()
