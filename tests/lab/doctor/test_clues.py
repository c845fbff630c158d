"""Laws of the doctor's clues: each is 0 or 1 where its formula says so, on traces whose fault is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.doctor.causes import CAUSES
from lab.doctor.diagnosis import OTHER_TITLES, diagnose, weigh
from lab.doctor.evidence import CLUES, gather
from lab.doctor.importers import rows
from lab.doctor.page import Patient, render
from lab.doctor.rules import over, under
from lab.doctor.view import View
from lab.traces import Trace
from tests.lab.doctor.patients import draw_rows, trace_of
from theory.streams import stream

ROWS = draw_rows()
EXACT = trace_of(ROWS, lambda logp, b: logp)


def noisy(std: float) -> Trace:
    """log mu off by independent noise of this size on each token's logit."""
    generator = stream(0, "clues")

    def change(logp: list[float], b: int) -> list[float]:
        return [min(x + (1 - math.exp(x)) * std * float(torch.randn((), generator=generator)), 0.0) for x in logp]

    return trace_of(ROWS, change)


def test_few_tokens_are_said_to_be_few() -> None:
    """Below the 2,500 tokens of the smallest trace that a fault was planted in, and only there."""
    found = diagnose(EXACT)
    for num, is_few in ((2499, True), (2500, False)):
        same = replace(found, seen={**found.seen, "num_tokens": float(num)})
        assert (same.caution is not None) == is_few
        assert (same.caution in same.lines()) == is_few


def test_two_equal_engines_show_nothing() -> None:
    """Equal bits: all agree, no gap, no shift, the mean ratio is 1, and the diagnosis says so."""
    seen = gather(EXACT)
    assert (seen["exact_share"], seen["k3_kl"], seen["size"], seen["rho_mean"], seen["shift_gain"]) == (1, 0, 0, 1, 0)
    assert diagnose(EXACT).named[0].name == "nothing"


def test_contexts_are_equal_exactly_where_all_tokens_before_are() -> None:
    """Two tokens share a context number if and only if their prompts and the tokens before them are the same."""
    view, prefixes = View.of(EXACT), []
    for row in ROWS:
        prefixes += [tuple(row["tokens"][: 2 + t]) for t in range(len(row["logp_mu"]))]
    numbers = view.context_n.tolist()
    assert len(set(zip(numbers, prefixes, strict=True))) == len(set(numbers)) == len(set(prefixes))


def test_a_tokens_row_is_that_of_the_token_before_it() -> None:
    """The routing row of a sampled token is numbered as its input token among all inputs."""
    view = View.of(EXACT)
    inputs = torch.cat([torch.tensor(row["tokens"][:-1]) for row in ROWS])
    before = torch.cat([torch.tensor(row["tokens"][1:-1]) for row in ROWS])
    assert torch.equal(inputs[view.row_n], before)


@given(mass=st.floats(0.3, 0.99))
def test_a_cut_distribution_has_its_kept_mass_as_mean_ratio(mass: float) -> None:
    """If log mu = log old - log S everywhere, the mean of rho is S, all of it on one side: the mask is named."""
    trace = trace_of(ROWS, lambda logp, b: [min(x - math.log(mass), -1e-3) if x < -2 else x for x in logp])
    seen = gather(trace)
    is_cut = View.of(trace).old_n < -2
    share = is_cut.double().mean().item()
    assert seen["rho_mean"] == pytest.approx(1 - share * (1 - mass), abs=1e-5)  # float32 log-probabilities
    assert seen["one_sided"] == pytest.approx(1.0)
    assert diagnose(trace).named[0].name == "mask"


def test_a_side_without_any_mass_is_told_as_such() -> None:
    """A filler that is far below every log-probability makes the mean ratio 0 in float64: words, not a traceback."""
    filled = diagnose(rows.trace([row | {"logp_old": [-1000.0] * len(row["logp_old"])} for row in ROWS]))
    assert filled.seen["rho_mean"] == 0 and filled.named[0].name == "mask"
    assert "truncated to about 0 % of its mass" in "\n".join(filled.lines())


@given(temperature=st.sampled_from([0.5, 0.8, 1.25, 2.0]))
def test_a_temperature_is_the_slope_of_logits(temperature: float) -> None:
    """With two tokens, logit(mu) = logit(old) / T exactly: the slope is 1 / T and explains everything."""

    def scaled(logp: list[float], b: int) -> list[float]:
        logits = [(x - math.log1p(-math.exp(x))) / temperature for x in logp]
        return [-math.log1p(math.exp(-z)) for z in logits]

    trace = trace_of(ROWS, scaled)
    seen = gather(trace)
    assert seen["logit_slope"] == pytest.approx(1 / temperature, rel=1e-3)  # float32 log-probabilities near 0
    assert seen["logit_fit"] > 0.999
    assert diagnose(trace).named[0].name == "temperature"


