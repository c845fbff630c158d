"""The page of a run's steps: the verdict and one figure, every step, and the tokens that carry the KL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.doctor.heat import HeatMap, heat_map
from lab.doctor.routes import NOWHERE
from lab.doctor.steps import words
from lab.doctor.steps.course import BY_NAME, FIGURES, Course, StepRecord
from lab.doctor.words import counted
from lab.report.figures import Caption, Figure
from lab.report.page import page
from lab.report.style import PALETTE, number
from lab.traces import Trace

TEMPLATES = Path(__file__).parents[1] / "template"
LEAST = 0.02
"""Smallest share of the KL for a cause to get its own colour."""


@dataclass(frozen=True)
class Ward:
    """The steps of a run, their name on the page, and the notes of their reader."""

    label: str
    course: Course
    num_shared: int
    worst: Trace | None
    format: str
    notes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The reader's caveats, each with the numbers of its steps."""
    unused: tuple[str, ...] = ()
    is_pi: bool = False

    @property
    def about(self) -> dict[str, Any]:
        """The reader's notes for a program."""
        caveat = " ".join(self._caveats) or None
        return {"format": self.format, "caveat": caveat, "unused": list(self.unused), "is_pi": self.is_pi}

    @property
    def _caveats(self) -> list[str]:
        num_steps, out = len(self.course.steps), []
        for note, at in self.notes.items():
            where = f"Step {at[0]}" if len(at) == 1 else f"{len(at):,} steps, first step {at[0]}"
            out.append(note if len(at) == num_steps else f"{where}: {note}")
        return out

    def lines(self) -> list[str]:
        """The reader's notes in words."""
        steps = self.course.steps
        tokens = counted(sum(int(step.diagnosis.seen["num_tokens"]) for step in steps), "sampled token")
        side = ", with pi in place of old" if self.is_pi else ""
        read = f"{tokens} of {counted(len(steps), 'step')}, read as {self.format}{side}."
        unused = [f"Not used: {', '.join(self.unused)}."] if self.unused else []
        return [*(f"Caveat: {caveat}" for caveat in self._caveats), read, *unused]


def render(ward: Ward) -> str:
    """The page as HTML."""
    course = ward.course
    shown = causes_shown(course)
    bands = layers_shown(course)
    causes, layers = kl_by_cause(course, shown), kl_by_layer(course, bands)
    figures = [figure for figure in (causes, layers) if figure is not None]
    heat: HeatMap | None = None if ward.worst is None else heat_map(ward.worst)
    return page(
        "course.html.jinja", figures, num_runs=len(shown), own=TEMPLATES, title=ward.label, ward=ward,
        course=course, verdict=words.verdict(course), causes=shown, by_cause=causes, by_layer=layers, bands=bands,
        titles=FIGURES, number=number, heat=heat, said=words.evidence(course, ward.num_shared),
    )  # fmt: skip


def causes_shown(course: Course) -> Mapping[str, Sequence[str]]:
    """The causes of the figure: titles, the largest part of the KL first, to the names that each stands for.

    Causes with less than LEAST of the KL are joined.
    """
    parts: dict[str, float] = {}
    for step in course.steps:
        for name, share in step.shares.items():
            parts[name] = parts.get(name, 0.0) + share * (step.figure("k3_kl") or 0.0)
    total = sum(parts.values())
    ranked = sorted((name for name, part in parts.items() if part > 0), key=lambda name: -parts[name])
    # One colour of the palette is left for all others.
    large = [name for name in ranked if parts[name] >= LEAST * total][: len(PALETTE) - 1]
    small = [name for name in ranked if name not in large]
    return {BY_NAME[name].title: (name,) for name in large} | ({"all others": small} if small else {})


def kl_by_cause(course: Course, causes: Mapping[str, Sequence[str]]) -> Figure | None:
    """A bar per step, as high as its KL, split in proportion to its causes' strengths; a line at the KL's change."""
    steps = [step for step in course.steps if step.figure("k3_kl") is not None]
    if not any(step.figure("k3_kl") for step in steps):
        return None
    data = [
        _bars(
            index, title, steps,
            [(step.figure("k3_kl") or 0.0) * sum(step.shares.get(name, 0.0) for name in names) for step in steps],
        )
        for index, (title, names) in enumerate(causes.items())
    ]  # fmt: skip
    since, layout, note = course.since(), _stacked(), ""
    if since is not None:
        numbers = [step.number for step in steps]
        at = numbers.index(since)
        # Between the last step before the change and the first after it; steps need not be consecutive.
        where = since - 0.5 if at == 0 else (numbers[at - 1] + since) / 2
        layout["shapes"] = [{"type": "line", "x0": where, "x1": where, "yref": "paper", "y0": 0, "y1": 1}]
        note = f"The line marks the change: {words.went(course, 'k3_kl')}."
    formula = "mean of rho - 1 - log rho by step, rho = old/mu; split in proportion to the causes' strengths"
    return Figure("kl-by-cause", "KL by step and cause", Caption(formula, "nats per token", "here"), data, layout, note)


def layers_shown(course: Course) -> Mapping[str, Sequence[int]]:
    """The layers at which some token's experts first differ; neighbours are joined if there are too few colours.

    Tokens without such a layer come last.
    """
    found = {layer for step in course.steps for layer in step.kl_by_layer or ()}
    layers, num_bands = sorted(found - {NOWHERE}), len(PALETTE) - 1
    size = -(-len(layers) // num_bands) if layers else 1  # ceiling division
    bands = [layers[start : start + size] for start in range(0, len(layers), size)]
    titles = {f"layer {b[0]}" if len(b) == 1 else f"layers {b[0]} to {b[-1]}": tuple(b) for b in bands}
    return titles | ({"the same experts everywhere": (NOWHERE,)} if layers else {})


def kl_by_layer(course: Course, bands: Mapping[str, Sequence[int]]) -> Figure | None:
    """A bar per step, as high as its KL, split by the first layer at which a token's own row has other experts."""
    steps = [step for step in course.steps if step.kl_by_layer]
    if not bands or not steps:
        return None
    data = [
        # Indices past the palette reuse its colours but are unknown to the legend, which hides causes.
        _bars(
            len(PALETTE) + index,
            title,
            steps,
            [sum((step.kl_by_layer or {}).get(n, 0.0) for n in own) for step in steps],
        )
        for index, (title, own) in enumerate(bands.items())
    ]
    formula = "sum of k3 over the tokens whose own row first differs at that layer, over all tokens; a bar is the k3 KL"
    note = "This is not the layer at fault: firstorder doctor --localise finds that one."
    return Figure(
        "kl-by-layer", "KL by step and layer", Caption(formula, "nats per token", "here"), data, _stacked(), note
    )


def _bars(index: int, title: str, steps: Sequence[StepRecord], heights: Sequence[float]) -> dict[str, Any]:
    """One colour of the stacked bars."""
    return (
        {"type": "bar", "name": title, "meta": {"run": index, "role": "bar"}}
        | {"x": [step.number for step in steps], "y": [height or None for height in heights]}
        | {"customdata": [f"{title}: {number(height)}" for height in heights]}
        | {"hovertemplate": "%{customdata}<extra></extra>"}
    )


def _stacked() -> dict[str, Any]:
    return {
        "barmode": "stack", "bargap": 0.15, "hovermode": "closest",
        "xaxis": {"title": {"text": "global step"}},
        "yaxis": {"title": {"text": "k3 KL, nats per token"}, "rangemode": "tozero"},
    }  # fmt: skip
