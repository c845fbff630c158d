"""The places in the text where the engines disagree: routing differences by token, and along one response.

Here d, in [0, L K], counts the differing expert choices of one input token over all L layers. Letters: R routing rows,
W those that both engines recorded at every layer.
Paper: R3 (arXiv 2510.11370) App. H for d, App. L (Table 11, Fig. 11) for the pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lab.report.figures import Caption, Figure, bar_layout, bar_trace, hover
from lab.report.runs import ReportRun
from lab.report.scale import MARGIN
from lab.report.style import number, shortened
from lab.traces import Trace
from theory.routing.measures import whole_rows

MOST_TOKENS = 24
"""Most tokens in the ranking."""
LEAST_SHARE = 2e-4
"""Share of the places below which the ranking omits a token, as R3's Table 11 does."""
COLUMNS, MOST_ROWS = 24, 6
"""Size of the grid that shows the beginning of a response, a cell per input token."""
ROW_HEIGHT, MAP_MARGIN = 36, 8
"""Height of a row of the grid, and the margin under the last one, which has no axis, pixels."""
LONGEST, IN_CELL = 5, 2
"""Most characters of a token's text under a bar and in a cell; hovering shows the rest."""
NO_TEXT = "□"
"""A token without text, in a cell: the stop token and other special ones."""
PROMPT, OBSERVED, SAMPLED = "prompt", "answered by the task", "sampled"


def token_difference(runs: Sequence[ReportRun]) -> Figure | None:
    """Bars of the mean routing difference per vocabulary token, the largest first (R3 Table 11)."""
    found = [(run, trace, mean_by_token(of.token_R, of.d_R)) for run, trace, of in _with_differences(runs)]
    if not found:
        return None
    largest: dict[int, float] = {}
    texts: dict[int, str] = {}
    for _, trace, means in found:
        texts |= trace.texts
        for token, mean in means.items():
            largest[token] = max(mean, largest.get(token, 0.0))
    ranked = sorted(largest, key=lambda token: (-largest[token], token))[:MOST_TOKENS]
    names = _distinct([_escaped(shortened(token_name(token, texts), LONGEST)) for token in ranked])
    data = []
    for run, _, means in found:
        y = [means.get(token) for token in ranked]
        data.append(bar_trace(run, names, y, map(number, y)))
    layout: dict[str, Any] = {
        "xaxis": {"type": "category", "tickangle": 0 if max(map(len, names)) < 5 else -45},
        "yaxis": {"title": {"text": "mean d"}, "rangemode": "tozero"},
    } | bar_layout(data)
    formula = "mean over a token's places of d = sum_l (K - |I_mu & I_old|), at most L K; the largest first"
    note = f"{_step(found)} Tokens at less than {LEAST_SHARE:.2%} of the places are omitted."
    caption = Caption(formula, "choices/token", "R3 Table 11")
    return Figure("token-difference", "Routing differences by token", caption, data, layout, note)


