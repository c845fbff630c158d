"""The held-out problems of a task that makes its own: a partition by hash, which needs no list.

A problem is held out if SHA-256 of the seed and its identity falls in one residue class of HELD_OUT_MODULUS: training
and held-out problems are disjoint by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from theory.contracts import Prompt
from theory.streams import derive_seed

HELD_OUT_MODULUS = 8
"""One problem in this many is held out."""
HELD_OUT_MARGIN = 4
"""Least number of problems on the held-out side per problem requested from it."""
MAX_REPEATS = 1000


def most_held_out(num_problems: int) -> int:
    """The largest number of held-out problems, of `num_problems`, that draws find distinct and soon."""
    return num_problems // (HELD_OUT_MODULUS * HELD_OUT_MARGIN)


def is_held_out(seed: int, *identity: int | str) -> bool:
    """Whether the problem of that identity is held out under the seed."""
    return derive_seed(seed, "partition", *identity) % HELD_OUT_MODULUS == 0


def distinct(
    draw: Callable[[int], Prompt], num_held_out: int, seed: int, advice: str, key: Callable[[Prompt], str]
) -> Iterator[Prompt]:
    """`draw(0)`, `draw(1)`, ..., each drawn again until its key is new; ValueError, with advice, after MAX_REPEATS."""
    seen: set[str] = set()
    for index in range(num_held_out):
        # Lazily: draws take numbers from a stream, and none are taken after the first new problem.
        drawn = (draw(index) for _ in range(MAX_REPEATS))
        prompt = next((prompt for prompt in drawn if key(prompt) not in seen), None)
        if prompt is None:
            raise ValueError(
                f"num_held_out: expected {num_held_out} distinct problems under seed {seed}, got {index}; {advice}"
            )
        seen.add(key(prompt))
        yield prompt
