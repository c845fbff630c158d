"""A cluster run whose processes are killed at random moments: `python -m tests.fuzz.cluster_kills [COUNT [STEPS]]`.

Megatron-core ranks, a vLLM engine and the driver of one run of STEPS global steps (40) are killed, COUNT times (20) in
all. Two of five kills are aimed, one at a checkpoint that is being saved and one at a push; the others come at a random
moment of a step. The run says in which stage it is (stages.py), and the tally counts kills by it. Lost ranks and
engines are replaced by the run itself; a lost driver is resumed. Every number that the run has computed is then
compared with that of a run that nothing happened to.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml

from tests.fuzz import stages
from tests.fuzz.stages import MARK_FILE, PUSH, SAVE

MARK = "FIRSTORDER_CLUSTER_KILLS"
"""Variable by which the processes of this run are known: Ray's workers inherit the driver's."""

VICTIMS = {"rank": "ray::RankActor", "engine": "ray::EngineActor", "driver": ""}
WEIGHTS = {"rank": 4, "engine": 4, "driver": 2}
AIMS = (SAVE, PUSH, None, None, None)
"""The stage at which a kill is aimed, by its number modulo five; None: at any moment."""

DURATIONS = {SAVE: "timing_s/save_checkpoint", PUSH: "timing_s/push"}
MEASURED = ("timing_s/", "rollout/", "transfer/")
"""Groups of metrics that say how a step ran, not what it computed."""

RESTARTS = {"rollout": {"max_restarts": 1000}, "cluster": {"max_rank_restarts": 1000}, "checkpoint": {"every": 2}}


def write_config(root: Path, steps: int) -> None:
    """The config of the real run in tests/scaled (Pr3, two ranks, one engine), longer, and its model."""
    from dataclasses import replace

    from lab.tasks.arithmetic import ALPHABET
    from sandbox.model import MoE
    from sandbox.model.checkpoint import save
    from tests.scaled import vllm_world
    from tests.scaled.test_scaled_run import CONFIG
    from theory.streams import stream

    save(MoE(replace(vllm_world.model_config(()), vocab_size=len(ALPHABET) + 2), stream(0, "kills")), root / "model")
    raw = yaml.safe_load(CONFIG.replace("MODEL", str(root / "model")))
    for block, fields in RESTARTS.items():
        raw[block] |= fields
    raw |= {"num_steps": steps, "evaluation": {"every": 10, "num_samples": 1, "max_prompts": 4}}
    (root / "config.yaml").write_text(yaml.safe_dump(raw), encoding="utf-8")


def start(root: Path, *words: str) -> subprocess.Popen[bytes]:
    """`firstorder train` of the run in `root`, in a process of its own that says its stage."""
    command = [sys.executable, "-m", stages.__name__, "train", str(root / "config.yaml")]
    environment = os.environ | {MARK: str(root), MARK_FILE: str(root / "stage")}
    with (root / "log").open("ab") as log:
        return subprocess.Popen(
            [*command, "--output", str(root / "runs"), "--progress", "none", *words],
            stdout=log, stderr=log, env=environment,
        )  # fmt: skip


def stage_of(root: Path) -> str:
    """The stage in which the run is now."""
    return (root / "stage").read_text()


def folder_of(root: Path) -> Path | None:
    """The newest run's folder."""
    return max((root / "runs").glob("*/*Z-*"), default=None)


def rows_of(root: Path) -> list[dict[str, Any]]:
    """The rows that are there; a line that is being written is left out."""
    folder, found = folder_of(root), []
    if folder is None or not (folder / "metrics.jsonl").is_file():
        return found
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def computed(root: Path) -> list[dict[str, Any]]:
    """The rows without what depends on the clock, or on how often a process was lost."""
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows_of(root)]


