"""Laws of Slurm scripts with a container: it has all that a run names, and the batch host needs nothing of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.scaled.test_launch import CONFIG, ROOT, calls, copy_of, launch, slurm, write_program

__all__ = ["slurm"]  # a fixture


def test_in_a_container_the_batch_host_needs_no_ray(capsys, slurm, tmp_path):
    """Ray and firstorder stand in the image alone: the script makes the token itself, and mounts it."""
    programs, inside, seen = Path(slurm["PATH"].split(":")[0]), tmp_path / "inside", tmp_path / "seen"
    inside.mkdir()
    for name in ("ray", "firstorder"):
        (programs / name).rename(inside / name)
        write_program(programs, name, "exit 127")
    started = (
        (inside / "ray").read_text(encoding="utf-8").replace("\n", f'\necho "$RAY_AUTH_TOKEN_PATH" >> {seen}\n', 1)
    )
    (inside / "ray").write_text(started, encoding="utf-8")
    srun = (programs / "srun").read_text(encoding="utf-8")
    (programs / "srun").write_text(srun.replace("SLURM_NODE=", f"PATH={inside}:$PATH SLURM_NODE="), encoding="utf-8")
    text = launch(capsys, CONFIG, "--kind", "slurm", "--container", "org/image:1.0")
    environment = {name: value for name, value in slurm.items() if name != "RAY_AUTH_TOKEN_PATH"}
    environment |= {"HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", text], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    token = f"{tmp_path}/.ray/auth_token"
    assert set(seen.read_text(encoding="utf-8").split()) == {token}
    steps = calls(slurm, "srun")
    assert steps and all(f"--container-mounts={tmp_path}:{tmp_path},{token}:{token}" in step for step in steps)
    assert len(calls(slurm, "firstorder")) == 1


def mounts(steps: list[list[str]]) -> list[str]:
    """The paths that the steps mount, the same in all of them, each at its own place."""
    (words,) = {word for step in steps for word in step if word.startswith("--container-mounts=")}
    pairs = [pair.split(":") for pair in words.partition("=")[2].split(",")]
    assert all(source == target for source, target in pairs)
    return [source for source, _ in pairs]


def test_a_container_has_what_the_run_names(capsys, slurm, tmp_path, monkeypatch):
    """Every file and folder that the command, the config and its `base:` name is in one mount, what a link leads to
    as well; no mount is in another; and the output exists before the first step."""
    work, far = tmp_path / "work", tmp_path / "far"
    for folder in (work, far / "hub/blobs", far / "hub/snapshots/1", far / "model", far / "scratch"):
        folder.mkdir(parents=True)
    (far / "hub/blobs/00").touch()
    (far / "hub/snapshots/1/model.safetensors").symlink_to("../../blobs/00")
    (far / "rows.jsonl").touch()
    (work / "rows.jsonl").symlink_to(far / "rows.jsonl")
    (work / "runs").symlink_to(far / "scratch")
    base, mine = far / "base.yaml", far / "configs/mine.yaml"
    mine.parent.mkdir()
    copy_of(CONFIG, base)
    mine.write_text("base: ../base.yaml\n", encoding="utf-8")
    monkeypatch.chdir(work)
    environment = {**slurm, "SLURM_SUBMIT_DIR": str(work)}

    def mounted(*words: str) -> list[str]:
        Path(slurm["LOG"]).unlink(missing_ok=True)
        text = launch(capsys, *words, "--kind", "slurm", "--container", "org/image:1.0")
        done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found = mounts(calls(slurm, "srun"))
        assert found[0] == str(work) and found[1] == slurm["RAY_AUTH_TOKEN_PATH"] and len(set(found)) == len(found)
        assert not [one for one in found for other in found if Path(other) in Path(one).parents]
        return [name for name in found[2:] if not name.startswith(str(ROOT))]

    task = ["--task.held_out_path", "null", "--task.path"]
    # The image has the configs that come with firstorder, and what is in the folder itself is mounted with it.
    inside = ["--model.path", str(work / "model"), "--output", str(work / "out")]
    assert mounted(CONFIG, *inside, *task, "data/rows.jsonl") == []
    named = ["--model.path", str(far / "hub/snapshots/1"), "--output", str(far / "new/runs")]
    found = mounted(str(mine), *named, *task, str(far / "hub/snapshots/1/rows.jsonl"))
    wanted = [base, mine, far / "hub/blobs", far / "hub/snapshots/1", far / "new/runs"]
    assert sorted(found) == sorted(map(str, wanted)) and (far / "new/runs").is_dir()
    assert sorted(mounted(CONFIG, *task, "rows.jsonl")) == sorted(map(str, [far / "rows.jsonl", far / "scratch"]))
