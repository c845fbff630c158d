"""`python -m tests.mutants.sample 300`: the names of that many generated mutants, for `mutmut run`.

Uniform without replacement over all of theory/, by a fixed seed, so that the share killed estimates that of all.
A longer sample begins with the shorter one: a run can be extended; `--skip` leaves its beginning out. mutmut must have
generated its mutants before.
"""

from __future__ import annotations

import argparse
import random

from tests.mutants.survivors import mutmut, statuses

SEED = 0


def sample(names: list[str], number: int, skip: int = 0) -> list[str]:
    """`number` of the names, shuffled, after the first `skip`."""
    shuffled = sorted(names)
    random.Random(SEED).shuffle(shuffled)
    return shuffled[skip : skip + number]


def main() -> None:
    """Prints one name a line."""
    parser = argparse.ArgumentParser(description="Draws generated mutants at random.")
    parser.add_argument("number", type=int, help="how many")
    parser.add_argument("--skip", type=int, default=0, help="how many of the order to leave out")
    options = parser.parse_args()
    print("\n".join(sample(list(statuses(mutmut("results", "--all", "true"))), options.number, options.skip)))


if __name__ == "__main__":
    main()