def processes(root: Path, victim: str) -> list[psutil.Process]:
    """The run's actors of that kind."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.info["cmdline"] or ())
            if title.startswith(VICTIMS[victim]) and process.environ().get(MARK) == str(root):
                found.append(process)
    return found


def kill(victim: str, root: Path, driver: subprocess.Popen[bytes], rng: random.Random) -> bool:
    """SIGKILL to the driver, or to one of the actors of that kind; False where there is none at the moment."""
    if victim == "driver":
        driver.kill()
        driver.wait()
        return True
    if not (found := processes(root, victim)):
        return False
    rng.choice(sorted(found, key=lambda process: process.pid)).kill()
    return True


def seconds_of(rows: Sequence[dict[str, Any]]) -> dict[str | None, float]:
    """The median seconds of an undisturbed run's step (None) and of the stages that kills are aimed at."""
    names = {None: "timing_s/step", **DURATIONS}
    return {aim: median(row[name] for row in rows[1:] if name in row) for aim, name in names.items()}


def wait_for(aim: str | None, root: Path, driver: subprocess.Popen[bytes], seconds: float, rng: random.Random) -> None:
    """Until a random moment of the step that has begun, or of the first half of the next stage of that kind."""
    if aim is None:
        time.sleep(rng.uniform(0, seconds))
        return
    while stage_of(root) != aim and driver.poll() is None:
        time.sleep(0.002)
    time.sleep(rng.uniform(0, seconds / 2))


def run_and_kill(
    root: Path, count: int, steps: int, seconds: dict[str | None, float], rng: random.Random
) -> Counter[tuple[str, str]]:
    """The run until it has ended well, with up to `count` kills, at most one per global step: by victim and stage."""
    tally: Counter[tuple[str, str]] = Counter()
    driver, seen = start(root), -1
    while True:
        code = driver.poll()
        if code == 0:
            return tally
        if code is not None:
            raise RuntimeError(f"the run ended with {code}: {(root / 'log').read_text()[-2000:]}")
        done = len(rows_of(root))
        if tally.total() < count and done > max(seen, 1) and done < steps:
            seen = done
            aim = AIMS[tally.total() % len(AIMS)]
            wait_for(aim, root, driver, seconds[aim], rng)
            (victim,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
            stage = stage_of(root)
            if driver.poll() is None and kill(victim, root, driver, rng):
                tally[victim, stage] += 1
                step = f"step {len(rows_of(root))}"
                print(f"[{tally.total()}/{count}] {victim} killed in {step}: {stage}, aimed at {aim}", flush=True)
                if victim == "driver":
                    driver = start(root, "--resume")
        time.sleep(0.05)


def main(count: int = 20, steps: int = 40) -> int:
    """Prints the tally; 1 where a number differs."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as base:
        whole, killed = Path(base).resolve() / "whole", Path(base).resolve() / "killed"
        for root in (whole, killed):
            root.mkdir()
            write_config(root, steps)
        if start(whole).wait() != 0:
            raise RuntimeError((whole / "log").read_text()[-2000:])
        wanted = computed(whole)
        tally = run_and_kill(killed, count, steps, seconds_of(rows_of(whole)), random.Random("cluster kills"))
        found = computed(killed)
    victims, stages_hit = Counter[str](), Counter[str]()
    for (victim, stage), number in tally.items():
        victims[victim] += number
        stages_hit[stage] += number
    kinds = ", ".join(f"{number} of {name}s" if name != "driver" else f"{number} of the driver"
                      for name, number in sorted(victims.items()))  # fmt: skip
    print("by stage: " + ", ".join(f"{number} {name}" for name, number in stages_hit.most_common()))
    differing = [row["step"] for row, other in zip(wanted, found, strict=False) if row != other]
    is_equal = not differing and len(wanted) == len(found)
    words = "every number equal" if is_equal else f"steps {differing} differ, {len(found)} of {len(wanted)} rows"
    print(f"{tally.total()} kills ({kinds}) in {steps} steps: {words}; {time.monotonic() - began:.0f} s")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
