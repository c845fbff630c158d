"""Runs killed at every kind of moment, and what they resume to: `python -m tests.fuzz.kills [COUNT]` prints the tally.

A run of the sandbox is killed in a process of its own in three ways, in turns: at a random moment, wherever it
is (SIGPROF), at a random use of one of its files (opened, renamed, removed, made: SIGKILL), and inside a write, after a
random number of bytes of one file (SIGXFSZ). One in four is killed a second time, while it resumes. Then
`firstorder train --resume` ends it, or `firstorder train` where nothing was recorded yet, and all that it recorded is
compared with a run that was never stopped, byte by byte but for the manifest, the times and the page.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from firstorder.cli import main
from lab.files import TEMPORARY
from tests.forks import begin, end
from tests.sandbox.training.test_resume import CONFIG

STEPS = 5
WAYS = ("moment", "use of a file", "inside a write")
USES = {"open", "os.rename", "os.remove", "os.mkdir", "os.truncate"}
Doom = Callable[[], None]


def train(root: Path, *words: str, doom: Doom | None = None, log: str = "log") -> int:
    """The exit code of `firstorder train` in a process of its own, which begins by `doom`; negative: killed by that."""

    def act() -> int:
        (doom or (lambda: None))()
        options = ["--output", str(root / "runs"), "--progress", "none", "--num_steps", str(STEPS)]
        return main(["train", str(root / "config.yaml"), *options, "--traces.every", "2", *words])

    return end(begin(act, root / log))


def at_moment(seconds: float) -> Doom:
    """The end of the process after so many seconds of its time; no handler runs."""

    def arm() -> None:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, seconds)

    return arm


def at_use(number: int, root: Path, report: Path | None = None) -> Doom:
    """SIGKILL at that use of a file of the runs; `report` is told how many there were, where none kills."""

    def arm() -> None:
        met = 0

        def look(event: str, args: tuple[object, ...]) -> None:
            nonlocal met
            if event in USES and str(root / "runs") in str(args[0]):
                met += 1
                if report is not None:
                    os.pwrite(told, f"{met:9}".encode(), 0)
                if met == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        told = -1 if report is None else os.open(report, os.O_CREAT | os.O_WRONLY)
        sys.addaudithook(look)

    return arm


def inside_write(num_bytes: int) -> Doom:
    """The end of the process once a file of its own would grow beyond that."""

    def arm() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    return arm


def recorded(root: Path) -> dict[str, bytes]:
    """The newest run's files by name; a stray temporary file is something recorded, too."""
    folder = max((root / "runs" / "resume").glob("*Z-*"))
    timed = ("manifest.json", "timing.jsonl", "report.html", ".lock", "log")
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in timed)
    found = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    found["page"] = str((folder / "report.html").is_file()).encode()
    found["strays"] = str(sorted(path.name for path in folder.rglob(f"*{TEMPORARY}*"))).encode()
    found["config.yaml"] = found["config.yaml"].replace(str(root).encode(), b"ROOT")
    return found


def doom_of(way: str, rng: random.Random, root: Path, seconds: float, uses: int, sizes: Sequence[int]) -> Doom:
    """A kill of that kind, where a whole run takes those seconds and uses, and its files have those sizes."""
    if way == "moment":
        return at_moment(rng.uniform(0.01, seconds))
    if way == "use of a file":
        return at_use(rng.randint(1, uses), root)
    return inside_write(rng.randrange(rng.choice(sizes)))


def kill_and_resume(way: str, rng: random.Random, root: Path, seconds: float, uses: int, sizes: Sequence[int]) -> int:
    """The number of kills before the run ended; AssertionError where it does not end well."""
    (root / "config.yaml").write_text(CONFIG)
    kills = train(root, doom=doom_of(way, rng, root, seconds, uses, sizes)) < 0
    if kills and rng.random() < 0.25:
        kills += train(root, "--resume", doom=doom_of(rng.choice(WAYS), rng, root, seconds / 2, uses // 2, sizes)) < 0
    code = train(root, "--resume", log="last")
    said = (root / "last").read_text()
    if code == 2 and "got none" in said:  # nothing is left to do, or nothing was recorded yet
        code = 0 if list(root.glob("runs/resume/*/report.html")) else train(root, log="last")
    assert code == 0, f"exit code {code}: {(root / 'last').read_text()}"
    return kills


def measure(count: int, base: Path) -> tuple[Counter[str], list[str]]:
    """Kills of each kind, and what went wrong, over runs until `count` kills were made."""
    whole = base / "whole"
    whole.mkdir()
    (whole / "config.yaml").write_text(CONFIG)
    began = os.times()
    assert train(whole, doom=at_use(-1, whole, whole / "uses")) == 0, (whole / "log").read_text()
    ended = os.times()
    seconds = ended.children_user + ended.children_system - began.children_user - began.children_system
    uses, wanted = int((whole / "uses").read_text()), recorded(whole)
    sizes = [len(data) for name, data in wanted.items() if len(data) > 100]
    tally: Counter[str] = Counter()
    faults = []
    case = 0
    while tally.total() < count and case < 4 * count:
        way, root = WAYS[case % len(WAYS)], base / f"case-{case}"
        root.mkdir()
        try:
            tally[way] += kill_and_resume(way, random.Random(f"kill {case}"), root, seconds, uses, sizes)
            got = recorded(root)
            if other := sorted(name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name)):
                faults.append(f"case {case}, {way}: {', '.join(other)} differ")
        except AssertionError as error:
            faults.append(f"case {case}, {way}: {error}")
        case += 1
    return tally, faults


if __name__ == "__main__":
    wanted_kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        counts, wrong = measure(wanted_kills, Path(folder).resolve())
    ways = ", ".join(f"{number} at a {way}" if way != WAYS[2] else f"{number} {way}" for way, number in counts.items())
    print(f"{counts.total()} kills ({ways}): {len(wrong)} runs that did not resume to the same bytes")
    print("\n".join(wrong) or f"all whole, in {time.monotonic() - began_at:.0f} s")
    sys.exit(bool(wrong))
