"""Laws of the corrections: those of every row of the table in `laws_objectives.py`, then limits, exactness, errors."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.strategies import MODERATE, batches, policy_pairs
from tests.theory.laws_objectives import CORRECTION_ROWS
from tests.theory.objective_batches import Batch, approx, log_gaps, ratios, tokens_of
from theory.objectives.corrections import CORRECTIONS, Correction, correction

NAMES = list(CORRECTIONS)


@pytest.mark.parametrize(
    ("name", "tight"), [(n, t) for n, row in CORRECTION_ROWS.items() for t in ([False, True] if row.tight else [False])]
)
@given(batch=batches(corners=MODERATE))
def test_corrections_are_their_formulas(name: str, tight: bool, batch: Batch) -> None:
    """Weights, cuts and rejections of each response are the formulas on its own tokens, at default and tight bounds."""
    row = CORRECTION_ROWS[name]
    fix = correction(name, **((row.tight or {}) if tight else {}))
    bounds = {key: value for key, value in vars(fix).items() if key != "numerator"}
    gap, free = log_gaps(batch), correction(name, **(row.free or {}))
    weight, keep = fix.weight(gap, batch.mask), fix.keep(gap, batch.mask)
    cut, uncut = fix.truncated(gap, batch.mask), free.weight(gap, batch.mask)
    for b in range(len(gap)):
        pi, old, mu = tokens_of(batch, b)
        if not pi:
            continue
        rho = ratios(old, mu)
        assert weight[b, batch.mask[b]].tolist() == approx(row.weights(rho, **bounds))
        assert keep[b].item() == row.keeps(rho, **bounds)
    # A weight is flagged exactly where its bounds changed it.
    assert torch.equal(cut[batch.mask], (weight != uncut)[batch.mask])


@pytest.mark.parametrize("name", CORRECTION_ROWS)
def test_equal_engines_change_nothing(name: str) -> None:
    """Where numerator equals mu every weight is 1, nothing is truncated, and every response is kept."""
    zero, mask, fix = torch.zeros(3, 4), torch.ones(3, 4, dtype=torch.bool), correction(name)
    assert torch.equal(fix.weight(zero, mask), torch.ones_like(zero))
    assert not fix.truncated(zero, mask).any()
    assert fix.keep(zero, mask).all()


@pytest.mark.parametrize("name", CORRECTION_ROWS)
@given(log_rho=st.floats(-2, 2))
def test_one_token_has_its_own_ratio_as_weight(name: str, log_rho: float) -> None:
    """On responses of one token each weighted correction without bounds is the token weight, each other one is 1."""
    gap, mask = torch.tensor([[log_rho]]), torch.ones(1, 1, dtype=torch.bool)
    fix = correction(name, **(CORRECTION_ROWS[name].free or {}))
    assert torch.equal(fix.weight(gap, mask), gap.exp() if fix.weighted else torch.ones(1, 1))


@given(first=policy_pairs(3), second=policy_pairs(3, 3), f=policy_pairs(9))
def test_weights_are_unbiased_by_enumeration(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], f: tuple[Tensor, Tensor]
) -> None:
    """E_mu[w f] = E_old[f] over all responses of two tokens: Seq-TIS without cap for any f, Prefix-TIS for its own."""
    old, mu = (
        torch.stack([x[0].log_softmax(-1)[:, None].expand(3, 3), x[1].log_softmax(-1)], -1).reshape(9, 2)
        for x in zip(first, second, strict=True)
    )
    mask = torch.ones(9, 2, dtype=torch.bool)
    sequence, prefix = (correction(n, cap=math.inf).weight(old - mu, mask) for n in ("seq_tis", "prefix_tis"))
    p_mu, p_old, values = mu.sum(1).exp(), old.sum(1).exp(), f[0]
    torch.testing.assert_close((p_mu * sequence[:, 0] * values).sum(), (p_old * values).sum(), rtol=1e-10, atol=1e-11)
    # The weight of the first token is exact for functions of the first token, that of the last for all.
    of_first = values.view(3, 3)[:, :1].expand(3, 3).reshape(9)
    torch.testing.assert_close((p_mu * prefix[:, 0] * of_first).sum(), (p_old * of_first).sum(), rtol=1e-10, atol=1e-11)
    torch.testing.assert_close((p_mu * prefix[:, 1] * values).sum(), (p_old * values).sum(), rtol=1e-10, atol=1e-11)


def test_k3_rejects_what_old_makes_likelier_first() -> None:
    """k3 of rho = 1.15 is above 0.01 and that of 1 / 1.15 below: the direction is KL(mu || old) with rho = old/mu."""
    gap, mask = torch.tensor([[math.log(1.15)], [-math.log(1.15)]]), torch.ones(2, 1) > 0
    assert correction("k3_rs").keep(gap, mask).tolist() == [False, True]


@pytest.mark.parametrize("name", NAMES)
def test_formula_holds_the_numbers(name: str) -> None:
    """The printed formula names the weight and every parameter's value."""
    fix = correction(name)
    assert fix.formula.startswith("w_t = ")
    for number in (v for k, v in vars(fix).items() if k != "numerator"):
        assert f"{number:g}" in fix.formula
    if fix.weighted:
        assert "old" in fix.symbol
        assert "pi" in correction(name, numerator="pi").symbol


