"""The figures of the report: each is one function from the runs to a plotly figure, or to None where there is no data.

To add a figure, write such a function and put it into its section in `SECTIONS`. A metric's caption (formula, unit, source)
comes from `theory.metrics.REGISTRY`; colours are left to the page, which knows whether it is light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.report.runs import ACCURACY, EXTREME, Run
from lab.report.style import DASHES, PALETTE, number, spread
from lab.verdict import ENTROPY, KL, REWARD, Series, trailing_mean
from theory.metrics import REGISTRY

HEIGHT = 280
MARGIN = {"l": 58, "r": 14, "t": 10, "b": 40}
LABEL_GAP = 14
"""Pixels between the baselines of two labels at the ends of lines."""
MAX_LABEL = 18


@dataclass(frozen=True)
class Caption:
    """What a figure shows: the formula, its unit, and where it comes from."""

    formula: str
    unit: str
    source: str
    name: str = ""


@dataclass(frozen=True)
class Figure:
    """A plotly figure without colours: every trace says its run in `meta`, every label in `name`."""

    id: str
    title: str
    captions: tuple[Caption, ...]
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    note: str = ""


FigureFunction = Callable[[Sequence[Run]], Figure | None]


@dataclass(frozen=True)
class Lines:
    """Metrics over the global steps, one line a run; several metrics share a figure by dashes.

    On a log axis a value of 0 (an exact engine has one) is drawn at the bottom, on a tick of its own. `is_noisy` draws
    each step faint under its trailing mean; `points` marks the single values of a sparse series.
    """

    id: str
    title: str
    names: tuple[str, ...]
    axis: str = "linear"
    style: str = "plain"
    dash_words: tuple[str, ...] = field(default=())

    def __call__(self, runs: Sequence[Run]) -> Figure | None:
        found = [(run, k, run.series(name)) for run in runs for k, name in enumerate(self.names)]
        found = [(run, k, values) for run, k, values in found if values]
        if not found:
            return None
        window = smoothing_window(max(len(values) for _, _, values in found)) if self.style == "noisy" else 1
        scale = Scale.of([value for _, _, values in found for _, value in values], self.axis)
        data: list[dict[str, Any]] = []
        ends: list[tuple[Run, int, float]] = []
        for run, k, values in found:
            smooth = trailing_mean(values, window)
            if window > 1:
                data.append(self._trace(run, k, values, scale) | {"opacity": 0.25, "hoverinfo": "skip"})
                data[-1]["meta"] = {"run": run.index, "role": "raw"}
                del data[-1]["hovertemplate"]
            data.append(self._trace(run, k, smooth, scale))
            data[-1]["customdata"] = [_hover(raw, mean, window) for (_, raw), (_, mean) in zip(values, smooth, strict=True)]
            if k == 0:
                ends.append((run, smooth[-1][0], smooth[-1][1]))
        layout = {"yaxis": scale.axis(), "xaxis": {"title": {"text": "global step"}}, "hovermode": "x unified"}
        if len(runs) > 1:
            layout["annotations"] = end_labels(ends, scale)
        return Figure(self.id, self.title, tuple(caption(n) for n in self.names), data, layout, self._note(window, scale))

    def _trace(self, run: Run, k: int, values: Series, scale: Scale) -> dict[str, Any]:
        word = f" {self.dash_words[k]}" if self.dash_words else ""
        dash = "dot" if k else DASHES[run.index // len(PALETTE) % len(DASHES)]
        is_lone = len(values) == 1
        return {
            "type": "scatter",
            "mode": "lines+markers" if self.style == "points" or is_lone else "lines",
            "x": [step for step, _ in values],
            "y": [scale.place(value) for _, value in values],
            "name": f"{run.label}{word}",
            "line": {"dash": dash},
            "hovertemplate": "%{customdata}",
            "meta": {"run": run.index, "role": "line"},
        }

    def _note(self, window: int, scale: Scale) -> str:
        notes = []
        if self.dash_words:
            notes.append(f"Solid: {self.dash_words[0]}; dotted: {self.dash_words[1]}.")
        if window > 1:
            notes.append(f"Faint: each step; bold: trailing mean of {window} steps.")
        if scale.has_zero_tick:
            notes.append("Zeros stand on the lowest tick.")
        return " ".join(notes)


@dataclass(frozen=True)
class Scale:
    """A value axis with its range settled in advance, so that labels can be kept apart in pixels.

    `floor` is where a log axis draws 0; None where it draws none.
    """

    low: float
    high: float
    is_log: bool
    floor: float | None = None

    @staticmethod
    def of(values: Sequence[float], axis: str) -> Scale:
        """The scale for these values; a log axis without a positive value is a linear one."""
        positive = [value for value in values if value > 0]
        if axis == "log" and positive:
            low, high = math.log10(min(positive)), math.log10(max(positive))
            has_zero = len(positive) < len(values)
            floor = 10.0 ** (math.floor(low) - 1) if has_zero else None
            low = math.log10(floor) if floor is not None else low
            pad = 0.06 * max(high - low, 0.5)
            return Scale(low - pad, high + pad, True, floor)
        low, high = min(values), max(values)
        if 0 <= low < 0.5 * high or low == high == 0:
            low = 0.0
        span = high - low or abs(high) or 1.0
        return Scale(low - (0.02 if low == 0 else 0.06) * span, high + 0.06 * span, False)

    @property
    def has_zero_tick(self) -> bool:
        return self.floor is not None

    def place(self, value: float) -> float:
        """Where the value is drawn: itself, or the floor where a log axis cannot draw it."""
        return self.floor if self.floor is not None and value <= 0 else value

    def pixels(self, value: float) -> float:
        """Pixels above the bottom of the plot."""
        placed = self.place(value)
        position = math.log10(placed) if self.is_log else placed
        return (position - self.low) / (self.high - self.low) * (HEIGHT - MARGIN["t"] - MARGIN["b"])

    def axis(self) -> dict[str, Any]:
        """plotly's axis: on a log axis whole decades, the floor's tick reading 0."""
        if not self.is_log:
            return {"range": [self.low, self.high]}
        ticks = list(range(math.ceil(self.low), math.floor(self.high) + 1))
        if self.floor is None and len(ticks) < 2:
            return {"type": "log", "range": [self.low, self.high], "nticks": 5, "exponentformat": "power"}
        zero = None if self.floor is None else round(math.log10(self.floor))
        step = max(1, math.ceil(len(ticks) / 6))
        ticks = [t for t in ticks if t == zero or t % step == 0 and (zero is None or t - zero >= 1)]
        return {
            "type": "log",
            "range": [self.low, self.high],
            "tickvals": [10.0**t for t in ticks],
            "ticktext": ["0" if t == zero else "1" if t == 0 else f"10<sup>{t}</sup>" for t in ticks],
        }


def caption(name: str) -> Caption:
    """The registered formula, unit and source of a metric."""
    metric = REGISTRY[name]
    return Caption(metric.formula, metric.unit, metric.source, name)


def smoothing_window(num_values: int) -> int:
    """Steps of the trailing mean that a noisy figure draws: a fifteenth of the run, at least 3 from 20 steps on."""
    return 1 if num_values < 20 else max(3, num_values // 15)


def end_labels(ends: Sequence[tuple[Run, int, float]], scale: Scale) -> list[dict[str, Any]]:
    """The runs' names at the ends of their lines, moved up or down where they would overlap."""
    wanted = [scale.pixels(value) for _, _, value in ends]
    placed = spread(wanted, LABEL_GAP, 4, HEIGHT - MARGIN["t"] - MARGIN["b"] - 4)
    labels = []
    for (run, step, value), want, place in zip(ends, wanted, placed, strict=True):
        y = scale.place(value)
        label = run.label if len(run.label) <= MAX_LABEL else f"{run.label[: MAX_LABEL - 1]}…"
        labels.append(
            {"x": step, "y": math.log10(y) if scale.is_log else y, "text": label, "name": f"run-{run.index}"}
            | {"showarrow": False, "xanchor": "left", "yanchor": "middle", "xshift": 7, "yshift": round(place - want, 1)}
        )
    return labels


