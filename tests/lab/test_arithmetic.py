"""Laws of the arithmetic task: what is shown earns the reward, what is verified is the answer alone, and the held-out
problems are never trained on."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.tasks.arithmetic import MAX_DRAWS, ArithmeticConfig, ArithmeticTask
from lab.tasks.arithmetic_styles import STYLES, longest
from lab.tasks.held_out import is_held_out
from tests.lab.answers import answer_with, respond
from theory.contracts import Prompt
from theory.streams import stream

GENERATOR = stream(0, "no demonstration draws from it")


SMALLEST = list(itertools.combinations_with_replacement(range(1, 10), 2))
SEEDS = [seed for seed in range(1001) if any(is_held_out(seed, *terms) for terms in SMALLEST)]
"""Seeds that hold out a problem of the smallest size; the task refuses the others for it."""


@st.composite
def dials(draw) -> dict[str, Any]:
    """Every dial's values. Tests build the task: the type checks draw from `random`, which strategies must not."""
    operation = draw(st.sampled_from(["add", "subtract"]))
    min_digits = draw(st.integers(1, 6))
    return {
        "min_digits": min_digits,
        "max_digits": min_digits + draw(st.integers(0, 3)),
        "num_terms": 2 if operation == "subtract" else draw(st.integers(2, 10)),
        "operation": operation,
        "num_held_out": 1,
        "seed": draw(st.sampled_from(SEEDS)),
    }


def worked_out(text: str, style: str = "columns") -> str:
    """The style's response to a problem such as `47+85=`."""
    sign = "-" if "-" in text else "+"
    return STYLES[style]([int(number) for number in text.rstrip("=").split(sign)], sign)


def terms_of(prompt: Prompt) -> list[int]:
    return [int(term) for term in prompt.id.replace("-", "+").split("+")]


@given(dials(), st.integers(0, 2**62), st.sampled_from(list(STYLES)))
def test_a_demonstration_earns_the_reward_and_fits(values, step, teacher):
    """Every teacher's demonstration has reward 1 for every problem, ends with the end token, and is not too long."""
    task = ArithmeticTask(ArithmeticConfig(**values))
    assert task.teachers == task.config.teachers == tuple(STYLES)
    for prompt in task.prompts(step, 4):
        demonstration = task.demonstration(prompt, GENERATOR, teacher)
        assert task.reward(prompt, respond(prompt, demonstration)) == 1.0
        assert demonstration.count(task.tokenizer.eos_id) == 1
        assert demonstration[-1] == task.tokenizer.eos_id
        assert len(demonstration) <= task.max_response_tokens
        assert task.tokenizer.decode(prompt.tokens) == prompt.text


@given(dials(), st.integers(0, 2**62))
def test_the_answer_is_right(values, step):
    """The verified answer is the sum, or the difference, of the numbers in the prompt, and never negative."""
    task = ArithmeticTask(ArithmeticConfig(**values))
    for prompt in task.prompts(step, 4):
        first, *others = terms_of(prompt)
        expected = first + sum(others) if task.config.operation == "add" else first - sum(others)
        assert prompt.answer == str(expected)
        assert expected >= 0


@given(dials(), st.integers(0, 2**62))
def test_every_step_is_a_true_column(values, step):
    """Step i takes column i of the prompt and the carry of step i - 1, and its two figures make its equation true."""
    task = ArithmeticTask(ArithmeticConfig(**values))
    sign = "+" if task.config.operation == "add" else "-"
    (prompt,) = task.prompts(step, 1)
    numbers, carry, kept = prompt.id.split(sign), 0, ""
    steps = worked_out(prompt.text).split("#")[0].split(";")
    for column, written in enumerate(steps, start=1):
        left, figures = written.split("=")
        *digits, carry_in = map(int, left.split(sign))
        assert digits == [int(number[-column]) for number in numbers]
        assert carry_in == carry
        carry, figure = map(int, figures)
        if sign == "+":
            assert sum(digits) + carry_in == 10 * carry + figure
        else:
            assert digits[0] - digits[1] - carry_in == figure - 10 * carry
        kept = f"{figure}{kept}"
    assert int(f"{carry}{kept}") == int(prompt.answer)


@given(dials(), st.integers(0, 2**62), st.data())
def test_a_changed_answer_earns_nothing(values, step, data):
    """One wrong, missing or added figure after the mark, or a missing end or mark, makes the reward 0."""
    task = ArithmeticTask(ArithmeticConfig(**values))
    (prompt,) = task.prompts(step, 1)
    steps, answer = task.tokenizer.decode(task.demonstration(prompt, GENERATOR, "columns")).split("#")
    at = data.draw(st.integers(0, len(answer) - 1))
    other = data.draw(st.sampled_from([c for c in "0123456789" if c != answer[at]]))
    assert answer_with(task, prompt, f"{steps}#{answer[:at]}{other}{answer[at + 1 :]}") == 0.0
    for wrong in (f"{answer}0", f"0{answer}", answer[:-1], f"{answer}#"):
        assert answer_with(task, prompt, f"{steps}#{wrong}") == 0.0
    assert answer_with(task, prompt, steps) == answer_with(task, prompt, answer) == 0.0
    assert task.reward(prompt, respond(prompt, task.demonstration(prompt, GENERATOR, "columns")[:-1])) == 0.0