def token_map(runs: Sequence[ReportRun]) -> Figure | None:
    """The beginning of one response, each token coloured by its routing difference (R3 Fig. 11).

    The response is the one with the largest mean difference over all runs. Sampled tokens are bold; the task's answers
    between two turns are framed.
    """
    found = [_most_different(*one) for one in _with_differences(runs)]
    if not found:
        return None
    _, run, trace, differences, b = max(found, key=lambda one: one[0])
    shown = (differences.response_R == b).nonzero()[: COLUMNS * MOST_ROWS, 0]
    tokens, d = differences.token_R[shown].tolist(), differences.d_R[shown].tolist()
    every_source = _sources(trace, b)
    sources = [every_source[position] for position in differences.position_R[shown].tolist()]
    # At least 1, as the opacity below divides by it and a response may have no difference.
    top = max(*d, 1.0)
    x, y = [i % COLUMNS for i in range(len(tokens))], [-(i // COLUMNS) for i in range(len(tokens))]
    cells = {
        "type": "scatter", "mode": "markers+text", "name": run.label, "meta": {"run": run.index, "role": "cells"},
        "x": x, "y": y, "text": [_cell(t, s, trace.texts) for t, s in zip(tokens, sources, strict=True)],
        "marker": {"symbol": "square", "opacity": [round(0.05 + 0.75 * choices / top, 3) for choices in d]},
    } | hover(
        f"{_escaped(token_name(token, trace.texts))} ({source}): {int(choices)} of {trace.num_choices} choices differ"
        for token, choices, source in zip(tokens, d, sources, strict=True)
    )  # fmt: skip
    observed = [i for i, source in enumerate(sources) if source == OBSERVED]
    frames = {
        "type": "scatter", "mode": "markers", "name": run.label, "meta": {"run": run.index, "role": "frames"},
        "x": [x[i] for i in observed], "y": [y[i] for i in observed], "hoverinfo": "skip",
        "marker": {"symbol": "square-open"},
    }  # fmt: skip
    rows = -(-len(tokens) // COLUMNS)
    blank = {"visible": False, "fixedrange": True}
    layout: dict[str, Any] = {
        "xaxis": blank | {"range": [-0.7, COLUMNS - 0.3]}, "yaxis": blank | {"range": [0.5 - rows, 0.7]},
        "hovermode": "closest", "margin": {"l": 0, "r": 0, "b": MAP_MARGIN},
    }  # fmt: skip
    formula = f"d of each input token, from 0 (pale) to {int(top)} (full)"
    note = f"{run.label}, step {trace.step}, response {b}, the one that differs most. Bold: sampled; plain: its prompt"
    note += "; framed: the task's answers." if observed else "."
    caption = Caption(formula, "choices", "R3 Fig. 11")
    data = [cells, frames] if observed else [cells]
    # As high as its rows: most responses of the sandbox have one or two.
    height = round((rows + 0.2) * ROW_HEIGHT) + MARGIN["t"] + MAP_MARGIN
    return Figure("token-map", "Routing differences along a response", caption, data, layout, note, height)


class Differences(NamedTuple):
    """The R routing rows that both engines recorded at every layer: input token, d, response, and position in it."""

    token_R: Int[Tensor, " R"]
    d_R: Float[Tensor, " R"]
    response_R: Int[Tensor, " R"]
    position_R: Int[Tensor, " R"]


def _with_differences(runs: Sequence[ReportRun]) -> list[tuple[ReportRun, Trace, Differences]]:
    """The runs whose newest trace has a row that both engines recorded."""
    found = [(run, trace, differences_of(trace)) for run in runs if (trace := run.newest_trace) is not None]
    return [(run, trace, differences) for run, trace, differences in found if differences is not None]


def _most_different(
    run: ReportRun, trace: Trace, differences: Differences
) -> tuple[float, ReportRun, Trace, Differences, int]:
    """The largest mean d of a response, the arguments, and that response's number."""
    b_R = differences.response_R
    sums, sizes = torch.bincount(b_R, differences.d_R, len(trace)), torch.bincount(b_R, minlength=len(trace))
    # -1 where a response has no whole row, so that argmax never picks it.
    means_B = torch.where(sizes > 0, sums / sizes.clamp(min=1), -1.0)
    return float(means_B.max()), run, trace, differences, int(means_B.argmax())


def differences_of(trace: Trace) -> Differences | None:
    """The routing rows that both engines recorded at every layer; None if there is none."""
    mu, old = trace.record_mu, trace.record_old
    if mu is None or old is None:
        return None
    is_whole, d_W = whole_rows(mu, old)
    if len(d_W) == 0:
        return None
    # A sequence has a routing row for every token but its last.
    is_input = torch.ones(len(trace.tokens), dtype=torch.bool)
    is_input[trace.offsets[1:] - 1] = False
    response_R = torch.repeat_interleave(torch.arange(len(trace)), trace.offsets.diff() - 1)
    position_R = is_input.nonzero()[:, 0] - trace.offsets[response_R]
    token_W, response_W, position_W = (of_row[is_whole] for of_row in (trace.tokens[is_input], response_R, position_R))
    return Differences(token_W.long(), d_W.double(), response_W, position_W)


def mean_by_token(tokens_R: Int[Tensor, " R"], d_R: Float[Tensor, " R"]) -> dict[int, float]:
    """The mean d of each token with at least LEAST_SHARE of the rows."""
    # Renumbered for bincount, which would allocate up to the largest token id.
    tokens, place_R = tokens_R.unique(return_inverse=True)
    sums, sizes = torch.bincount(place_R, d_R), torch.bincount(place_R)
    kept = sizes >= LEAST_SHARE * len(tokens_R)
    return {int(tokens[i]): float(sums[i] / sizes[i]) for i in kept.nonzero()[:, 0]}


def _sources(trace: Trace, b: int) -> list[str]:
    """The origin of each token of response b: its prompt, the task, or the policy mu."""
    # `is_response` has no entries for prompts, so subtract the earlier prompts' tokens from the offset.
    num_prompt, S = int(trace.num_prompt[b]), int(trace.offsets[b + 1] - trace.offsets[b])
    first = int(trace.offsets[b] - trace.num_prompt[:b].sum())
    is_sampled = trace.is_response[first : first + S - num_prompt].tolist()
    return [PROMPT] * num_prompt + [SAMPLED if sampled else OBSERVED for sampled in is_sampled]


def _cell(token: int, source: str, texts: dict[int, str]) -> str:
    text = _escaped(token_name(token, texts)[:IN_CELL]) if texts.get(token) or not texts else NO_TEXT
    return f"<b>{text}</b>" if source == SAMPLED else text


def token_name(token: int, texts: dict[int, str]) -> str:
    """The token's text with white space made visible; its id, in angle brackets, where it has no text.

    In a trace without any texts the ids have no brackets.
    """
    text = texts.get(token, "")
    if not text:
        return f"⟨{token}⟩" if texts else f"{token}"
    return text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣")


def _escaped(text: str) -> str:
    """The text escaped for plotly, which would read a token such as `<b>` as a tag."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _distinct(names: list[str]) -> list[str]:
    """The names, repeated ones numbered, since a category axis would draw equal names at one place."""
    return [name if names.index(name) == i else f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)]


def _step(found: Sequence[tuple[ReportRun, Trace, Any]]) -> str:
    steps = sorted({trace.step for _, trace, _ in found})
    return f"Newest trace: step {steps[0]}." if len(steps) == 1 else "Newest trace of each run."
