r"""A user's own file of problems with verified answers, one JSON object a line, graded by Math-Verify.

    {"problem": "What is 1/2 + 1/3?", "answer": "5/6"}
    {"problem": "Expand (x+1)^2.", "answer": "x^2+2x+1", "source": "other keys are left alone"}

The prompt is the template of R3 (arXiv 2510.11370), App. K; a response earns 1 if its last box equals the answer:

    What is 1/2 + 1/3?
    Please reason step by step,
    and put your final answer within \boxed{ }.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from lab.config.strict import Strict
from lab.tasks.grading import grade, is_parseable
from lab.tasks.tokenizers import Tokenizer
from theory.contracts import Prompt, Response
from theory.streams import derive_seed, stream

PROBLEM = "{problem}"
R3_TEMPLATE = PROBLEM + "\nPlease reason step by step,\nand put your final answer within \\boxed{ }."


class JsonlConfig(Strict):
    """Where the problems are, how they are put, and which of them are held out."""

    kind: Literal["jsonl"] = "jsonl"
    path: str = Field(min_length=1, description="the file; a relative path counts from the working folder")
    problem_key: str = Field("problem", min_length=1, description="key of the problem's text")
    answer_key: str = Field("answer", min_length=1, description="key of the verified answer, a string")
    solution_key: str | None = Field(None, description="key of a worked solution; with it, every line must have one")
    prompt_template: str = Field(R3_TEMPLATE, description="the prompt; {problem} stands for the problem's text")
    chat_template: bool = Field(False, description="put the prompt as a user message in the tokenizer's chat template")
    max_prompt_tokens: int = Field(2048, ge=1, description="a longer prompt is an error that names its line")
    max_response_tokens: int = Field(4096, ge=1, description="longest response, end token included")
    held_out_path: str | None = Field(None, description="a second file, held out whole; no problem may be in both")
    held_out_fraction: float = Field(0.1, gt=0, lt=1, description="held-out share of `path` without held_out_path")
    seed: int = Field(0, ge=0, description="names the order of the epochs and the held-out share")

    @model_validator(mode="after")
    def _fields_fit_together(self) -> JsonlConfig:
        if PROBLEM not in self.prompt_template:
            raise ValueError(f"prompt_template: expected {PROBLEM} in it, got {self.prompt_template!r}")
        if self.problem_key == self.answer_key:
            raise ValueError(f"answer_key: expected another key than problem_key, got {self.answer_key!r} for both")
        return self


@dataclass(frozen=True)
class Problem:
    """One line of the file; `where` is `path:line` for messages."""

    where: str
    problem: str
    answer: str
    solution: str | None


class JsonlTask:
    """`theory.contracts.Task` over a file; training prompts walk through it in epochs, without replacement in each."""

    def __init__(self, config: JsonlConfig, tokenizer: Tokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.max_response_tokens = config.max_response_tokens
        train, held_out = split(config)
        self._solutions = {p.problem: p for p in train if p.solution is not None}
        self._train = tuple(map(self._prompt, train))
        self._held_out = tuple(map(self._prompt, held_out))

    def prompts(self, step: int, num_prompts: int) -> Sequence[Prompt]:
        """The next `num_prompts` problems: numbers [step * num_prompts, (step + 1) * num_prompts) of the endless walk.

        Epoch e of the walk is the file in an order drawn from the stream "epoch", e: a uniform permutation. The walk is
        without gaps as long as `num_prompts` stays the same.
        """
        n = len(self._train)
        numbers = range(step * num_prompts, (step + 1) * num_prompts)
        return tuple(self._train[_epoch_order(self.config.seed, i // n, n)[i % n]] for i in numbers)

    def held_out(self) -> Sequence[Prompt]:
        """The held-out problems, in the order of their file."""
        return self._held_out

    def reward(self, prompt: Prompt, response: Response) -> float:
        """1.0 if Math-Verify finds the response's final expression equal to the answer, else 0.0 (R3, App. K)."""
        tokens = response.tokens.tolist()
        eos_id = self.tokenizer.eos_id
        return grade(
            self.tokenizer.decode(tokens[: tokens.index(eos_id)] if eos_id in tokens else tokens), prompt.answer
        )

    def _prompt(self, problem: Problem) -> Prompt:
        text = self.config.prompt_template.replace(PROBLEM, problem.problem)
        try:
            tokens = self.tokenizer.chat(text) if self.config.chat_template else self.tokenizer.prompt(text)
        except ValueError as error:
            raise ValueError(f"{problem.where}: {error}") from error
        if len(tokens) > self.config.max_prompt_tokens:
            raise ValueError(
                f"{problem.where}: expected a prompt of at most max_prompt_tokens = {self.config.max_prompt_tokens} "
                f"tokens, got {len(tokens)}"
            )
        return Prompt(id=problem.where, tokens=tokens, answer=problem.answer, text=text)


