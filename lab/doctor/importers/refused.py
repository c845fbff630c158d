"""Dumps that are not read: why not, and the way out."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

PICKLE = (
    "a pickle can run any code when it is opened, and is not loaded: let SkyRL save tensors beside it, with the lines "
    "of docs/doctor.md (What to add to SkyRL), and give the doctor the .pt"
)
TRL = (
    "TRL's completions hold texts and rewards, no tokens and no log-probabilities; they are in what "
    "GRPOTrainer._generate_and_score_completions returns: docs/doctor.md has a hook that writes them, and "
    "docs/how-to/watch-the-mismatch.md lines that look there while a run trains"
)


def refuse_pickle(path: Path) -> None:
    """ValueError for a pickle, by its name."""
    if path.suffix in (".pkl", ".pickle"):
        raise ValueError(PICKLE)


def refuse_texts(names: Collection[str]) -> None:
    """ValueError for TRL's table of completions (`completions_{step}.parquet`, trl/trainer/grpo_trainer.py)."""
    if {"prompt", "completion", "advantage", "step"} <= set(names) and "tokens" not in names:
        raise ValueError(TRL)
