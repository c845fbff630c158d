"""Laws of the parts of a KL: a partition in which each planted fault fills its own; and of the tokens that carry it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lab.doctor.diagnosis import diagnose
from lab.doctor.heat import MOST_RESPONSES, MOST_TOKENS, heat_map
from lab.doctor.importers import rows
from lab.doctor.page import Patient, render
from lab.doctor.shares import EARLIER, FILLED, LAST, OTHERS, OWN, SAME, kinds, shares
from lab.doctor.view import View
from lab.traces import Trace
from tests.lab.browser import probed
from tests.lab.doctor.patients import draw_rows, trace_of, with_experts
from theory.streams import stream


def routed(other_row: int) -> Trace:
    """Responses of which row `other_row` has other experts, and tokens from that row's on are off by 0.3 nats."""
    out = []
    for row in draw_rows():
        S = len(row["tokens"])
        old = torch.zeros(S - 1, 2, 2, dtype=torch.long) + torch.arange(2)
        mu = old.clone()
        mu[other_row : other_row + 1, 1] = torch.tensor([2, 3])
        # The token at place t + 1 is scored by row t: the first sampled one, at place 2, by row 1.
        logp_mu = [x - 0.3 * (t + 1 >= other_row) for t, x in enumerate(row["logp_old"])]
        out.append(with_experts(row | {"logp_mu": logp_mu}, mu, old))
    return rows.trace(out)


def test_the_kinds_are_a_partition() -> None:
    """Every sampled token has one kind, and the shares of KL and of tokens sum to 1."""
    trace = routed(other_row=4)
    view = View.of(trace)
    assert bool((torch.stack([*kinds(view).values()]).sum(0) == 1).all())
    found = shares(view)
    assert found is not None
    assert sum(part for part, _ in found.values()) == pytest.approx(1, abs=1e-12)
    assert sum(of for _, of in found.values()) == pytest.approx(1, abs=1e-12)


def test_routes_divide_tokens_into_own_earlier_and_none() -> None:
    """The token that the differing row scores has other experts itself, later ones after it, and those before none."""
    view = View.of(routed(other_row=4))
    found = kinds(view)
    # Two tokens of prompt: the sampled token at position t is scored by row t + 1.
    is_before = view.position_n < 3
    assert torch.equal(found[OWN], view.position_n == 3) and torch.equal(found[EARLIER], view.position_n > 3)
    assert torch.equal(found[SAME], is_before & ~view.is_last_n) and torch.equal(
        found[LAST], is_before & view.is_last_n
    )
    assert bool(found[LAST].any()) and bool(found[EARLIER].any())


FAULTS: dict[str, tuple[Callable[[list[float], int], list[float]], str]] = {
    "zeros": (lambda old, b: [0.0, *[x - 1e-3 for x in old[1:]]], FILLED),
    "the last token": (lambda old, b: [*[x - 1e-3 for x in old[:-1]], old[-1] - 1.0], LAST),
    "noise": (lambda old, b: [x - 0.5 * torch.rand(1, generator=stream(b, "shares")).item() for x in old], OTHERS),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_the_part_that_is_made_for_it(name: str) -> None:
    """Nine tenths of the KL, or the most of it, is where the fault was planted."""
    change, kind = FAULTS[name]
    found = shares(View.of(trace_of(draw_rows(), change)))
    assert found is not None and max(found, key=lambda one: found[one][0]) == kind
    assert name == "noise" or found[kind][0] > 0.9


def test_there_are_no_parts_of_nothing() -> None:
    """Equal engines and infinite log-probabilities have no shares."""
    assert shares(View.of(trace_of(draw_rows(), lambda old, b: old))) is None
    assert shares(View.of(trace_of(draw_rows(), lambda old, b: [-torch.inf, *old[1:]]))) is None


def test_the_heat_map_has_the_worst_responses_and_their_worst_tokens() -> None:
    """Responses by their part of the KL, a bounded number; of a long one the part around its worst token."""
    row = {"tokens": list(range(402)), "num_prompt": 2, "logp_mu": [-1.0] * 400, "logp_old": [-1.0] * 400}
    far = row | {"logp_old": [-1.0] * 300 + [-3.0] + [-1.0] * 99}
    near = row | {"logp_old": [-1.5] + [-1.0] * 399}
    found = heat_map(rows.trace([row, near, far]))
    assert found is not None and [line.response for line in found.rows] == [2, 1] and found.covered == pytest.approx(1)
    worst = found.rows[0]
    assert len(worst.cells) == MOST_TOKENS and worst.where == ", tokens 220 to 379 of 400"
    assert [i for i, cell in enumerate(worst.cells) if cell.strength > 0] == [80]
    assert worst.cells[80].strength == 1 and worst.cells[80].is_extreme and "at 300" in worst.cells[80].hover
    assert not found.rows[1].cells[0].is_extreme and 0 < found.rows[1].cells[0].strength < 1
    assert heat_map(rows.trace([row])) is None
    many = heat_map(rows.trace([far] * 20))
    assert many is not None and len(many.rows) == MOST_RESPONSES


TAP = """
const [first, second] = document.querySelectorAll(".heat");
const shown = () => [...document.querySelectorAll(".picked")].map((said) => said.hidden ? null : said.textContent);
const found = [shown()];
for (const token of [first.querySelector(".extreme"), second.querySelector("span"), second]) {
  token.dispatchEvent(new Event("click", {bubbles: true}));
  found.push(shown());
}
parent.postMessage([...found, first.querySelector(".extreme").title], "*");
"""


def test_a_tapped_token_says_its_numbers_under_its_response(tmp_path: Path) -> None:
    """On a phone nothing hovers; a tap beside the tokens changes nothing."""
    row = {"tokens": list(range(42)), "num_prompt": 2, "logp_mu": [-1.0] * 40}
    trace = rows.trace([row | {"logp_old": [-1.0] * i + [-3.0] + [-1.0] * (39 - i)} for i in (7, 30)])
    page = render([Patient("t", 0, trace, diagnose(trace))])
    before, one, two, beside, title = probed(page, TAP, tmp_path, 400, is_dark=False)
    assert before == [None, None] and one == [title, None] and " at 7: mu 0.368, old 0.0498" in title
    assert two[0] == title and " at 0: mu 0.368, old 0.368" in two[1] and beside == two
