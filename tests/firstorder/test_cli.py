"""Laws of the command: a user's mistake is one line and exit code 2, help explains itself, and starting it is cheap."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from firstorder import __version__
from firstorder.cli import main
from firstorder.worlds import Schemas
from lab.config.load import load, to_yaml

ROOT = Path(__file__).parents[2]

TINY = """
name: tiny
backend: sandbox
num_steps: 1
task: {kind: arithmetic}
algorithm:
  objective: {preset: minirl}
  batch: {num_prompts: 2, num_responses: 2}
  sampling: {max_tokens: 8}
evaluation: {num_samples: 1, max_prompts: 2}
model: {hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 1, head_dim: 8, num_experts: 4, expert_size: 8}
cold_start: null
logging: {loggers: []}
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config file of the smallest run, in an empty folder that is also the working folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def environment() -> dict[str, str]:
    """The environment in which `python -m firstorder` is this checkout's in any folder, not the installed one."""
    before = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), before] if before else [str(ROOT)])}


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The command's stderr, once it is one line and the exit code is 2."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    return err.removeprefix("error: ").removesuffix("\n")


MISTAKES = [
    (["--algorithm.replay.mdoe", "R3"], "algorithm.replay.mdoe: unknown key; did you mean 'mode'?"),
    (["--num_step", "3"], "num_step: unknown key; did you mean 'num_steps'?"),
    (["--num_steps", "three"], 'num_steps: expected a valid integer, got "three"'),
    (["--num_steps", "0"], "num_steps: expected a value greater than or equal to 1, got 0"),
    (["--model.experts_per_token", "9"], "model.experts_per_token: expected 1 to 4 (experts), got 9"),
    (["--model.num_kv_heads", "3"], "model.num_heads: expected a multiple of num_kv_heads 3, got 2"),
    (["--model.head_dim", "3"], "model.head_dim: expected an even number (rotations act on pairs), got 3"),
    (["--model.dense_layers", "[1]"], "model.dense_layers: expected indices in [0, 1), got 1"),
    (["--engine.defects", "[{kind: router_nois}]"], "engine.defects.0.kind: expected one of"),
    (["--engine.defects", "[{kind: router_noise, sdt: 1}]"], "engine.defects.0.sdt: unknown key; did you mean 'std'?"),
    (["--task.kind", "sorting"], "task.kind: expected one of"),
    (["--name", "a/b"], "name: string should match pattern"),
    (["--backend", "sandbocks"], "backend: unknown backend 'sandbocks'; did you mean 'sandbox'?"),
    (["--base", "other.yaml"], "base: unknown key"),
    (["--resume"], "--resume: expected an unfinished run of this config"),
    (["--progress", "loud"], "--progress: expected one of bar, lines, none, got loud"),
    (["another.yaml"], "unexpected argument 'another.yaml'; expected overrides such as --algorithm.replay.mode R3"),
]


TOO_LARGE = [
    (["--model.num_experts", "1000000000000"], "model.num_experts: expected a value less than or equal to 32768, got"),
    (["--model.num_layers", "1000000000"], "model.num_layers: expected a value less than or equal to 1000, got"),
    (
        ["--num_steps", "1000000000000"],
        "num_steps: expected a value less than or equal to 1000000000, got 1000000000000",
    ),
    (["--task.max_digits", "100000"], "task.max_digits: expected a value less than or equal to 1000, got 100000"),
    (["--model.hidden_size", "1000000", "--model.expert_size", "1000000"], "(1.2e+13 weights)"),
    (["--algorithm.batch.num_responses", "10000000000"], "for 20,000,000,000 responses (algorithm.batch, evaluation)"),
    (["--evaluation.num_samples", "10000000000"], "for 20,000,000,000 responses (algorithm.batch, evaluation)"),
    (["--algorithm.sampling.max_tokens", "1000000000000"], "of 1,000,000,000,000 tokens"),
]


