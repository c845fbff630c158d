"""The meaning of a strength, on three models that it was not counted on: stated and observed shares of right causes.

`python -m tests.pages.strengths` prints the table of docs/doctor.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from scipy.stats import binom

from lab.doctor.reliability import BINS, bin_of
from lab.markdown import markdown_table
from tests.pages.doctor_plants import PLANTS
from tests.pages.doctor_tables import Found, decided, every, num_right
from tests.pages.ward import Ward, findings

COMMON = ("--algorithm.batch.num_prompts", "16")
MODELS: tuple[tuple[str, ...], ...] = (
    ("--model.hidden_size", "44", "--model.num_heads", "2", "--model.num_kv_heads", "2", "--seed", "21"),
    ("--model.hidden_size", "88", "--model.num_experts", "12", "--seed", "22"),
    ("--model.hidden_size", "60", "--model.num_layers", "4", "--model.num_experts", "16", "--seed", "23"),
)
FIRST_DRAW, NUM_DRAWS, NUM_STEPS = 90, 4, 6


def seen() -> list[Found]:
    """The diagnoses of every plant on every draw of the three models."""
    draws, out = range(FIRST_DRAW, FIRST_DRAW + NUM_DRAWS), []
    for model in MODELS:
        ward = Ward("configs/arithmetic.yaml", (*COMMON, *model), NUM_STEPS)
        out += every(findings(ward, list(PLANTS), draws))
    return out


def table(found: Sequence[Found]) -> str:
    """By strength: the stated share, the number that are right, and its range by chance alone."""
    bounds, rows = [*(least for least, _, _ in BINS), 1.0], []
    for i, (_, right, num) in enumerate(BINS):
        here = [one for one in decided(found) if bin_of(one.strength) == i]
        low, high = (int(x) for x in binom.interval(0.983, len(here), right / num))
        share = f"{num_right(here) / len(here):.2f}" if here else "–"
        words = f"{num_right(here)} of {len(here)}"
        rows.append((f"{bounds[i]:g} to {bounds[i + 1]:g}", f"{right / num:.2f}", share, words, f"{low} to {high}"))
    return markdown_table(("strength", "share stated", "share seen", "right", "right by chance"), rows)


if __name__ == "__main__":
    print(table(seen()), end="")
