"""Countdown: reach a target from given numbers, each used once. A search task, with many right answers per problem.

    prompt             response (`$` stands for the end token)
    2,4,16>18:         4-2=2;16+2=18#16+(4-2)$
    2,4,16>18:         16-4=12;12-2=10x4-2=2;16+2=18#16+(4-2)$

The expression after the last `#` is verified by its value: any expression over the given numbers that reaches the
target earns the reward, whatever was written before. The three teachers write steps from the numbers to the target
(`forward`), from the target to the numbers (`backward`), or forward after attempts that fail, each closed by `x`
(`attempts`): responses of varying length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator

from lab.tasks.block import TaskBlock
from lab.tasks.expressions import BadExpression, evaluate
from lab.tasks.held_out import distinct, is_held_out
from lab.tasks.tokenizers import CharTokenizer, Tokenizer, text_after
from theory.contracts import Prompt, Response
from theory.streams import stream

MARK, FAILED = "#", "x"
ALPHABET = f"0123456789+-*/()=,;:>{FAILED}{MARK}"
TEACHERS = ("forward", "backward", "attempts")

# Draws without a problem within the dials after which that is an error.
MAX_DRAWS = 2_000

Operation = Literal["+", "-", "*", "/"]


class CountdownConfig(TaskBlock):
    """The difficulty dials: more numbers, more operations and a wider range make the search larger."""

    kind: Literal["countdown"] = "countdown"
    num_numbers: int = Field(3, ge=2, le=5, description="numbers of a problem (at most 5: demonstrations are searched)")
    max_number: int = Field(20, ge=2, description="numbers are uniform on 1, ..., max_number, and may come twice")
    operations: tuple[Operation, ...] = Field(
        ("+", "-"), min_length=1, description="of +, -, * and / (exact: without a remainder)"
    )
    use_all: bool = Field(True, description="whether every number must be used; else each at most once")
    max_value: int = Field(99, ge=1, description="largest target, and largest step of a demonstration")
    num_attempts: int = Field(3, ge=1, description="most failed attempts that the teacher `attempts` writes")
    num_held_out: int = Field(128, ge=1, description="held-out problems")
    seed: int = Field(0, ge=0, description="names the problems drawn and the held-out share")

    def task(self, tokenizer: Tokenizer | None) -> CountdownTask:
        """The task, in its own characters."""
        del tokenizer
        return CountdownTask(self)

    @model_validator(mode="after")
    def _operations_are_distinct(self) -> CountdownConfig:
        if len(set(self.operations)) < len(self.operations):
            raise ValueError(f"operations: expected each at most once, got {', '.join(self.operations)}")
        return self

    @property
    def teachers(self) -> tuple[str, ...]:
        """The styles of its demonstrations."""
        return TEACHERS


@dataclass(frozen=True)
class Term:
    """A value and its expression, in parentheses where it is a result; a given number is itself."""

    value: int
    text: str


@dataclass(frozen=True)
class Merge:
    """A merge of two terms into one: `left operation right = result`."""

    left: Term
    operation: str
    right: Term
    result: Term

    def __str__(self) -> str:
        return f"{self.left.value}{self.operation}{self.right.value}={self.result.value}"


class CountdownTask:
    """`theory.contracts.Task` with demonstrations; every problem is made from a solution, so that it has one.

    The held-out share (held_out.py) depends on the numbers and the target.
    """

    def __init__(self, config: CountdownConfig) -> None:
        self.config = config
        self.tokenizer = CharTokenizer(ALPHABET)
        self.max_response_tokens = longest(config) + 1
        self._held_out = tuple(self._draw_held_out())

    def prompts(self, step: int, num_prompts: int) -> Sequence[Prompt]:
        """`num_prompts` training problems, independent and with replacement; they depend on seed and step alone.

        Numbers are uniform, the target is the result of uniform steps, and draws that are no training problem are
        repeated. The first n of a longer list are the list of n.
        """
        generator = stream(self.config.seed, "prompts", step)
        return tuple(self._draw(generator, held_out=False) for _ in range(num_prompts))

    def held_out(self) -> Sequence[Prompt]:
        """`num_held_out` distinct problems, fixed by the seed."""
        return self._held_out

    def reward(self, prompt: Prompt, response: Response) -> float:
        """1.0 if the response ends, and the text after its last `#` reaches the target by the rules; else 0.0.

        A sampled padding token is no text.
        """
        answer = text_after(MARK, response.tokens.tolist(), self.tokenizer)
        return float(answer is not None and is_right(answer, *problem_of(prompt), self.config))

    @property
    def teachers(self) -> tuple[str, ...]:
        """`forward`, `backward` and `attempts`."""
        return self.config.teachers

    def demonstration(self, prompt: Prompt, generator: torch.Generator, teacher: str) -> tuple[int, ...]:
        """The tokens of the teacher's response, end token included; failed attempts are drawn from `generator`.

        The solution is the first of the shortest ones in the order of `merges`, so the same for a problem every time.
        """
        numbers, target = problem_of(prompt)
        steps = solution(numbers, target, self.config)
        attempts = ""
        if teacher == "attempts":
            num = int(torch.randint(self.config.num_attempts + 1, (), generator=generator))
            attempts = "".join(self._failed_attempt(numbers, target, generator) for _ in range(num))
        written = written_backward(steps) if teacher == "backward" else ";".join(map(str, steps))
        # Without the outermost parentheses, those of the last step.
        answer = steps[-1].result.text.removeprefix("(").removesuffix(")")
        return (*self.tokenizer.encode(f"{attempts}{written}{MARK}{answer}"), self.tokenizer.eos_id)

    def _failed_attempt(self, numbers: Sequence[int], target: int, generator: torch.Generator) -> str:
        """A walk of uniform steps that ends elsewhere, closed by `x`; empty where ten walks reached the target."""
        for _ in range(10):
            steps = walk(numbers, self.config, generator, len(numbers) - 1)
            # No step may reach the target: without `use_all`, the walk up to that step would be a solution.
            if steps and all(step.result.value != target for step in steps):
                return ";".join(map(str, steps)) + FAILED
        return ""

    def _draw(self, generator: torch.Generator, *, held_out: bool) -> Prompt:
        """A problem from one side of the partition, by rejection; ValueError where the dials leave none."""
        config = self.config
        for _ in range(MAX_DRAWS):
            drawn = torch.randint(1, config.max_number + 1, (config.num_numbers,), generator=generator)
            # Sorted: a problem and its other orders are one, on the same side of the partition.
            numbers = sorted(drawn.tolist())
            # Where not all numbers must be used, the target may use a few of them: at least one step.
            most = config.num_numbers - 1
            num_steps = most if config.use_all else int(torch.randint(1, most + 1, (), generator=generator))
            steps = walk(numbers, config, generator, num_steps)
            if len(steps) < num_steps:
                continue
            target = steps[-1].result.value
            if target in numbers and not config.use_all:  # a given number alone would be an answer
                continue
            if self._is_held_out(numbers, target) == held_out:
                id = f"{','.join(map(str, numbers))}>{target}"
                return Prompt(id=id, tokens=self.tokenizer.encode(f"{id}:"), answer=str(target), text=f"{id}:")
        raise ValueError(
            "max_number: expected dials that leave problems to train on and to hold out under seed "
            f"{config.seed}, got none in {MAX_DRAWS} draws; widen the dials or change the seed"
        )

    def _is_held_out(self, numbers: Sequence[int], target: int) -> bool:
        return is_held_out(self.config.seed, *numbers, target)

    def _draw_held_out(self) -> Iterator[Prompt]:
        config, generator = self.config, stream(self.config.seed, "held_out")
        advice = "lower it, widen the dials or change the seed"

        def draw(_: int) -> Prompt:
            return self._draw(generator, held_out=True)

        return distinct(draw, config.num_held_out, config.seed, advice, key=lambda prompt: prompt.id)


def problem_of(prompt: Prompt) -> tuple[tuple[int, ...], int]:
    """The numbers, in ascending order, and the target."""
    numbers, target = prompt.text.rstrip(":").split(">")
    return tuple(int(number) for number in numbers.split(",")), int(target)


def is_right(answer: str, numbers: Sequence[int], target: int, config: CountdownConfig) -> bool:
    """Whether the expression keeps the rules and its value is the target.

    Rules: the configured operations and parentheses; each given number at most as often as it was given, and exactly so
    under `use_all`; no other number; every quotient a whole number. Steps may be negative, 0 or larger than max_value.
    """
    given = Counter(map(str, numbers))
    try:
        value, used = evaluate(answer, config.operations, given)
    except BadExpression:
        return False
    return value == target and (used == given or not config.use_all)


def merges(terms: Sequence[Term], config: CountdownConfig) -> Iterator[tuple[Merge, tuple[Term, ...]]]:
    """Every step from these terms, with the terms after it: pairs in order, operations in the config's order.

    A result is a whole number in [1, max_value]; the larger term stands on the left.
    """
    for i in range(len(terms)):
        for j in range(i):
            # Unequal terms the other way round make a difference below 1, or a fraction.
            left, right = sorted((terms[i], terms[j]), key=lambda term: term.value, reverse=True)
            others = tuple(term for k, term in enumerate(terms) if k not in (i, j))
            for operation in config.operations:
                value = _result(left.value, operation, right.value)
                if value is not None and 1 <= value <= config.max_value:
                    result = Term(value, f"({left.text}{operation}{right.text})")
                    yield Merge(left, operation, right, result), (*others, result)


def solution(numbers: Sequence[int], target: int, config: CountdownConfig) -> tuple[Merge, ...]:
    """The first of the shortest lists of steps that end in the target; ValueError where there is none."""
    # A step makes one term of two, so all n numbers are used after exactly n - 1 steps.
    lengths = range(len(numbers) - 1, len(numbers)) if config.use_all else range(1, len(numbers))
    found = next((steps for n in lengths if (steps := _search(_given(numbers), target, config, n))), None)
    if found is None:
        raise ValueError(f"expected a problem with a solution in [1, {config.max_value}], got {numbers} > {target}")
    return found


def walk(
    numbers: Sequence[int], config: CountdownConfig, generator: torch.Generator, num_steps: int
) -> tuple[Merge, ...]:
    """`num_steps` steps, each uniform among those possible; fewer where none is possible any more."""
    terms, steps = _given(numbers), []
    for _ in range(num_steps):
        possible = list(merges(terms, config))
        if not possible:
            break
        step, terms = possible[int(torch.randint(len(possible), (), generator=generator))]
        steps.append(step)
    return tuple(steps)


def written_backward(steps: Sequence[Merge]) -> str:
    """The steps from the target on: `18=16+2;2=4-2`."""
    return ";".join(f"{s.result.value}={s.left.value}{s.operation}{s.right.value}" for s in reversed(steps))


def longest(config: CountdownConfig) -> int:
    """A bound on the characters of every teacher's response: all values as wide as the widest."""
    n, width = config.num_numbers, len(str(max(config.max_value, config.max_number)))
    # n - 1 steps of three values and two signs, with separators; n values, their signs, n - 2 pairs of parentheses.
    chain = (n - 1) * (3 * width + 2) + (n - 2)
    expression = n * width + (n - 1) + 2 * (n - 2)
    return config.num_attempts * (chain + len(FAILED)) + chain + len(MARK) + expression


def _search(terms: tuple[Term, ...], target: int, config: CountdownConfig, num_steps: int) -> tuple[Merge, ...] | None:
    """The first list of exactly `num_steps` steps that ends in the target, depth first."""
    for step, rest in merges(terms, config):
        if num_steps == 1:
            if step.result.value == target:
                return (step,)
        elif (later := _search(rest, target, config, num_steps - 1)) is not None:
            return (step, *later)
    return None


def _given(numbers: Sequence[int]) -> tuple[Term, ...]:
    return tuple(Term(number, str(number)) for number in numbers)


def _result(left: int, operation: str, right: int) -> int | None:
    """The value of a step; None for a quotient that is no whole number."""
    if operation == "/":
        return left // right if left % right == 0 else None  # terms are at least 1: right is never 0
    return {"+": left + right, "-": left - right, "*": left * right}[operation]
