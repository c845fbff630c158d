r"""Laws of the jsonl task: every line is trained on once an epoch or held out, and a bad line is named by number."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab import evaluation
from lab.tasks import DemonstratedTask, build, grading, jsonl
from lab.tasks.jsonl import JsonlConfig
from lab.tasks.tokenizers import CharTokenizer
from tests.lab.answers import respond
from theory.contracts import Task
from theory.streams import stream

TOKENIZER = CharTokenizer(string.printable)


def write(path, rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def rows(n: int) -> list[dict[str, str]]:
    return [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(n)]


@pytest.fixture(scope="module")
def twenty(tmp_path_factory) -> str:
    return write(tmp_path_factory.mktemp("jsonl") / "twenty.jsonl", rows(20))


def test_is_a_task_without_demonstrations(twenty):
    """The built task satisfies the loop's protocol and offers no demonstrations that it does not have."""
    task = build(JsonlConfig(path=twenty), TOKENIZER)
    assert isinstance(task, Task)
    assert not isinstance(task, DemonstratedTask)
    with pytest.raises(ValueError, match="tokenizer"):
        build(JsonlConfig(path=twenty))


def test_the_default_prompt_is_that_of_the_paper(twenty):
    """The prompt is the problem and R3's two lines (App. K), to the character, and the tokens are its encoding."""
    for prompt in build(JsonlConfig(path=twenty), TOKENIZER).prompts(0, 3):
        problem, rest = prompt.text.split("\n", 1)
        assert problem == f"What is {int(prompt.answer) - 1} + 1?"
        assert rest == "Please reason step by step,\nand put your final answer within \\boxed{ }."
        assert TOKENIZER.decode(prompt.tokens) == prompt.text


def test_braces_in_problem_and_template_are_left_alone(tmp_path):
    """Only {problem} is replaced, and once: braces of LaTeX, and the word itself inside a problem, stay as they are."""
    problem = r"Is \frac{1}{2} {problem} {0}?"
    path = write(tmp_path / "p.jsonl", [{"problem": problem, "answer": "1"}, *rows(1)])
    config = JsonlConfig(path=path, prompt_template="<{problem}> \\boxed{ }", held_out_fraction=0.5)
    task = build(config, TOKENIZER)
    assert f"<{problem}> \\boxed{{ }}" in [p.text for p in (*task.prompts(0, 1), *task.held_out())]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num_prompts=st.integers(1, 50), seed=st.integers(0, 99), num_steps=st.integers(1, 12))
def test_epochs_are_without_replacement(twenty, num_prompts, seed, num_steps):
    """After any number of steps each training problem has come equally often, give or take one; none was held out."""
    task = build(JsonlConfig(path=twenty, seed=seed, held_out_fraction=0.25), TOKENIZER)
    walked = [p for step in range(num_steps) for p in task.prompts(step, num_prompts)]
    counts = Counter(p.id for p in walked)
    whole, rest = divmod(num_prompts * num_steps, 15)
    expected = [whole + 1] * rest + [whole] * (15 - rest)
    assert sorted(counts.values(), reverse=True) == [c for c in expected if c > 0]
    for start in range(0, len(walked) - 14, 15):
        assert len({p.id for p in walked[start : start + 15]}) == 15
    held_out = {p.id for p in task.held_out()}
    assert len(held_out) == 5
    assert not held_out & set(counts)
    assert task.prompts(3, num_prompts) == build(task.config, TOKENIZER).prompts(3, num_prompts)


def test_epochs_and_seeds_have_orders_of_their_own(twenty):
    """The order changes from epoch to epoch and from seed to seed."""
    task, other = (build(JsonlConfig(path=twenty, seed=seed, held_out_fraction=0.25), TOKENIZER) for seed in (0, 1))
    orders = [tuple(p.id for p in task.prompts(epoch, 15)) for epoch in range(4)]
    assert len(set(orders)) == 4
    assert {p.id for p in other.held_out()} != {p.id for p in task.held_out()}


