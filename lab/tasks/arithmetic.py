"""Multi-digit sums and differences, worked out in writing: a task that a model of a hundred thousand parameters learns
in a minute, with a difficulty dial that is also a dial of response length.

    prompt         response of the default teacher, the column method (`$` stands for the end token)
    47+85=         7+5+0=12;4+8+1=13#132$
    23+48+61=      3+8+1+0=12;2+4+6+1=13#132$

The other two teachers are in arithmetic_styles.py. Every step is local; the difficulty is to get all of them right.
Only the final answer, after `#`, is verified. All terms of a problem have the same number of digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from pydantic import Field, model_validator

from lab.tasks.arithmetic_styles import MARK, STYLES, longest
from lab.tasks.block import TaskBlock
from lab.tasks.held_out import distinct, is_held_out, most_held_out
from lab.tasks.tokenizers import CharTokenizer, Tokenizer, text_after
from theory.contracts import Prompt, Response
from theory.streams import stream

ALPHABET = f"0123456789+-=;{MARK}"
SIGNS = {"add": "+", "subtract": "-"}

# Draws without a problem on the wanted side of the partition after which that is an error. Where it has a single
# problem, as 1+1 among the 81 sums of two digits, all of them miss it with a probability of e^-124.
MAX_DRAWS = 10_000


class ArithmeticConfig(TaskBlock):
    """The difficulty dials: more digits or more terms make longer responses and lower accuracy."""

    kind: Literal["arithmetic"] = "arithmetic"
    min_digits: int = Field(3, ge=1, description="digits of every term in the easiest problems")
    max_digits: int = Field(
        5, ge=1, le=1000, description="digits of every term in the hardest; counts are equally likely"
    )
    num_terms: int = Field(2, ge=2, le=10, description="terms of a problem (at most 10, so that a carry is one digit)")
    operation: Literal["add", "subtract"] = Field("add", description="subtract takes two terms, the larger one first")
    num_held_out: int = Field(256, ge=1, description="held-out problems, spread evenly over the digit counts")
    seed: int = Field(0, ge=0, description="names the problems drawn and the held-out share")

    def task(self, tokenizer: Tokenizer | None) -> ArithmeticTask:
        """The task, in its own characters."""
        del tokenizer
        return ArithmeticTask(self)

    @model_validator(mode="after")
    def _dials_fit_together(self) -> ArithmeticConfig:
        if self.max_digits < self.min_digits:
            raise ValueError(f"max_digits: expected at least min_digits = {self.min_digits}, got {self.max_digits}")
        if self.operation == "subtract" and self.num_terms != 2:
            raise ValueError(f"num_terms: expected 2 where operation is subtract, got {self.num_terms}")
        for digits, wanted in zip(self.levels, self.held_out_per_level, strict=True):
            limit = most_held_out(num_problems(digits, self.num_terms))
            if wanted > limit:
                raise ValueError(
                    f"num_held_out: expected at most {limit} problems of {digits} digits (there are "
                    f"{num_problems(digits, self.num_terms)} in all), got {self.num_held_out}, {wanted} of them"
                )
        return self

    @property
    def teachers(self) -> tuple[str, ...]:
        """The styles of its demonstrations."""
        return tuple(STYLES)

    @property
    def levels(self) -> range:
        """The digit counts."""
        return range(self.min_digits, self.max_digits + 1)

    @property
    def held_out_per_level(self) -> tuple[int, ...]:
        """The number of held-out problems of each digit count; they differ by at most one."""
        each, rest = divmod(self.num_held_out, len(self.levels))
        return tuple(each + (i < rest) for i in range(len(self.levels)))


def num_problems(digits: int, num_terms: int) -> int:
    """The number of problems of d digits and k terms, their order aside: C(n + k - 1, k), n = 9*10^(d-1)."""
    return math.comb(9 * 10 ** (digits - 1) + num_terms - 1, num_terms)


class ArithmeticTask:
    """`theory.contracts.Task` with demonstrations; see the module for the format and `ArithmeticConfig` for the dials.

    The held-out share (held_out.py) depends on the sorted terms: both sides are disjoint also up to the terms' order.
    """

    def __init__(self, config: ArithmeticConfig) -> None:
        self.config = config
        self.tokenizer = CharTokenizer(ALPHABET)
        self.max_response_tokens = longest(config.max_digits, config.num_terms, SIGNS[config.operation]) + 1
        self._held_out = tuple(self._draw_held_out())

    def prompts(self, step: int, num_prompts: int) -> Sequence[Prompt]:
        """`num_prompts` problems, independent and with replacement: digits uniform, then terms uniform, none held out.

        They depend on the seed and the step alone; the first n of a longer list are the list of n.
        """
        generator = stream(self.config.seed, "prompts", step)
        return tuple(self._draw(generator, held_out=False, digits=None) for _ in range(num_prompts))

    def held_out(self) -> Sequence[Prompt]:
        """`num_held_out` problems, distinct also up to the order of terms, digit counts in turn; fixed by the seed."""
        return self._held_out

    def reward(self, prompt: Prompt, response: Response) -> float:
        """1.0 if the response ends, and the text after its last `#` equals the answer exactly; else 0.0.

        A sampled padding token is no text.
        """
        return float(text_after(MARK, response.tokens.tolist(), self.tokenizer) == prompt.answer)

    @property
    def teachers(self) -> tuple[str, ...]:
        """The styles of arithmetic_styles.py."""
        return self.config.teachers

    def demonstration(self, prompt: Prompt, generator: torch.Generator, teacher: str) -> tuple[int, ...]:
        """The response tokens that solve the problem in the teacher's style, end token included; no draws."""
        sign = SIGNS[self.config.operation]
        numbers = [int(number) for number in prompt.text.rstrip("=").split(sign)]
        return (*self.tokenizer.encode(STYLES[teacher](numbers, sign)), self.tokenizer.eos_id)

    def _draw(self, generator: torch.Generator, *, held_out: bool, digits: int | None) -> Prompt:
        """A problem from one side of the partition, by rejection; its digit count as given, or drawn uniformly."""
        config = self.config
        if digits is None:
            digits = int(torch.randint(config.min_digits, config.max_digits + 1, (), generator=generator))
        # Digits are drawn before the rejection, which must not change their distribution.
        terms = self._terms(generator, digits, held_out)
        if config.operation == "subtract":
            terms = sorted(terms, reverse=True)
        sign = SIGNS[config.operation]
        text = sign.join(map(str, terms)) + "="
        answer = sum(terms) if config.operation == "add" else terms[0] - terms[1]
        return Prompt(id=text[:-1], tokens=self.tokenizer.encode(text), answer=str(answer), text=text)

    def _terms(self, generator: torch.Generator, digits: int, held_out: bool) -> list[int]:
        """Terms from one side of the partition, by rejection; ValueError where the seed leaves that side none."""
        for _ in range(MAX_DRAWS):
            terms = draw_terms(digits, self.config.num_terms, generator)
            if self._is_held_out(terms) == held_out:
                return terms
        raise ValueError(
            f"num_held_out: expected problems of {digits} digits to {'hold out' if held_out else 'train on'} under "
            f"seed {self.config.seed}, got none in {MAX_DRAWS} draws; raise min_digits or change the seed"
        )

    def _is_held_out(self, terms: list[int]) -> bool:
        return is_held_out(self.config.seed, *sorted(terms))

    def _draw_held_out(self) -> Iterator[Prompt]:
        """The digit counts in turn; the config's margin leaves each more held-out problems than it needs."""
        config, generator = self.config, stream(self.config.seed, "held_out")

        def draw(index: int) -> Prompt:
            return self._draw(generator, held_out=True, digits=config.levels[index % len(config.levels)])

        def key(prompt: Prompt) -> str:
            # Unambiguous without separators: the terms of a problem have equally many digits.
            return "".join(sorted(prompt.id.replace("-", "+").split("+")))

        advice = "lower it, raise min_digits or change the seed"
        return distinct(draw, config.num_held_out, config.seed, advice, key)


def draw_terms(digits: int, num_terms: int, generator: torch.Generator) -> list[int]:
    """`num_terms` independent uniform numbers of exactly that many digits (a first digit is never 0)."""
    # By digits: numbers of up to 1000 of them do not fit into int64.
    first = torch.randint(1, 10, (num_terms, 1), generator=generator)
    rest = torch.randint(0, 10, (num_terms, digits - 1), generator=generator)
    return [int("".join(map(str, row))) for row in torch.cat([first, rest], dim=1).tolist()]
