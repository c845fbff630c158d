"""Laws of what the mask leaves out: padding, holes, splits and rejections, and metrics that combine by token counts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from tests.effort import few
from tests.strategies import MODERATE, Cut, batches, cuts
from tests.theory.laws_objectives import RATIO_ROWS, tuned
from tests.theory.laws_presets import EVERY, PRESET_ROWS
from tests.theory.objective_batches import Batch, Response, make_batch, tokens_of
from theory import metrics
from theory.objectives import CORRECTIONS, combine_metrics, correction, preset


@pytest.mark.parametrize(("name", "correction_name"), EVERY)
@few
@given(batch=batches(corners=MODERATE))
def test_masked_positions_are_nowhere(name: str, correction_name: str | None, batch: Batch) -> None:
    """nan, inf and -inf off the mask change no value and no metric, and their gradient is exactly 0."""
    objective = tuned(name, correction_name)
    out, gradient = batch.with_gradient(objective)
    assert not gradient[~batch.mask].any()
    for filler in (50.0, math.nan, -math.inf):
        pi, old, mu = (torch.where(batch.mask, x, filler) for x in (batch.pi, batch.old, batch.mu))
        dirty = replace(batch, pi=pi, old=old, mu=mu)
        again, its_gradient = dirty.with_gradient(objective)
        assert torch.equal(again.objective, out.objective)
        assert again.metrics == out.metrics
        assert torch.equal(its_gradient, gradient)


@pytest.mark.parametrize(("name", "correction_name"), EVERY)
@few
@given(batch=batches(corners=MODERATE))
def test_padding_holes_and_empty_rows(name: str, correction_name: str | None, batch: Batch) -> None:
    """Columns and rows of padding change nothing, and holes are as if cut out: masked equals sliced."""
    objective = tuned(name, correction_name)
    whole, gradient = batch.with_gradient(objective)
    pi, old, mu, mask = (torch.nn.functional.pad(x, (0, 3, 0, 2)) for x in (batch.pi, batch.old, batch.mu, batch.mask))
    wide = Batch(pi, old, mu, torch.nn.functional.pad(batch.advantages, (0, 2), value=7.0), mask)
    torch.testing.assert_close(wide.gradient(objective)[:-2, :-3], gradient, rtol=1e-12, atol=1e-15)
    totals, total = objective.totals(batch.old, batch.mu, batch.mask), 0.0
    for b in range(len(batch.pi)):
        at = batch.mask[b]
        pi, old, mu, mask = (x[b : b + 1, at] for x in (batch.pi, batch.old, batch.mu, batch.mask))
        row = Batch(pi, old, mu, batch.advantages[b : b + 1], mask)
        out, sliced = row.with_gradient(objective, totals=totals)
        total += out.objective.item()
        torch.testing.assert_close(sliced[0], gradient[b, at], rtol=1e-12, atol=1e-15)
    assert whole.objective.item() == pytest.approx(total, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize(("name", "correction_name"), EVERY)
@few
@given(batch=batches(corners=MODERATE), cut=cuts())
def test_permutation_and_micro_batches(name: str, correction_name: str | None, batch: Batch, cut: Cut) -> None:
    """Responses may come in any order and in any split: objectives add up, metrics combine by token counts."""
    objective = tuned(name, correction_name)
    whole, gradient = batch.with_gradient(objective)
    totals = objective.totals(batch.old, batch.mu, batch.mask)
    parts = [batch.rows(index) for index in (cut.order[: cut.at], cut.order[cut.at :])]
    outputs, gradients = zip(*(part.with_gradient(objective, totals=totals) for part in parts), strict=True)
    total = sum(out.objective.item() for out in outputs)
    assert total == pytest.approx(whole.objective.item(), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(torch.cat(gradients), gradient[cut.order], rtol=1e-12, atol=1e-15)
    counted = [(int(p.mask.sum()), out.metrics) for p, out in zip(parts, outputs, strict=True)]
    if whole.metrics:
        combined = combine_metrics(counted)
        assert combined == pytest.approx({k: v.item() for k, v in whole.metrics.items()}, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("name", list(PRESET_ROWS))
def test_everything_rejected(name: str) -> None:
    """With every response rejected, J and its gradient are 0 and the rejected fraction is 1; nothing is nan."""
    batch = make_batch(0, gap=0.0)
    gone = replace(batch, mu=batch.old - 3.0)
    objective = preset(name, correction=correction("geo_rs"))
    assert objective.totals(gone.old, gone.mu, gone.mask).num_tokens == 0
    assert not objective.kept(gone.old, gone.mu, gone.mask).any()
    out = gone(objective)
    assert out.objective.item() == 0
    assert out.metrics["rollout_corr/rejected_fraction"].item() == 1
    assert out.metrics["rollout_corr/weight_max"].item() == 0
    assert not gone.gradient(objective).any()


def test_a_part_without_response_tokens_counts_for_nothing() -> None:
    """An aborted response adds 0 and reports nothing, rather than zeros; it leaves metrics of others as they are."""
    batch = make_batch(0)
    empty = replace(batch, mask=torch.zeros_like(batch.mask)).rows([0])
    whole = batch(preset("grpo")).metrics
    out = empty(preset("grpo"))
    assert out.objective.item() == 0 and out.metrics == {}
    full, none = (int(batch.mask.sum()), whole), (0, out.metrics)
    for parts in ([none, full], [full, none], [full, none, full]):
        assert combine_metrics(parts) == pytest.approx({name: value.item() for name, value in whole.items()}, rel=1e-12)


@pytest.mark.parametrize("name", [name for name, cls in CORRECTIONS.items() if cls().rejection])
def test_no_rejection_hides_a_nan(name: str) -> None:
    """A response with a NaN log-prob is kept, so that objective and gradient say so; without it they are finite."""
    batch = make_batch(0, gap=0.0)
    broken = replace(batch, old=batch.old.index_put((torch.tensor(2), torch.tensor(0)), torch.tensor(math.nan)))
    objective = preset("grpo", correction=correction(name))
    assert batch(objective).objective.isfinite()
    assert objective.kept(broken.old, broken.mu, broken.mask)[2].any()
    assert broken(objective).objective.isnan()


@pytest.mark.parametrize("name", list(PRESET_ROWS))
def test_a_rejected_response_may_be_infinite(name: str) -> None:
    """A response to which old gives probability 0 is rejected, and its infinite ratio reaches no gradient."""
    batch = make_batch(0, gap=0.01)
    broken = replace(batch, old=batch.old.index_put((torch.tensor(2), torch.tensor(0)), torch.tensor(-math.inf)))
    rest = [0, 1, 3, 4, 5]
    objective = preset(name, correction=correction("k3_rs"))
    gradient = broken.gradient(objective)
    assert not gradient[2].any()
    torch.testing.assert_close(gradient[rest], batch.rows(rest).gradient(objective), rtol=1e-12, atol=1e-15)


def test_rejection_changes_denominators_and_icepop_does_not() -> None:
    """IcePop's zeroed tokens stay in every denominator; rejected responses leave them."""
    batch = make_batch(0, gap=0.6)
    everything = preset("grpo_dapo").totals(batch.old, batch.mu, batch.mask)
    assert tuned("grpo_dapo", "icepop").totals(batch.old, batch.mu, batch.mask) == everything
    assert tuned("grpo_dapo", "geo_rs").totals(batch.old, batch.mu, batch.mask).num_responses < everything.num_responses
    assert batch(tuned("grpo_dapo", "icepop")).metrics["rollout_corr/truncated_fraction"] > 0


