"""Laws of the predictor: a convex loss that reaches nothing else, a linear drift learnt exactly, folding, sampling.

That a zero predictor is no predictor (Pr2 is R2 and Pr3 is R3, bit for bit) stands in tests/theory/test_replay.py for
one pass and in tests/sandbox/training/test_predictive_replay.py for whole steps. Paper: Pr2 (arXiv 2606.00395) sec. 4,
App. B, E and G.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.theory.predictor_batches import (
    LAYERS,
    D,
    E,
    K,
    draw_features,
    draw_pi,
    draw_predictor,
    drifted,
    loss_of,
    rows,
    seeds,
)
from theory.bounds.topk import margin, route_flips, swap_cost
from theory.routing.features import RouterFeatures, draw_rows
from theory.routing.gates import GATES, select, weigh
from theory.routing.packed_rows import offsets_of
from theory.routing.predictor import LOSSES, PredictorSettings, PredictorTrainer, fold, predictive_logits
from theory.streams import stream

# ---- the losses as functions of W_p ----------------------------------------------------------------------------------


def guess(name: str, features: RouterFeatures, predictor: dict[int, Tensor], i: int) -> Tensor:
    """The distribution that the loss moves, at layer i: softmax of p_old + h W_p (kl), or of h W_p (delta)."""
    assert features.hidden is not None
    bias = features.hidden[:, i] @ predictor[LAYERS[i]]
    return (bias + features.logits[:, i] if name == "kl" else bias).softmax(1)


@pytest.mark.parametrize("name", LOSSES)
@given(seed=seeds)
def test_the_hessian_is_its_closed_form_and_has_no_negative_eigenvalue(name: Literal["kl", "delta"], seed: int) -> None:
    """H = mean_t (h h^T) x (diag(g) - g g^T), g the guess: a mean of products of positive semi-definite matrices."""
    features, pi, predictor = draw_features(seed), draw_pi(seed), draw_predictor(seed)
    weights = tuple(predictor.values())
    blocks = torch.autograd.functional.hessian(
        lambda *w: loss_of(pi, features, dict(zip(LAYERS, w, strict=True)), name), weights
    )
    assert features.hidden is not None
    for i, j in product(range(len(LAYERS)), repeat=2):
        if i != j:
            assert not blocks[i][j].any()  # a layer's loss knows its own predictor alone
            continue
        h, g = features.hidden[:, i], guess(name, features, predictor, i)
        spread = torch.diag_embed(g) - g[:, :, None] * g[:, None, :]
        expected = torch.einsum("fa,fb,fed->aebd", h, h, spread) / len(h)
        torch.testing.assert_close(blocks[i][j], expected, rtol=1e-9, atol=1e-12)  # float64 sums of five terms
        eigenvalues = torch.linalg.eigvalsh(blocks[i][j].reshape(D * E, D * E))
        assert float(eigenvalues[0]) >= -1e-12
        # A column shared by all experts moves no softmax: D flat directions at least.
        assert int((eigenvalues < 1e-10).sum()) >= D


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_reach_the_predictor_alone(name: Literal["kl", "delta"]) -> None:
    """The teacher and the features receive nothing."""
    features, pi = draw_features(0), draw_pi(0).requires_grad_()
    assert features.hidden is not None
    features.hidden.requires_grad_()
    features.logits.requires_grad_()
    loss = loss_of(pi, features, {n: w.requires_grad_() for n, w in draw_predictor(0).items()}, name)
    others = [pi, features.hidden, features.logits]
    assert all(g is None for g in torch.autograd.grad(loss, others, allow_unused=True))


# ---- what it learns, and what that buys ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_a_linear_drift_is_recovered(name: Literal["kl", "delta"]) -> None:
    """Where p_pi = p_old + h dW the loss goes to 0 and h W_p to h dW, on inputs never seen too, with agreement 1."""
    features, drift = draw_features(1, F=64), draw_predictor(1)
    unseen = draw_features(2, F=500)
    pi, pi_unseen = drifted(features, drift), drifted(unseen, drift)
    trainer = PredictorTrainer(LAYERS, D, E, PredictorSettings(1.0, name), dtype=torch.float64)
    agreement, losses = [], []
    for step in range(600):
        losses.append(trainer.step(features, pi, lr=0.05 * 0.99**step)["predictor/loss"])
        if step in (0, 30, 599):
            predicted = unseen.plus_bias(trainer.weights()).logits.flatten(0, 1)
            chosen = select(predicted, K, GATES["qwen3"])
            same = (chosen == select(pi_unseen.flatten(0, 1), K, GATES["qwen3"])).all(1)
            agreement.append(float(same.double().mean()))
    assert losses[0] > 1e3 * losses[100] > 1e6 * losses[-1]
    assert losses[-1] < 1e-10
    # After one step, after 30 and in the limit.
    assert agreement[0] < 0.5 < agreement[1] < agreement[2] == 1
    for i, number in enumerate(LAYERS):
        assert unseen.hidden is not None
        gap = unseen.hidden[:, i] @ (trainer.weights()[number] - drift[number])
        # A shift of all logits alike is invisible to a softmax. The loss is quadratic in the rest: sqrt(1e-10) x 10.
        assert (gap - gap.mean(dim=1, keepdim=True)).abs().max() < 1e-4


@given(seed=seeds, size=st.sampled_from([0.3, 0.03, 0.003]), k=st.integers(1, E))
def test_a_small_loss_certifies_the_experts(seed: int, size: float, k: int) -> None:
    """A predictor's loss below margin^2 / 2, over F rows below 1/F of it, gives the live top-k on every row and layer.

    So does a loss below the least swap cost, which is never smaller; and no more routes differ than `route_flips` says.
    """
    features = draw_features(seed)
    pi = features.logits + size * draw_pi(seed)
    predictor = draw_predictor(seed, size=size)
    predicted, loss = features.plus_bias(predictor).logits, loss_of(pi, features, predictor).item()
    gate = GATES["olmoe"]
    same = (select(pi.flatten(0, 1), k, gate) == select(predicted.flatten(0, 1), k, gate)).all(1).view(5, len(LAYERS))
    for certificate in (margin(pi, k).square() / 2, swap_cost(pi, k)):
        assert bool(same.all()) or loss >= float(certificate.min()) / 5 - 1e-15  # rounding of the loss
        # Row by row, from the row's own loss.
        for f in range(5):
            own = loss_of(pi[f : f + 1], rows(features, [f]), predictor).item()
            assert bool(same[f].all()) or own >= float(certificate[f].min()) - 1e-15
    flips = route_flips(pi, predicted, k, threshold=1e-3)
    assert float(flips.lhs) == pytest.approx(float((~same.all(1)).double().mean()))
    assert bool(flips.holds(1e-12))


# ---- names of experts, and the gate's weight -------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@given(seed=seeds)
def test_the_predictor_does_not_know_the_names_of_experts(name: Literal["kl", "delta"], seed: int) -> None:
    """Relabelling experts everywhere changes no loss, relabels what a step learns, and relabels the predicted route."""
    features, pi, predictor = draw_features(seed), draw_pi(seed), draw_predictor(seed)
    order = torch.randperm(E, generator=stream(seed, "relabel"))
    moved = RouterFeatures(features.rows, features.offsets, features.hidden, features.logits[..., order], LAYERS)
    renamed = {n: w[:, order] for n, w in predictor.items()}
    # Softmax sums in another order.
    expected = loss_of(pi, features, predictor, name).item()
    assert loss_of(pi[..., order], moved, renamed, name).item() == pytest.approx(expected, rel=1e-12)
    learnt = []
    for x, y in ((features, pi), (moved, pi[..., order])):
        trainer = PredictorTrainer(LAYERS, D, E, PredictorSettings(1.0, name), dtype=torch.float64)
        for _ in range(3):
            trainer.step(x, y, lr=0.1)
        learnt.append(trainer.weights())
    for n in LAYERS:
        torch.testing.assert_close(learnt[1][n], learnt[0][n][:, order], rtol=1e-6, atol=1e-9)  # AdamW's 1 / sqrt(v)
    for gate in (GATES["qwen3"], GATES["moonlight"]):
        here, there = (x.plus_bias(w).logits[:, 0] for x, w in ((features, predictor), (moved, renamed)))
        chosen, chosen_there = select(here, K, gate), select(there, K, gate)
        # order[new] = old; the route comes back ascending by its own names.
        assert torch.equal(order[chosen_there].sort(dim=1).values, chosen)
        dense, dense_there = (
            torch.zeros_like(x).scatter(1, e, weigh(x, e, gate)) for x, e in ((here, chosen), (there, chosen_there))
        )
        torch.testing.assert_close(dense_there, dense[:, order], rtol=1e-12, atol=0)


@given(seed=seeds)
def test_folding_is_adding_the_bias(seed: int) -> None:
    """A gate of W + W_p^T gives p + h W_p, the same experts and the same gates; other tensors pass untouched."""
    generator = stream(seed, "fold")
    predictor = draw_predictor(seed)
    hidden = torch.randn(20, D, generator=generator)
    gates = {i: f"model.layers.{i}.block.gate.weight" for i in range(4)}
    named = {gates[i]: torch.randn(E, D, generator=generator) for i in range(4)}
    named["model.embed_tokens.weight"] = torch.randn(3, D, generator=generator)
    folded = dict(fold(named.items(), predictor, gates))
    assert list(folded) == list(named)
    for name, tensor in named.items():
        number = int(name.split(".")[2]) if "gate" in name else -1
        if number not in predictor:
            assert folded[name] is tensor
            continue
        biased, logits = predictive_logits(hidden @ tensor.T, hidden, predictor[number]), hidden @ folded[name].T
        # One product of a rounded sum, against a sum of two rounded products: D terms of order one.
        torch.testing.assert_close(logits, biased, rtol=0, atol=1e-13)
        for gate in (GATES["qwen3"], GATES["olmoe"], GATES["moonlight"]):
            experts = select(biased, K, gate)
            assert torch.equal(select(logits, K, gate), experts)
            torch.testing.assert_close(weigh(logits, experts, gate), weigh(biased, experts, gate), rtol=1e-12, atol=0)


# ---- sub-sampled rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [(3, 3), (5, 2), (4, 1)])
@given(seed=seeds)
def test_sub_sampling_ragged_responses_weighs_them_by_the_rows_they_give(num_rows: tuple[int, int], seed: int) -> None:
    """Over every draw of T_c = 2 rows per response, the mean loss weighs response b by min(T_c, its rows) (App. E.1).

    So it is the full loss, unbiased, where responses have equally many rows, and another mean where they do not.
    """
    F = sum(num_rows)
    features, pi, predictor = draw_features(seed, F), draw_pi(seed, F), draw_predictor(seed)
    spans = [range(num_rows[0]), range(num_rows[0], F)]
    draws = [combinations(span, min(2, len(span))) for span in spans]
    losses = [
        loss_of(pi[[*a, *b]], packed(features, [list(a), list(b)]), predictor) for a, b in product(*draws)
    ]  # each pair is equally likely
    own = [loss_of(pi[list(span)], rows(features, list(span)), predictor) for span in spans]
    given_rows = [min(2, n) for n in num_rows]
    weighed = sum(m * loss for m, loss in zip(given_rows, own, strict=True)) / sum(given_rows)
    mean, full = torch.stack(losses).mean().item(), loss_of(pi, features, predictor).item()
    assert mean == pytest.approx(float(weighed), rel=1e-12)
    assert (mean == pytest.approx(full, rel=1e-9)) == (num_rows[0] == num_rows[1])


def packed(features: RouterFeatures, chosen: list[list[int]]) -> RouterFeatures:
    """The features on these rows, as two responses."""
    assert features.hidden is not None
    flat = [f for part in chosen for f in part]
    offsets = offsets_of([len(part) for part in chosen])
    return RouterFeatures(features.rows[flat], offsets, features.hidden[flat], features.logits[flat], LAYERS)


def test_rows_are_drawn_uniformly_along_each_response() -> None:
    """Every pair of subsets of two responses is equally likely: chi-square of 10 x 6 cells over 1,800 draws."""
    generator = stream(0, "chi-square")
    cells = product(combinations(range(2, 7), 2), combinations(range(4), 2))
    counts: dict[tuple[tuple[int, ...], ...], int] = dict.fromkeys(cells, 0)
    num_draws = 1800
    for _ in range(num_draws):
        first, second = draw_rows([7, 4], [2, 0], 2, generator)
        counts[tuple(first.tolist()), tuple(second.tolist())] += 1
    expected = num_draws / len(counts)
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    # 59 degrees of freedom: between the 0.1% and the 99.9% quantile; the stream is fixed.
    assert len(counts) == 60
    assert 30.3 < chi_square < 98.3
