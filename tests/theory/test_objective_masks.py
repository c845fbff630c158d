"""Laws of what the mask leaves out: padding, holes, splits and rejections, and metrics that combine by token counts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.theory.objective_batches import Batch, make_batch, tuned
from theory import metrics
from theory.objectives import CORRECTIONS, PRESETS, correction, preset
from theory.streams import stream

EVERY = (
    [(name, "none") for name in PRESETS] + [("minirl", c) for c in CORRECTIONS if c != "none"] + [("gspo", "seq_mis")]
)


@pytest.mark.parametrize(("name", "correction_name"), EVERY)
def test_masked_positions_are_nowhere(name: str, correction_name: str) -> None:
    """nan, inf and -inf off the mask change no value and no metric, and their gradient is exactly 0."""
    batch, objective = make_batch(1), tuned(name, correction_name)
    for filler in (0.0, 50.0, math.nan, -math.inf):
        dirty = Batch(
            *(torch.where(batch.mask, x, filler) for x in (batch.pi, batch.old, batch.mu)), batch.advantages, batch.mask
        )
        out, clean = dirty(objective), batch(objective)
        assert torch.equal(out.objective, clean.objective)
        assert out.metrics == clean.metrics
        assert torch.equal(dirty.gradient(objective), batch.gradient(objective))
    assert not batch.gradient(objective)[~batch.mask].any()


@pytest.mark.parametrize(("name", "correction_name"), EVERY)
def test_padding_holes_and_empty_rows(name: str, correction_name: str) -> None:
    """Columns and rows of padding change nothing, and holes are as if cut out: masked equals sliced."""
    batch, objective = make_batch(2), tuned(name, correction_name)
    wide = Batch(*(torch.nn.functional.pad(x, (0, 3, 0, 2)) for x in (batch.pi, batch.old, batch.mu)),
                 torch.nn.functional.pad(batch.advantages, (0, 2), value=7.0),
                 torch.nn.functional.pad(batch.mask, (0, 3, 0, 2)))  # fmt: skip
    torch.testing.assert_close(wide(objective).objective, batch(objective).objective, rtol=1e-12, atol=1e-15)
    totals = objective.totals(batch.old, batch.mu, batch.mask)
    sliced = [batch.rows(slice(b, b + 1)) for b in range(len(batch.pi))]
    sliced = [
        Batch(*(x[:, row.mask[0]] for x in (row.pi, row.old, row.mu)), row.advantages, row.mask[:, row.mask[0]])
        for row in sliced
    ]
    total = sum(row(objective, totals=totals).objective.item() for row in sliced)
    assert batch(objective).objective.item() == pytest.approx(total, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("name", "correction_name"), EVERY)
def test_permutation_and_micro_batches(name: str, correction_name: str) -> None:
    """Responses may come in any order and in any split: objectives add up, metrics combine by token counts."""
    objective = tuned(name, correction_name)
    for seed in range(3):
        batch = make_batch(seed)
        whole, totals = batch(objective), objective.totals(batch.old, batch.mu, batch.mask)
        order = torch.randperm(6, generator=stream(seed, "order"))
        parts = [batch.rows(order[:1]), batch.rows(order[1:4]), batch.rows(order[4:])]
        outputs = [part(objective, totals=totals) for part in parts]
        total = sum(out.objective.item() for out in outputs)
        assert total == pytest.approx(whole.objective.item(), rel=1e-12, abs=1e-15)
        grads = torch.cat([part.gradient(objective, totals=totals) for part in parts])
        torch.testing.assert_close(grads, batch.gradient(objective)[order], rtol=1e-12, atol=1e-15)
        counts = [int(part.mask.sum()) for part in parts]
        for metric, value in whole.metrics.items():
            values = [out.metrics[metric].item() for out in outputs]
            mean = sum(n * v for n, v in zip(counts, values, strict=True)) / sum(counts)
            assert (max(values) if metric.endswith("_max") else mean) == pytest.approx(
                value.item(), rel=1e-12, abs=1e-15
            )


@pytest.mark.parametrize("name", list(PRESETS))
def test_only_pi_carries_a_gradient(name: str) -> None:
    """No gradient reaches old, mu or the advantages: weights, masks and baselines are constants."""
    batch = make_batch(0)
    leaves = [x.clone().requires_grad_() for x in (batch.pi, batch.old, batch.mu, batch.advantages)]
    preset(name)(*leaves, batch.mask).objective.backward()
    assert leaves[0].grad is not None
    assert [x.grad for x in leaves[1:]] == [None, None, None]


@pytest.mark.parametrize("name", list(PRESETS))
def test_everything_rejected(name: str) -> None:
    """With every response rejected, J and its gradient are 0 and the rejected fraction is 1; nothing is nan."""
    batch = make_batch(0, gap=0.0)
    gone = replace(batch, mu=batch.old - 3.0)
    objective = preset(name, correction=correction("geo_rs"))
    assert objective.totals(gone.old, gone.mu, gone.mask).num_tokens == 0
    out = gone(objective)
    assert out.objective.item() == 0
    assert out.metrics["rollout_corr/rejected_fraction"].item() == 1
    assert out.metrics["rollout_corr/weight_max"].item() == 0
    assert not gone.gradient(objective).any()


def test_a_rejected_response_may_be_infinite() -> None:
    """A response to which old gives probability 0 is rejected, and its infinite ratio reaches no gradient."""
    batch = make_batch(0, gap=0.01)
    broken = replace(batch, old=batch.old.index_put((torch.tensor(2), torch.tensor(0)), torch.tensor(-math.inf)))
    rest = [0, 1, 3, 4, 5]
    for name in PRESETS:
        objective = preset(name, correction=correction("k3_rs"))
        grad = broken.gradient(objective)
        assert not grad[2].any()
        torch.testing.assert_close(grad[rest], batch.rows(rest).gradient(objective), rtol=1e-12, atol=1e-15)


def test_rejection_changes_denominators_and_icepop_does_not() -> None:
    """IcePop's zeroed tokens stay in every denominator; rejected responses leave them."""
    batch = make_batch(0, gap=0.6)
    everything = preset("grpo_dapo").totals(batch.old, batch.mu, batch.mask)
    assert tuned("grpo_dapo", "icepop").totals(batch.old, batch.mu, batch.mask) == everything
    assert tuned("grpo_dapo", "geo_rs").totals(batch.old, batch.mu, batch.mask).num_responses < everything.num_responses
    assert batch(tuned("grpo_dapo", "icepop")).metrics["rollout_corr/truncated_fraction"] > 0


