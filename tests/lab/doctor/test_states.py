"""Laws of a dump of hidden states: rows that do not fit its tokens are one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lab.doctor.layers.states import States


@pytest.mark.parametrize(
    ("tokens", "lengths", "words"),
    [
        ([1, 2, 3], [], r"lengths: expected counts above 0 that sum up to 3 tokens, got \[\]"),
        ([1, 2, 3], [3, 0], r"lengths: expected counts above 0 that sum up to 3 tokens, got \[3, 0\]"),
        ([1, 2, 3], 3, r"lengths: expected one dimension, got shape \(\)"),
        ([[1, 2, 3]], [3], r"tokens: expected one dimension, got shape \(1, 3\)"),
    ],
)
def test_tokens_and_lengths_that_do_not_fit_are_one_line(
    tokens: object, lengths: object, words: str, tmp_path: Path
) -> None:
    """No sequence, an empty one, a single number, a batch."""
    whole = {"tokens": torch.tensor(tokens), "lengths": torch.tensor(lengths, dtype=torch.long)}
    save_file(whole | {"model.norm.out": torch.zeros(3, 2)}, path := tmp_path / "mu.states.safetensors")
    with pytest.raises(ValueError, match=f"^{path}: {words}$"):
        States.load(path)