def test_the_held_out_share_survives_new_lines(twenty, tmp_path):
    """Adding one line moves at most one problem across the split, and the order of lines moves none."""
    small = build(JsonlConfig(path=twenty, held_out_fraction=0.25), TOKENIZER)
    more = write(tmp_path / "more.jsonl", [*reversed(rows(20)), {"problem": "new", "answer": "1"}])
    large = build(JsonlConfig(path=more, held_out_fraction=0.25), TOKENIZER)
    before, after = ({p.text for p in task.held_out()} for task in (small, large))
    assert len(before - after) <= 1


def test_a_second_file_is_held_out_whole(twenty, tmp_path):
    """With held_out_path all lines of `path` are trained on, and a problem in both files is an error with its lines."""
    other = write(tmp_path / "other.jsonl", [{"problem": "new", "answer": "1"}])
    task = build(JsonlConfig(path=twenty, held_out_path=other), TOKENIZER)
    assert len({p.id for p in task.prompts(0, 20)}) == 20
    assert [p.answer for p in task.held_out()] == ["1"]
    leaking = write(tmp_path / "leaking.jsonl", [{"problem": "new", "answer": "1"}, rows(20)[6]])
    with pytest.raises(ValueError, match=r"leaking\.jsonl:2: .*twenty\.jsonl:7"):
        build(JsonlConfig(path=twenty, held_out_path=leaking), TOKENIZER)


@pytest.mark.unchecked  # a check of the prompts' type would make one of them
def test_an_evaluation_makes_the_prompts_that_it_samples_alone(twenty, monkeypatch):
    """Of 10 held-out problems it makes the first 3, which is all that it is asked for."""
    task = build(JsonlConfig(path=twenty, held_out_fraction=0.5), TOKENIZER)
    first, made, make = [p.id for p in task.held_out()][:3], [], jsonl.prompt_of
    monkeypatch.setattr(jsonl, "prompt_of", lambda row, *rest: made.append(row.where) or make(row, *rest))

    def sampled(engine, task, prompts, *_):
        return SimpleNamespace(responses=[respond(prompt, (TOKENIZER.eos_id,)) for prompt in prompts])

    monkeypatch.setattr(evaluation, "roll_out", sampled)
    limits = {"num_samples": 1, "max_prompts": 3, "max_tokens": 9, "max_turns": 1, "temperature": 1.0, "seed": 0}
    assert evaluation.evaluate(Mock(), task, **limits)["eval/stop_fraction"] == 1.0
    assert made == first


def test_rewards_are_those_of_the_grader(twenty):
    """The response's text up to its end token is graded: a right box earns 1 in any form, also without an end token."""
    task = build(JsonlConfig(path=twenty), TOKENIZER)
    (prompt,) = task.prompts(0, 1)
    right, wrong = rf"So \boxed{{{prompt.answer}.0}}", r"So \boxed{-1}"
    encode, eos_id = TOKENIZER.encode, TOKENIZER.eos_id
    assert task.reward(prompt, respond(prompt, (*encode(right), eos_id))) == 1.0
    assert task.reward(prompt, respond(prompt, encode(right))) == 1.0
    assert task.reward(prompt, respond(prompt, (*encode(wrong), eos_id))) == 0.0
    assert task.reward(prompt, respond(prompt, (*encode(right), eos_id, *encode(wrong)))) == 1.0
    assert task.reward(prompt, respond(prompt, (eos_id,))) == 0.0