def _hover(raw: float, mean: float, window: int) -> str:
    return number(mean) if window == 1 else f"{number(mean)} (this step {number(raw)})"


LEARNING: tuple[FigureFunction, ...] = (
    Lines("reward", "Reward in training", (REWARD,), style="noisy"),
    Lines("accuracy", "Held-out accuracy", (ACCURACY,), style="points"),
    Lines("response-length", "Response length", ("response_length/mean",), style="noisy"),
)
DISCREPANCY: tuple[FigureFunction, ...] = (
    Lines("k3-kl", "KL between rollout and training engine", (KL,), axis="log"),
    Lines("extreme-fraction", "Extreme tokens, F(2)", (EXTREME,), axis="log"),
    Lines("effective-sample-size", "Effective sample size", ("rollout_corr/eff_sample_size",)),
    Lines("truncated-fraction", "Tokens cut by the correction", ("rollout_corr/truncated_fraction",)),
)
OPTIMISATION: tuple[FigureFunction, ...] = (
    Lines("entropy", "Entropy of the policy", (ENTROPY,), style="noisy"),
    Lines("grad-norm", "Gradient norm", ("actor/grad_norm",), axis="log", style="noisy"),
    Lines(
        "clip-fractions",
        "Tokens held by the trust region",
        ("actor/pg_clipfrac_high", "actor/pg_clipfrac_low"),
        dash_words=("high", "low"),
    ),
    Lines("staleness-kl", "Policy staleness", ("staleness/k3_kl",), axis="log"),
)
ROUTING: tuple[FigureFunction, ...] = (
    Lines("router-disagreement", "Routers that disagree", ("routing/router_disagreement",)),
    Lines("token-disagreement", "Tokens with a differing router", ("routing/token_disagreement",)),
    Lines("topk-agreement", "Top-k agreement of cached and present route", ("routing/topk_agreement",)),
    Lines("route-kl", "KL between cached and present route", ("routing/route_kl",), axis="log"),
    Lines("native-rows", "Rows without a record under replay", ("routing/native_rows",)),
)
PREDICTOR: tuple[FigureFunction, ...] = (
    Lines("predictor-loss", "Predictor loss", ("predictor/loss",), axis="log", style="noisy"),
    Lines("predictor-norm", "Size of the predictor", ("predictor/weight_norm",)),
)