@pytest.mark.parametrize("name", list(PRESET_ROWS))
def test_metrics_are_registered_token_means(name: str) -> None:
    """Clip fractions, mean ratio and its maximum where A < 0 equal counts over plain lists, under registered names."""
    batch, row = make_batch(5), PRESET_ROWS[name]
    out = batch(preset(name)).metrics
    metrics.check(out)
    assert out["rollout_corr/rejected_fraction"] == 0
    if not row.ratio:
        assert not any(key.startswith("actor/") for key in out)
        return
    r, stops, negative = [], [], []
    for b in range(len(batch.pi)):
        pi, old, mu = tokens_of(batch, b)
        x = Response(pi, old, mu, batch.advantages[b].item(), [], [])
        own = RATIO_ROWS[preset(name).ratio.name].by_hand([math.log(a) for a in x.r])
        r, negative = r + own, negative + (own if x.A < 0 else [])
        stops += row.stops(x) if row.stops is not None else []
    assert out["actor/ratio_mean"].item() == pytest.approx(sum(r) / len(r))
    assert out["actor/negative_ratio_max"].item() == pytest.approx(max(negative))
    if row.stops is None:
        assert not any(key.startswith("actor/pg_clipfrac") for key in out)
        return
    high, low = (sum(flag) / len(r) for flag in zip(*stops, strict=True))
    assert out["actor/pg_clipfrac_high"].item() == pytest.approx(high)
    assert out["actor/pg_clipfrac_low"].item() == pytest.approx(low)
    assert out["actor/pg_clipfrac"].item() == pytest.approx(high + low)


def test_the_largest_negative_ratio_needs_a_negative_advantage() -> None:
    """Without A < 0 there is none; per-token advantages count each at its token; a product that overflows is e^75."""
    batch = make_batch(5)
    better = replace(batch, advantages=batch.advantages.abs())
    assert "actor/negative_ratio_max" not in better(preset("grpo")).metrics
    advantages = torch.ones_like(batch.pi)
    advantages[2, 0] = -1.0
    inputs = (batch.pi, batch.old, batch.mu, batch.advantages, batch.mask)
    out = preset("grpo", advantage="optimal_token")(*inputs, advantages_BT=advantages).metrics
    assert out["actor/negative_ratio_max"].item() == (batch.pi - batch.old)[2, 0].exp().item()
    far = replace(batch, old=batch.old - 100.0)(preset("grpo")).metrics
    assert far["actor/negative_ratio_max"].item() == pytest.approx(math.exp(75))


def test_weight_metrics() -> None:
    """Weight mean, maximum and truncated fraction are those of the correction's own weight."""
    batch = make_batch(5, gap=1.0)
    out = batch(preset("minirl", cap=1.5)).metrics
    w = (batch.pi - batch.mu).exp()[batch.mask]
    assert out["rollout_corr/weight_mean"].item() == pytest.approx(w.clamp(max=1.5).mean().item())
    assert out["rollout_corr/weight_max"].item() == 1.5
    assert out["rollout_corr/truncated_fraction"].item() == pytest.approx((w > 1.5).double().mean().item())
