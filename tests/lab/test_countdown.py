"""Laws of the Countdown task: every problem has a solution, and right expressions alone earn the reward."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lab.strict import validate
from lab.tasks.countdown import TEACHERS, CountdownConfig, CountdownTask, is_right, problem_of, solution
from tests.lab.answers import answer_with, respond
from theory.contracts import Prompt
from theory.streams import stream


@st.composite
def dials(draw) -> dict[str, Any]:
    """Dials of small searches. Tests build the task: the type checks draw from `random`, which strategies must not."""
    return {
        "num_numbers": draw(st.integers(2, 4)),
        "max_number": draw(st.integers(12, 20)),
        "operations": draw(st.sampled_from(["+-", "*+", "-+*", "+-*/"]).map(list)),
        "use_all": draw(st.booleans()),
        "max_value": draw(st.integers(40, 200)),
        "num_attempts": draw(st.integers(1, 4)),
        "num_held_out": 1,
        "seed": draw(st.integers(0, 1000)),
    }


def make(values: dict[str, Any]) -> CountdownTask:
    return CountdownTask(validate(CountdownConfig, values, "test"))


# -- what earns nothing


@given(dials(), st.integers(0, 2**62), st.sampled_from(TEACHERS))
def test_a_demonstration_is_right_and_no_neighbour_of_it_is(values, step, teacher):
    """The shown answer earns 1; one more number, a number again, another target, no end or no mark earn 0."""
    task = make(values)
    for prompt in task.prompts(step, 3):
        shown = task.demonstration(prompt, stream(step, "shown"), teacher)
        assert task.reward(prompt, respond(prompt, shown)) == 1.0
        assert task.reward(prompt, respond(prompt, shown[:-1])) == 0.0
        answer = task.tokenizer.decode(shown).rpartition("#")[2]
        assert answer_with(task, prompt, f"#1#{answer}") == 1.0
        assert answer_with(task, prompt, answer) == 0.0
        numbers, target = problem_of(prompt)
        # A number that is still there twice may be added and subtracted: that answer is right, too.
        spare = Counter(numbers) - Counter(int(text) for text in re.findall(r"\d+", answer))
        doubled = [f"{answer}+{number}-{number}" for number in (numbers[0], 1) if spare[number] < 2]
        for wrong in (*doubled, f"{answer}+0", f"{target}", f"-{answer}", f"({answer}", f"{answer})",
                      f"{answer}=", f" {answer}"[1:] + ";", f"{answer}#", ""):  # fmt: skip
            assert answer_with(task, prompt, f"#{wrong}") == 0.0, wrong
        assert not is_right(answer, numbers, target + 1, task.config)
        if task.config.use_all:
            assert not is_right(answer, (*numbers, 1), target, task.config)
        else:
            assert is_right(answer, (*numbers, 1), target, task.config)


# -- problems


@given(dials(), st.integers(0, 2**62))
def test_every_problem_keeps_the_dials(values, step):
    """Numbers and targets are in range and sorted, a target is no given number unless all must be used, and the answer
    is the target."""
    task = make(values)
    config = task.config
    for prompt in task.prompts(step, 5):
        numbers, target = problem_of(prompt)
        assert list(numbers) == sorted(numbers) and len(numbers) == config.num_numbers
        assert all(1 <= n <= config.max_number for n in numbers) and 1 <= target <= config.max_value
        assert config.use_all or target not in numbers
        assert prompt.answer == str(target) and task.tokenizer.decode(prompt.tokens) == prompt.text
        assert prompt.text == f"{','.join(map(str, numbers))}>{target}:"


def reachable(numbers: tuple[int, ...], config: CountdownConfig) -> dict[int, int]:
    """Value -> fewest steps that end in it, by trying every step; a step's result is whole and in [1, max_value]."""
    best: dict[int, int] = {}
    states = {tuple(sorted(numbers))}
    for num_steps in range(1, len(numbers)):
        after = set()
        for state in states:
            for i, left in enumerate(state):
                for j, right in enumerate(state):
                    results = {"+": left + right, "-": left - right, "*": left * right, "/": Fraction(left, right)}
                    for sign in config.operations if i != j else ():
                        value = results[sign]
                        if value == int(value) and 1 <= value <= config.max_value:
                            rest = [n for k, n in enumerate(state) if k not in (i, j)]
                            after.add(tuple(sorted([*rest, int(value)])))
                            best.setdefault(int(value), num_steps)
        states = after
    return best if not config.use_all else {state[0]: len(numbers) - 1 for state in states}


@given(dials(), st.integers(0, 2**62))
def test_the_shown_solution_is_a_shortest_one(values, step):
    """A demonstration has as few steps as any solution has; a target that no steps reach is an error."""
    task = make(values)
    assume(task.config.num_numbers < 4)
    (prompt,) = task.prompts(step, 1)
    numbers, target = problem_of(prompt)
    best = reachable(numbers, task.config)
    assert len(solution(numbers, target, task.config)) == best[target]
    missed = next(v for v in range(1, 10_000) if v not in best)
    with pytest.raises(ValueError, match="expected a problem with a solution"):
        solution(numbers, missed, task.config)


