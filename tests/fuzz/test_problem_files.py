"""A problem file that was edited or torn, in any format: its rows are read whole, or refused in one line."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.tasks.jsonl import DatasetConfig, JsonlConfig, split
from lab.tasks.problems import ProblemsConfig
from tests.fuzz.mutations import TooLongError, edited, misplaced, note, num_cases, torn, within

ROWS: list[dict[str, Any]] = [
    {"problem": "What is 1/2 + 1/3?", "answer": "5/6", "solution": r"\boxed{5/6}", "source": {"name": "a", "year": 1}},
    {"problem": "Expand $(x+1)^2$.", "answer": "$x^2+2x+1$", "solution": r"So \boxed{x^2+2x+1}.", "source": None},
    {"problem": [{"role": "user", "content": "What is 7*6?"}], "answer": "42", "solution": r"\boxed{42}"},
    {"problem": "Name the interval.", "answer": r"(-\infty, 3]", "solution": r"\boxed{(-\infty, 3]}", "extra": [1, 2]},
    {"problem": "Solve é = 3.", "answer": "3", "solution": r"\boxed{3}"},
]
ANSWERS = (r"\frac{1}{0}", "{" * 3_000, "((1", "9" * 400, "2^{2^{2^{2^{99}}}}", "1e400", "∞", "\\", "x_{", r"\boxed{}")


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def changed(rng: random.Random) -> list[Any]:
    rows = json.loads(json.dumps(ROWS))
    place = rng.randrange(len(rows))
    if rng.random() < 0.3:
        rows[place]["answer"] = rng.choice(ANSWERS)
    else:
        rows[place] = edited(rows[place], rng, (2**70, 1e308, 3))
    return rows


def jsonl(folder: Path, rng: random.Random) -> Path:
    """JSON Lines with a field edited, a line moved, doubled or joined to the next, or bytes torn."""
    data = lines(changed(rng))
    how = rng.random()
    if how < 0.2:
        data = torn(lines(ROWS), rng)
    elif how < 0.4:
        data = b"".join(line + b"\n" for line in misplaced(lines(ROWS).splitlines(), rng))
    (folder / "t.jsonl").write_bytes(data)
    return folder / "t.jsonl"


def table(folder: Path, rng: random.Random, suffix: str) -> Path:
    """A table of rows with columns gone or of other kinds, where it can hold them; or with bytes torn."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    plain = [row for row in ROWS if isinstance(row["problem"], str)]
    rows = [{k: row[k] for k in ("problem", "answer", "solution")} for row in plain]
    path = folder / f"t{suffix}"
    names = {f"{key}s" if rng.random() < 0.1 else key: key for key in rows[0] if rng.random() < 0.95}
    wrong = rng.choice(sorted(rows[0]))
    if rng.random() < 0.5:
        for row in rows:
            row[wrong] = (
                rng.choice([None, 3, 2.5, [1], {"a": 1}, b"\xff", "", "3"]) if rng.random() < 0.5 else row[wrong]
            )
    try:
        made = pa.Table.from_pylist([{new: row[old] for new, old in names.items()} for row in rows])
        pq.write_table(made, path) if suffix == ".parquet" else write_arrow(pa, made, path)
    except (pa.ArrowException, TypeError):  # a column has one type
        made = pa.Table.from_pylist([{"problem": row["problem"], "answer": row["answer"]} for row in plain])
        pq.write_table(made, path) if suffix == ".parquet" else write_arrow(pa, made, path)
    if rng.random() < 0.4:
        path.write_bytes(torn(path.read_bytes(), rng))
    return path


def write_arrow(pa: Any, made: Any, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, made.schema) as writer:
        writer.write_table(made)


def parquet(folder: Path, rng: random.Random) -> Path:
    return table(folder, rng, ".parquet")


def arrow(folder: Path, rng: random.Random) -> Path:
    return table(folder, rng, ".arrow")


def saved(folder: Path, rng: random.Random) -> Path:
    """A folder that `datasets.save_to_disk` wrote, with one of its files torn, edited or gone."""
    datasets = pytest.importorskip("datasets")
    path = folder / "saved"
    whole = Path(str(folder) + "-whole")
    if not whole.is_dir():
        rows = [{k: row[k] for k in ("problem", "answer")} for row in ROWS if isinstance(row["problem"], str)]
        datasets.Dataset.from_list(rows).save_to_disk(whole)
    shutil.copytree(whole, path)
    victim = rng.choice(sorted(each for each in path.iterdir() if each.is_file()))
    if rng.random() < 0.15:
        victim.unlink()
    elif victim.suffix == ".json" and rng.random() < 0.7:
        victim.write_text(json.dumps(edited(json.loads(victim.read_text()), rng, (2**70, -1, 3))))
    else:
        victim.write_bytes(torn(victim.read_bytes(), rng))
    return path


FORMATS: dict[str, Callable[[Path, random.Random], Path]] = {
    "jsonl": jsonl, "parquet": parquet, "arrow": arrow, "saved": saved,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_spoiled_file_is_problems_or_one_line(name: str, tmp_path: Path, record_property: Any) -> None:
    """Within 20 s every row is a problem with the very texts of the file, or one line names the file."""
    outcomes = [outcome(name, case, tmp_path / "files") for case in range(num_cases(40))]
    note(record_property, outcomes)
    assert not (faults := [each for each in outcomes if each not in ("read", "refused")]), "\n".join(faults)
    assert 0.2 < outcomes.count("refused") / len(outcomes) < 0.95


def outcome(name: str, case: int, folder: Path) -> str:
    """`read`, `refused`, or what went wrong with the case."""
    rng = random.Random(f"{name} {case}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = FORMATS[name](folder, rng)
    config: ProblemsConfig = (JsonlConfig if name == "jsonl" else DatasetConfig)(
        path=str(path), held_out_fraction=0.3, chat_template=True, solution_key=rng.choice([None, "solution"])
    )
    said = f"{name}, case {case}: "
    try:
        with within(20):
            problems = [problem for side in split(config) for problem in side]
    except ValueError as error:
        is_clear = str(path) in str(error) and "\n" not in str(error) and len(str(error)) < 2_000
        return "refused" if is_clear else f"{said}{error}"
    except (Exception, TooLongError) as error:
        return f"{said}{type(error).__name__}: {error}"
    if not all(isinstance(text, str) and text.strip() for p in problems for text in (p.problem, p.answer)):
        return f"{said}{problems}"
    if name != "jsonl":
        return "read"
    rows = [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    answers = sorted(row["answer"] for row in rows)
    return "read" if sorted(problem.answer for problem in problems) == answers else f"{said}{problems}"