@pytest.mark.parametrize(("name", "divide"), [("seq_mis", False), ("geo_rs", True)])
@given(batch=batches(corners=MODERATE), lo=st.floats(0.5, 0.95), hi=st.floats(1.05, 2.0))
def test_verls_numbers_keep_the_same_responses(name: str, divide: bool, batch: Batch, lo: float, hi: float) -> None:
    """log(a) <= sum (or mean) of k1 = log(mu/old) <= log(b), with the numbers that `verl` prints, is our rule."""
    fix = correction(name, lo=lo, hi=hi)
    words = re.search(r'"(.*)_(.*)"', fix.verl)
    assert words
    a, b = (float(x) for x in words.groups())
    log_rho, length = log_gaps(batch), batch.mask.sum(1).clamp(min=1)
    k1 = -log_rho.sum(1) / (length if divide else 1)
    # A value within the rounding of six printed digits of a bound is decided by that rounding.
    assume(all(((k1 - math.log(x)).abs() > 1e-5).all() for x in (a, b)))
    expected = (k1 >= math.log(a)) & (k1 <= math.log(b))
    assert torch.equal(fix.keep(log_rho, batch.mask), expected)


def test_only_k1_bounds_are_inverted() -> None:
    """verl's names stand at those corrections alone whose bounds it has on mu/old; an open end stays open."""
    assert {name for name in CORRECTIONS if correction(name).verl} == {"seq_mis", "geo_rs", "token_k1"}
    assert correction("seq_mis").verl == 'seq_sum_k1 with rollout_rs_threshold "0.5_inf", bounds on mu/old'


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("token_tsi", {}, "unknown correction 'token_tsi': did you mean 'token_tis'"),
        ("token_tis", {"capp": 2.0}, "unknown parameter of token_tis 'capp': did you mean 'cap'"),
        ("token_tis", {"cap": 0.0}, r"token_tis: expected cap > 0, got 0\.0"),
        ("seq_tis", {"cap": "2"}, "seq_tis: cap: expected a number, got '2'"),
        ("icepop", {"lo": 3.0, "hi": 2.0}, r"icepop: expected 0 <= lo < hi, got lo = 3\.0, hi = 2\.0"),
        ("geo_rs", {"lo": 1.0, "hi": 1.0}, r"lo = 1\.0, hi = 1\.0 \(on old/mu; verl's k1 .* \[1/b, 1/a\] here\)"),
        ("k3_rs", {"max_k3": -1.0}, r"k3_rs: expected max_k3 >= 0, got -1\.0"),
        ("geo_rs", {"numerator": "pi"}, r"geo_rs: expected numerator to be one of \('old',\), got 'pi'"),
    ],
)
def test_errors_name_what_came_and_what_was_expected(name: str, params: dict, message: str) -> None:
    """Unknown names suggest the nearest one; values out of range are shown beside the range."""
    with pytest.raises(ValueError, match=message):
        correction(name, **params)


def test_a_weight_without_its_logarithm_is_refused() -> None:
    """Objectives multiply weights as logarithms: a class that gives `weight` alone would weigh nothing."""
    with pytest.raises(TypeError, match="Half: expected log_weight beside weight"):

        class Half(Correction):
            def weight(self, log_gap_BT: Tensor, is_response_BT: Tensor) -> Tensor:
                return torch.full_like(log_gap_BT, 0.5)
