"""Filtering of a problem file by pass rate: a model's rate on each problem, then the problems within a band of rates.

R3 (arXiv 2510.11370), App. J draws 16 responses per problem from a weak model and removes those that it solves in more
than 90 % of them. It writes, beside DATA.jsonl (or .parquet, or a folder of rows):

    DATA.pass_rates.jsonl    one row per problem, in the order of the file, added as it is measured
    DATA.filtered.jsonl      the kept rows, as they stood in DATA (of a table: as JSON objects)

A killed filter continues after the last whole row of its rates. `sampled_by` in a row identifies how it was measured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lab.files import append_line, atomic_write, exclusive, whole_lines
from lab.progress import ProgressKind, progress_of
from lab.strict import parse_json
from lab.tasks.block import TaskBlock
from lab.tasks.jsonl import reward_of
from lab.tasks.readers import TABLES, read_rows
from lab.tasks.tokenizers import Tokenizer
from theory.contracts import Prompt, RolloutEngine, Sampling
from theory.streams import derive_seed

# Enters `sampled_by`: raise it when the procedure of the measurement changes.
PROCEDURE = 1

Row = dict[str, Any]


@dataclass(frozen=True)
class Band:
    """The pass rates that are kept: `lowest` <= rate <= `highest`, both in [0, 1]; ValueError for anything else."""

    lowest: float = 0.0
    highest: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.lowest <= 1:
            raise ValueError(f"--min-pass-rate: expected a rate in [0, 1], got {self.lowest}")
        if not self.lowest <= self.highest <= 1:
            raise ValueError(f"--max-pass-rate: expected a rate in [{self.lowest}, 1], got {self.highest}")

    def __contains__(self, rate: float) -> bool:
        return self.lowest <= rate <= self.highest


@dataclass(frozen=True)
class ProblemFile:
    """All problems of a file, none held out: prompt and row text of each, in order."""

    path: Path
    prompts: tuple[Prompt, ...]
    texts: tuple[bytes, ...]
    tokenizer: Tokenizer

    @staticmethod
    def open(path: str, config: TaskBlock, tokenizer: Tokenizer) -> ProblemFile:
        """The file at `path`, read as the task's block says; ValueError for the first bad row."""
        prompts = config.file_prompts(path, tokenizer)
        return ProblemFile(Path(path), prompts, _texts(Path(path), prompts), tokenizer)

    @property
    def ids(self) -> tuple[str, ...]:
        """The place of each row, `file:number`, without the file's folder."""
        return tuple(prompt.id.removeprefix(f"{self.path.parent}/") for prompt in self.prompts)

    def beside(self, what: str) -> Path:
        """The file `<name>.<what>.jsonl` in the same folder."""
        name = self.path.name if self.path.is_dir() else self.path.stem
        return self.path.with_name(f"{name}.{what}.jsonl")


@dataclass(frozen=True)
class Summary:
    """The pass rates that a filter measured, and the file of the problems that it kept."""

    rates: tuple[float, ...]
    band: Band
    num_samples: int
    filtered: Path

    def line(self) -> str:
        """The counts in one line, with the file of the kept problems."""
        kept = sum(rate in self.band for rate in self.rates)
        never, always = self.rates.count(0.0), self.rates.count(1.0)
        return (
            f"kept {kept} of {len(self.rates)} problems, with pass rates of {self.band.lowest:g} to "
            f"{self.band.highest:g} over {self.num_samples} samples ({never} never solved, {always} always): "
            f"{self.filtered}"
        )


