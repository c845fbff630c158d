"""Laws of the data formats: one set of problems is the same task in every format, and a bad row is named in each."""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lab.config.load import to_yaml
from lab.extras import how_to_install
from lab.strict import validate
from lab.tasks import TextTask, build
from lab.tasks.jsonl import DatasetConfig, JsonlConfig
from lab.tasks.problems import ProblemsConfig
from lab.tasks.tokenizers import CharTokenizer
from tests.lab.answers import answer_with
from theory.streams import derive_seed, stream

TOKENIZER = CharTokenizer(string.printable)
Rows = list[dict[str, Any]]
Write = Callable[[Path, Rows], Path]


def jsonl(folder: Path, rows: Rows) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(folder: Path, rows: Rows) -> Path:
    # Row groups of 3, so that row numbers have to be counted across them.
    pq.write_table(pa.Table.from_pylist(rows), folder / "problems.parquet", row_group_size=3)
    return folder / "problems.parquet"


def arrow_file(folder: Path, rows: Rows) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(str(folder / "problems.arrow"), table.schema) as file:
        file.write_table(table)
    return folder / "problems.arrow"


def arrow_stream(folder: Path, rows: Rows) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(folder / "problems.arrow"), table.schema) as file:
        file.write_table(table)
    return folder / "problems.arrow"


def parquet_folder(folder: Path, rows: Rows) -> Path:
    (folder / "parts").mkdir()
    for i, part in enumerate((rows[:4], rows[4:])):
        pq.write_table(pa.Table.from_pylist(part), folder / "parts" / f"part-{i}.parquet")
    (folder / "parts" / "_SUCCESS").write_text("")
    return folder / "parts"


def saved(folder: Path, rows: Rows) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def saved_in_another_order(folder: Path, rows: Rows) -> Path:
    """Rows that lie reversed, with a copy that is not selected, under indices that put them right, shown as numpy's."""
    stored = datasets.Dataset.from_list([*reversed(rows), rows[0]])
    stored.select(range(len(rows) - 1, -1, -1)).with_format("numpy").save_to_disk(str(folder / "saved"))
    return folder / "saved"