def test_no_response_token_gives_no_metrics() -> None:
    """A micro-batch without a response token adds 0 and reports nothing, rather than zeros."""
    batch = make_batch(0)
    out = replace(batch, mask=torch.zeros_like(batch.mask))(preset("minirl"))
    assert out.objective.item() == 0
    assert out.metrics == {}


@pytest.mark.parametrize("name", list(PRESETS))
def test_metrics_are_registered_token_means(name: str) -> None:
    """Clip fractions, ratio and weight metrics equal counts over plain lists, under registered names."""
    batch = make_batch(5)
    out = batch(preset(name))
    metrics.check(out.metrics)
    A = batch.advantages[:, None].expand_as(batch.pi)[batch.mask].tolist()
    logr = torch.where(batch.mask, batch.pi - batch.old, 0.0)
    if name == "gspo":
        logr = (logr.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True)).expand_as(logr)
    r = logr.exp()[batch.mask].tolist()
    assert out.metrics["rollout_corr/rejected_fraction"] == 0
    if name == "reinforce":
        assert not any(key.startswith("actor/") for key in out.metrics)
        return
    region = PRESETS[name].trust_region
    unsigned = name == "cispo"
    high = sum(x > region.high and (unsigned or a > 0) for x, a in zip(r, A, strict=True)) / len(r)
    low = sum(x < region.low and (unsigned or a < 0) for x, a in zip(r, A, strict=True)) / len(r)
    assert out.metrics["actor/ratio_mean"].item() == pytest.approx(sum(r) / len(r))
    assert out.metrics["actor/pg_clipfrac_high"].item() == pytest.approx(high)
    assert out.metrics["actor/pg_clipfrac_low"].item() == pytest.approx(low)
    assert out.metrics["actor/pg_clipfrac"].item() == pytest.approx(high + low)


def test_weight_metrics() -> None:
    """Weight mean, maximum and truncated fraction are those of the correction's own weight."""
    batch = make_batch(5, gap=1.0)
    out = batch(preset("minirl", cap=1.5)).metrics
    w = (batch.pi - batch.mu).exp()[batch.mask]
    assert out["rollout_corr/weight_mean"].item() == pytest.approx(w.clamp(max=1.5).mean().item())
    assert out["rollout_corr/weight_max"].item() == 1.5
    assert out["rollout_corr/truncated_fraction"].item() == pytest.approx((w > 1.5).double().mean().item())
