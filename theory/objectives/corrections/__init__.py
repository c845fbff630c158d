"""Corrections of the engine gap: weights that reweight mu's samples, and rejections that leave responses out.

A weight changes a token's term and no denominator; a rejection takes a response out of the mask and so out of every
denominator. Neither carries a gradient. With `numerator="old"` a weight is built on rho = old/mu, the engine gap
alone (decoupled from the ratio pi/old); with "pi" on pi/mu, the whole weight, which then includes the ratio.
Rejections always use rho = old/mu: they are known before any gradient pass. An objective has one correction and one
further rejection: verl's Geo-RS-Token-TIS is `correction="token_tis"` with `rejection="geo_rs"`.
Papers: MiniRL (arXiv 2512.01374) Eq. 3, 5, 7 and sec. 4.2, R3 (2510.11370) Eq. 2, MinPRO (2601.22718); the corrections'
names after verl's rollout_corr, TIS (F. Yao et al., 2025), MIS and Geo-RS (J. Liu et al., 2025), IcePop (X. Zhao et
al., 2025).
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from theory.names import number, unknown_name
from theory.objectives.corrections.base import CORRECTIONS, Correction, NoCorrection

# Imported first, so that weights precede rejections in the table and in printed lists.
from theory.objectives.corrections.weights import (  # isort: skip
    IcePop, MinPRO, PrefixTIS, SeqClip, SeqTIS, TokenClip, TokenIS, TokenTIS,
)  # fmt: skip
from theory.objectives.corrections.rejections import (  # isort: skip
    K3RS, GeoRS, SeqMaxK2, SeqMaxK3, SeqMIS, TokenK1, TokenK2, TokenK3,
)  # fmt: skip


def correction(name: str, **params: Any) -> Correction:
    """The named correction with these parameters; the rest keep their defaults.

    Raises ValueError for an unknown name or parameter, with the nearest valid one, and for a value out of range.
    """
    if name not in CORRECTIONS:
        raise unknown_name("correction", name, CORRECTIONS)
    cls = CORRECTIONS[name]
    valid = [field.name for field in fields(cls)]
    for param in params:
        if param not in valid:
            raise unknown_name(f"parameter of {name}", param, valid)
    return cls(**{param: _value(name, param, value) for param, value in params.items()})


def _value(name: str, param: str, value: Any) -> Any:
    return value if param == "numerator" else number(f"{name}: {param}", value)


__all__ = [
    "CORRECTIONS", "Correction", "GeoRS", "IcePop", "K3RS", "MinPRO", "NoCorrection", "PrefixTIS", "SeqClip", "SeqMIS",
    "SeqMaxK2", "SeqMaxK3", "SeqTIS", "TokenClip", "TokenIS", "TokenK1", "TokenK2", "TokenK3", "TokenTIS", "correction",
]  # fmt: skip
