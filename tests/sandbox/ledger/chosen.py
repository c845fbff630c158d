"""Some claims of the ledger, and rows for them, from which the tests of its pages make these."""

from __future__ import annotations

import random

from sandbox.claims import CLAIMS, REGIMES
from sandbox.ledger.cells import KEPT, NUM_WINDOWS, key
from sandbox.ledger.claim import FRESH, Row

CHOSEN = tuple(claim for claim in CLAIMS if claim.number in (3, 5, 9, 17, 20, 34))
SEEDS = range(3)


def made_rows() -> dict[str, Row]:
    """Rows of all cells in `paper`, seen and fresh, and of some in `stress`: random numbers, R3's ten times lower."""
    draws, found = random.Random(5), {}
    for regime in REGIMES[:2]:
        for arm in dict.fromkeys(arm for claim in CHOSEN for arm in claim.arms):
            for seed in (*SEEDS, *(FRESH + seed for seed in SEEDS)):
                if regime.name == "stress" and draws.random() < 0.3:
                    continue
                level = 1e-3 if "R3" in arm.name else 1e-2
                series = {name: [level * (1 + draws.random()) for _ in range(NUM_WINDOWS)] for name in KEPT}
                first = draws.choice([None, 100])
                found[key(regime, arm, seed)] = {
                    "series": series, "first_step": first, "verdict": "collapsed" if first else "stable",
                    "num_steps": 400, "regime": regime.name, "arm": arm.name, "seed": seed, "seconds": 36.0,
                    "machine": "a machine", "torch": "2",
                    "probes": {"token_share_of_routing": 0.2 + 0.01 * draws.random()},
                }  # fmt: skip
    return found
