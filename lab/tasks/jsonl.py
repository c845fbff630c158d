r"""A user's own problems with verified answers, one per line or row, graded by Math-Verify.

    {"problem": "What is 1/2 + 1/3?", "answer": "5/6"}
    {"problem": "Expand (x+1)^2.", "answer": "x^2+2x+1", "source": "other keys are left alone"}

The prompt is the template of R3 (arXiv 2510.11370), App. K; a response earns 1 if its last box equals the answer:

    What is 1/2 + 1/3?
    Please reason step by step,
    and put your final answer within \boxed{ }.
"""

from __future__ import annotations

import functools
import heapq
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, overload

import torch

from lab.tasks.grading import grade
from lab.tasks.problems import PROBLEM, ProblemRow, ProblemsConfig, read_problems
from lab.tasks.tokenizers import HuggingFaceTokenizer, Tokenizer, length_to_end
from theory.contracts import Prompt, Response
from theory.streams import derive_seed, stream


class ProblemFileConfig(ProblemsConfig):
    """The part of both kinds of problem files that makes tasks and prompts from them."""

    def task(self, tokenizer: Tokenizer | None) -> ProblemTask:
        """The task; with demonstrations where the rows have solutions."""
        assert tokenizer is not None, "lab.tasks.build asks for the tokenizer"
        return (ProblemTask if self.solution_key is None else DemonstratedProblemTask)(self, tokenizer)

    def count_held_out(self) -> int | None:
        """The number of held-out problems, read from the files; None where one of them is not on this machine."""
        is_here = all(Path(name).exists() for name in self.named_files)
        return len(split(self)[1]) if is_here else None

    def file_prompts(self, path: str, tokenizer: Tokenizer) -> tuple[Prompt, ...]:
        """Every problem of that file, none held out."""
        return tuple(prompt_of(problem, self, tokenizer) for problem in read_problems(self, path))


class JsonlConfig(ProblemFileConfig):
    """Problems in a JSON Lines file."""

    kind: Literal["jsonl"] = "jsonl"


class DatasetConfig(ProblemFileConfig):
    """Problems in a JSON Lines, Parquet or Arrow file, a folder of such tables, or a `datasets` folder of one split."""

    kind: Literal["dataset"] = "dataset"


