"""The grader of Countdown answers against Python's own grammar and fractions."""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.tasks.countdown import ALPHABET, CountdownConfig, is_right, problem_of
from tests.lab.answers import respond
from tests.lab.test_countdown import dials, make


def computed(answer: str, config: CountdownConfig) -> tuple[Fraction, Counter[int]] | None:
    """Value and used numbers by Python's parser: only binary operations on numbers, every quotient whole; or None."""
    used: list[int] = []
    operators = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        if not isinstance(node, ast.BinOp) or operators.get(type(node.op)) not in config.operations:
            raise ValueError(ast.dump(node))
        left, right, sign = value(node.left), value(node.right), operators[type(node.op)]
        if sign == "/":
            if right == 0 or (left / right).denominator != 1:
                raise ValueError("not whole")
            return left / right
        return {"+": left + right, "-": left - right, "*": left * right}[sign]

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python remarks on 3(4), which is no expression of ours
            return value(ast.parse(answer, mode="eval").body), Counter(used)
    except (SyntaxError, ValueError):
        return None


def oracle(answer: str, numbers: tuple[int, ...], target: int, config: CountdownConfig) -> bool:
    """Whether the text is right, by `computed`."""
    result, have = computed(answer, config), Counter(numbers)
    if result is None or result[0] != target:
        return False
    return result[1] == have if config.use_all else result[1] <= have


@st.composite
def answers(draw, numbers: tuple[int, ...], operations: tuple[str, ...]) -> str:
    """An expression over some of the numbers, in any order and shape, with up to two characters changed or not."""
    terms = [str(n) for n in draw(st.permutations(numbers))[: draw(st.integers(1, len(numbers)))]]
    while len(terms) > 1:
        at, sign = draw(st.integers(0, len(terms) - 2)), draw(st.sampled_from(operations))
        joined = f"{terms[at]}{sign}{terms[at + 1]}"
        terms[at : at + 2] = [f"({joined})" if draw(st.booleans()) else joined]
    (text,) = terms
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from([*"0123456789+-*/()=,;", ""])) + text[at + draw(st.integers(0, 1)) :]
    return text


@given(dials(), st.integers(0, 2**62), st.data())
def test_the_grader_is_the_oracle(values, step, data):
    """Of expressions near to right ones, the grader takes exactly those that Python's grammar and fractions take."""
    task = make(values)
    (prompt,) = task.prompts(step, 1)
    numbers, target = problem_of(prompt)
    for _ in range(10):
        answer = data.draw(answers(numbers, task.config.operations))
        result = computed(answer, task.config)
        # Mostly ask for what the expression makes, so that many are right.
        goal = target if result is None else data.draw(st.sampled_from([int(result[0]), int(result[0]), target]))
        assert is_right(answer, numbers, goal, task.config) == oracle(answer, numbers, goal, task.config)


@given(dials(), st.integers(0, 2**62), st.lists(st.integers(0, len(ALPHABET) + 1), max_size=30))
def test_random_tokens_earn_what_the_oracle_says(values, step, tokens):
    """Any tokens at all have reward 0 or 1, by what stands after the last mark and before the first end."""
    task = make(values)
    (prompt,) = task.prompts(step, 1)
    texts = task.tokenizer.decode(tokens[: tokens.index(1)] if 1 in tokens else []).rpartition("#")
    expected = bool(texts[1]) and oracle(texts[2], *problem_of(prompt), task.config)
    assert task.reward(prompt, respond(prompt, tuple(tokens))) == float(expected)


EVERY = CountdownConfig(operations=("+", "-", "*", "/"), num_numbers=4, use_all=False)


@pytest.mark.parametrize(
    ("answer", "numbers", "target", "right"),
    [
        ("8-3-2", (2, 3, 8), 3, True),  # from the left
        ("8-(3-2)", (2, 3, 8), 7, True),
        ("2+3*8", (2, 3, 8), 26, True),  # products first
        ("8/2*3", (2, 3, 8), 12, True),
        ("8/3*3", (3, 3, 8), 8, False),  # a quotient must be whole
        ("8/3+1", (1, 3, 8), 3, False),  # and is not rounded
        ("8/(3-3)", (3, 3, 8), 8, False),
        ("3-8", (3, 8), -5, True),  # steps may be negative
        ("(3-8)/5", (3, 5, 8), -1, True),
        ("2*(3-8)+12", (2, 3, 8, 12), 2, True),
        ("08-3", (3, 8), 5, False),  # as it was given
        ("((8-3))", (3, 8), 5, True),
        ("8", (3, 8), 8, True),
        ("12", (1, 2), 12, False),  # figures are not joined
        ("3+3", (3, 8), 6, False),  # a number as often as it was given
        ("3+3", (3, 3), 6, True),
        ("8 - 3", (3, 8), 5, False),
        ("8-+3", (3, 8), 5, False),
        ("()", (3, 8), 0, False),
        ("8-3)(", (3, 8), 5, False),
        ("2**3", (2, 3), 8, False),
        ("8//3", (3, 8), 2, False),
        ("8(3)", (3, 8), 24, False),
    ],
)
def test_the_grammar(answer, numbers, target, right):
    """Precedence, order, parentheses, whole quotients and given numbers, each by an example."""
    assert is_right(answer, numbers, target, EVERY) is right


@pytest.mark.parametrize(
    "answer", ["(" * 100_000 + "3" + ")" * 100_000, "9" * 100_000, "3*" * 100_000 + "3", "3-" * 100_000, "(" * 100_000]
)
def test_a_hostile_answer_is_only_wrong(answer):
    """Deep nesting, numbers without end and long products are refused or computed, and break nothing."""
    assert is_right(answer, (3, 9), 5, EVERY) is False
