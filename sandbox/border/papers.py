"""The papers' settings beside the border: where they lie, and whether length or rate explains their small KL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.border.study import paragraph


@dataclass(frozen=True)
class PaperSetting:
    """A paper's setting: k3 KL(mu || old) per token, N, longest response (an upper bound), learning rate."""

    source: str
    kl: float
    n: int
    length: int
    rate: float


R3 = "R3 (arXiv 2510.11370) sec. 3.1, 5.1"
SETTINGS = (
    PaperSetting(R3, 1.535e-3, 8, 30720, 1e-6),
    PaperSetting(R3, 1.535e-3, 1, 30720, 3e-6),
    PaperSetting("Pr2 (arXiv 2606.00395) App. E.1, at R3's KL", 1.535e-3, 8, 16384, 1e-6),
)


@dataclass(frozen=True)
class SmallWorld:
    """The study's side: x* of KL x N, and the length, rate and largest mean KL of the runs that it was fitted to."""

    border: float
    length: float
    rate: float
    kl: float


def small(unaided: pd.DataFrame, border: float) -> SmallWorld:
    """The study's side from its runs without a remedy."""
    (rate,) = unaided["rate"].unique()
    length = float(unaided["length"].to_numpy(dtype=float).mean())
    largest = max(float(own["kl"].to_numpy(dtype=float).mean()) for _, own in unaided.groupby("gap"))
    return SmallWorld(border, length, float(rate), largest)


def length_power(setting: PaperSetting, own: SmallWorld, of_rate: float = 0.0) -> float:
    """The power p at which KL x N x length^p x rate^`of_rate` puts the setting on the border."""
    missing = math.log(own.border / (setting.kl * setting.n)) + of_rate * math.log(own.rate / setting.rate)
    return missing / math.log(setting.length / own.length)


def rate_power(setting: PaperSetting, own: SmallWorld, of_length: float) -> float:
    """The power q of the rate at which KL x N x length^`of_length` x rate^q puts the setting on the border."""
    left = math.log(setting.kl * setting.n / own.border) + of_length * math.log(setting.length / own.length)
    return left / math.log(own.rate / setting.rate)


def answer(own: SmallWorld, of_length: float, of_rate: float) -> str:
    """The paragraph that answers why a small world needs a larger KL.

    of_length: the least power of the length by the runs on sums; of_rate: that of the rate by the runs at half of it.
    """
    one = SETTINGS[0]
    at_border = own.border / one.n
    allowed = rate_power(one, own, of_length)
    needed = [length_power(one, own, power) for power in (0.0, 1.0, 2.0)]
    if needed[0] > of_length:
        end = "The sums' power is too small: length alone does not make up for the factor"
    elif of_rate > allowed:
        end = (
            "So length would be reason enough at one rate, but the rate takes back more than that if it counts so far "
            "out as it does here: these runs do not say why a small world needs the larger KL"
        )
    else:
        end = "So length is reason enough for the factor, with the power of the rate that is found here, too"
    return paragraph(
        f"Why does a small world need the larger KL? R3's KL is {number(one.kl)} per token; the map's largest gap has "
        f"{number(own.kl / one.kl)} times as much.",
        f"In `KL x N` R3's setting (N = {one.n}) lies at "
        f"{number(one.kl * one.n / own.border)} of x*, and half of the runs here collapse from a KL of "
        f"{number(at_border)} on, {number(at_border / one.kl)} times R3's.",
        f"Length could be: R3's longest responses have {number(one.length / own.length)} times the map's tokens.",
        f"A factor length^p puts R3 on the border at p = {number(needed[0])}, and the runs on "
        f"[sums](border.md#longer-responses) ask for p above {number(of_length)}.",
        f"But R3's learning rate, {number(one.rate)}, is {number(own.rate / one.rate)} times smaller.",
        f"With the rate as a factor p would have to be {number(needed[1])}, with its square {number(needed[2])}; at "
        f"the sums' p the rate's power may be {number(allowed)} at most, and half the rate asks for "
        f"{number(of_rate)} in runs of 400 updates ([longer ones](border.md#ten-times-the-updates) collapse there).",
        f"{end}.",
    )


def table(borders: Mapping[str, float], rate: float) -> str:
    """The settings on the numbers with and without length and rate, as a Markdown table of shares of x*."""
    wanted = ("KL x N", "KL x length x N", "KL x N x rate")
    lines = []
    for one in SETTINGS:
        shares = {
            "KL x N": one.kl * one.n / borders["KL x N"],
            "KL x length x N": one.kl * one.n * one.length / borders["KL x length x N"],
            "KL x N x rate": one.kl * one.n * one.rate / (borders["KL x N"] * rate),
        }
        shown = (number(shares[name]) for name in wanted)
        lines.append((one.source, number(one.kl), str(one.n), str(one.length), number(one.rate), *shown))
    titles = ("setting", "KL", "N", "longest response", "rate", *(f"`{name}`, over x*" for name in wanted))
    return markdown_table(titles, lines)


__all__ = ["SETTINGS", "PaperSetting", "SmallWorld", "answer", "length_power", "rate_power", "small", "table"]
