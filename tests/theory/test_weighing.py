"""Laws of a weight with a further rejection beside it, and of weights over their mean."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.effort import few
from tests.strategies import MODERATE, Cut, batches, cuts
from tests.theory.laws_objectives import CORRECTION_ROWS
from tests.theory.laws_presets import PRESET_ROWS, gradient_by_hand
from tests.theory.objective_batches import Batch, make_batch, ratios, tokens_of
from tests.theory.test_laws_extremes import DTYPES, FLAT, IMPOSSIBLE, extremes, require_equation
from theory.objectives import CORRECTIONS, Correction, Objective, correction, preset

REJECTIONS = [name for name, cls in CORRECTIONS.items() if not cls.weighted and name != "none"]
WEIGHTS = ("token_tis", "seq_tis", "token_clip")


def tight(name: str) -> Correction:
    return correction(name, **(CORRECTION_ROWS[name].tight or {}))


def both(weight: str, rejection: str, name: str = "grpo_dapo") -> Objective:
    return preset(name, correction=tight(weight), rejection=tight(rejection))


@pytest.mark.parametrize("rejection", REJECTIONS)
@pytest.mark.parametrize("weight", WEIGHTS)
@few
@given(batch=batches(corners=MODERATE))
def test_a_weight_and_a_rejection_multiply(weight: str, rejection: str, batch: Batch) -> None:
    """The gradient is by hand: the product of both weights, on the responses that the rejection keeps."""
    first, second = CORRECTION_ROWS[weight], CORRECTION_ROWS[rejection]

    def weights(rho: list[float]) -> list[float]:
        pairs = zip(first.weights(rho, **(first.tight or {})), second.weights(rho, **(second.tight or {})), strict=True)
        return [a * b for a, b in pairs]

    expected = gradient_by_hand(
        PRESET_ROWS["grpo_dapo"], batch, weights, lambda rho: second.keeps(rho, **(second.tight or {}))
    )
    torch.testing.assert_close(batch.gradient(both(weight, rejection)), expected, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("rejection", REJECTIONS)
def test_a_rejection_beside_no_weight_is_that_correction(rejection: str) -> None:
    """Beside no weight a rejection is the correction of its name, to the bit, and so are its metrics."""
    for seed in range(4):
        batch = make_batch(seed)
        beside = preset("grpo", rejection=tight(rejection))
        alone = preset("grpo", correction=tight(rejection))
        assert torch.equal(batch.gradient(beside), batch.gradient(alone))
        assert batch(beside).metrics == batch(alone).metrics


def test_a_rejection_looks_at_the_engine_gap_whatever_the_weight_is_built_on() -> None:
    """MiniRL's weight holds pi; the rejection beside it is decided on old/mu, before any gradient pass."""
    batch = make_batch(0)
    for rejection in ("geo_rs", "token_k1"):
        objective = preset("minirl", rejection=tight(rejection))
        moved = replace(batch, pi=batch.pi - 3.0)
        zero = [x.gradient(objective)[x.mask] == 0 for x in (batch, moved)]
        plain = [x.gradient(preset("minirl"))[x.mask] == 0 for x in (batch, moved)]
        assert (zero[0] & ~plain[0]).any()
        # pi = 0.05 old: M_t stops where A < 0, and leaves the rest to the rejection.
        assert torch.equal(zero[0] | plain[0] | plain[1], zero[1] | plain[0] | plain[1])


@pytest.mark.parametrize(("weight", "rejection"), [("token_tis", "geo_rs"), ("seq_tis", "token_k3")])
@few
@given(batch=extremes(), dtype=st.sampled_from(DTYPES))
@example(batch=FLAT, dtype=torch.float32)
@example(batch=IMPOSSIBLE, dtype=torch.float32)
def test_both_at_extremes(weight: str, rejection: str, batch: Batch, dtype: torch.dtype) -> None:
    """Any finite or -inf log-probabilities, in any type: value and gradient are the equation's, and never nan."""
    for name in ("grpo_dapo", "minirl_no_is"):
        require_equation(both(weight, rejection, name), batch, dtype)