@pytest.mark.parametrize(("words", "wanted"), TOO_LARGE, ids=[" ".join(words) for words, _ in TOO_LARGE])
def test_what_cannot_fit_is_refused_at_once(
    words: list[str], wanted: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A size beyond this machine is one line with the estimate, before anything is made."""
    message = fails(capsys, "train", str(tiny), *words, "--progress", "none")
    assert wanted in message
    assert "less than or equal" in message or " GB of memory, got one of at least " in message
    assert not Path("runs").exists()


@pytest.mark.parametrize(("words", "wanted"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_a_mistake_is_one_line(words: list[str], wanted: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every class of mistake on the command line: exit code 2, one line on stderr, nothing on stdout, no run folder."""
    assert wanted in fails(capsys, "train", str(tiny), *words)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a: [1\n", "bad.yaml:2: not valid YAML"),
        ("backend: sandbox\n", "missing, and it has no default (and "),
        ("backend: scaled\nmodel: {}\n", "missing, and it has no default (and "),
    ],
)
def test_a_bad_file_is_one_line(text: str, wanted: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config file that is not one says why, with the line where there is one."""
    Path("bad.yaml").write_text(text)
    assert wanted in fails(capsys, "train", "bad.yaml")


def test_a_missing_file_is_one_line(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path without a file, a folder in its place, no path at all, a run that is not there, a command that is not."""
    assert fails(capsys, "train", "none.yaml") == (
        "none.yaml: no such file, and no such name in `firstorder configs`; did you mean 'demo/none'?"
    )
    assert fails(capsys, "train", str(tiny.parent)) == f"{tiny.parent}: expected a YAML file, got a folder"
    assert fails(capsys, "train") == "missing CONFIG: YAML file that describes the run"
    assert fails(capsys, "train", "--seed", "3") == "missing CONFIG, the YAML file that describes the run"
    assert (
        fails(capsys, "report", "runs/none") == "runs/none: expected a run folder (with config.yaml), got nothing there"
    )
    assert fails(capsys, "report") == "missing RUN: run folders"
    assert fails(capsys, "trian").startswith("unknown command 'trian'; did you mean 'train'? (expected one of: train, ")


def test_a_table_that_cannot_be_written_is_not_measured(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`ladder` refuses a file in a folder that is not there before its first engine starts."""
    message = fails(capsys, "ladder", str(ROOT / "configs" / "demo_scaled" / "base.yaml"), "--out", "nofolder/x.md")
    assert message == "--out: expected a file in a folder that exists, got nofolder/x.md"


def test_debug_shows_the_traceback(tiny: Path) -> None:
    """With --debug the error itself comes through."""
    with pytest.raises(ValueError, match="unknown key"):
        main(["train", str(tiny), "--sed", "3", "--debug"])


def test_an_error_of_ours_is_one_line(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unexpected error: its type and the way to its traceback, exit code 70, and at most 300 characters."""

    def broken(*_: object) -> None:
        raise KeyError("logp_old" * 100)

    monkeypatch.setattr("lab.config.load.load", broken)
    assert main(["train", str(tiny)]) == 70
    err = capsys.readouterr().err
    assert err.startswith("error: KeyError: 'logp_oldlogp") and err.endswith(" ... (unexpected: --debug shows where)\n")
    assert err.count("\n") == 1 and len(err) <= len("error: \n") + 300
    with pytest.raises(KeyError):
        main(["train", str(tiny), "--debug"])


def test_only_alike_names_are_suggested(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is like none of the known ones is told these, and no guess."""
    message = fails(capsys, "train", str(tiny), "--zzzz", "3")
    assert message.startswith(f"{tiny}: zzzz: unknown key (expected one of: name, seed,")
    message = fails(capsys, "train", str(tiny), "--algorithm.objective.preset", "xyz")
    assert "unknown preset 'xyz' (expected one of: minirl" in message


# -- what the command does


def test_the_printed_config_is_the_config(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--print-config prints YAML that loads to the same config, overrides included, and prints itself again."""
    assert main(["train", str(tiny), "--print-config", "--algorithm.replay.mode", "R3", "--seed=7"]) == 0
    printed = capsys.readouterr().out
    Path("printed.yaml").write_text(printed)
    config = load("printed.yaml", [], Schemas())
    assert config == load(tiny, ["--algorithm.replay.mode", "R3", "--seed", "7"], Schemas())
    assert config.seed == 7 and config.algorithm.replay.mode == "R3" and to_yaml(config) == printed


def test_options_may_stand_before_the_config(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The order of CONFIG and the options does not matter."""
    printed = []
    for words in ([str(tiny), "--seed", "7", "--num_steps=2"], ["--seed", "7", "--num_steps=2", str(tiny)]):
        assert main(["train", "--print-config", *words]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "seed: 7" in printed[0]


def test_a_runs_traces_have_its_temperature(tiny: Path, tmp_path: Path) -> None:
    """Sampled at 0.8, a run's trace says so, and the exact engine's log-probabilities are the trainer's to the bit."""
    from lab.records import RunFolder
    from lab.traces import Trace

    words = ["--algorithm.sampling.temperature", "0.8", "--num_steps", "1", "--progress", "none"]
    assert main(["train", str(tiny), *words, "--output", str(tmp_path / "tempered")]) == 0
    [folder] = [path.parent for path in (tmp_path / "tempered").rglob("metrics.jsonl")]
    trace = Trace.load(RunFolder(folder).traces()[-1])
    assert trace.temperature == 0.8 and torch.equal(trace.logp_mu, trace.logp_old)


def test_a_run_leaves_a_folder_and_a_report(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`train` ends in verdict, accuracy and page; `report` takes the folder, or the one above, and prints the page."""
    assert main(["train", str(tiny), "--progress", "none"]) == 0
    verdict, accuracy, page = capsys.readouterr().out.splitlines()[-3:]
    folder = Path(page).parent
    assert verdict.startswith("tiny: The run is undecided after ") and accuracy.startswith("held-out accuracy: ")
    assert folder.parent == Path("runs/tiny")
    assert {"config.yaml", "manifest.json", "metrics.jsonl", "verdict.json", "report.html"} <= {
        path.name for path in folder.iterdir()
    }
    assert load(folder / "config.yaml", [], Schemas()) == load(tiny, [], Schemas())
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert main(["report", "runs/tiny", str(folder), "--out", "both.html"]) == 0
    assert Path("both.html").read_text().lstrip().lower().startswith("<!doctype html")
    capsys.readouterr()
    assert fails(capsys, "report", str(folder), str(folder)).startswith("--out: expected a file")
    assert fails(capsys, "train", str(tiny), "--resume").startswith("--resume: expected an unfinished run")


def test_a_setting_without_effect_is_noted(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = "algorithm.batch.num_minibatches: with 1 Pr3 is R3"
    assert main(["train", str(tiny), "--algorithm.replay.mode", "Pr3", "--num_steps", "1"]) == 0
    assert note in capsys.readouterr().err
    assert main(["train", str(tiny), "--algorithm.replay.mode", "R3", "--num_steps", "1"]) == 0
    assert note not in capsys.readouterr().err


def test_a_requeued_run_continues_or_begins(tiny: Path) -> None:
    """With --resume-if-any a run begins where there is none or it has ended, and continues in its folder where it had
    not."""
    words = ["train", str(tiny), "--progress", "none", "--resume-if-any"]
    assert main(words) == 0
    (first,) = Path("runs/tiny").iterdir()
    for name in ("verdict.json", "report.html"):
        (first / name).unlink()
    assert main(words) == 0
    assert list(Path("runs/tiny").iterdir()) == [first] and (first / "report.html").is_file()
    assert main(words) == 0
    assert len(list(Path("runs/tiny").iterdir())) == 2


@pytest.mark.parametrize(
    "path",
    sorted(
        set(ROOT.glob("configs/**/*.yaml")) - {*ROOT.glob("configs/audit/*.yaml"), *ROOT.glob("configs/flow/*.yaml")}
    ),
    ids=lambda path: path.stem,
)
def test_every_shipped_config_loads(path: Path) -> None:
    """Each file under configs/ is a config of this version; those of audits and flows have their own tests."""
    assert load(path, [], Schemas()).algorithm.build()


# -- help


@pytest.mark.parametrize("command", ["train", "report", "audit", "flow", "filter", "export"])
def test_help_explains_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command's help has examples of itself, one per line, and a word about each option."""
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    examples = text.split("Examples:\n")[1].split("\n\n")[0].splitlines()
    assert len(examples) >= 2 and all(line.strip().startswith(f"firstorder {command} ") for line in examples)
    assert "--debug" in text and "Show the full traceback" in text


def test_the_command_alone_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a subcommand the command prints its help; --version prints the version."""
    assert main([]) == 0
    alone = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == alone and "train" in alone and "report" in alone
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"firstorder {__version__}\n"


STARTS = """
import sys
from firstorder.cli import main

def loaded(*names):
    print("loaded:", *[name for name in names if name in sys.modules])

assert main(["train", "--help"]) == 0
loaded("torch", "lightning", "plotly", "numpy")
assert main(["train", "demo/none", "--print-config"]) == 0
loaded("lightning", "plotly", "jinja2", "pandas", "scipy", "transformers")
import sandbox.run
loaded("lightning", "transformers", "matplotlib", "scipy", "sandbox.kernels.compiled")
"""


def test_what_is_not_needed_is_not_imported() -> None:
    """Commands start soon: help needs no tensor library; `--print-config` neither a trainer nor a report's templates
    and pictures; a run none of what Lightning's metrics of texts, sound and pictures would load, and no kernels that
    it does not ask for."""
    done = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, check=True, timeout=120)
    said = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("loaded:")]
    assert said == [[], [], ["lightning"]]


def test_a_fresh_run_does_not_resume(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--fresh and --resume-if-any contradict each other, in either order: refused before anything is made."""
    for words in (["--fresh", "--resume-if-any"], ["--resume-if-any", "--fresh"]):
        assert fails(capsys, "train", str(tiny), *words) == "--resume-if-any: expected without --fresh, got it with it"
    assert not Path("runs").exists()