def filter_problems(
    file: ProblemFile,
    engine: RolloutEngine,
    sampling: Sampling,
    band: Band,
    *,
    sampler: str,
    progress: ProgressKind = "none",
) -> Summary:
    """Measures the missing pass rates, and writes the rates and the kept rows, each file whole or not at all.

    A rate is the mean reward of `sampling.num_responses` responses, sampled with a seed derived from `sampling.seed`
    and the prompt: it depends on no other problem. `sampler` names the weights and the engine. Existing rates are
    reused, also for another band. Raises ValueError where they are damaged or were measured otherwise, and RecordError
    where the disk refuses or another process is filtering the file.
    """
    path, filtered, ids = file.beside("pass_rates"), file.beside("filtered"), file.ids
    sampled_by = _fingerprint(file, sampling, sampler)
    # A file of its own: some releases of filelock empty or remove the file that they lock.
    lock = path.with_name(f".{path.name}.lock")
    with exclusive(lock, f"cannot write {path}: another process is filtering {file.path}"):
        rates = _rates_there(path, file, sampled_by)
        shown = progress_of(progress, file.path.name, len(file.prompts), len(rates), unit="problem")
        try:
            for i in range(len(rates), len(file.prompts)):
                rates.append(_pass_rate(file.prompts[i], file.tokenizer, engine, sampling))
                append_line(path, _line(ids[i], rates[i], sampling, band, sampled_by))
                if shown is not None:
                    shown.show(i + 1, f"rate {rates[i]:.3f}  kept {sum(rate in band for rate in rates)}")
        finally:
            if shown is not None:
                shown.close()
        # Rewrite all rows: `kept` in those of an earlier call may refer to another band.
        lines = [_line(id, rate, sampling, band, sampled_by) for id, rate in zip(ids, rates, strict=True)]
        atomic_write(path, _joined(lines))
        kept = [text for text, rate in zip(file.texts, rates, strict=True) if rate in band]
        atomic_write(filtered, _joined(kept))
    return Summary(tuple(rates), band, sampling.num_responses, filtered)


def _pass_rate(prompt: Prompt, tokenizer: Tokenizer, engine: RolloutEngine, sampling: Sampling) -> float:
    # The seed depends on the prompt's tokens, not on its row: moving or adding problems changes no rate.
    own = replace(sampling, seed=derive_seed(sampling.seed, "pass_rate", *prompt.tokens))
    responses = engine.generate([prompt], own).responses
    return sum(reward_of(prompt, response, tokenizer) for response in responses) / len(responses)


def _rates_there(path: Path, file: ProblemFile, sampled_by: str) -> list[float]:
    """The rates of the first problems, from an earlier call; ValueError names the line of a foreign or damaged one."""
    rates: list[float] = []
    ids = file.ids
    for number, line in enumerate(whole_lines(path), start=1):
        where = f"{path}:{number}"
        try:
            row: Row = parse_json(line)
            id, rate, by = row["id"], float(row["rate"]), row["sampled_by"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{where}: expected a row with id, rate and sampled_by, got {line[:60]!r}") from error
        if by != sampled_by:
            raise ValueError(
                f"{where}: expected a rate of these problems under this model, engine and sampling ({sampled_by}), "
                f"got one of others ({by}); move the file away to measure again"
            )
        if number > len(ids) or id != ids[number - 1]:
            wanted = ids[number - 1] if number <= len(ids) else f"no more than {len(ids)} rows"
            raise ValueError(f"{where}: expected {wanted}, got the rate of {id}; move the file away to measure again")
        rates.append(rate)
    return rates


def _fingerprint(file: ProblemFile, sampling: Sampling, sampler: str) -> str:
    """Twelve hex digits of everything that a rate depends on: equal digits promise equal rates."""
    problems = [[prompt.tokens, prompt.answer] for prompt in file.prompts]
    drawn = [sampling.max_tokens, sampling.num_responses, sampling.temperature, sampling.seed]
    # torch promises no equal draws and sums from one release to the next.
    parts = [PROCEDURE, torch.__version__, file.tokenizer.end_ids, sampler, drawn, problems]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _line(id: str, rate: float, sampling: Sampling, band: Band, sampled_by: str) -> bytes:
    row = {"id": id, "rate": rate, "samples": sampling.num_responses, "kept": rate in band, "sampled_by": sampled_by}
    return json.dumps(row, ensure_ascii=False).encode()


def _texts(path: Path, prompts: Sequence[Prompt]) -> tuple[bytes, ...]:
    """The rows as lines of JSON; those of a JSON Lines file byte for byte."""
    if path.is_file() and path.suffix not in TABLES:
        # Ids count blank lines, too, so they are places in this list.
        lines = path.read_bytes().splitlines()
        return tuple(lines[int(prompt.id.rpartition(":")[2]) - 1] for prompt in prompts)
    return tuple(_as_json(row, where) for where, row in read_rows(str(path), example=""))


def _as_json(row: Row, where: str) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: expected a row that JSON can hold, got: {error}") from error


def _joined(lines: Sequence[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)
