"""Half of Qwen3-30B-A3B beside vLLM in BF16 and FP8: the tables and the picture of docs/on-gpu.md on it.

`python -m tests.pages.deep_ladder` writes them from results/on_gpu/deep_ladder.json, which
`firstorder ladder configs/on_gpu/deep_ladder.yaml --json` wrote. The predictions were committed before that run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.border.pictures import svg
from tests.pages.on_gpu import PAGE, RESULTS
from tests.pages.study import ROOT, Part

FILE = RESULTS / "deep_ladder.json"
PICTURE = ROOT / "docs/images/on-gpu-depth.svg"
LADDER, OUTCOME = Part(PAGE, "deep ladder"), Part(PAGE, "deep predictions")

KL, TOKENS = "rollout_corr/k3_kl", "routing/token_disagreement"
BF16, FP8, CACHE, BOTH = "bf16", "bf16, fp8 weights", "bf16, fp8 KV cache", "bf16, fp8 weights and KV cache"
COLOURS = {BF16: "#4c78a8", CACHE: "#72b7b2", FP8: "#e45756", BOTH: "#b279a2"}


@dataclass(frozen=True)
class Engine:
    """An engine's means over its draws; `by_layer` has the share of routers that differ, in [0, 1]."""

    num_tokens: int
    kl: float
    replayed_kl: float
    tokens: float
    by_layer: tuple[float, ...]

    @property
    def removed(self) -> float:
        """The share of the KL that R3 takes away."""
        return 1 - self.replayed_kl / self.kl

    @property
    def routers(self) -> float:
        """The share of all routers that differ."""
        return fmean(self.by_layer)


def engines() -> dict[str, Engine]:
    """The engines of the stored run by name, in the order of their KL."""
    found = {rung["name"]: _engine(rung["draws"]) for rung in json.loads(FILE.read_text(encoding="utf-8"))}
    return dict(sorted(found.items(), key=lambda item: item[1].kl))


def _engine(draws: list[dict[str, Any]]) -> Engine:
    layers = zip(*(draw["differing_routers"].values() for draw in draws), strict=True)
    return Engine(
        num_tokens=sum(draw["num_tokens"] for draw in draws),
        kl=fmean(draw["metrics"][KL] for draw in draws),
        replayed_kl=fmean(draw["replayed_kl"] for draw in draws),
        tokens=fmean(draw["metrics"][TOKENS] for draw in draws),
        by_layer=tuple(fmean(layer) for layer in layers),
    )


@dataclass(frozen=True)
class Predicted:
    """A sentence written before the run, and its test, which also says what was found."""

    words: str
    test: Callable[[dict[str, Engine]], tuple[bool, str]]


def _bf16_depth(found: dict[str, Engine]) -> tuple[bool, str]:
    first, last = found[BF16].by_layer[0], found[BF16].by_layer[-1]
    return 0.03 <= first <= 0.06 and 0.35 <= last <= 0.70, f"{first:.1%} to {last:.1%}"


def _fp8_first(found: dict[str, Engine]) -> tuple[bool, str]:
    ratio = found[FP8].by_layer[0] / found[BF16].by_layer[0]
    return ratio >= 4, f"{number(ratio)} times"


def _fp8_last(found: dict[str, Engine]) -> tuple[bool, str]:
    return found[FP8].by_layer[-1] > 0.5, f"{found[FP8].by_layer[-1]:.1%}"


def _fp8_kl(found: dict[str, Engine]) -> tuple[bool, str]:
    ratio = found[FP8].kl / found[BF16].kl
    return ratio >= 10, f"{number(ratio)} times"


def _cache_between(found: dict[str, Engine]) -> tuple[bool, str]:
    means = [fmean(found[name].by_layer[:4]) for name in (BF16, CACHE, FP8)]
    return means[0] < means[1] < means[2], ", ".join(f"{mean:.1%}" for mean in means)


def _bf16_replay(found: dict[str, Engine]) -> tuple[bool, str]:
    return found[BF16].removed >= 0.9, f"{found[BF16].removed:.1%}"


