"""The claims of the ledger, one file each, and the regimes in which they are tried.

A new claim is a new file with a CLAIM; nothing else needs an edit. Its predictions are written before its runs.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from pathlib import Path

from lab.config import shipped
from sandbox.claims.border_arms import NORMS
from sandbox.ledger.cells import Regime
from sandbox.ledger.claim import Claim
from theory.names import did_you_mean, unknown_name

FOLDER = shipped.FOLDER / "claims"

RESULTS = Path(__file__).resolve().parents[2] / "results" / "claims"
"""The folder of the project's rows and pages."""

CLAIMS: tuple[Claim, ...] = tuple(
    importlib.import_module(f"{__name__}.{module.name}").CLAIM
    # By name, hence by number: the names have two digits.
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name)
    if module.name not in ("arms", "border_arms")
)
"""All claims by number, one for each module of this folder."""

REGIMES: tuple[Regime, ...] = (
    *(Regime.open(FOLDER / f"{name}.yaml") for name in ("paper", "stress", "hot", "noisy")),
    Regime.open(FOLDER / "border.yaml", norms=NORMS, own_cold_starts=True),
    Regime.open(FOLDER / "vllm.yaml"),
)
"""The settings in which claims are tried; the top of each file describes it. In `border` every arm has the gradient
clipping of its preset, and every seed its own initial model."""


def chosen_claims(words: Sequence[str]) -> tuple[Claim, ...]:
    """The claims with these numbers or names, ordered by number; ValueError for an unknown one, or for none."""
    if not words:
        raise ValueError("missing CLAIM: numbers or names of claims, or all; --list shows them")
    by_word = {word: claim for claim in CLAIMS for word in (str(claim.number), claim.name)}
    for word in words:
        if word != "all" and word not in by_word:
            hint = did_you_mean(word, [claim.name for claim in CLAIMS])
            known = f"a number, {CLAIMS[0].number} to {CLAIMS[-1].number}, or a name; --list shows them"
            raise ValueError(f"unknown claim '{word}'{hint and f': {hint}'} (expected {known})")
    return tuple(c for c in CLAIMS if "all" in words or {str(c.number), c.name} & set(words))


def chosen_regimes(words: Sequence[str]) -> tuple[Regime, ...]:
    """The regimes with these names, or all without names; ValueError for an unknown one."""
    for word in words:
        if word not in {regime.name for regime in REGIMES}:
            raise ValueError(f"--regime: {unknown_name('regime', word, [regime.name for regime in REGIMES])}")
    return tuple(regime for regime in REGIMES if not words or regime.name in words)


__all__ = ["CLAIMS", "REGIMES", "RESULTS", "chosen_claims", "chosen_regimes"]