GOOD = {"problem": "What is 1 + 1?", "answer": "2"}
BAD_LINES = [
    ('{"problem": "a", "answer": "1"', "expected a JSON object such as", "got invalid JSON"),
    ("[" * 100000, "expected a JSON object such as", "got invalid JSON"),
    ("[1, 2]", "expected a JSON object such as", "got list [1, 2]"),
    ('{"problem": "a"}', "expected the key 'answer'", "got 'problem'"),
    ("{}", "expected the key 'problem'", "got no keys"),
    ('{"problem": "a", "answer": 5}', 'answer: expected a string such as "5"', "got int 5"),
    ('{"problem": null, "answer": "5"}', "problem: expected a string", "got NoneType null"),
    ('{"problem": "a", "answer": " "}', "answer: expected a text that is not empty", "got ' '"),
    ('{"problem": "a", "answer": "?"}', "answer: expected an expression that Math-Verify can parse", "got '?'"),
    (json.dumps(GOOD), "expected a new problem", "bad.jsonl:1 again"),
    ('{"problem": "caf\\u00e9", "answer": "1"}', "expected only characters of", "got 'é'"),
    (json.dumps({"problem": "a" * 500, "answer": "1"}), "at most max_prompt_tokens = 200 tokens", "got 572"),
]


@pytest.mark.parametrize(("line", "expected", "came"), BAD_LINES, ids=lambda text: text[:30])
def test_a_bad_line_is_named(tmp_path, line, expected, came):
    """A bad line is one ValueError that starts with path:line and says what was expected and what came."""
    # The blank line is skipped but counted, as an editor counts it.
    path = write(tmp_path / "bad.jsonl", [GOOD, "", line, *rows(3)[2:]])
    with pytest.raises(ValueError) as caught:
        build(JsonlConfig(path=path, max_prompt_tokens=200, held_out_fraction=0.3), TOKENIZER)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ")
    assert expected in message
    assert came in message
    assert "\n" not in message


def test_a_prompt_without_tokens_is_named(tmp_path, monkeypatch):
    """A tokenizer without an unknown token may leave nothing of a row: there is no token to sample after."""
    monkeypatch.setattr(TOKENIZER, "prompt", lambda text: TOKENIZER.encode(text.replace("?", "")))
    path = write(tmp_path / "bad.jsonl", [{"problem": "1", "answer": "1"}, {"problem": "??", "answer": "2"}])
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: expected a prompt of at least 1 token, got 0$"):
        build(JsonlConfig(path=path, prompt_template="{problem}", held_out_fraction=0.5), TOKENIZER)


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path):
    """A line that is not UTF-8 is named like any other bad line."""
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"problem": "\xff\xfe", "answer": "1"}\n')
    with pytest.raises(ValueError, match=r"bytes\.jsonl:2: .*invalid JSON"):
        build(JsonlConfig(path=str(path)), TOKENIZER)


def test_a_file_that_cannot_serve_is_one_line(tmp_path):
    """No file, a folder, an empty file, too few lines to hold one out: one line that names the file."""
    empty, one = write(tmp_path / "empty.jsonl", [""]), write(tmp_path / "one.jsonl", [GOOD])
    for path, words in (
        (str(tmp_path / "absent.jsonl"), "No such file"),
        (str(tmp_path), "Is a directory"),
        (empty, "got an empty file"),
        (one, "held_out_fraction: expected to hold out and to leave at least 1 of the 1 problems"),
    ):
        with pytest.raises(ValueError) as caught:
            build(JsonlConfig(path=path), TOKENIZER)
        assert words in str(caught.value)
        assert path in str(caught.value)
        assert "\n" not in str(caught.value)


def test_solutions_become_demonstrations(tmp_path):
    """With a solution key each training prompt's demonstration is its own line's solution, ended, and earns 1."""
    path = write(tmp_path / "s.jsonl", [{**row, "how": rf"\boxed{{{row['answer']}}}"} for row in rows(10)])
    task = build(JsonlConfig(path=path, solution_key="how"), TOKENIZER)
    assert isinstance(task, DemonstratedTask)
    for prompt in task.prompts(0, 9):
        demonstration = task.demonstration(prompt, stream(0, "unused"), "solutions")
        assert TOKENIZER.decode(demonstration) == rf"\boxed{{{prompt.answer}}}"
        assert demonstration[-1] == TOKENIZER.eos_id
        assert task.reward(prompt, respond(prompt, demonstration)) == 1.0
    with pytest.raises(ValueError, match="expected a training prompt"):
        task.demonstration(task.held_out()[0], stream(0, "unused"), "solutions")


