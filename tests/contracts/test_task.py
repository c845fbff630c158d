"""Every task keeps the contract of `lab.tasks`: prompts by step, a held-out side, teachers that are right, and dials
that are refused by name."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.strict import ConfigError, Strict, validate
from lab.tasks import KINDS, DemonstratedTask, TaskBlock, TaskConfig, TextTask, build
from lab.tasks.arithmetic import ArithmeticConfig
from lab.tasks.calculator import CalculatorConfig
from lab.tasks.countdown import CountdownConfig
from lab.tasks.jsonl import DatasetConfig, JsonlConfig, ProblemFileConfig
from lab.tasks.tokenizers import CharTokenizer
from tests.lab.answers import respond
from theory.contracts import Environment, Task
from theory.streams import stream

Make = Callable[[Path], TextTask]


@dataclass(frozen=True)
class Row:
    """A kind of task: the settings that the laws try, and wrong ones with the start of the error."""

    makes: dict[str, Make]
    wrong: list[tuple[dict[str, Any], str]]


def problems(config: type[ProblemFileConfig]) -> Make:
    """Twelve problems of a file whose rows have solutions."""

    def make(folder: Path) -> TextTask:
        rows = [{"problem": f"What is {i} + 1?", "answer": str(i + 1), "how": rf"\boxed{{{i + 1}}}"} for i in range(12)]
        path = folder / "problems.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        kind = config.model_fields["kind"].default
        block = config(kind=kind, path=str(path), solution_key="how", held_out_fraction=0.25)
        return build(block, CharTokenizer(string.printable))

    return make


TASKS: dict[str, Row] = {
    "arithmetic": Row(
        {
            "sums": lambda _: build(ArithmeticConfig(num_terms=3, num_held_out=8)),
            "differences": lambda _: build(ArithmeticConfig(operation="subtract", num_held_out=8)),
        },
        wrong=[
            ({"min_digits": 4, "max_digits": 3}, "max_digits: expected at least min_digits = 4, got 3"),
            ({"min_digits": 0}, "min_digits: expected a value greater than or equal to 1, got 0"),
            ({"operation": "subtract", "num_terms": 3}, "num_terms: expected 2 where operation is subtract"),
            ({"num_terms": 11}, "num_terms: expected a value less than or equal to 10, got 11"),
            ({"min_digits": 1, "max_digits": 1}, "num_held_out: expected at most 1 problems of 1 digits"),
            ({"operation": "multiply"}, "operation: expected 'add' or 'subtract', got \"multiply\""),
            ({"max_digit": 3}, "max_digit: unknown key; did you mean 'max_digits'?"),
        ],
    ),
    "countdown": Row(
        {
            "defaults": lambda _: build(CountdownConfig(num_held_out=8)),
            "all dials": lambda _: build(
                CountdownConfig(
                    num_numbers=4, operations=("+", "-", "*", "/"), use_all=False, max_value=200, num_held_out=8
                )
            ),
        },
        wrong=[
            ({"num_numbers": 6}, "num_numbers: expected a value less than or equal to 5, got 6"),
            ({"operations": []}, "operations: "),
            ({"operations": ["+", "+"]}, "operations: expected each at most once, got +, +"),
            ({"operations": ["^"]}, "operations.0: expected '+', '-', '*' or '/', got \"^\""),
        ],
    ),
    "jsonl": Row(
        {"with solutions": problems(JsonlConfig)},
        wrong=[
            ({"path": "x", "prompt_template": "none"}, "prompt_template: expected {problem} in it, got 'none'"),
            ({"path": "x", "answer_key": "problem"}, "answer_key: expected another key than problem_key"),
            ({"path": "x", "held_out_fraction": 1.0}, "held_out_fraction: expected a value less than 1, got 1.0"),
            ({"path": ""}, "path: "),
        ],
    ),
    "dataset": Row({"with solutions": problems(DatasetConfig)}, wrong=[({"path": ""}, "path: ")]),
}
"""Tasks of one turn with demonstrations, a row per kind."""

# The calculator answers, so that its demonstrations have several turns: tests/lab/test_calculator.py has their laws.
ROWS = TASKS | {
    "calculator": Row(
        {"defaults": lambda _: build(CalculatorConfig(num_held_out=8))},
        wrong=[
            ({"min_operations": 3}, "max_operations: expected at least min_operations = 3, got 2"),
            ({"max_digits": 1, "num_held_out": 16}, "num_held_out: expected at most 7 problems of 1 operations"),
            ({"max_digits": 5}, "max_digits: expected a value less than or equal to 4, got 5"),
        ],
    )
}


def named(rows: dict[str, Row]) -> list[Any]:
    """Each setting of each row as a parameter of a test."""
    return [pytest.param(make, id=f"{kind}, {name}") for kind, row in rows.items() for name, make in row.makes.items()]


@pytest.mark.parametrize(
    ("block", "wanted"),
    [
        (CountdownConfig(num_numbers=2, max_number=20, num_held_out=500), "task.num_held_out: expected 500 distinct"),
        (CountdownConfig(operations=("+",), max_value=1), "task.max_number: expected dials that leave problems"),
        (
            ArithmeticConfig(min_digits=1, max_digits=1, num_held_out=1, seed=1203),
            "task.num_held_out: expected problems",
        ),
        (JsonlConfig(path="none.jsonl"), "none.jsonl: "),
    ],
)
def test_a_task_that_cannot_be_made_names_the_field_in_full(block: TaskBlock, wanted: str) -> None:
    """Also where only its problems, once drawn, show that the block does not fit; a file stays named by its path."""
    with pytest.raises(ValueError) as caught:
        build(block, CharTokenizer("0123456789"))
    assert str(caught.value).startswith(wanted) or str(caught.value).startswith(f"cannot read {wanted}")


def test_every_kind_has_a_row() -> None:
    """The kinds that a config may name are those of the rows."""
    assert {kind.model_fields["kind"].default for kind in KINDS} == set(ROWS)


@pytest.fixture(params=named(TASKS))
def task(request: pytest.FixtureRequest, tmp_path: Path) -> TextTask:
    return request.param(tmp_path)


def test_prompts_are_named_by_their_step(task: TextTask) -> None:
    """The same step gives the same prompts, another step gives others; ids and tokens name a problem."""
    assert isinstance(task, Task) and isinstance(task, TextTask)
    assert list(task.prompts(3, 5)) == list(task.prompts(3, 5)) != list(task.prompts(4, 5))
    prompts = [p for step in range(4) for p in task.prompts(step, 5)]
    assert len({p.id for p in prompts}) == len({p.tokens for p in prompts}) == len(set(prompts)) > 5
    assert all(0 <= token < task.tokenizer.vocab_size for p in prompts for token in p.tokens)


@pytest.mark.parametrize("make", named(ROWS))
def test_its_block_says_what_it_is(make: Make, tmp_path: Path) -> None:
    """The block knows without the task whether it answers responses, whether it is built without a tokenizer, and how
    many problems are held out."""
    task: Any = make(tmp_path)
    assert task.config.count_held_out() == len(task.held_out())
    assert task.config.has_turns == isinstance(task, Environment)
    if task.config.needs_tokenizer:
        with pytest.raises(ValueError, match=r"^task\.kind: expected a tokenizer"):
            build(task.config)
    else:
        assert build(task.config).tokenizer.vocab_size == task.tokenizer.vocab_size


def test_what_is_held_out_is_never_trained_on(task: TextTask) -> None:
    """Held-out problems are fixed, distinct, and none of those of a hundred steps."""
    held_out = [p.tokens for p in task.held_out()]
    assert held_out == [p.tokens for p in task.held_out()] and len(set(held_out)) == len(held_out) > 0
    assert not set(held_out) & {p.tokens for step in range(100) for p in task.prompts(step, 4)}


def test_every_teacher_shows_right_responses(task: TextTask) -> None:
    """A demonstration earns 1, ends with its only end token and fits; the same generator gives the same one."""
    assert isinstance(task, DemonstratedTask)
    assert task.teachers and len(set(task.teachers)) == len(task.teachers)
    for teacher in task.teachers:
        for prompt in task.prompts(0, 8):
            shown = task.demonstration(prompt, stream(5, "shown"), teacher)
            assert task.reward(prompt, respond(prompt, shown)) == 1.0
            assert shown.index(task.tokenizer.eos_id) == len(shown) - 1 < task.max_response_tokens
            assert shown == task.demonstration(prompt, stream(5, "shown"), teacher)


def test_teachers_write_in_different_ways(task: TextTask) -> None:
    """Two teachers of one task show most problems in different words, and their lengths differ in the mean."""
    assert isinstance(task, DemonstratedTask)
    prompts = task.prompts(0, 16)
    shown = {t: [task.demonstration(p, stream(5, "shown", i), t) for i, p in enumerate(prompts)] for t in task.teachers}
    for a in task.teachers:
        for b in task.teachers:
            same = sum(x == y for x, y in zip(shown[a], shown[b], strict=True))
            assert same == len(prompts) if a == b else same <= len(prompts) // 2
    assert len(task.teachers) == 1 or len({sum(map(len, all_)) for all_ in shown.values()}) > 1


def test_an_answer_to_another_problem_earns_nothing(task: TextTask) -> None:
    """The response to one problem is wrong for another with another answer, and an empty one is wrong for all."""
    assert isinstance(task, DemonstratedTask)
    first, *others = task.prompts(0, 6)
    shown = task.demonstration(first, stream(5, "shown"), task.teachers[0])
    for prompt in others:
        assert prompt.answer == first.answer or task.reward(prompt, respond(prompt, shown)) == 0.0
        assert task.reward(prompt, respond(prompt, (task.tokenizer.eos_id,))) == 0.0


class Holder(Strict):
    """A run's config as far as tasks are concerned."""

    task: TaskConfig


@pytest.mark.parametrize(
    ("kind", "dials", "words"),
    [
        pytest.param(kind, dials, words, id=f"{kind} {dials}")
        for kind, row in ROWS.items()
        for dials, words in row.wrong
    ],
)
def test_wrong_dials_are_one_line(kind: str, dials: dict[str, Any], words: str) -> None:
    """A wrong dial is one line with its full name, the expected value and the one found."""
    with pytest.raises(ConfigError) as caught:
        validate(Holder, {"task": {"kind": kind, **dials}}, "config.yaml")
    assert str(caught.value).startswith(f"config.yaml: task.{words}") and "\n" not in str(caught.value)
