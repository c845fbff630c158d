"""The places of the ledger's regimes on the map: the N at which their gap reaches the border, and a name for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.border.table import where
from sandbox.claims.border_arms import DEGREES
from sandbox.ledger.claim import Row

KL = "rollout_corr/k3_kl"

ARMS = ("minirl-N1", "minirl-N4", "minirl-N8")
"""Arms of every regime that sample with its engine and replay nothing."""

BEYOND = "r1.0"
"""The study's gap beyond the map, at twice the router noise of `border`."""

WORDS = """## The ledger's regimes on this map

A regime is an engine gap, and in `hot` a higher learning rate; its claims choose N. If `KL x N` passes `x*` = {border}
at an N of the map ({least} to {most}), the border runs through the regime. If even the largest N stays below `x*`, the
regime is *quiet*; if the smallest reaches it, *beyond*. `x*` is that of GRPO at the learning rate of `border`, {rate};
half the rate moves it (claim 45). KL is the mean over the first twentieth of MiniRL's runs without replay, and for
claim 44 that of the first step.
"""


def place(kl: float, border: float) -> str:
    """*quiet*, *border* or *beyond*: whether KL x N reaches the border x* at no N of the map, at some, or at all.

    kl: k3 KL(mu || old) at the start of training, nats per token, above 0. border: x* of `KL x N`, where half of the
    runs without a remedy collapse.
    """
    if kl * max(DEGREES) < border:
        return "quiet"
    return "beyond" if kl * min(DEGREES) >= border else "border"


def first_kl(rows: Sequence[Row]) -> float:
    """The mean k3 KL over the first window of the rows that have one, nats per token; nan if none does."""
    found = [row["series"][KL][0] for row in rows if row["series"].get(KL)]
    known = [value for value in found if value is not None]
    return math.fsum(known) / len(known) if known else math.nan


def markdown(rows: Mapping[str, Row], table: pd.DataFrame, border: float, rate: float) -> str:
    """A line per regime with runs of ARMS, and one for the gap beyond the map: KL, N at the border, place.

    rate: the learning rate of the runs to which the `border` x* was fitted.
    """
    of_regime: dict[str, list[Row]] = {}
    for row in rows.values():
        if row["arm"] in ARMS:
            of_regime.setdefault(row["regime"], []).append(row)
    gaps = {f"`{name}`": first_kl(own) for name, own in of_regime.items()}
    off_map = where(table, gap=BEYOND, remedy="tis")["kl"].to_numpy(dtype=float)
    if len(off_map):
        gaps["router noise 1.0 (claim 44)"] = float(off_map.mean())
    lines = [
        (name, number(kl), number(border / kl), place(kl, border))
        for name, kl in sorted(gaps.items(), key=lambda one: one[1])
        if not math.isnan(kl)
    ]
    head = WORDS.format(border=number(border), rate=number(rate), least=min(DEGREES), most=max(DEGREES))
    return f"{head}\n{markdown_table(('regime', 'KL', 'N where KL x N = x*', 'place'), lines)}"


__all__ = ["ARMS", "first_kl", "markdown", "place"]