class DemonstratedJsonlTask(JsonlTask):
    """A `JsonlTask` whose lines carry worked solutions, so that a model can be cold-started on them."""

    def __init__(self, config: JsonlConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self._demonstrations = {
            prompt.id: self._encode_solution(problem)
            for prompt, problem in zip(self._train, self._solutions.values(), strict=True)
        }

    def demonstration(self, prompt: Prompt, generator: torch.Generator) -> tuple[int, ...]:
        """The tokens of the line's solution and the end token; no draws. ValueError for a prompt not of this task."""
        if prompt.id not in self._demonstrations:
            raise ValueError(f"expected a training prompt of {self.config.path}, got {prompt.id!r}")
        return self._demonstrations[prompt.id]

    def _encode_solution(self, problem: Problem) -> tuple[int, ...]:
        assert problem.solution is not None
        if grade(problem.solution, problem.answer) != 1.0:
            raise ValueError(
                f"{problem.where}: {self.config.solution_key}: expected a solution that ends in the answer "
                f"{problem.answer!r}, got ...{problem.solution[-40:]!r}"
            )
        tokens = (*self.tokenizer.encode(problem.solution), self.tokenizer.eos_id)
        if len(tokens) > self.config.max_response_tokens:
            raise ValueError(
                f"{problem.where}: {self.config.solution_key}: expected at most max_response_tokens = "
                f"{self.config.max_response_tokens} tokens, got {len(tokens)}"
            )
        return tokens


@functools.lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, n: int) -> list[int]:
    return torch.randperm(n, generator=stream(seed, "epoch", epoch)).tolist()


def split(config: JsonlConfig) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems, both in the order of their files.

    Without `held_out_path`, the round(fraction * n) problems with the smallest hash of seed and text are held out: the
    share is exact, and adding lines moves few problems across. ValueError if either side would be empty.
    """
    problems = read_problems(config, config.path)
    if config.held_out_path is not None:
        held_out = read_problems(config, config.held_out_path)
        training = {p.problem: p.where for p in problems}
        for p in held_out:
            if p.problem in training:
                raise ValueError(
                    f"{p.where}: expected a problem that is not trained on, got that of {training[p.problem]}"
                )
        return problems, held_out
    num_held_out = round(config.held_out_fraction * len(problems))
    if not 0 < num_held_out < len(problems):
        raise ValueError(
            f"held_out_fraction: expected to hold out and to leave at least 1 of the {len(problems)} problems of "
            f"{config.path}, got {config.held_out_fraction}, that is {num_held_out}"
        )
    rank = sorted(problems, key=lambda p: derive_seed(config.seed, "partition", p.problem))
    chosen = {p.problem for p in rank[:num_held_out]}
    return [p for p in problems if p.problem not in chosen], [p for p in problems if p.problem in chosen]


def read_problems(config: JsonlConfig, path: str) -> list[Problem]:
    """Every line as a problem; ValueError `path:line: what was expected, what came` for the first bad one.

    Blank lines are skipped and keys besides the configured ones ignored. A problem that comes twice is bad: its copies
    could fall on both sides of the held-out split.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: expected a file of problems, got: {error.strerror or error}") from error
    problems: list[Problem] = []
    first: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        problem = _read_line(config, line, f"{path}:{number}")
        if problem.problem in first:
            raise ValueError(f"{problem.where}: expected a new problem, got that of {first[problem.problem]} again")
        first[problem.problem] = problem.where
        problems.append(problem)
    if not problems:
        raise ValueError(f"{path}: expected one problem a line, got an empty file")
    return problems


def _read_line(config: JsonlConfig, line: bytes, where: str) -> Problem:
    example = json.dumps({config.problem_key: "...", config.answer_key: "..."})
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected a JSON object such as {example}, got invalid JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object such as {example}, got {_short(row)}")
    solution = None if config.solution_key is None else _text(row, config.solution_key, where)
    problem = Problem(where, _text(row, config.problem_key, where), _text(row, config.answer_key, where), solution)
    if not is_parseable(problem.answer):
        raise ValueError(
            f"{where}: {config.answer_key}: expected an expression that Math-Verify can parse, got {problem.answer!r}"
        )
    return problem


def _text(row: dict[str, Any], key: str, where: str) -> str:
    if key not in row:
        raise ValueError(f"{where}: expected the key {key!r}, got {', '.join(map(repr, row)) or 'no keys'}")
    value = row[key]
    if not isinstance(value, str):
        raise ValueError(
            f"{where}: {key}: expected a string such as {json.dumps(str(value)[:40])}, got {_short(value)}"
        )
    if not value.strip():
        raise ValueError(f"{where}: {key}: expected a text that is not empty, got {value!r}")
    return value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
