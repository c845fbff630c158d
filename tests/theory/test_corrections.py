"""Laws of the nine corrections: their formulas on lists of tokens, their limits, and that weights never reject."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from theory.objectives.corrections import CORRECTIONS, Correction, correction
from theory.streams import stream

NAMES = list(CORRECTIONS)
WEIGHTED = [name for name in NAMES if CORRECTIONS[name].weighted]


def batch(seed: int, scale: float = 0.4) -> tuple[Tensor, Tensor]:
    """log(old/mu) on response tokens (0 elsewhere), and a ragged mask with holes."""
    generator = stream(seed, "corrections")
    mask = torch.rand(6, 5, generator=generator) < 0.7
    mask[:, 0] = True
    return torch.where(mask, scale * torch.randn(6, 5, generator=generator, dtype=torch.float64), 0.0), mask


def rows(x: Tensor, mask: Tensor) -> list[list[float]]:
    return [x[b][mask[b]].tolist() for b in range(len(x))]


def weights_by_hand(name: str, rho: list[float]) -> list[float]:
    """The default weights of one response, from its token ratios."""
    product = math.prod(rho)
    return {
        "none": [1.0] * len(rho),
        "token_is": rho,
        "token_tis": [min(r, 2.0) for r in rho],
        "prefix_tis": [min(math.prod(rho[: t + 1]), 2.0) for t in range(len(rho))],
        "seq_tis": [min(product, 2.0)] * len(rho),
        "icepop": [r if 0.5 <= r <= 5.0 else 0.0 for r in rho],
        "seq_mis": [product] * len(rho),
        "geo_rs": [1.0] * len(rho),
        "k3_rs": [1.0] * len(rho),
    }[name]


def keeps_by_hand(name: str, rho: list[float]) -> bool:
    """Whether the default correction keeps one response."""
    if name == "seq_mis":
        return 0.0 <= math.prod(rho) <= 2.0
    if name == "geo_rs":
        return 0.99 <= math.prod(rho) ** (1 / len(rho)) <= 1.01
    if name == "k3_rs":
        return sum(r - 1 - math.log(r) for r in rho) / len(rho) <= 0.01
    return True


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 500), scale=st.sampled_from([0.01, 0.1, 0.4, 1.0]))
def test_formulas_on_lists(name: str, seed: int, scale: float) -> None:
    """Weights and rejections equal their formulas computed response by response on plain lists."""
    log_gap_BT, mask = batch(seed, scale)
    fix = correction(name)
    rho = [[math.exp(x) for x in row] for row in rows(log_gap_BT, mask)]
    assert fix.keep(log_gap_BT, mask).tolist() == [keeps_by_hand(name, r) for r in rho]
    for got, r in zip(rows(fix.weight(log_gap_BT), mask), rho, strict=True):
        assert got == pytest.approx(weights_by_hand(name, r), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_equal_engines_change_nothing(name: str) -> None:
    """Where old equals mu every weight is 1, nothing is truncated, and every response is kept."""
    zero, mask = torch.zeros(3, 4, dtype=torch.float64), torch.ones(3, 4, dtype=torch.bool)
    fix = correction(name)
    assert torch.equal(fix.weight(zero), torch.ones_like(zero))
    assert not fix.truncated(zero).any()
    assert fix.keep(zero, mask).all()


@given(log_rho=st.floats(-2, 2))
def test_length_one_makes_token_prefix_and_sequence_equal(log_rho: float) -> None:
    """On responses of one token the three truncated weights are the same, and so are Seq-MIS's and token IS's."""
    gap = torch.tensor([[log_rho]], dtype=torch.float64)
    token, prefix, sequence = (correction(n, cap=1.5).weight(gap) for n in ("token_tis", "prefix_tis", "seq_tis"))
    assert torch.equal(token, prefix)
    assert torch.equal(token, sequence)
    assert torch.equal(correction("seq_mis").weight(gap), correction("token_is").weight(gap))


@given(seed=st.integers(0, 500))
def test_prefix_is_token_first_and_sequence_last(seed: int) -> None:
    """A prefix weight equals the token weight on the first token and the sequence weight on the last."""
    log_gap_BT, _ = batch(seed)
    token, prefix, sequence = (
        correction(n, cap=math.inf).weight(log_gap_BT) for n in ("token_tis", "prefix_tis", "seq_tis")
    )
    torch.testing.assert_close(prefix[:, 0], token[:, 0], rtol=1e-12, atol=0)
    torch.testing.assert_close(prefix[:, -1], sequence[:, -1], rtol=1e-12, atol=0)


@given(seed=st.integers(0, 500))
def test_no_cap_is_no_truncation(seed: int) -> None:
    """Token-TIS with an infinite cap is token IS; every truncated weight is at most its cap, and flagged where cut."""
    log_gap_BT, _ = batch(seed, scale=1.0)
    assert torch.equal(
        correction("token_tis", cap=math.inf).weight(log_gap_BT), correction("token_is").weight(log_gap_BT)
    )
    for name in ("token_tis", "prefix_tis", "seq_tis"):
        fix, free = correction(name, cap=1.25), correction(name, cap=math.inf)
        assert fix.weight(log_gap_BT).max() <= 1.25
        assert torch.equal(fix.truncated(log_gap_BT), fix.weight(log_gap_BT) != free.weight(log_gap_BT))


@given(seed=st.integers(0, 200))
def test_weights_are_unbiased_by_enumeration(seed: int) -> None:
    """E_mu[w f] = E_old[f] for the product weights over all responses of two tokens: Seq-TIS without cap is exact."""
    generator = stream(seed, "enumeration")
    V = 3
    logits = torch.randn(4, V, V, generator=generator, dtype=torch.float64)
    first_old, first_mu = logits[0, 0].log_softmax(-1), logits[1, 0].log_softmax(-1)
    second_old, second_mu = logits[2].log_softmax(-1), logits[3].log_softmax(-1)
    old = torch.stack([first_old[:, None].expand(V, V), second_old], -1).reshape(-1, 2)
    mu = torch.stack([first_mu[:, None].expand(V, V), second_mu], -1).reshape(-1, 2)
    f = torch.randn(V * V, generator=generator, dtype=torch.float64)
    weight = correction("seq_tis", cap=math.inf).weight(old - mu)[:, 0]
    torch.testing.assert_close(
        (mu.sum(1).exp() * weight * f).sum(), (old.sum(1).exp() * f).sum(), rtol=1e-11, atol=1e-12
    )
    # The prefix weight of token t is exact for functions of the tokens up to t.
    g = torch.randn(V, generator=generator, dtype=torch.float64).repeat_interleave(V)
    prefix = correction("prefix_tis", cap=math.inf).weight(old - mu)[:, 0]
    torch.testing.assert_close(
        (mu.sum(1).exp() * prefix * g).sum(), (first_old.exp() * g[::V]).sum(), rtol=1e-11, atol=1e-12
    )


def test_geometric_mean_lets_opposite_gaps_cancel_and_k3_does_not() -> None:
    """Geo-RS keeps a response whose gaps are +x and -x; K3-RS rejects it: why both exist."""
    gap, mask = torch.tensor([[0.5, -0.5]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    assert correction("geo_rs").keep(gap, mask).all()
    assert not correction("k3_rs").keep(gap, mask).any()


def test_k3_rejects_what_old_makes_likelier_first() -> None:
    """k3 of rho = 1.15 is above 0.01 and that of 1 / 1.15 below: the direction is KL(mu || old) with rho = old/mu."""
    gap, mask = torch.tensor([[math.log(1.15)], [-math.log(1.15)]], dtype=torch.float64), torch.ones(2, 1) > 0
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


def test_the_table_has_nine() -> None:
    """Each class stands in the table under its own name, and there are nine."""
    assert len(CORRECTIONS) == 9
    assert all(cls.name == name and issubclass(cls, Correction) for name, cls in CORRECTIONS.items())


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("token_tsi", {}, "unknown correction 'token_tsi': did you mean 'token_tis'"),
        ("token_tis", {"capp": 2.0}, "unknown parameter of token_tis 'capp': did you mean 'cap'"),
        ("token_tis", {"cap": 0.0}, r"token_tis: expected cap > 0, got 0\.0"),
        ("token_tis", {"cap": math.nan}, "expected cap > 0, got nan"),
        ("seq_tis", {"cap": "2"}, "seq_tis: cap: expected a number, got '2'"),
        ("icepop", {"lo": 3.0, "hi": 2.0}, r"icepop: expected 0 <= lo < hi, got lo = 3\.0, hi = 2\.0"),
        ("k3_rs", {"max_k3": -1.0}, r"k3_rs: expected max_k3 >= 0, got -1\.0"),
        ("geo_rs", {"numerator": "pi"}, r"geo_rs: expected numerator to be one of \('old',\), got 'pi'"),
    ],
)
def test_errors_name_what_came_and_what_was_expected(name: str, params: dict, message: str) -> None:
    """Unknown names suggest the nearest one; values out of range are shown beside the range."""
    with pytest.raises(ValueError, match=message):
        correction(name, **params)


@pytest.mark.parametrize("name", WEIGHTED)
def test_whole_numbers_are_numbers(name: str) -> None:
    """An int where a float is meant gives the same correction."""
    params = {k: v for k, v in vars(correction(name)).items() if k != "numerator"}
    whole = {k: int(v) for k, v in params.items() if v == int(v)}
    assert correction(name, **whole) == correction(name)
