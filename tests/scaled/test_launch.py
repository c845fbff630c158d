"""`firstorder launch`: the scripts run as bash, ask for the plan's nodes and GPUs, and hand any path on unchanged."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from subprocess import list2cmdline

import pytest
import yaml
from ray.runtime_env import RuntimeEnv
from ruamel.yaml import YAML

from firstorder.cli import main

ROOT = Path(__file__).parents[2]
CONFIG = "configs/scaled/minirl/n8_r3.yaml"
ODD = 'it\'s a "$HOME" `id` \\ run; %x & é 🙂.yaml'


def launch(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", *words]) == 0
    return capsys.readouterr().out


def write_program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """A Slurm job of eight nodes, as far as the script sees it: its commands, and what they were called with."""
    programs = tmp_path / "bin"
    programs.mkdir()
    log = tmp_path / "log.jsonl"
    # One write a call: programs that start together append whole lines.
    line = "import json, sys; sys.stdout.write(json.dumps(sys.argv[1:]) + chr(10))"
    record = f"""python3 -c '{line}' "$(basename "$0")" "$@" >> {log}"""
    # srun carries its command out on this machine: what stands after its own options, which take values after `=`.
    words = 'while [[ "$1" == -* ]]; do if [ "$1" = -w ]; then node=$2; shift; fi; shift; done'
    write_program(programs, "srun", f'{record}\n{words}\nSLURM_NODE="$node" exec "$@"')
    write_program(programs, "scontrol", "printf 'node%d\\n' 1 2 3 4 5 6 7 8")
    write_program(programs, "ray", f'{record}\n[ "$1" = start ] && exec sleep 3 || exit 0')
    write_program(programs, "firstorder", record)
    write_program(programs, "hostname", 'echo "10.0.0.${SLURM_NODE#node} fe80::1"')
    # Only the script's own check of the GPUs reads a program from stdin.
    real = shlex.quote(sys.executable)
    write_program(programs, "python3", f'[ "$1" = - ] && cat > /dev/null && exit 0\nexec {real} "$@"')
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "node[1-8]",
        "SLURM_CPUS_ON_NODE": "96",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "auth_token"),
        "LOG": str(log),
    }


def calls(environment: dict[str, str], program: str) -> list[list[str]]:
    lines = [json.loads(line) for line in Path(environment["LOG"]).read_text(encoding="utf-8").splitlines()]
    return [line[1:] for line in lines if line[0] == program]


def copy_of(config: str, path: Path) -> str:
    path.write_text(f"base: {ROOT / config}\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("kind", ["slurm", "ray"])
def test_scripts_are_bash(capsys, tmp_path, kind):
    """bash reads the script in a file, Slurm's with a container, without an error."""
    file = tmp_path / "script.sh"
    words = ["--container", "org/image:1.0"] if kind == "slurm" else ["--output", "/shared/runs"]
    words += ["--out", str(file)]
    assert main(["launch", CONFIG, "--kind", kind, *words]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


def test_nodes_and_gpus_are_the_plans(capsys):
    """Slurm is asked for the nodes and GPUs that the plan counts, and the script waits for all of them."""
    config = "configs/scaled/pr2/qwen3_off8.yaml"
    assert main(["plan", config, "--no-dry-run", "--json"]) == 0
    cluster = json.loads(capsys.readouterr().out)["cluster"]
    text = launch(capsys, config, "--kind", "slurm")
    nodes, gpus = cluster["num_nodes"], cluster["gpus_per_node"]
    assert f"#SBATCH --nodes={nodes}\n" in text and f"#SBATCH --gpus-per-node={gpus}\n" in text
    assert (
        "#SBATCH --mem=0\n" in text
    )  # all of it: `--exclusive` gives a node's CPUs and GPUs, and a site's default memory
    assert f'ray.cluster_resources().get("GPU", 0)) < {nodes * gpus}:' in text
    assert nodes * gpus >= cluster["gpus_needed"]


def test_files_that_are_not_here_are_named(capsys):
    """A recipe's model and problems that this machine lacks are a line on stderr, and the script is written."""
    words = ["--model.path", "no/model", "--task.path", __file__, "--task.held_out_path", "no/rows.jsonl"]
    assert main(["launch", CONFIG, "--kind", "slurm", *words]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!") and err.count("\n") == 1
    assert err.startswith("not on this machine: no/model, no/rows.jsonl; ")


def test_slurm_options_are_there_only_if_given(capsys):
    """Partition, account, time and container come from the caller; nothing of any machine is in the script."""
    plain = launch(capsys, CONFIG, "--kind", "slurm")
    assert not any(word in plain for word in ("--partition", "--account", "--time", "--container", str(ROOT)))
    words = ("--partition", "gpu", "--account", "lab", "--time", "2-00:00:00", "--container", "org/image:1.0")
    given = launch(capsys, CONFIG, "--kind", "slurm", *words)
    for line in ("#SBATCH --partition=gpu", "#SBATCH --account=lab", "#SBATCH --time=2-00:00:00"):
        assert f"\n{line}\n" in given
    assert "--container-image=org/image:1.0" in given
    # Slurm stops reading its lines at the first command.
    last = max(i for i, line in enumerate(given.splitlines()) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in given.splitlines()[:last])


def test_the_slurm_script_runs(capsys, slurm, tmp_path):
    """On eight nodes: a head on the first, seven workers with its address, then `firstorder train` on the first."""
    config = copy_of(CONFIG, tmp_path / ODD)
    text = launch(capsys, config, "--kind", "slurm", "--seed", "7", "--task.path", "data/a b.jsonl")
    done = subprocess.run(["bash", "-c", text], env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    token = Path(slurm["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and re.fullmatch("[0-9a-f]{64}", token.read_text())
    starts = [call for call in calls(slurm, "ray") if call[0] == "start"]
    assert len([call for call in starts if "--head" in call]) == 1
    assert len([call for call in starts if "10.0.0.1:6379" in call]) == 7
    assert all("--num-gpus=8" in call and f"--object-store-memory={320 * 2**30}" in call for call in starts)
    placed = [call[call.index("-w") + 1] for call in calls(slurm, "srun") if "start" in call]
    assert sorted(placed) == [f"node{i}" for i in range(1, 9)]
    (train,) = calls(slurm, "firstorder")
    expected = ["train", config, "--seed", "7", "--task.path", "data/a b.jsonl", "--cluster.address", "auto"]
    assert train == [*expected, "--progress", "lines", "--fresh"]


def test_a_requeued_job_resumes_and_a_failed_run_fails(capsys, slurm, tmp_path):
    """After Slurm requeued it the job continues the run if there is one, and the run's exit code is the job's."""
    text = launch(capsys, CONFIG, "--kind", "slurm")
    programs = Path(slurm["PATH"].split(":")[0])
    body = (programs / "firstorder").read_text(encoding="utf-8") + "exit 3"
    (programs / "firstorder").write_text(body, encoding="utf-8")
    environment = {**slurm, "SLURM_RESTART_COUNT": "1"}
    done = subprocess.run(["bash", "-c", text], env=environment, cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 3
    assert calls(slurm, "firstorder")[0][-1] == "--resume-if-any"


@pytest.mark.parametrize("word", ["--fresh", "--resume", "--resume-if-any", "--resum"])
def test_a_job_that_ran_out_of_time_continues(capsys, slurm, tmp_path, word):
    """A word after the script says how it starts, under Slurm and Ray, whatever else is set; another word is refused
    before anything starts, and so is the word as an option of launch, with that advice."""
    programs = Path(slurm["PATH"].split(":")[0])
    environment = {**slurm, "RAY_ADDRESS": "http://head:8265"}
    for kind, command in (("slurm", "sbatch"), ("ray", "bash")):
        text = launch(capsys, CONFIG, "--kind", kind, "--output", "/shared/runs")
        if kind == "ray":
            write_program(programs, "ray", f'cp "$4" {tmp_path}/env.yaml')
        Path(slurm["LOG"]).unlink(missing_ok=True)
        words = ["bash", "-c", text, "FILE", word]
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        if word == "--resum":
            assert done.returncode == 2 and done.stderr.count("\n") == 1 and "got --resum\n" in done.stderr
            assert not Path(slurm["LOG"]).exists()
            continue
        assert done.returncode == 0, done.stderr
        if kind == "ray":
            job = yaml.safe_load((tmp_path / "env.yaml").read_text(encoding="utf-8"))["env_vars"]
            subprocess.run("printenv TRAIN | sh", shell=True, env={**slurm, **job}, cwd=tmp_path, check=True)
        (train,) = calls(slurm, "firstorder")
        assert train[-3:] == ["--progress", "lines", word]
        assert main(["launch", CONFIG, word, "--kind", kind, "--output", "/shared/runs", "--model.path", "m"]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"error: {word}: expected ") and f"{command} FILE --resume-if-any" in err


def test_a_job_of_the_wrong_size_stops_at_once(capsys, slurm, tmp_path):
    """A job with other nodes than the plan's ends with exit code 2 and both numbers."""
    text = launch(capsys, "configs/scaled/pr2/qwen3_off2.yaml", "--kind", "slurm")
    done = subprocess.run(["bash", "-c", text], env=slurm, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "expected 4 nodes, got 8" in done.stderr


def test_the_ray_job_carries_any_command(capsys, slurm, tmp_path):
    """`ray job submit` gets a runtime environment whose TRAIN is the very command, whatever is in its path.

    Ray joins the words of the entry point by `list2cmdline` and gives the result to a shell; so does the test.
    """
    config = copy_of(CONFIG, tmp_path / ODD)
    words = ["--seed", "7", "--output", "/shared/my runs"]
    text = launch(capsys, config, "--kind", "ray", *words)
    programs, seen = Path(slurm["PATH"].split(":")[0]), tmp_path / "seen"
    seen.mkdir()
    save = f'printf "%s\\0" "$@" > {seen}/words; cp "$4" {seen}/env.yaml'
    write_program(programs, "ray", save)
    environment = {**slurm, "RAY_ADDRESS": "http://head:8265"}
    done = subprocess.run(["bash", "-c", text], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    submitted = (seen / "words").read_text(encoding="utf-8").split("\0")[:-1]
    assert submitted[:3] == ["job", "submit", "--runtime-env"] and submitted[4] == "--"
    written = (seen / "env.yaml").read_text(encoding="utf-8")
    runtime = YAML(typ="safe", pure=True).load(written)
    assert yaml.safe_load(written) == runtime  # Ray reads it by PyYAML
    assert runtime["working_dir"] == "." and runtime["excludes"] == ["/runs/", "/.git/", "/.venv/"]
    RuntimeEnv(**runtime)  # which `ray job submit` builds: it refuses fields that do not go together
    job = {**slurm, **runtime["env_vars"]}
    subprocess.run(list2cmdline(submitted[5:]), shell=True, env=job, cwd=tmp_path, check=True)
    (train,) = calls(slurm, "firstorder")
    assert train == ["train", config, *words, "--cluster.address", "auto", "--progress", "lines", "--fresh"]


def test_the_ray_job_needs_an_address(capsys, tmp_path):
    """Without $RAY_ADDRESS the script says what it expected."""
    text = launch(capsys, CONFIG, "--kind", "ray", "--output", "/shared/runs")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(["bash", "-c", text], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "expected the address of the Ray dashboard" in done.stderr


def test_a_ray_job_takes_no_config_that_stays_behind(capsys, tmp_path, monkeypatch):
    """`promote` may write into runs/, which the job leaves out: refused, and a Slurm script is not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    copy_of(CONFIG, Path("runs/mine.yaml"))
    launch(capsys, "runs/mine.yaml", "--kind", "slurm")
    assert main(["launch", "runs/mine.yaml", "--kind", "ray", "--output", "/shared/runs"]) == 2
    assert "CONFIG: expected a path in this folder, outside runs, .git, .venv" in capsys.readouterr().err


IN_IMAGE = ["--kind", "slurm", "--container", "org/image:1.0"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--kind", "ray", "--partition", "gpu"], "--partition: expected only with --kind slurm"),
        (["--kind", "ray", "--container", "org/image:1.0"], "--container: expected only with --kind slurm"),
        (["--kind", "ray"], "output: expected an absolute path in a folder that all nodes share"),
        (["--kind", "ray", "--output", "/shared", "--model.path", "./runs/model"], "got ./runs/model"),
        (["--kind", "ray", "--output", "/shared", "--task.path", "../mine.jsonl"], "task: expected a path in this"),
        (["--kind", "slurm", "--partition", "a\n#SBATCH --x"], "--partition: expected a value of the form"),
        (["--kind", "slurm", "--time", "soon"], "--time: expected a value of the form"),
        ([*IN_IMAGE, "--model.path", "/a model"], "model.path: expected a path that pyxis can mount, not /"),
        ([*IN_IMAGE, "--task.path", "/data:1/rows.jsonl"], "task: expected a path that pyxis can mount, not /"),
        ([*IN_IMAGE, "--output", "/"], "output: expected a path that pyxis can mount, not /"),
        ([*IN_IMAGE, "--output", "/shared/x/../runs"], "output: expected a path in this folder, or an absolute"),
        ([*IN_IMAGE, "--task.path", "data/../../rows.jsonl"], "task: expected a path in this folder, or an absolute"),
        (["--kind", "slurm", "--cluster.num_nodes", "2"], "cluster.num_nodes: expected at least 64 GPUs"),
        (["--kind", "slurm", "--training.recompute", "none"], "training: expected at most 79.6 GiB"),
        (["--kind", "slurm", "--out", "no/such/folder/x.sh"], "--out: expected a file in a folder that exists"),
        (["--kind", "pbs"], "--kind"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(capsys, words, line):
    """A wrong option, or a config that does not fit, ends with exit code 2 and one line."""
    assert main(["launch", CONFIG, *words]) == 2
    err = capsys.readouterr().err
    assert line in err and err.count("\n") == 1


def test_a_layout_of_a_search_for_given_lengths_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """A layout that fits for sequences of these lengths alone gets its script; the lengths are no words of the job."""
    places = (CONFIG, "--kind", "slurm", "--rollout.max_num_seqs", "400")
    assert main(["launch", *places]) == 2
    assert "400 sequences" in capsys.readouterr().err
    printed = launch(capsys, *places, "--mean-tokens", "2000", "--longest-tokens", "9000")
    assert "--rollout.max_num_seqs 400" in printed and "tokens 2000" not in printed and "tokens 9000" not in printed


@pytest.mark.parametrize("kind", ["slurm", "ray"])
def test_an_address_that_the_script_would_not_use_is_refused(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """The run joins the Ray that its script starts, or that its job is in; another address would be ignored."""
    words = ("launch", CONFIG, "--kind", kind, "--output", "/shared/runs", "--cluster.address")
    assert main([*words, "10.0.0.1:6379"]) == 2
    assert "cluster.address: expected null or auto" in capsys.readouterr().err
    assert main([*words, "auto"]) == 0