def test_only_the_last_answer_before_the_end_counts():
    """Wrong steps, earlier answers and whatever follows the end token change nothing; the last mark decides."""
    task = ArithmeticTask(ArithmeticConfig())
    (prompt,) = task.prompts(0, 1)
    for before in ("1+1+1=99;;==", "", "#1"):
        assert answer_with(task, prompt, f"{before}#{prompt.answer}") == 1.0
    assert answer_with(task, prompt, f"#{prompt.answer}#1") == 0.0
    tokens = (*task.tokenizer.encode(f"#{prompt.answer}"), task.tokenizer.eos_id, *task.tokenizer.encode("#1"))
    assert task.reward(prompt, respond(prompt, tokens)) == 1.0


def test_training_never_sees_a_held_out_problem():
    """No training draw is a held-out problem in any order of its terms, and training reaches all the others."""
    task = ArithmeticTask(ArithmeticConfig(min_digits=2, max_digits=2, num_held_out=100))
    held_out = {tuple(sorted(terms_of(p))) for p in task.held_out()}
    assert len(held_out) == 100  # of about 512: drawn with replacement, some ten of them would come twice
    assert not held_out & {tuple(sorted(terms_of(p))) for step in range(4) for p in task.prompts(step, 500)}
    task = ArithmeticTask(ArithmeticConfig(min_digits=1, max_digits=1, num_held_out=1))
    drawn = {tuple(sorted(terms_of(p))) for step in range(4) for p in task.prompts(step, 500)}
    every = set(itertools.combinations_with_replacement(range(1, 10), 2))
    # 2000 draws: a problem such as 1+1 comes with probability 1/81 or more, and is missed with e^-25.
    assert drawn == {terms for terms in every if not task._is_held_out(list(terms))}
    assert drawn < every


@given(dials(), st.integers(0, 2**62))
def test_the_partition_is_by_content(values, step):
    """The side of a problem does not depend on the order of its terms, and each draw is on the side asked for."""
    task = ArithmeticTask(ArithmeticConfig(**values))
    for prompt in task.prompts(step, 2):
        orders = itertools.islice(itertools.permutations(terms_of(prompt)), 6)
        assert not any(task._is_held_out(list(terms)) for terms in orders)
    for prompt in task.held_out():
        assert task._is_held_out(terms_of(prompt))


def test_held_out_problems_are_spread_evenly_and_fixed():
    """Digit counts differ by at most one problem, and the seed alone decides which problems they are."""
    config = ArithmeticConfig(min_digits=2, max_digits=4, num_held_out=100)
    held_out = ArithmeticTask(config).held_out()
    counts = [sum(len(p.id) == 2 * digits + 1 for p in held_out) for digits in (2, 3, 4)]
    assert sorted(counts) == [33, 33, 34]
    assert ArithmeticTask(config).held_out() == held_out
    assert ArithmeticTask(config.model_copy(update={"seed": 1})).held_out() != held_out


def test_a_step_names_its_prompts():
    """Prompts depend on seed and step alone: the same again, a prefix of a longer draw, and others for another step."""
    task, again = (ArithmeticTask(ArithmeticConfig(seed=5)) for _ in range(2))
    assert task.prompts(3, 8) == again.prompts(3, 8) == task.prompts(3, 20)[:8]
    assert task.prompts(4, 8) != task.prompts(3, 8)
    assert ArithmeticTask(ArithmeticConfig(seed=6)).prompts(3, 8) != task.prompts(3, 8)


def test_digits_and_figures_are_uniform():
    """Each digit count, each leading digit and each last digit comes with its share."""
    task = ArithmeticTask(ArithmeticConfig(min_digits=2, max_digits=4))
    prompts = task.prompts(0, 3000)
    for digits in (2, 3, 4):
        # A share of 1/3 of 3000 has a standard deviation of 0.9 %; the tolerance is five of them.
        assert sum(len(p.id) == 2 * digits + 1 for p in prompts) / 3000 == pytest.approx(1 / 3, abs=0.045)
    for figure in range(10):
        first = sum(p.id[0] == str(figure) for p in prompts) / 3000
        last = sum(p.id[-1] == str(figure) for p in prompts) / 3000
        # Standard deviation 0.6 %.
        assert first == pytest.approx(0 if figure == 0 else 1 / 9, abs=0.03)
        assert last == pytest.approx(1 / 10, abs=0.03)


@pytest.mark.parametrize(
    ("digits", "num_terms", "sign"), [(1, 2, "+"), (2, 2, "+"), (1, 3, "+"), (1, 2, "-"), (2, 2, "-")]
)
def test_the_longest_response_is_the_longest(digits, num_terms, sign):
    """Of all problems of a size, in every style, the longest response is exactly as long as the task says."""
    every = itertools.product(range(10 ** (digits - 1), 10**digits), repeat=num_terms)
    problems = [numbers for numbers in every if sign == "+" or numbers[0] >= numbers[1]]
    assert longest(digits, num_terms, sign) == max(
        len(style(numbers, sign)) for style in STYLES.values() for numbers in problems
    )


