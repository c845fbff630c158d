"""Laws of cut end tokens: they are told from responses that a bound has cut, and are named beside a gap's cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.doctor.causes import CAUSES, UNKNOWN
from lab.doctor.diagnosis import Diagnosis, diagnose, weigh
from lab.doctor.evidence import gather
from lab.doctor.importers import rows
from lab.doctor.page import Patient, render
from lab.doctor.steps.course import StepRecord, joint
from lab.doctor.undecided import DECIDED
from lab.doctor.words import HARMLESS
from tests.lab.doctor.patients import END, draw_rows, trace_of, with_experts
from tests.lab.doctor.test_clues import NUMBERS
from theory.streams import stream

ROWS = draw_rows(num_prompts=20)
BY_NAME = {cause.name: cause for cause in (*CAUSES, UNKNOWN)}


def cut(drawn_rows: Sequence[dict[str, Any]], most: int | None = None, has_ends: bool = True) -> list[dict[str, Any]]:
    """The rows with at most this many tokens each, prompt included, and with or without their end tokens."""
    out = []
    for row in drawn_rows:
        stop = len(row["tokens"]) - (not has_ends and row["tokens"][-1] == END)
        stop = stop if most is None else min(stop, most)
        part = {name: row[name][: stop - row["num_prompt"]] for name in ("logp_mu", "logp_old", "entropy_old")}
        out += [row | {"tokens": row["tokens"][:stop]} | part] if stop > row["num_prompt"] else []
    return out


def prompted(drawn_rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with 0, 1 or 2 tokens more in the prompt, by the prompt."""
    more = [(row["tokens"][0] + row["tokens"][1]) % 3 for row in drawn_rows]
    return [
        row | {"tokens": [0] * n + row["tokens"], "num_prompt": 2 + n} for row, n in zip(drawn_rows, more, strict=True)
    ]


@pytest.mark.parametrize("most", [None, 8, 7])
def test_responses_without_their_end_token_are_found(most: int | None) -> None:
    """With the end token cut from every response that stopped, none of them ends on a token of ends alone.

    A response at the bound on its own length, or on prompt and response together, did not stop.
    """
    drawn = ROWS if most is None else prompted(ROWS)
    assert gather(rows.trace(cut(drawn, most)))["end_share"] == 1
    assert gather(rows.trace(cut(drawn, most, has_ends=False)))["end_share"] < 0.05


@pytest.mark.parametrize("has_ends", [True, False])
def test_a_response_that_is_masked_as_a_whole_does_not_count(has_ends: bool) -> None:
    """Frameworks mask whole responses (too long, filtered, padding): the others tell what they told without it."""
    drawn = cut(ROWS, has_ends=has_ends)
    masked = [row | {"is_response": [i != 3] * len(row["logp_mu"])} for i, row in enumerate(drawn)]
    found = gather(rows.trace(masked))["end_share"]
    assert found == gather(rows.trace([*drawn[:3], *drawn[4:]]))["end_share"] and (found == 1) == has_ends


def test_responses_that_all_reach_a_bound_do_not_tell_of_end_tokens() -> None:
    """Where prompt and response have one length together in every row, none is known to have stopped."""
    full = [row for row in cut(prompted(ROWS), 6) if len(row["tokens"]) == 6]
    assert len({len(row["logp_mu"]) for row in full}) == 3 and len(full) > 100
    assert "end_share" not in gather(rows.trace(full))
    assert diagnose(rows.trace(full)).named[0].name == "nothing"


def noise(std: float) -> Callable[[list[float], int], list[float]]:
    """Independent noise of this size on each token's logit."""
    generator = stream(0, "end tokens")
    return lambda logp, b: [
        min(x + (1 - math.exp(x)) * std * float(torch.randn((), generator=generator)), -1e-6) for x in logp
    ]


def at_temperature(logp: list[float], b: int) -> list[float]:
    """Log mu at temperature 0.8, for two tokens."""
    return [-math.log1p(math.exp(-(x - math.log1p(-math.exp(x))) / 0.8)) for x in logp]


@pytest.mark.parametrize(("change", "name"), [
    (noise(0.1), "precision"),
    (at_temperature, "temperature"),
    (lambda logp, b: [*logp[1:], logp[-1]], "shifted"),
    (lambda logp, b: [0.0 if t % 2 else x for t, x in enumerate(logp)], "zero_padded"),
])  # fmt: skip
def test_two_plants_are_both_named(change: Callable[[list[float], int], list[float]], name: str) -> None:
    """The cause of a gap is named where the end tokens are cut off besides, which is said first."""
    # Equal experts: without any, rounding and routers look alike.
    whole, parts = (
        [with_experts(row, *[torch.tensor([[[0, 1]]]).expand(len(row["tokens"]) - 1, 1, 2)] * 2) for row in found]
        for found in (cut(ROWS), cut(ROWS, has_ends=False))
    )
    assert diagnose(trace_of(whole, change)).named[0].name == name
    found = diagnose(trace_of(parts, change))
    assert [cause.name for cause in found.named] == ["end_token", name]
    assert found.fault is BY_NAME["end_token"] and found.verdict.startswith("it looks like responses without their end")
    assert any(line.startswith(f"Besides, {BY_NAME[name].title} (strength") for line in found.lines())
    page = render([Patient("t", 0, trace_of(parts, change), found)])
    assert f">besides, {BY_NAME[name].title}</h3>" in page and "or, less likely" not in page


@given(seen=NUMBERS, share=st.floats(0, 1))
def test_a_gap_keeps_the_strengths_of_its_causes(seen: dict[str, float], share: float) -> None:
    """Whatever share of responses ends on an end token, no cause of a gap is stronger or weaker for it."""
    before, after = ({c.name: s for c, s in weigh(of).items()} for of in (seen, seen | {"end_share": share}))
    free = {"end_token", "nothing"}  # equal bits clear a pair only if its responses are whole
    assert {name: before[name] for name in before if name not in free} == {
        name: after[name] for name in after if name not in free
    }


FEW = {"exact_share": 0.0, "k3_kl": HARMLESS / 10, "size": 1e-4, "num_tokens": 4000.0}
"""Rounding too small to matter, with a strength of 1."""


@pytest.mark.parametrize(("name", "clues"), [
    ("end_token", {"end_share": 0.07}),
    ("sampler_mask", {"surprise_z": -5.0, "tail_share": 0.02}),
    ("sampler_temperature", {"surprise_z": -5.0, "tail_share": 0.25}),
])  # fmt: skip
def test_no_rounding_hides_a_fault_that_leaves_the_gap(name: str, clues: dict[str, float]) -> None:
    """In a step and over a run: the fault is named first although harmless rounding is stronger, and beside it."""
    assert Diagnosis(FEW, weigh(FEW)).fault is None
    found = Diagnosis(FEW | clues, weigh(FEW | clues))
    assert DECIDED < found.strengths[BY_NAME[name]] < found.strengths[BY_NAME["precision"]]
    assert [cause.name for cause in found.named] == [name, "precision"] and found.fault is BY_NAME[name]
    step = StepRecord(1, 256, found, 1e-5)
    assert joint([step]).named[0] is BY_NAME[name] and step.shares["precision"] == pytest.approx(1, abs=1e-3)