def test_bad_solutions_are_named(tmp_path):
    """A missing, wrong or overlong solution is an error that starts with path:line and names the key."""
    for solution, limit, words in (
        (None, 100, "expected the key 'how'"),
        (r"\boxed{-1}", 100, "how: expected a solution that ends in the answer"),
        ("so " * 40 + r"\boxed{20}", 100, "how: expected at most max_response_tokens = 100 tokens, got"),
    ):
        lines = [{**row, "how": rf"\boxed{{{row['answer']}}}"} for row in rows(20)]
        del lines[-1]["how"]
        lines[-1] |= {} if solution is None else {"how": solution}
        path = write(tmp_path / "s.jsonl", lines)
        other = write(tmp_path / "o.jsonl", [{"problem": "new", "answer": "1", "how": "1"}])
        config = JsonlConfig(path=path, held_out_path=other, solution_key="how", max_response_tokens=limit)
        with pytest.raises(ValueError) as caught:
            build(config, TOKENIZER)
        assert str(caught.value).startswith(f"{path}:20: ")
        assert words in str(caught.value)


def test_solutions_beyond_the_first_are_checked_as_they_are_used(tmp_path, monkeypatch):
    """Opening grades two solutions here, not all ten; a wrong one further on is an error once it is asked for."""
    graded = []
    grade = jsonl.grade
    monkeypatch.setattr(jsonl, "CHECKED_AT_ONCE", 2)
    monkeypatch.setattr(jsonl, "grade", lambda text, answer: graded.append(text) or grade(text, answer))
    lines = [{**row, "how": rf"\boxed{{{row['answer']}}}"} for row in rows(10)]
    lines[4]["how"] = r"\boxed{-1}"
    other = write(tmp_path / "o.jsonl", [{"problem": "new", "answer": "1", "how": "1"}])
    path = write(tmp_path / "s.jsonl", lines)
    task = build(JsonlConfig(path=path, held_out_path=other, solution_key="how"), TOKENIZER)
    assert graded == [line["how"] for line in lines[:2]]
    by_id = {prompt.id: prompt for prompt in task.prompts(0, 10)}
    for number in (1, 9, 9):  # the same again is not graded again
        demonstration = task.demonstration(by_id[f"{path}:{number}"], stream(0, "unused"), "solutions")
        assert TOKENIZER.decode(demonstration) == lines[number - 1]["how"]
    assert graded == [lines[i]["how"] for i in (0, 1, 8)]
    with pytest.raises(ValueError, match=rf"^{re.escape(path)}:5: how: expected a solution that ends in the answer"):
        task.demonstration(by_id[f"{path}:5"], stream(0, "unused"), "solutions")


def test_answers_that_are_numbers_or_known_are_not_asked_for_again(tmp_path, monkeypatch):
    """A thousand problems with numbers and one expression as answers ask the grading process once."""
    asked = []
    monkeypatch.setattr(grading._POOL, "ask", lambda request: not asked.append(request["answer"]))
    grading._is_read.cache_clear()
    answers = [r"\frac{1}{7}" if i % 2 else str(-i / 2) for i in range(1000)]
    lines = [{"problem": f"Problem {i}", "answer": answer} for i, answer in enumerate(answers)]
    task = build(JsonlConfig(path=write(tmp_path / "many.jsonl", lines)), TOKENIZER)
    grading._is_read.cache_clear()  # of what the stand-in said
    assert asked == [r"\frac{1}{7}"]
    assert sorted(p.answer for p in (*task.prompts(0, 900), *task.held_out())) == sorted(answers)