def values_of(text: str) -> list[int]:
    """The signed numbers of a sum such as `30-50+2`."""
    return [int(value) for value in re.findall(r"[+-]?\d+", text)]


@given(dials(), st.integers(0, 2**62), st.sampled_from(["place_values", "running"]))
def test_every_written_equation_is_true(values, step, style):
    """Each step of these two styles is a true equation, and the answer is what the last one ends in."""
    task = ArithmeticTask(ArithmeticConfig(**values))
    for prompt in task.prompts(step, 4):
        steps, answer = worked_out(prompt.text, style).split("#")
        assert all(sum(values_of(left)) == int(right) for left, right in (s.split("=") for s in steps.split(";")))
        assert steps.split("=")[-1] == answer


@given(dials(), st.integers(0, 2**62))
def test_place_values_are_added_from_the_first_on(values, step):
    """The first steps take the columns with their values, the first column first; the others add the results up."""
    task = ArithmeticTask(ArithmeticConfig(**values))
    (prompt,) = task.prompts(step, 1)
    texts = prompt.id.replace("-", "+").split("+")
    steps = [s.split("=") for s in worked_out(prompt.text, "place_values").split("#")[0].split(";")]
    width, parts = len(texts[0]), [int(right) for _, right in steps[: len(texts[0])]]
    for column in range(width):
        taken = [abs(value) for value in values_of(steps[column][0])]
        assert taken == [int(text[column]) * 10 ** (width - 1 - column) for text in texts]
    totals = [parts[0], *(int(right) for _, right in steps[width:])]
    assert [values_of(left) for left, _ in steps[width:]] == [[t, p] for t, p in zip(totals, parts[1:], strict=False)]


@given(dials(), st.integers(0, 2**62))
def test_a_running_sum_goes_from_term_to_term(values, step):
    """It starts at the first term; each step continues from the last, by one figure that is not 0 with its value; the
    steps of a term make the whole term."""
    task = ArithmeticTask(ArithmeticConfig(**values))
    (prompt,) = task.prompts(step, 1)
    first, *others = terms_of(prompt)
    steps = [s.split("=") for s in worked_out(prompt.text, "running").split("#")[0].split(";")]
    assert [values_of(left)[0] for left, _ in steps] == [first, *(int(right) for _, right in steps[:-1])]
    moved = [abs(values_of(left)[1]) for left, _ in steps]
    assert all(str(value).strip("0") in "123456789" for value in moved)
    assert len(moved) == sum(figure != "0" for term in others for figure in str(term))
    for term in others:
        while term:
            assert len(str(moved[0])) == len(str(term))
            term -= moved.pop(0)
    assert not moved


def test_teachers_write_different_lengths():
    """The styles of one problem, to the character; a 0 takes no step of a running sum."""
    written = {style: worked_out("503-278=", style) for style in STYLES}
    assert written == {
        "columns": "3-8-0=15;0-7-1=12;5-2-1=02#225",
        "place_values": "500-200=300;0-70=-70;3-8=-5;300-70=230;230-5=225#225",
        "running": "503-200=303;303-70=233;233-8=225#225",
    }
    assert worked_out("503+205=", "running") == "503+200=703;703+5=708#708"


def test_the_smallest_world_still_has_its_held_out_problem():
    """Even of the 45 one-digit sums, the most that the config admits can be held out, under any of many seeds."""
    for seed in range(30):
        task = ArithmeticTask(ArithmeticConfig(min_digits=1, max_digits=1, num_held_out=1, seed=seed))
        assert len(task.held_out()) == 1


@pytest.mark.parametrize("max_digits", [1, 2])
def test_a_seed_that_holds_none_out_is_refused(max_digits):
    """Of the 45 one-digit sums none is held out under this seed: one line says so, and no search goes on for ever."""
    values = {"min_digits": 1, "max_digits": max_digits, "num_held_out": max_digits, "seed": 1203}
    every = itertools.combinations_with_replacement(range(1, 10), 2)
    assert not any(is_held_out(1203, *terms) for terms in every)
    with pytest.raises(ValueError) as caught:
        ArithmeticTask(ArithmeticConfig(**values))
    assert str(caught.value) == (
        f"num_held_out: expected problems of 1 digits to hold out under seed 1203, got none in {MAX_DRAWS} draws; "
        "raise min_digits or change the seed"
    )
    assert len(ArithmeticTask(ArithmeticConfig(**values | {"seed": 1204})).held_out()) == max_digits


def test_a_side_without_problems_is_refused(monkeypatch):
    """Without a problem to train on, as if all were held out, one line says so."""
    task = ArithmeticTask(ArithmeticConfig())
    monkeypatch.setattr("lab.tasks.arithmetic.is_held_out", lambda *_: True)
    with pytest.raises(ValueError, match=r"digits to train on under seed 0, got none in \d+ draws"):
        task.prompts(0, 1)