@pytest.mark.parametrize("step", [1, -1])
def test_a_shift_is_found_with_its_direction(step: int) -> None:
    """Where log mu_t is log old_{t+s}, the gap vanishes at s and at no other shift."""

    def moved(logp: list[float], b: int) -> list[float]:
        return [*logp[1:], logp[-1]] if step == 1 else [logp[0], *logp[:-1]]

    seen = gather(trace_of(ROWS, moved))
    assert seen["shift"] == step and seen["shift_gain"] > 1e3
    assert diagnose(trace_of(ROWS, moved)).named[0].name == "shifted"


def test_zeros_are_told_by_where_they_stand() -> None:
    """Zeros in last places alone are a missing end token, zeros elsewhere a filling; likely tokens at 0 are neither."""
    last = trace_of(ROWS, lambda logp, b: [*logp[:-1], 0.0])
    half = trace_of(ROWS, lambda logp, b: [0.0 if t % 2 else x for t, x in enumerate(logp)])
    greedy = trace_of(ROWS, lambda logp, b: [0.0 if x > math.log(0.5) else x for x in logp])
    assert gather(last)["zero_last_share"] == 1 and gather(last)["zero_share"] == 0
    assert gather(greedy)["zero_share"] == 0 < gather(greedy)["zero_sure_share"]
    assert [diagnose(trace).named[0].name for trace in (last, half)] == ["last_token", "zero_padded"]


def test_noise_is_what_does_not_repeat() -> None:
    """The unrepeated part is 1 for independent noise and 0 for a deviation that is a function of context and token."""
    fixed = trace_of(ROWS, lambda logp, b: [x * 1.1 for x in logp])
    assert gather(fixed)["noise_share"] < 1e-9
    # About 300 groups of two or more: their mean square scatters by some 10%.
    assert gather(noisy(0.1))["noise_share"] == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize("share", [1.0, 0.05])
def test_what_does_not_repeat_has_the_tail_of_its_law(share: float) -> None:
    """Normal noise on every token's logit has 2.58 / 0.67 = 3.8; noise on a few of them a far longer tail."""
    generator = stream(2, "clues")

    def change(logp: list[float], b: int) -> list[float]:
        hit = [float(torch.rand((), generator=generator)) < share for _ in logp]
        noise = (0.1 * torch.randn(len(logp), generator=generator)).tolist()
        return [
            x + (1 - math.exp(x)) * (z if is_hit else 1e-3 * z) for x, z, is_hit in zip(logp, noise, hit, strict=True)
        ]

    # Far from p = 1, so that no log-probability is above 0.
    drawn = [row | {"logp_old": [x - 1 for x in row["logp_old"]]} for row in draw_rows(num_prompts=40)]
    trace = trace_of(drawn, change)
    tail = gather(trace)["unrepeated_tail"]
    assert tail == pytest.approx(2.576 / 0.674, rel=0.15) if share == 1 else tail > 10
    assert (diagnose(trace).named[0].name == "routing") == (share < 1)
    assert diagnose(trace, is_dense=True).named[0].name == "precision"
    assert "unrepeated_tail" not in gather(trace_of(drawn, lambda logp, b: [1.1 * x for x in logp]))


@pytest.mark.parametrize("at", [3, 5])
def test_a_fall_along_the_response_has_its_position_and_factor(at: int) -> None:
    """Deviations that are e^3 times smaller from a position on fall there by 3 nats."""
    drawn = draw_rows(num_prompts=40, num_responses=8)
    generator = stream(1, "clues")

    def change(logp: list[float], b: int) -> list[float]:
        sign = [1.0 if float(torch.rand((), generator=generator)) < 0.5 else -1.0 for _ in logp]
        size = [0.05 if t < at else 0.05 * math.exp(-3) for t in range(len(logp))]
        return [min(x + (1 - math.exp(x)) * s * z, 0.0) for x, s, z in zip(logp, sign, size, strict=True)]

    trace = trace_of(drawn, change)
    seen = gather(trace)
    assert seen["jump_at"] == at
    assert seen["jump"] == pytest.approx(3.0, abs=0.1)  # |d| / (1 - p) is the planted size to float32 rounding
    assert diagnose(trace).named[0].name == "switched"


def test_the_samplers_clues_are_within_chance_for_an_honest_one_and_far_outside_for_a_sharper() -> None:
    """Drawn from what is scored, both z scores are of order 1; at temperature 0.5 both are beyond 4."""
    honest = gather(trace_of(draw_rows(num_prompts=20, seed=3), lambda logp, b: logp))
    assert abs(honest["surprise_z"]) < 3 and abs(honest["collision_z"]) < 3
    sharp_rows = draw_rows(num_prompts=20, seed=3, drawn=lambda logits: logits / 0.5)
    sharp = gather(trace_of(sharp_rows, lambda logp, b: logp))
    assert sharp["surprise_z"] < -4 and sharp["collision_z"] > 4
    assert sharp["surprise_gap"] < 0 < sharp["rho_mean"]