FORMATS: dict[str, Write] = {
    "jsonl": jsonl, "parquet": parquet, "arrow file": arrow_file, "arrow stream": arrow_stream,
    "folder of parquet": parquet_folder, "save_to_disk": saved, "save_to_disk with indices": saved_in_another_order,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> None:
    datasets.disable_progress_bars()


def problems(n: int = 10) -> Rows:
    rows = [{"problem": f"What is {i} + 1?", "answer": str(i + 1), "level": i / 7} for i in range(n)]
    return [row | {"how": rf"\boxed{{{row['answer']}}}"} for row in rows]


def nested(n: int = 10) -> Rows:
    """The same problems as the DAPO-17K files have them: chat messages, and the answer inside an object."""
    return [
        {
            "prompt": [{"role": "user", "content": row["problem"]}],
            "reward_model": {"ground_truth": row["answer"], "style": "rule", "how": row["how"]},
        }
        for row in problems(n)
    ]


def seen(task: TextTask) -> tuple[list[Any], list[Any], list[float]]:
    """A task as a run sees it: its walk, its held-out problems, its rewards; without the places in the file."""
    walk = [p for step in range(3) for p in task.prompts(step, 4)]
    rewards = [answer_with(task, p, rf"\boxed{{{answer}}}") for p in walk[:3] for answer in ("3", p.answer)]
    prompts, held_out = ([(p.tokens, p.answer, p.text) for p in some] for some in (walk, task.held_out()))
    return prompts, held_out, rewards


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", ["flat", "nested"])
def test_every_format_is_the_same_task(make: Write, shape: str, tmp_path: Path) -> None:
    """Prompts, answers, order, held-out split, rewards and demonstrations do not depend on how the rows are stored."""
    (tmp_path / "reference").mkdir()
    reference = jsonl(tmp_path / "reference", problems())
    wanted = build(JsonlConfig(path=str(reference), held_out_fraction=0.3, solution_key="how"), TOKENIZER)
    if shape == "flat":
        path = make(tmp_path, problems())
        task = build(DatasetConfig(path=str(path), held_out_fraction=0.3, solution_key="how"), TOKENIZER)
    else:
        path = make(tmp_path, nested())
        task = build(
            DatasetConfig(
                path=str(path), held_out_fraction=0.3, problem_key="prompt", answer_key="reward_model.ground_truth",
                solution_key="reward_model.how",
            ),
            TOKENIZER,
        )  # fmt: skip
    assert seen(task) == seen(wanted)
    assert 1.0 in seen(task)[2] and 0.0 in seen(task)[2]
    for ours, theirs in zip(task.prompts(0, 4), wanted.prompts(0, 4), strict=True):
        draws = [stream(0, "unused"), stream(0, "unused")]
        assert task.demonstration(ours, draws[0], "solutions") == wanted.demonstration(theirs, draws[1], "solutions")  # type: ignore[attr-defined]


def test_rows_are_numbered_as_they_lie(tmp_path: Path) -> None:
    """A prompt's id is its file and row, from 1, across row groups, files of a folder and a selection."""
    for make in (parquet, parquet_folder, saved_in_another_order):
        (folder := tmp_path / make.__name__).mkdir()
        path = make(folder, problems())
        task = build(DatasetConfig(path=str(path), held_out_fraction=0.1), TOKENIZER)
        ids = {p.answer: p.id for p in (*task.prompts(0, 9), *task.held_out())}
        for i in range(10):
            here = (path / f"part-{i // 4 if i < 8 else 1}.parquet", (i if i < 4 else i - 4) + 1)
            place, number = here if make is parquet_folder else (path, i + 1)
            assert ids[str(i + 1)] == f"{place}:{number}"


def test_the_split_is_by_the_text_alone(tmp_path: Path) -> None:
    """Held out are the texts with the smallest hash of seed and text, as strings and as a single message."""
    rank = sorted(problems(), key=lambda row: derive_seed(5, "partition", row["problem"]))
    wanted = {row["answer"] for row in rank[:3]}
    flat = JsonlConfig(path=str(jsonl(tmp_path, problems())), held_out_fraction=0.3, seed=5)
    assert {p.answer for p in build(flat, TOKENIZER).held_out()} == wanted
    keys = {"problem_key": "prompt", "answer_key": "reward_model.ground_truth"}
    chat = flat.model_copy(update={"path": str(jsonl(tmp_path, nested())), **keys})
    assert {p.answer for p in build(chat, TOKENIZER).held_out()} == wanted


def test_an_exact_key_wins_over_a_path(tmp_path: Path) -> None:
    """A key with a dot in it that the row has as it stands is that key."""
    rows = [{"problem": f"{i}?", "a.b": "1", "a": {"b": "2"}} for i in range(4)]
    config = JsonlConfig(path=str(jsonl(tmp_path, rows)), answer_key="a.b", held_out_fraction=0.5)
    assert {p.answer for p in build(config, TOKENIZER).held_out()} == {"1"}


# -- what can be wrong


BAD_ROWS = [
    ({"problem": "no answer"}, "expected the key 'answer', got 'problem'"),
    ({"problem": "5?", "answer": 5}, 'answer: expected a string such as "5", got int 5'),
    ({"problem": "?", "answer": " "}, "answer: expected a text that is not empty"),
    ({"problem": "?", "answer": "%%"}, "answer: expected an expression that Math-Verify can parse, got '%%'"),
    ({"problem": [], "answer": "1"}, "problem: expected a text or chat messages, got an empty list"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "words"), BAD_ROWS, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("make", [parquet, saved])
def test_a_bad_row_is_named_in_every_format(make: Write, row: dict[str, Any], words: str, tmp_path: Path) -> None:
    """A bad row of a table is one line as a bad line of JSON is: file, number, field, what came, what was expected."""
    path = make(tmp_path, [row])
    message = fails(DatasetConfig(path=str(path)))
    assert message.startswith(f"{path}:1: ") and words in message


@pytest.mark.parametrize("make", [arrow_file, arrow_stream, saved, parquet])
def test_a_table_that_was_cut_is_one_line(make: Write, tmp_path: Path) -> None:
    """Wherever a table ends too early, the line has its name; mapped into memory, it would be a signal."""
    path = make(tmp_path, problems())
    table = next(path.glob("*.arrow")) if path.is_dir() else path
    whole = table.read_bytes()
    for part in (0, 8, len(whole) // 4, len(whole) // 2, len(whole) - 40):
        table.write_bytes(whole[:part])
        message = fails(DatasetConfig(path=str(path)))
        assert message.startswith(str(path)) and "\n" not in message
    middle = len(whole) // 3  # the file says that there is more than there is
    table.write_bytes(whole[:middle] + whole[2 * middle :])
    assert fails(DatasetConfig(path=str(path))).startswith(str(path))


def test_a_file_that_cannot_serve_is_one_line(tmp_path: Path) -> None:
    """A wrong kind, a broken table, a folder without any, all splits at once, no rows: one line with the path."""
    table = parquet(tmp_path, problems())
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "broken.arrow").write_bytes(b"ARROW1")
    (tmp_path / "none").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "state.json").write_text("{")
    splits = datasets.DatasetDict({name: datasets.Dataset.from_list(problems(2)) for name in ("train", "test")})
    splits.save_to_disk(str(tmp_path / "splits"))
    pq.write_table(pa.table({"problem": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    for config, words in (
        (JsonlConfig(path=str(table)), "expected JSON lines where task.kind is jsonl, got a .parquet file"),
        (DatasetConfig(path=str(tmp_path / "absent.parquet")), "No such file"),
        (DatasetConfig(path=str(tmp_path / "broken.parquet")), "expected a Parquet file, got: "),
        (DatasetConfig(path=str(tmp_path / "broken.arrow")), "expected an Arrow file, got: "),
        (DatasetConfig(path=str(tmp_path / "none")), "or one of .parquet or .arrow files, got one without either"),
        (DatasetConfig(path=str(tmp_path / "damaged")), "expected a folder that datasets.save_to_disk wrote, got: "),
        (DatasetConfig(path=str(tmp_path / "splits")), f"{tmp_path}/splits/test or {tmp_path}/splits/train"),
        (DatasetConfig(path=str(tmp_path / "empty.parquet")), "got an empty file"),
    ):
        message = fails(config)
        assert message.startswith(config.path) and words in message
    whole = build(DatasetConfig(path=str(tmp_path / "splits" / "train"), held_out_fraction=0.5), TOKENIZER)
    assert len(whole.held_out()) == 1


@pytest.mark.parametrize(("make", "package"), [(parquet, "pyarrow"), (saved, "datasets")])
def test_a_missing_library_is_one_line(make: Write, package: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Without the library of a format its files are refused with the extra that brings it; JSON Lines need neither."""
    path, lines = make(tmp_path, problems()), jsonl(tmp_path, problems())
    monkeypatch.setitem(sys.modules, package, None)
    message = fails(DatasetConfig(path=str(path)))
    assert message == f"{path}: expected {package} to read it, which is not installed ({how_to_install('data')})"
    assert build(DatasetConfig(path=str(lines)), TOKENIZER).held_out()


def test_the_block_loads_back() -> None:
    """Both kinds keep their name through YAML, with the kind first."""
    for kind in (JsonlConfig, DatasetConfig):
        text = to_yaml(kind(path="x", problem_key="prompt", answer_key="reward_model.ground_truth"))
        assert text.startswith(f"kind: {kind(path='x').kind}\n")  # type: ignore[attr-defined]
        raw = {"kind": kind(path="x").kind, "path": "x"}  # type: ignore[attr-defined]
        assert validate(kind, raw, "config.yaml") == kind(path="x")


def fails(config: ProblemsConfig, tokenizer: Any = TOKENIZER) -> str:
    """The one line with which the task refuses its config."""
    with pytest.raises(ValueError) as caught:
        build(config, tokenizer)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)