def test_geo_rs_token_tis_by_hand() -> None:
    """Two responses of ratios (3, 1/3) and (1.5, 1): the first is kept and weighs 2 and 1/3, the second is rejected."""
    mu = torch.zeros(2, 2) - 2.0
    old = mu + torch.tensor([[3.0, 1 / 3], [1.5, 1.0]]).log()
    batch = Batch(old, old, mu, torch.ones(2), torch.ones(2, 2, dtype=torch.bool))
    objective = preset("reinforce", correction="token_tis", rejection="geo_rs")
    torch.testing.assert_close(batch.gradient(objective), torch.tensor([[2.0, 1 / 3], [0.0, 0.0]]))
    assert objective.describe().splitlines()[6].startswith("  rejection     geo_rs: w_t = 1; keep response i only if")


# ---- weights over their mean -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", ["token_tis", "token_clip", "seq_tis", "seq_mis", "prefix_tis"])
@few
@given(batch=batches(corners=MODERATE), cut=cuts())
def test_normalised_weights_have_the_mean_1(weight: str, batch: Batch, cut: Cut) -> None:
    """The gradient is that of the plain weights over their mean: of tokens, or of responses; and its parts add up.

    The mean is of kept responses: the weight of a rejected one may exceed all others together.
    """
    plain = preset("grpo_dapo", correction=tight(weight))
    normal = preset("grpo_dapo", correction=tight(weight), normalise_weights=True)
    row, found = CORRECTION_ROWS[weight], []
    for b in range(len(batch.pi)):
        _, old, mu = tokens_of(batch, b)
        rho = ratios(old, mu)
        is_kept = old and row.keeps(rho, **(row.tight or {}))
        weights = row.weights(rho, **(row.tight or {})) if is_kept else []
        found += weights[:1] if weight in ("seq_tis", "seq_mis") else weights
    mean = sum(found) / len(found) if found else 1.0
    torch.testing.assert_close(batch.gradient(normal) * mean, batch.gradient(plain), rtol=1e-11, atol=1e-14)
    totals = normal.totals(batch.old, batch.mu, batch.mask)
    assert math.exp(totals.log_mean_weight) == pytest.approx(mean, rel=1e-11)
    parts = [batch.rows(index) for index in (cut.order[: cut.at], cut.order[cut.at :])]
    gradients = torch.cat([part.gradient(normal, totals=totals) for part in parts])
    torch.testing.assert_close(gradients, batch.gradient(normal)[cut.order], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("weight", [{"correction": "seq_mis"}, {"correction": "token_is", "rejection": "geo_rs"}])
def test_a_rejected_response_leaves_the_others_weights(weight: dict[str, str]) -> None:
    """Two responses on policy keep the weight 1 beside a rejected one whose ratio is e^5 at every token."""
    mu = torch.full((3, 4), -6.0)
    old = mu + torch.tensor([0.0, 0.0, 5.0])[:, None]
    batch = Batch(old, old, mu, torch.ones(3), torch.ones(3, 4, dtype=torch.bool))
    objective = preset("reinforce", normalise_weights=True, **weight)
    expected = torch.tensor([1.0, 1.0, 0.0])[:, None].expand(3, 4)
    gradient = batch.gradient(objective)
    torch.testing.assert_close(gradient / gradient.max(), expected)
    assert objective.totals(old, mu, batch.mask).log_mean_weight == pytest.approx(0, abs=1e-12)


def test_weights_that_are_all_0_stay_0() -> None:
    """Where every weight is 0 nothing is divided by their mean; an infinite weight over its own mean is 1, not nan."""
    batch = make_batch(0, gap=0.0)
    objective = preset("reinforce", correction=correction("icepop", lo=2.0, hi=3.0), normalise_weights=True)
    assert not batch.gradient(objective).any()
    mu = batch.mu.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(-math.inf))
    lone = preset("reinforce", correction="token_is", normalise_weights=True)
    weight = replace(batch, mu=mu)(lone).metrics["rollout_corr/weight_max"]
    assert weight.item() == 1.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rejection": "token_tis"}, "rejection: expected a correction that only rejects, got token_tis, which rew"),
        ({"normalise_weights": True}, "normalise_weights: expected a weight on old/mu, .* correction none with"),
        (
            {"correction": "token_tis", "normalise_weights": True, "centering": "full"},
            "normalise_weights: expected centering none, got full",
        ),
    ],
)
def test_errors_say_what_fits(overrides: dict, message: str) -> None:
    """A weight in the place of a rejection, and a mean of nothing, are refused with what came."""
    with pytest.raises(ValueError, match=message):
        preset("grpo", **overrides)
