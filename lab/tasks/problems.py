"""From the rows of a file to problems: dotted keys, prompts that are chat messages, and one clear line for a bad row.

{"problem": "What is 1/2 + 1/3?", "answer": "5/6"}                         problem, answer
{"prompt": [{"role": "user", "content": "What is 1/2 + 1/3?"}],            prompt,
 "reward_model": {"ground_truth": "5/6", "style": "rule"}}                 reward_model.ground_truth
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from lab.tasks.block import TaskBlock
from lab.tasks.grading import is_parseable
from lab.tasks.readers import TABLES, read_lines, read_rows, short
from lab.tasks.tokenizers import ROLES, Message

PROBLEM = "{problem}"
SAID_EVERY = 100_000
"""Problems between two lines of progress while a file is read."""
R3_TEMPLATE = PROBLEM + "\nPlease reason step by step,\nand put your final answer within \\boxed{ }."


class ProblemsConfig(TaskBlock):
    """Place and form of the problems, and the held-out share."""

    needs_tokenizer: ClassVar[bool] = True
    grades_in_processes: ClassVar[bool] = True
    reads_problems: ClassVar[bool] = True

    kind: str
    path: str = Field(min_length=1, description="the file; a relative path counts from the working folder")
    problem_key: str = Field(
        "problem", min_length=1, description="key of the problem: its text, or chat messages; a.b is b inside a"
    )
    answer_key: str = Field("answer", min_length=1, description="key of the verified answer, a string; a.b as above")
    solution_key: str | None = Field(None, description="key of a worked solution; with it, every row must have one")
    prompt_template: str = Field(
        R3_TEMPLATE, description="the prompt; {problem} stands for the problem's text (of messages: the last one's)"
    )
    chat_template: bool = Field(False, description="put the prompt as a user message in the tokenizer's chat template")
    max_prompt_tokens: int = Field(2048, ge=1, description="a longer prompt is an error that names its row")
    max_response_tokens: int = Field(
        4096, ge=1, description="longest worked solution, end token included; responses: sampling.max_tokens"
    )
    held_out_path: str | None = Field(None, description="a second file, held out whole; no problem may be in both")
    held_out_fraction: float = Field(0.1, gt=0, lt=1, description="held-out share of `path` without held_out_path")
    seed: int = Field(0, ge=0, description="names the order of the epochs and the held-out share")

    @property
    def named_files(self) -> tuple[str, ...]:
        """The problem file, and the one held out if there is one."""
        return (self.path,) if self.held_out_path is None else (self.path, self.held_out_path)

    @property
    def teachers(self) -> tuple[str, ...]:
        """The teachers that can cold-start a model on the task: the rows' own solutions, or none."""
        return () if self.solution_key is None else ("solutions",)

    @model_validator(mode="after")
    def _fields_fit_together(self) -> ProblemsConfig:
        if PROBLEM not in self.prompt_template:
            raise ValueError(f"prompt_template: expected {PROBLEM} in it, got {self.prompt_template!r}")
        if self.problem_key == self.answer_key:
            raise ValueError(f"answer_key: expected another key than problem_key, got {self.answer_key!r} for both")
        return self


@dataclass(frozen=True, slots=True)
class ProblemRow:
    """Row `number` of the file `path`. `before` holds the messages before the problem's own, if any."""

    path: str
    number: int
    problem: str
    answer: str
    solution: str | None
    before: tuple[Message, ...] = ()

    @property
    def where(self) -> str:
        """`path:number`, for messages; made on access, as a million of them take as much memory as the problems."""
        return f"{self.path}:{self.number}"

    @property
    def identity(self) -> str:
        """The identity of a problem, shared by its copies: its text, and the messages before it, if any."""
        if not self.before:
            return self.problem
        return json.dumps([*((m["role"], m["content"]) for m in self.before), self.problem])


