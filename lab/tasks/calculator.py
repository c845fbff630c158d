"""A task with turns: the model calls a calculator, reads its reply, calls again, and states the answer.

Copying numbers into calls is easy and learned in a minute; knowing when to stop, and what the last result was, takes
several turns. The calculator's replies are in the response but not sampled by the model: they are in no loss.

    prompt      37*6+58=
    response    <37*6>$=222;<222+58>$=280;#280$        `$` ends a turn; `=222;` and `=280;` are the calculator's

A call is a number, a sign and a number without a sign of its own; to anything else without the mark `#` the calculator
replies `=?;`. A turn with the mark is the last one. Only the first sign may be a `*`, so that evaluation from left to
right is the problem's value. Only the answer after `#` is verified, not the way to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator

from lab.tasks.arithmetic import MAX_DRAWS, draw_terms
from lab.tasks.block import TaskBlock
from lab.tasks.held_out import distinct, is_held_out, most_held_out
from lab.tasks.tokenizers import CharTokenizer, Tokenizer
from theory.contracts import Prompt, Response
from theory.streams import stream

MARK = "#"
ALPHABET = f"0123456789+-*=;<>?{MARK}"
# At most nine digits: a longer result cannot go into another call, so numbers do not grow from turn to turn.
CALL = re.compile(r"<(-?[0-9]{1,9})([-+*])([0-9]{1,9})>")
UNREADABLE = "=?;"


class CalculatorConfig(TaskBlock):
    """The difficulty dials: more operations make more turns, more digits longer numbers to copy."""

    has_turns: ClassVar[bool] = True

    kind: Literal["calculator"] = "calculator"
    min_operations: int = Field(1, ge=1, le=8, description="operations of the easiest problems: calls that they need")
    max_operations: int = Field(2, ge=1, le=8, description="operations of the hardest; each count is equally likely")
    max_digits: int = Field(2, ge=1, le=4, description="digits of a number, from 1 on; each count is equally likely")
    multiply: bool = Field(True, description="whether the first operation may be a product")
    num_held_out: int = Field(256, ge=1, description="held-out problems, spread evenly over the operation counts")
    seed: int = Field(0, ge=0, description="names the problems drawn and the held-out share")

    def task(self, tokenizer: Tokenizer | None) -> CalculatorTask:
        """The task, in its own characters."""
        del tokenizer
        return CalculatorTask(self)

    @model_validator(mode="after")
    def _dials_fit_together(self) -> CalculatorConfig:
        if self.max_operations < self.min_operations:
            raise ValueError(
                f"max_operations: expected at least min_operations = {self.min_operations}, got {self.max_operations}"
            )
        # The fewest operations have the fewest problems, and get the rounded-up share.
        share = -(-self.num_held_out // len(self.levels))
        limit = most_held_out(self.num_problems(self.min_operations))
        if share > limit:
            raise ValueError(
                f"num_held_out: expected at most {limit} problems of {self.min_operations} operations (there are "
                f"{self.num_problems(self.min_operations)} in all), got {self.num_held_out}, {share} of them"
            )
        return self

    @property
    def teachers(self) -> tuple[str, ...]:
        """The one style of its demonstrations."""
        return ("calls",)

    @property
    def levels(self) -> range:
        """The operation counts."""
        return range(self.min_operations, self.max_operations + 1)

    def num_problems(self, num_operations: int) -> int:
        """The number of problems of that many operations."""
        num_signs = (3 if self.multiply else 2) * 2 ** (num_operations - 1)
        return num_signs * (10**self.max_digits - 1) ** (num_operations + 1)


class CalculatorTask:
    """`theory.contracts.Environment` with demonstrations; see the module for the format, the config for the dials.

    The held-out share (held_out.py) depends on the problem's text.
    """

    def __init__(self, config: CalculatorConfig) -> None:
        self.config = config
        self.tokenizer = CharTokenizer(ALPHABET)
        d, k = config.max_digits, config.max_operations
        largest = 10**d - 1
        # Width of the widest value with its minus sign; each call is `<value+number>`, an end token and `=value;`; then
        # `#value` and its end token.
        width = 1 + len(str((largest**2 if config.multiply else largest) + k * largest))
        self.max_response_tokens = k * ((width + d + 3) + 1 + (width + 2)) + (width + 1) + 1
        self._held_out = tuple(self._draw_held_out())

    def prompts(self, step: int, num_prompts: int) -> Sequence[Prompt]:
        """`num_prompts` problems, independent and with replacement, none held out: operations, signs and digit counts
        uniform, then numbers of these digits uniform.

        They depend on the seed and the step alone; the first n of a longer list are the list of n.
        """
        generator, levels = stream(self.config.seed, "prompts", step), self.config.levels
        drawn = []
        for _ in range(num_prompts):
            level = levels[int(torch.randint(len(levels), (), generator=generator))]
            drawn.append(self._draw(generator, level, held_out=False))
        return tuple(drawn)

    def held_out(self) -> Sequence[Prompt]:
        """`num_held_out` distinct problems, operation counts in turn; fixed by the seed."""
        return self._held_out

    def observe(self, prompt: Prompt, response: Response) -> tuple[int, ...] | None:
        """The calculator's answer to the last turn: the value of a call, or `=?;`; None to a turn with the mark."""
        turn = self._last_turn(response)
        if MARK in turn:
            return None
        call = CALL.fullmatch(turn)
        return self.tokenizer.encode(UNREADABLE if call is None else f"={apply(*call.groups())};")

    def reward(self, prompt: Prompt, response: Response) -> float:
        """1.0 if the last turn ends, and the text after its last `#` equals the answer exactly; else 0.0.

        A sampled padding token is no text.
        """
        if int(response.tokens[-1]) not in self.tokenizer.end_ids:
            return 0.0
        _, mark, answer = self._last_turn(response).rpartition(MARK)
        return 1.0 if mark and answer == prompt.answer else 0.0

    @property
    def teachers(self) -> tuple[str, ...]:
        """The one style of its demonstrations."""
        return self.config.teachers

    def demonstration(self, prompt: Prompt, generator: torch.Generator, teacher: str = "calls") -> tuple[int, ...]:
        """All turns that solve the problem, with the calculator's replies in between; no draws, as there is one way."""
        turns, end = worked_turns(prompt.text), self.tokenizer.eos_id
        return tuple(token for said, turn in turns for token in (*self.tokenizer.encode(said + turn), end))

    def _last_turn(self, response: Response) -> str:
        """The text of the tokens after the last observation."""
        observed = (~response.is_response).nonzero()[:, 0].tolist()
        return self.tokenizer.decode(response.tokens[observed[-1] + 1 if observed else 0 :].tolist())

    def _draw(self, generator: torch.Generator, num_operations: int, *, held_out: bool) -> Prompt:
        """A problem from one side of the partition, by rejection; ValueError where the seed leaves that side none."""
        for _ in range(MAX_DRAWS):
            text, answer = self._problem(generator, num_operations)
            if is_held_out(self.config.seed, text) == held_out:
                return Prompt(id=text, tokens=self.tokenizer.encode(f"{text}="), answer=answer, text=f"{text}=")
        raise ValueError(
            f"num_held_out: expected problems of {num_operations} operations to "
            f"{'hold out' if held_out else 'train on'} under seed {self.config.seed}, got none in {MAX_DRAWS} draws; "
            "raise max_digits or change the seed"
        )

    def _problem(self, generator: torch.Generator, num_operations: int) -> tuple[str, str]:
        """The text of a problem, and its answer."""
        text = str(self._number(generator))
        value = text
        for index in range(num_operations):
            signs = "+-*" if index == 0 and self.config.multiply else "+-"
            sign = signs[int(torch.randint(len(signs), (), generator=generator))]
            number = str(self._number(generator))
            text, value = f"{text}{sign}{number}", str(apply(value, sign, number))
        return text, value

    def _number(self, generator: torch.Generator) -> int:
        digits = int(torch.randint(1, self.config.max_digits + 1, (), generator=generator))
        return draw_terms(digits, 1, generator)[0]

    def _draw_held_out(self) -> Iterator[Prompt]:
        """The operation counts in turn; the config's margin leaves each more held-out problems than it needs."""
        config, generator = self.config, stream(self.config.seed, "held_out")

        def draw(index: int) -> Prompt:
            return self._draw(generator, config.levels[index % len(config.levels)], held_out=True)

        advice = "lower it, raise max_digits or change the seed"
        return distinct(draw, config.num_held_out, config.seed, advice, key=lambda prompt: prompt.id)


def apply(left: str, sign: str, right: str) -> int:
    """The value of one operation on two whole numbers."""
    a, b = int(left), int(right)
    return a * b if sign == "*" else a + b if sign == "+" else a - b


def worked_turns(text: str) -> Iterator[tuple[str, str]]:
    """Each turn with the calculator's answer before it: "" and "<37*6>", then "=222;" and "<222+58>"."""
    value, *rest = re.findall(r"[0-9]+|[-+*]", text)
    said = ""
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        yield said, f"<{value}{sign}{number}>"
        value = str(apply(value, sign, number))
        said = f"={value};"
    yield said, f"{MARK}{value}"
