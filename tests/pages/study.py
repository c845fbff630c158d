"""Shared by the studies of exact runs: the rows of a record folder, their means, and their part of a page."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lab.casebook import kept_cases, newest
from lab.flow.config import FlowConfig
from lab.flow.records import FILE, read
from lab.flow.table import MeanInterval, interval
from lab.records import RunFolder
from tests.pages.predictions import Prediction, Study

ROOT = Path(__file__).parents[2]

Values = NDArray[np.float64]
"""A number per problem."""


@dataclass(frozen=True)
class Part:
    """The part of a page between the marks `<!-- name -->` and `<!-- /name -->`."""

    page: Path
    name: str

    @property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(rf"(?<=<!-- {self.name} -->\n).*?(?=<!-- /{self.name} -->)", re.DOTALL)

    def read(self) -> str:
        """The text between the marks; ValueError where the page has none."""
        found = self._pattern.search(self.page.read_text(encoding="utf-8"))
        if found is None:
            raise ValueError(f"{self.page.name}: expected the marks of {self.name}, got none")
        return found.group()

    def write(self, text: str) -> None:
        """Puts the text between the marks."""
        # A function, since `sub` would read backslashes of a plain string as escapes.
        self.page.write_text(self._pattern.sub(lambda _: text, self.page.read_text(encoding="utf-8")), encoding="utf-8")


TABLES, FRONT = ROOT / "docs/exact-training-tables.md", ROOT / "docs/exact-training.md"


def runs_in(folder: Path, config: FlowConfig) -> pd.DataFrame:
    """The rows of all runs in a record folder of that config; of an unfinished folder, only whole problems."""
    finished = newest(folder, FILE)
    if finished is not None:
        return read(finished)
    cases = kept_cases(RunFolder(folder))
    # A problem is whole once it has a case for each engine error.
    whole = len(cases) // len(config.errors) * len(config.errors)
    frame = pd.DataFrame([row for case in cases[:whole] for row in case])
    # JSON has no infinity: B = inf (no sampling noise) is stored as null.
    return frame.assign(B=frame["B"].fillna(np.inf))


def mean(study: str, values: pd.Series, *names: str) -> MeanInterval:
    """The interval of the mean over the problems that both sides of a difference have."""
    return interval(values.dropna().to_numpy(), study, *names)


def of_mean(study: str, name: str, words: str, measured: str, gap: Callable[[Study], pd.Series]) -> Prediction[Study]:
    """The prediction that the mean of a difference is above 0."""
    return Prediction(name, words, measured, lambda of: [mean(study, gap(of), name)])


def update(
    folders: Sequence[str], rows_of: Callable[[Path], pd.DataFrame], kept: Path, part: Part, block: Callable[[], str]
) -> None:
    """Keeps the rows of the runs in these folders; without a folder, writes the page's part from the kept rows."""
    if not folders:
        part.write(block())
        return
    rows: pd.DataFrame = pd.concat([rows_of(Path(folder)) for folder in folders], ignore_index=True)
    # Six digits: rounding at the tenth differs between machines.
    kept.write_text(rows.to_csv(index=False, float_format="%.6g"), encoding="utf-8")