def played(steps: str, numbers: tuple[int, ...]) -> Counter[int]:
    """The numbers that are left after the written steps; each must be true and use what is there."""
    left = Counter(numbers)
    for equation in steps.split(";"):
        made, result = equation.split("=")
        sign = next(c for c in "+-*/" if c in made)
        a, b = map(int, made.split(sign))
        assert {"+": a + b, "-": a - b, "*": a * b, "/": Fraction(a, b)}[sign] == int(result)
        for number in (a, b):
            assert left[number] > 0
            left[number] -= 1
        left[int(result)] += 1
    return left


@given(dials(), st.integers(0, 2**62))
def test_written_steps_are_true_and_failed_attempts_fail(values, step):
    """Every step of every teacher is true and uses what is there; failed attempts miss the target, the last ends in it;
    the backward steps are the forward ones from the end on."""
    task = make(values)
    (prompt,) = task.prompts(step, 1)
    numbers, target = problem_of(prompt)
    shown = {
        teacher: task.tokenizer.decode(task.demonstration(prompt, stream(step, "shown"), teacher))
        for teacher in TEACHERS
    }
    forward, answer = shown["forward"].split("#")
    assert played(forward, numbers)[target] > 0 and forward.endswith(f"={target}")
    backward = [equation.split("=")[::-1] for equation in shown["backward"].split("#")[0].split(";")[::-1]]
    assert ";".join("=".join(equation) for equation in backward) == forward
    *failed, last = shown["attempts"].split("#")[0].split("x")
    assert last == forward and len(failed) <= task.config.num_attempts
    for attempt in failed:
        played(attempt, numbers)
        assert all(int(equation.split("=")[1]) != target for equation in attempt.split(";"))
    assert {text.split("#")[1] for text in shown.values()} == {answer}


def test_attempts_vary_and_are_drawn_from_the_generator():
    """One problem is shown with 0 to num_attempts failed attempts, equally often, and in the same way by one draw."""
    task = CountdownTask(CountdownConfig(num_attempts=3))
    (prompt,) = task.prompts(0, 1)
    shown = [task.tokenizer.decode(task.demonstration(prompt, stream(i, "shown"), "attempts")) for i in range(400)]
    counts = Counter(text.count("x") for text in shown)
    assert set(counts) == {0, 1, 2, 3}
    # A share of 1/4 of 400 has a standard deviation of 8.7; the tolerance is five of them.
    assert all(count == pytest.approx(100, abs=44) for count in counts.values())
    assert len(set(map(len, shown))) > 5
    again = task.tokenizer.decode(task.demonstration(prompt, stream(7, "shown"), "attempts"))
    assert again == shown[7]


def test_the_longest_response_has_room_for_the_widest_values():
    """The bound on the response's length is above that of a failed and a right step of two-figure numbers, by one: a
    failed attempt may end in two figures, this one ends in one."""
    task = CountdownTask(CountdownConfig(num_numbers=2, max_number=99, num_attempts=1))
    prompt = Prompt("", task.tokenizer.encode("49,50>99:"), "99", "49,50>99:")
    shown = {len(task.demonstration(prompt, stream(i, "shown"), "attempts")) for i in range(20)}
    assert max(shown) == len("50-49=1x50+49=99#50+49") + 1 == task.max_response_tokens - 1


def test_the_examples_of_the_docstring():
    """The problem of the module's docstring, in every style, to the character."""
    task = CountdownTask(CountdownConfig())
    prompt = Prompt("", task.tokenizer.encode("2,4,16>18:"), "18", "2,4,16>18:")
    shown = {t: task.tokenizer.decode(task.demonstration(prompt, stream(0, "x"), t)) for t in ("forward", "backward")}
    assert shown == {"forward": "4-2=2;16+2=18#16+(4-2)", "backward": "18=16+2;2=4-2#16+(4-2)"}


def test_training_never_sees_a_held_out_problem():
    """Held-out problems are distinct, fixed by the seed, and never drawn in training, which draws all others."""
    config = CountdownConfig(num_numbers=2, max_number=9, num_held_out=4)
    held_out = [p.id for p in CountdownTask(config).held_out()]
    assert len(set(held_out)) == 4 and held_out == [p.id for p in CountdownTask(config).held_out()]
    assert held_out != [p.id for p in CountdownTask(config.model_copy(update={"seed": 1})).held_out()]
    task = CountdownTask(config)
    drawn = {p.id for step in range(4) for p in task.prompts(step, 500)}
    every = {f"{a},{b}>{t}" for a in range(1, 10) for b in range(a, 10) for t in (a + b, b - a) if t >= 1}
    # 2000 draws of 81 problems: one that is trained on comes with probability 1/81 or more, and is missed with e^-24.
    assert drawn == {id for id in every if not task._is_held_out(*_parts(id))}
    assert not drawn & set(held_out) and drawn < every


def _parts(id: str) -> tuple[list[int], int]:
    numbers, target = id.split(">")
    return [int(number) for number in numbers.split(",")], int(target)


# -- the config


def test_dials_without_problems_are_one_line():
    """Dials that leave no problem, or fewer than are held out, say so."""
    with pytest.raises(ValueError, match=r"^max_number: expected dials that leave problems to train on and to"):
        CountdownTask(CountdownConfig(operations=("+",), max_value=1))
    with pytest.raises(ValueError, match=r"^num_held_out: expected 500 distinct problems under seed 0, got \d+"):
        CountdownTask(CountdownConfig(num_numbers=2, max_number=20, num_held_out=500))