class ProblemTask:
    """`theory.contracts.Task` over problems; training prompts walk through them in epochs, each without replacement."""

    def __init__(self, config: ProblemsConfig, tokenizer: Tokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.max_response_tokens = config.max_response_tokens
        if config.chat_template and isinstance(tokenizer, HuggingFaceTokenizer):
            _say_turn_end(tokenizer)
        train, held_out = split(config)
        self._train = Prompts(train, config, tokenizer)
        self._held_out = Prompts(held_out, config, tokenizer)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, held out or not."""
        return max(self._train.longest, self._held_out.longest)

    def prompts(self, step: int, num_prompts: int) -> Sequence[Prompt]:
        """The next `num_prompts` problems: numbers [step * num_prompts, (step + 1) * num_prompts) of the endless walk.

        Epoch e of the walk is a uniform permutation of them drawn from the stream "epoch", e. The walk has no gaps as
        long as `num_prompts` stays the same and every step is requested: dynamic sampling skips the problems of the
        rounds that it does not need.
        """
        n = len(self._train)
        numbers = range(step * num_prompts, (step + 1) * num_prompts)
        return tuple(self._train[_epoch_order(self.config.seed, i // n, n)[i % n]] for i in numbers)

    def held_out(self) -> Sequence[Prompt]:
        """The held-out problems, in the order of their file."""
        return self._held_out

    def reward(self, prompt: Prompt, response: Response) -> float:
        """1.0 if Math-Verify finds the response's final expression equal to the answer, else 0.0 (R3, App. K)."""
        return reward_of(prompt, response, self.tokenizer)


def _say_turn_end(tokenizer: HuggingFaceTokenizer) -> None:
    """A line on stderr where the template ends a turn with a token that ends no response."""
    if (other := tokenizer.other_turn_end()) is not None:
        print(
            f"chat_template: it ends an assistant's turn with {other}, at which no response ends: a model that was "
            "taught the template goes on to max_tokens; add its id to eos_token_id in generation_config.json",
            file=sys.stderr,
        )


CHECKED_AT_ONCE = 1000
"""Solutions that are graded before anything starts: half a second. A million would take many minutes."""


class DemonstratedProblemTask(ProblemTask):
    """A `ProblemTask` whose rows carry worked solutions, so that a model can be cold-started on them.

    The first CHECKED_AT_ONCE solutions are checked here, the others when they are asked for.
    """

    def __init__(self, config: ProblemsConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        first = self._train.problems[:CHECKED_AT_ONCE]
        self._demonstrations = {problem.where: self._encode_solution(problem) for problem in first}

    @property
    def teachers(self) -> tuple[str, ...]:
        """The file itself."""
        return self.config.teachers

    def demonstration(self, prompt: Prompt, generator: torch.Generator, teacher: str) -> tuple[int, ...]:
        """The tokens of the row's solution and the end token; no draws.

        Raises ValueError for a prompt that is not of this task, and for a solution that is wrong or too long.
        """
        if prompt.id not in self._demonstrations:
            if prompt.id not in self._by_place:
                raise ValueError(f"expected a training prompt of {self.config.path}, got {prompt.id!r}")
            self._demonstrations[prompt.id] = self._encode_solution(self._by_place[prompt.id])
        return self._demonstrations[prompt.id]

    @functools.cached_property
    def _by_place(self) -> dict[str, ProblemRow]:
        return {problem.where: problem for problem in self._train.problems}

    def _encode_solution(self, problem: ProblemRow) -> tuple[int, ...]:
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


class Prompts(Sequence[Prompt]):
    """The prompts of problems, all checked here and made again on access, because their tokens take much memory."""

    def __init__(self, problems: list[ProblemRow], config: ProblemsConfig, tokenizer: Tokenizer) -> None:
        self.problems, self._config, self._tokenizer = problems, config, tokenizer
        self.longest = max((len(prompt_of(problem, config, tokenizer).tokens) for problem in problems), default=0)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Prompt, ...]: ...
    def __getitem__(self, index: int | slice) -> Prompt | tuple[Prompt, ...]:
        if isinstance(index, slice):
            return tuple(prompt_of(p, self._config, self._tokenizer) for p in self.problems[index])
        return prompt_of(self.problems[index], self._config, self._tokenizer)

    def __len__(self) -> int:
        return len(self.problems)


def prompt_of(problem: ProblemRow, config: ProblemsConfig, tokenizer: Tokenizer) -> Prompt:
    """The problem in the config's template; its `id` is the row's place. ValueError names an empty or too long row."""
    text = config.prompt_template.replace(PROBLEM, problem.problem)
    try:
        tokens = tokenizer.chat(text, problem.before) if config.chat_template else tokenizer.prompt(text)
    except ValueError as error:
        raise ValueError(f"{problem.where}: {error}") from error
    if not tokens:  # a tokenizer without an unknown token drops the characters that it lacks
        raise ValueError(f"{problem.where}: expected a prompt of at least 1 token, got 0")
    if len(tokens) > config.max_prompt_tokens:
        raise ValueError(
            f"{problem.where}: expected a prompt of at most max_prompt_tokens = {config.max_prompt_tokens} "
            f"tokens, got {len(tokens)}"
        )
    return Prompt(id=problem.where, tokens=tokens, answer=problem.answer, text=text)


def reward_of(prompt: Prompt, response: Response, tokenizer: Tokenizer) -> float:
    """1.0 if the text before the end token is equal to the answer by Math-Verify, else 0.0 (R3, App. K)."""
    tokens = response.tokens.tolist()
    return grade(tokenizer.decode(tokens[: length_to_end(tokens, tokenizer)]), prompt.answer)


@functools.lru_cache(maxsize=4)  # a batch may span the end of one epoch and the start of the next
def _epoch_order(seed: int, epoch: int, n: int) -> list[int]:
    return torch.randperm(n, generator=stream(seed, "epoch", epoch)).tolist()


def split(config: ProblemsConfig) -> tuple[list[ProblemRow], list[ProblemRow]]:
    """Training and held-out problems, both in the order of their files.

    Without `held_out_path`, the round(fraction * n) problems with the smallest hash of seed and text are held out: the
    share is exact, and added lines move few problems across. ValueError if either side would be empty.
    """
    problems = read_problems(config, config.path)
    if config.held_out_path is not None:
        held_out = read_problems(config, config.held_out_path)
        training = {p.identity: p.where for p in problems}
        for p in held_out:
            if p.identity in training:
                raise ValueError(
                    f"{p.where}: expected a problem that is not trained on, got that of {training[p.identity]}"
                )
        return problems, held_out
    num_held_out = round(config.held_out_fraction * len(problems))
    if not 0 < num_held_out < len(problems):
        raise ValueError(
            f"held_out_fraction: expected to hold out and to leave at least 1 of the {len(problems)} problems of "
            f"{config.path}, got {config.held_out_fraction}, that is {num_held_out}"
        )
    first = heapq.nsmallest(num_held_out, problems, key=lambda p: derive_seed(config.seed, "partition", p.identity))
    # `read_problems` refuses a repeated identity, so that these are exactly the problems of `first`.
    chosen = {p.identity for p in first}
    return [p for p in problems if p.identity not in chosen], [p for p in problems if p.identity in chosen]