@pytest.mark.parametrize("has_entropies", [True, False])
def test_a_sampler_that_nobody_scores_is_named_with_and_without_entropies(has_entropies: bool) -> None:
    """Equal log-probabilities do not clear a pair whose tokens come from a top-2 mask or a low temperature."""
    masked = draw_rows(num_prompts=20, drawn=lambda z: torch.where(z >= z.topk(2).values[-1], z, -math.inf))
    kept = masked if has_entropies else [{k: v for k, v in row.items() if k != "entropy_old"} for row in masked]
    names = {cause.name for cause in diagnose(rows.trace(kept)).named}
    assert names & {"sampler_mask", "sampler_temperature"} and "nothing" not in names


def test_what_is_not_finite_is_said_first_and_alone() -> None:
    """One NaN among the log-probabilities is the diagnosis; nothing is computed around it."""
    trace = trace_of(ROWS, lambda logp, b: [math.nan if b == 3 and t == 0 else x for t, x in enumerate(logp)])
    assert set(gather(trace)) == {"nonfinite_share", "num_tokens"}
    assert diagnose(trace).named[0].name == "not_finite" and "NaN" in "\n".join(diagnose(trace).lines())


@pytest.mark.parametrize("odd", [math.nan, -math.inf])
@pytest.mark.parametrize("is_every", [False, True])
def test_what_is_not_finite_has_a_page(odd: float, is_every: bool) -> None:
    """The page says so and draws the tokens that are finite, if there are some."""
    trace = trace_of(ROWS, lambda logp, b: [odd if is_every or b == 3 else x for x in logp])
    page = render([Patient("t", 0, trace, diagnose(trace))])
    assert "NaN or infinite" in page
    assert ("probability-scatter" in page) == (not is_every)


def test_the_view_counts_sampled_tokens_alone() -> None:
    """Observations have a place in the response and no say: the clues are those without them, at their positions."""
    masks = [{"is_response": [t != 1 for t in range(len(row["logp_mu"]))]} for row in ROWS]
    trace = rows.trace([row | mask for row, mask in zip(ROWS, masks, strict=True)])
    view = View.of(trace)
    assert len(view) == int(trace.is_response.sum()) and not bool((view.position_n == 1).any())
    assert view.token_n.tolist() == [x for row in ROWS for t, x in enumerate(row["tokens"][2:]) if t != 1]
    assert "end_share" not in gather(trace)


def test_a_trace_without_sampled_tokens_is_one_line() -> None:
    """Nothing sampled, nothing to say: a ValueError with both numbers."""
    trace = rows.trace([row | {"is_response": [False] * len(row["logp_mu"])} for row in ROWS])
    with pytest.raises(ValueError, match=r"expected at least 1 sampled token, got 0 of \d+"):
        diagnose(trace)


def possible(seen: dict[str, float]) -> dict[str, float]:
    """These clues without signs where none can be negative, and with all or none of those of both sides' routes."""
    seen |= {name: abs(seen[name]) for name in ("kl_per_flip", "flips_per_size", "sure_ratio") if name in seen}
    if ("kl_per_flip" in seen) != ("flips_per_size" in seen):
        seen = {name: value for name, value in seen.items() if name not in ("kl_per_flip", "flips_per_size")}
    return seen


NUMBERS = st.dictionaries(
    st.sampled_from(sorted({*CLUES, *OTHER_TITLES})), st.floats(-20, 20), max_size=len(CLUES)
).map(possible)


@given(seen=NUMBERS)
def test_strengths_are_shares_of_what_can_be_explained(seen: dict[str, float]) -> None:
    """Whatever was seen, strengths are in [0, 1] and those of the causes that explain sum to at most 1."""
    strengths = weigh(seen)
    assert all(0 <= strength <= 1 for strength in strengths.values())
    assert sum(strength for cause, strength in strengths.items() if cause.explains) <= 1 + 1e-9
    assert len(strengths) == len(CAUSES) + 1


@given(x=st.floats(1e-3, 1e3), threshold=st.floats(1e-3, 1e3))
def test_a_threshold_is_where_a_weight_is_a_half(x: float, threshold: float) -> None:
    """over rises through 1/2 at its threshold, under is what is left, and no data weighs nothing."""
    assert over(threshold, threshold) == pytest.approx(0.5)
    assert (over(x, threshold) > 0.5) == (x > threshold) or math.isclose(x, threshold)
    assert over(x, threshold) + under(x, threshold) == pytest.approx(1.0)
    assert over(None, threshold) == under(None, threshold) == over(-x, threshold) == 0


def test_every_cause_is_told_in_whole_sentences() -> None:
    """Each cause has words, a fix that ends in a full stop, and clues that exist."""
    for cause in CAUSES:
        assert cause.fix.endswith(".") and set(cause.shows) <= {*CLUES, *OTHER_TITLES}


@pytest.mark.parametrize(("size", "has_formats"), [(0.1, False), (0.2, True), (1.0, True), (2.0, False)])
def test_other_weights_may_be_a_coarse_format_at_that_size_alone(size: float, has_formats: bool) -> None:
    """Where formats coarser than FP8 were taken for other weights (0.2 to 2 of a logit), the words say so."""
    for words in (cause.words for cause in CAUSES if cause.name in ("stale", "wrong_weights")):
        assert ("NVFP4" in words({"size": size})) == has_formats