def read_problems(config: ProblemsConfig, path: str) -> list[ProblemRow]:
    """Every row as a problem; ValueError `path:number: what was expected, what came` for the first bad one.

    Keys besides the configured ones are ignored. A repeated problem is an error: its copies could fall on both sides of
    the held-out split.
    """
    first: dict[str, ProblemRow] = {}
    for where, row in _rows(config, path):
        problem = _problem(config, row, where)
        before = first.setdefault(problem.identity, problem)
        if before is not problem:
            raise ValueError(f"{where}: expected a new problem, got that of {before.where} again")
        if len(first) % SAID_EVERY == 0:
            print(f"{path}: {len(first):,} problems read", file=sys.stderr, flush=True)
    problems = list(first.values())
    if not problems:
        raise ValueError(f"{path}: expected at least one problem, got an empty file")
    return problems


def _rows(config: ProblemsConfig, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    example = json.dumps({config.problem_key: "...", config.answer_key: "..."})
    if config.kind == "dataset":
        return read_rows(path, example)
    if Path(path).suffix in TABLES:
        raise ValueError(
            f"{path}: expected JSON lines where task.kind is jsonl, got a {Path(path).suffix} file; dataset reads it"
        )
    return read_lines(path, example)


def _problem(config: ProblemsConfig, row: dict[str, Any], where: str) -> ProblemRow:
    before, text = _messages(_value(row, config.problem_key, where), config.problem_key, where)
    if before and not config.chat_template:
        roles = ", ".join([*(m["role"] for m in before), "user"])
        raise ValueError(
            f"{where}: {config.problem_key}: expected one user message where chat_template is off, got {roles}"
        )
    answer = _text(_value(row, config.answer_key, where), config.answer_key, where)
    key = config.solution_key
    solution = None if key is None else _text(_value(row, key, where), key, where)
    if not is_parseable(answer):
        begins = answer if len(answer) <= 60 else answer[:57] + "..."
        raise ValueError(
            f"{where}: {config.answer_key}: expected an expression that Math-Verify can parse, got {begins!r}"
        )
    # One string for the path of all problems, not a copy in each.
    path, _, number = where.rpartition(":")  # from the right, as a path may have colons
    return ProblemRow(sys.intern(path), int(number), text, answer, solution, before)


def _messages(value: Any, key: str, where: str) -> tuple[tuple[Message, ...], str]:
    """The messages before the problem's, and its text; a plain string is a user message with none before it."""
    if not isinstance(value, list):
        return (), _text(value, key, where)
    if not value:
        raise ValueError(f"{where}: {key}: expected a text or chat messages, got an empty list")
    messages = [_message(one, f"{key}.{i}", where) for i, one in enumerate(value)]
    if messages[-1]["role"] != "user":
        raise ValueError(f"{where}: {key}: expected a user's message as the last, got one of {messages[-1]['role']}")
    return tuple(messages[:-1]), messages[-1]["content"]


def _message(value: Any, key: str, where: str) -> Message:
    if not isinstance(value, dict) or not {"role", "content"} <= value.keys():
        raise ValueError(f"{where}: {key}: expected a message with role and content, got {short(value)}")
    if value["role"] not in ROLES:
        raise ValueError(f"{where}: {key}.role: expected one of {', '.join(ROLES)}, got {short(value['role'])}")
    return {"role": value["role"], "content": _text(value["content"], f"{key}.content", where)}


def _value(row: dict[str, Any], key: str, where: str) -> Any:
    """The value at a key; a key that the row does not have verbatim is split at its dots."""
    if key in row:
        return row[key]
    block: Any = row
    names = key.split(".")
    for depth, name in enumerate(names):
        if not isinstance(block, dict):
            inside = ".".join(names[:depth])
            raise ValueError(
                f"{where}: {key}: expected an object with the key {name!r} at {inside}, got {short(block)}"
            )
        if name not in block:
            raise ValueError(f"{where}: expected the key {key!r}, got {_keys(block, names[:depth])}")
        block = block[name]
    return block


def _keys(block: dict[str, Any], inside: Sequence[str]) -> str:
    names = ", ".join(repr(name) for name in block) or "no keys"
    return f"{names} in {'.'.join(inside)}" if inside else names


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        example = json.dumps(str(value)[:40])
        raise ValueError(f"{where}: {key}: expected a string such as {example}, got {short(value)}")
    if not value.strip():
        raise ValueError(f"{where}: {key}: expected a text that is not empty, got {value!r}")
    return value
