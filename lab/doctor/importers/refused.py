"""Dumps that are refused: the reason, and the way around it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

PICKLE = (
    "a pickle can run any code when it is opened, and is not loaded: let SkyRL save tensors beside it with the lines "
    "of docs/doctor.md (What to add to SkyRL), and pass the .pt to the doctor"
)
TRL = (
    "TRL's completions hold texts and rewards, no tokens and no log-probabilities; these are in the result of "
    "GRPOTrainer._generate_and_score_completions: docs/doctor.md has a hook that writes them, and "
    "docs/how-to/watch-the-mismatch.md one that diagnoses them during training"
)


def refuse_pickle(path: Path) -> None:
    """ValueError for a file with the name of a pickle."""
    if path.suffix in (".pkl", ".pickle"):
        raise ValueError(PICKLE)


def refuse_texts(names: Collection[str]) -> None:
    """ValueError for TRL's table of completions (`completions_{step}.parquet`, trl/trainer/grpo_trainer.py).

    Its other columns, the advantage and a reward per function, depend on the release.
    """
    if {"prompt", "completion", "step"} <= set(names) and "tokens" not in names:
        raise ValueError(TRL)