def _fp8_replay(found: dict[str, Engine]) -> tuple[bool, str]:
    return found[FP8].removed >= 0.5, f"{found[FP8].removed:.1%}"


PREDICTIONS = (
    Predicted("BF16: 3 to 6% of routers differ in the first layer, 35 to 70% in the last", _bf16_depth),
    Predicted("FP8 weights: at least 4 times the share of BF16 in the first layer", _fp8_first),
    Predicted("FP8 weights: over 50% in the last layer", _fp8_last),
    Predicted("FP8 weights: at least 10 times the KL of BF16", _fp8_kl),
    Predicted("FP8 KV cache: in the first four layers between BF16 and FP8 weights", _cache_between),
    Predicted("BF16: R3 takes at least 90% of the KL away", _bf16_replay),
    Predicted("FP8 weights: R3 takes at least half of the KL away", _fp8_replay),
)


def ladder() -> str:
    """The engines as a table: KL with and without R3, and routers that differ in all, in the first and last layer."""
    titles = (
        "engine", "tokens", "k3 KL(mu, old)", "under R3", "R3 removes", "routers that differ", "first layer",
        "last layer", "tokens with one",
    )  # fmt: skip
    return markdown_table(titles, [
        (name, f"{one.num_tokens:,}", number(one.kl), number(one.replayed_kl), f"{one.removed:.0%}",
         f"{one.routers:.1%}", f"{one.by_layer[0]:.1%}", f"{one.by_layer[-1]:.1%}", f"{one.tokens:.1%}")
        for name, one in engines().items()
    ])  # fmt: skip


def outcome() -> str:
    """Each prediction, what was found, and whether it holds."""
    rows = []
    for predicted in PREDICTIONS:
        holds, words = predicted.test(engines())
        rows.append((predicted.words, words, "yes" if holds else "**no**"))
    return markdown_table(("predicted", "found", "holds"), rows)


def figure() -> Figure:
    """Routers that differ by layer, a line per engine; beside it each engine's KL without and under R3."""
    made = Figure(figsize=(9.6, 3.4), layout="constrained")
    left, right = made.subplots(1, 2, width_ratios=(1.25, 1))
    found = engines()
    for name, one in found.items():
        left.plot(range(1, len(one.by_layer) + 1), [100 * x for x in one.by_layer], color=COLOURS[name], lw=1.6)
    # Labels stand over the middle of their lines; those of the two highest lines on either side of them.
    places = {BOTH: 14, FP8: -9, CACHE: 10, BF16: 8}
    for name, dy in places.items():
        height = 100 * found[name].by_layer[13]
        left.annotate(
            name, (14, height), xytext=(0, dy), textcoords="offset points", ha="center",
            va="bottom" if dy > 0 else "top", fontsize=8, color=COLOURS[name],
        )  # fmt: skip
    left.set(xlabel="layer", ylabel="routers that differ, %", ylim=(0, 100))
    for row, (name, one) in enumerate(found.items()):
        right.plot([one.replayed_kl, one.kl], [row, row], color=COLOURS[name], lw=2.2, solid_capstyle="butt")
        right.plot([one.kl], [row], "o", color=COLOURS[name], ms=8)
        right.plot([one.replayed_kl], [row], "o", color=COLOURS[name], ms=8, mfc="white", mew=1.8)
        right.annotate(
            f"{name}: R3 removes {one.removed:.0%}", ((one.replayed_kl * one.kl) ** 0.5, row), xytext=(0, 7),
            textcoords="offset points", ha="center", va="bottom", fontsize=8, color=COLOURS[name],
        )  # fmt: skip
    right.set(xscale="log", xlim=(3e-5, 3e-2), ylim=(len(found) - 0.5, -0.8), yticks=[])
    right.set_xlabel("k3 KL(mu, old), nats per token (hollow: under R3)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    right.spines["left"].set_visible(False)
    return made


def main() -> None:
    """Writes both tables and the picture."""
    LADDER.write(ladder())
    OUTCOME.write(outcome())
    PICTURE.write_text(svg(figure()), encoding="utf-8")


if __name__ == "__main__":
    main()
