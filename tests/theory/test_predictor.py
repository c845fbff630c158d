"""The predictor: its losses are the paper's, a linear drift is learnt exactly, and folding it is adding its bias."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from theory.routing.features import RouterFeatures
from theory.routing.gates import GATES, select
from theory.routing.predictor import (
    LOSSES,
    PredictorSettings,
    PredictorTrainer,
    delta_loss,
    fold,
    kl_loss,
    learns,
    predictive_logits,
)
from theory.routing.record import offsets_of
from theory.streams import stream

D, E, K = 4, 6, 2
LAYERS = (1, 3)
seeds = st.integers(0, 9999)


def draw_features(seed: int, F: int = 5) -> RouterFeatures:
    """Random (h_old, p_old) on F rows of one response."""
    generator = stream(seed, "features")
    return RouterFeatures(
        rows=torch.arange(F),
        offsets=offsets_of([F]),
        hidden=torch.randn(F, len(LAYERS), D, generator=generator),
        logits=torch.randn(F, len(LAYERS), E, generator=generator),
        layer_numbers=LAYERS,
    )


def draw_pi(seed: int, F: int = 5) -> Tensor:
    """Random router logits of pi on the same rows."""
    return torch.randn(F, len(LAYERS), E, generator=stream(seed, "pi"))


def draw_predictor(seed: int, size: float = 0.5) -> dict[int, Tensor]:
    """A random W_p per layer."""
    generator = stream(seed, "predictor")
    return {n: size * torch.randn(D, E, generator=generator) for n in LAYERS}


def drifted(features: RouterFeatures, drift: dict[int, Tensor]) -> Tensor:
    """pi's logits where every router moved by `drift` under unchanged inputs: p_old + h drift."""
    return features.plus_bias(drift).logits


def rows(features: RouterFeatures, chosen: list[int]) -> RouterFeatures:
    """The features on these rows of one response alone."""
    assert features.hidden is not None
    offsets = offsets_of([len(chosen)])
    return RouterFeatures(
        features.rows[chosen], offsets, features.hidden[chosen], features.logits[chosen], features.layer_numbers
    )


@given(seed=seeds)
def test_losses_are_equation_8_and_appendix_g(seed: int) -> None:
    """Sum over layers of the mean over rows of KL(target || guess), term by term."""
    features, pi, predictor = draw_features(seed), draw_pi(seed), draw_predictor(seed)
    expected = {"kl": 0.0, "delta": 0.0}
    for i, number in enumerate(LAYERS):
        assert features.hidden is not None
        for f in range(5):
            old, bias = features.logits[f, i], features.hidden[f, i] @ predictor[number]
            for name, target, guess in (("kl", pi[f, i], old + bias), ("delta", pi[f, i] - old, bias)):
                p, q = target.softmax(0), guess.softmax(0)
                expected[name] += float((p * (p / q).log()).sum()) / 5
    for name, loss in LOSSES.items():
        # Sixty terms of order one.
        assert loss(pi, features, predictor).item() == pytest.approx(expected[name], rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@given(seed=seeds, share=st.floats(0, 1))
def test_losses_are_convex_and_not_negative(name: str, seed: int, share: float) -> None:
    """On the segment between two predictors the loss lies below the chord, and is at least 0 everywhere."""
    features, pi = draw_features(seed), draw_pi(seed)
    a, b = draw_predictor(seed, 2.0), draw_predictor(seed + 1, 2.0)
    between = {n: share * a[n] + (1 - share) * b[n] for n in LAYERS}
    left, middle, right = (LOSSES[name](pi, features, w).item() for w in (a, between, b))
    assert middle <= share * left + (1 - share) * right + 1e-12  # rounding of three sums of order one
    assert min(left, middle, right) >= 0


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_reach_the_predictor_alone(name: str) -> None:
    """The losses differentiate correctly in W_p, and the teacher and the features receive nothing."""
    features, pi = draw_features(0), draw_pi(0).requires_grad_()
    assert features.hidden is not None
    features.hidden.requires_grad_()
    features.logits.requires_grad_()
    predictor = {n: w.requires_grad_() for n, w in draw_predictor(0).items()}
    weights = list(predictor.values())
    loss = LOSSES[name](pi, features, predictor)
    assert all(g is None for g in torch.autograd.grad(loss, [pi, features.hidden, features.logits], allow_unused=True,
                                                      retain_graph=True))  # fmt: skip
    assert torch.autograd.gradcheck(
        lambda *w: LOSSES[name](pi, features, dict(zip(LAYERS, w, strict=True))), tuple(weights)
    )


@given(seed=seeds)
def test_the_gradient_of_the_kl_loss_is_its_closed_form(seed: int) -> None:
    """d L / d W_p = mean_t h (rho_hat - rho): the cross-entropy's gradient, as rho is held."""
    features, pi = draw_features(seed), draw_pi(seed)
    predictor = {n: w.requires_grad_() for n, w in draw_predictor(seed).items()}
    grads = torch.autograd.grad(kl_loss(pi, features, predictor), list(predictor.values()))
    for i, (number, grad) in enumerate(zip(LAYERS, grads, strict=True)):
        assert features.hidden is not None
        hidden = features.hidden[:, i]
        gap = (features.logits[:, i] + hidden @ predictor[number]).softmax(1) - pi[:, i].softmax(1)
        torch.testing.assert_close(grad, hidden.T @ gap / 5, rtol=1e-10, atol=1e-13)  # float64 sums of five terms


@pytest.mark.parametrize("name", LOSSES)
def test_a_linear_drift_is_recovered(name: str) -> None:
    """Where p_pi = p_old + h drift, the minimum is 0 at W_p = drift up to a shift per input, with top-k agreement 1."""
    features, drift = draw_features(1, F=64), draw_predictor(1)
    pi = drifted(features, drift)
    trainer = PredictorTrainer(LAYERS, D, E, PredictorSettings(loss=name), dtype=torch.float64)
    for step in range(600):
        metrics = trainer.step(features, pi, lr=0.05 * 0.99**step)
    assert metrics["predictor/loss"] < 1e-10
    for number, weight in trainer.weights().items():
        # A column shared by all experts shifts every logit alike, which a softmax cannot see.
        gap = (weight - drift[number]) - (weight - drift[number]).mean(dim=1, keepdim=True)
        assert gap.abs().max() < 1e-4  # the loss is quadratic there: sqrt(1e-10) times a condition number of ten
    predicted = features.plus_bias(trainer.weights()).logits
    for i in range(len(LAYERS)):
        gate = GATES["qwen3"]
        assert torch.equal(select(predicted[:, i], K, gate), select(pi[:, i], K, gate))


@pytest.mark.parametrize("name", LOSSES)
@given(seed=seeds, size=st.integers(1, 5))
def test_sub_sampling_is_unbiased(name: str, seed: int, size: int) -> None:
    """The mean loss over all subsets of T_c rows is the loss over all rows (Pr2 App. E.1)."""
    features, pi, predictor = draw_features(seed), draw_pi(seed), draw_predictor(seed)
    losses = [
        LOSSES[name](pi[list(chosen)], rows(features, list(chosen)), predictor)
        for chosen in combinations(range(5), size)
    ]
    full = LOSSES[name](pi, features, predictor).item()
    assert torch.stack(losses).mean().item() == pytest.approx(full, rel=1e-12)  # sums of at most ten losses


@given(
    p_logits=st.lists(st.floats(-4, 4), min_size=E, max_size=E),
    direction=st.lists(st.floats(-1, 1), min_size=E, max_size=E),
    scale=st.floats(0, 1),
    k=st.integers(1, E - 1),
)
def test_a_loss_below_half_the_squared_margin_gives_the_same_experts(
    p_logits: list[float], direction: list[float], scale: float, k: int
) -> None:
    """KL(p || p_hat) < margin^2 / 2 implies equal top-k, and always p(S*) - p(S_hat) <= sqrt(2 KL) (Pr2 Lemma B.2)."""
    logits = torch.tensor(p_logits)
    guess = logits + scale * torch.tensor(direction)
    p, p_hat = logits.softmax(0), guess.softmax(0)
    kl = max(float((p * (p / p_hat).log()).sum()), 0.0)
    best, chosen = p.topk(k).indices, p_hat.topk(k).indices
    assert (
        float(p[best].sum() - p[chosen].sum()) <= (2 * kl) ** 0.5 + 1e-9
    )  # kl itself is off by 1e-16, its root by 1e-8
    top = p.sort(descending=True).values
    margin = float(top[k - 1] - top[k])
    assume(margin > 0)
    if kl < margin**2 / 2:
        assert set(best.tolist()) == set(chosen.tolist())


@given(seed=seeds)
def test_losses_do_not_know_the_names_of_experts(seed: int) -> None:
    """Relabelling the experts of logits, features and predictor alike changes no loss."""
    features, pi, predictor = draw_features(seed), draw_pi(seed), draw_predictor(seed)
    order = torch.randperm(E, generator=stream(seed, "relabel"))
    moved = RouterFeatures(features.rows, features.offsets, features.hidden, features.logits[..., order], LAYERS)
    for loss in (kl_loss, delta_loss):
        renamed = loss(pi[..., order], moved, {n: w[:, order] for n, w in predictor.items()})
        # Softmax sums in another order.
        assert renamed.item() == pytest.approx(loss(pi, features, predictor).item(), rel=1e-12)


@given(seed=seeds)
def test_folding_is_adding_the_bias(seed: int) -> None:
    """A gate of W + W_p^T gives the logits p + h W_p, and the same experts; every other tensor passes untouched."""
    generator = stream(seed, "fold")
    predictor = draw_predictor(seed)
    hidden = torch.randn(20, D, generator=generator)
    named = {f"model.layers.{i}.mlp.gate.weight": torch.randn(E, D, generator=generator) for i in range(4)}
    named["model.embed_tokens.weight"] = torch.randn(3, D, generator=generator)
    folded = dict(fold(named.items(), predictor))
    assert list(folded) == list(named)
    for name, tensor in named.items():
        number = int(name.split(".")[2]) if "gate" in name else -1
        if number not in predictor:
            assert folded[name] is tensor
            continue
        logits = hidden @ tensor.T
        biased = predictive_logits(logits, hidden, predictor[number])
        # One product of a rounded sum, against a sum of two rounded products: D terms of order one.
        torch.testing.assert_close(hidden @ folded[name].T, biased, rtol=0, atol=1e-13)
        for gate in (GATES["qwen3"], GATES["moonlight"]):
            assert torch.equal(select(hidden @ folded[name].T, K, gate), select(biased, K, gate))


def test_fold_keeps_the_type_of_the_gate_and_finds_every_gate() -> None:
    """The sum is rounded once into the gate's type; a gate of another shape, or absent, is an error."""
    predictor = draw_predictor(0)
    gate = torch.randn(E, D, generator=stream(0, "gate")).to(torch.bfloat16)
    named = {f"layers.{n}.gate": gate for n in LAYERS}
    folded = dict(fold(named.items(), predictor, gate_name="layers.{}.gate"))
    assert torch.equal(folded["layers.1.gate"], (gate.double() + predictor[1].T).to(torch.bfloat16))
    with pytest.raises(ValueError, match=r"got none named \['layers.3.gate'\]"):
        list(fold([("layers.1.gate", gate)], predictor, gate_name="layers.{}.gate"))
    with pytest.raises(ValueError, match=r"layers.1.gate: expected a gate of shape \(6, 4\), got \(4, 6\)"):
        list(fold([("layers.1.gate", gate.T)], predictor, gate_name="layers.{}.gate"))


def test_the_first_mini_step_teaches_nothing() -> None:
    """The predictor learns from the second mini-batch on, as on the first pi is still old (Pr2 Alg. 3)."""
    assert [learns(i) for i in range(4)] == [False, True, True, True]
    features = draw_features(0)
    assert kl_loss(features.logits, features, draw_predictor(0, size=0.0)).item() == 0


def test_training_starts_at_zero_and_scales_the_learning_rate() -> None:
    """W_p = 0 at the start; AdamW's first step moves every entry by lr x multiplier, against its gradient."""
    features, pi = draw_features(0), draw_pi(0)
    trainer = PredictorTrainer(LAYERS, D, E, PredictorSettings(learning_rate_multiplier=100.0), dtype=torch.float64)
    assert all(float(w.abs().max()) == 0 for w in trainer.weights().values())
    zero = {n: w.requires_grad_() for n, w in trainer.weights().items()}
    grads = torch.autograd.grad(kl_loss(pi, features, zero), list(zero.values()))
    metrics = trainer.step(features, pi, lr=1e-5)
    for weight, grad in zip(trainer.weights().values(), grads, strict=True):
        # AdamW's eps of 1e-8 against gradients above 1e-4.
        torch.testing.assert_close(weight, -1e-3 * grad.sign(), rtol=1e-3, atol=0)
    assert metrics["predictor/loss"] == pytest.approx(kl_loss(pi, features, zero).item(), rel=1e-12)
    assert metrics["predictor/weight_norm"] == pytest.approx(1e-3 * (len(LAYERS) * D * E) ** 0.5, rel=1e-3)


def test_ranks_that_reduce_gradients_learn_alike() -> None:
    """Two ranks that average gradients over halves of the rows learn what one learns from all of them."""
    features, pi = draw_features(0, F=6), draw_pi(0, F=6)
    halves = [list(range(3)), list(range(3, 6))]
    alone = PredictorTrainer(LAYERS, D, E, PredictorSettings(), dtype=torch.float64)
    alone.step(features, pi, lr=0.1)
    seen: list[list[Tensor]] = []
    for half in halves:
        PredictorTrainer(LAYERS, D, E, PredictorSettings(), dtype=torch.float64).step(
            rows(features, half), pi[half], lr=0.1, reduce=lambda grads: seen.append([g.clone() for g in grads])
        )

    def average(grads: list[Tensor]) -> None:
        for grad, a, b in zip(grads, *seen, strict=True):
            grad.copy_((a + b) / 2)

    rank = PredictorTrainer(LAYERS, D, E, PredictorSettings(), dtype=torch.float64)
    rank.step(rows(features, halves[0]), pi[halves[0]], lr=0.1, reduce=average)
    for number in LAYERS:
        torch.testing.assert_close(rank.weights()[number], alone.weights()[number], rtol=1e-9, atol=0)  # two means of 3


@pytest.mark.parametrize("num_before", [0, 3])
def test_a_resumed_predictor_goes_on_with_the_same_bits(num_before: int) -> None:
    """Saving after any number of steps and loading into a fresh trainer gives the same later steps, bit for bit."""
    features, pi = draw_features(0), draw_pi(0)
    whole = PredictorTrainer(LAYERS, D, E, PredictorSettings())
    for _ in range(num_before):
        whole.step(features, pi, lr=0.01)
    resumed = PredictorTrainer(LAYERS, D, E, PredictorSettings())
    resumed.step(features, -pi, lr=0.5)  # what it held before does not matter
    resumed.load_state_tensors(whole.state_tensors())
    for _ in range(3):
        whole.step(features, pi, lr=0.01)
        resumed.step(features, pi, lr=0.01)
    mine, theirs = resumed.state_tensors(), whole.state_tensors()
    assert set(mine) == set(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_state_that_does_not_fit_is_an_error() -> None:
    """Missing layers and other shapes are named before anything is changed."""
    trainer = PredictorTrainer(LAYERS, D, E, PredictorSettings())
    state = trainer.state_tensors()
    with pytest.raises(ValueError, match=r"predictor.3.weight.* got \['predictor.1.weight'\]"):
        trainer.load_state_tensors({"predictor.1.weight": state["predictor.1.weight"]})
    with pytest.raises(ValueError, match=r"predictor.3.weight: expected shape \(4, 6\), got \(6, 4\)"):
        trainer.load_state_tensors({**state, "predictor.3.weight": torch.zeros(6, 4)})


def test_losses_refuse_what_they_cannot_compare() -> None:
    """Other rows, layers without a predictor, features without inputs, and no rows at all are errors."""
    features, pi, predictor = draw_features(0), draw_pi(0), draw_predictor(0)
    with pytest.raises(ValueError, match=r"expected logits of shape \(5, 2, 6\), got \(4, 2, 6\)"):
        kl_loss(pi[:4], features, predictor)
    with pytest.raises(ValueError, match=r"predictor for layers \[1, 3\], got \[1\]"):
        kl_loss(pi, features, {1: predictor[1]})
    with pytest.raises(ValueError, match="at least 1 feature row, got 0"):
        kl_loss(pi[:0], rows(features, []), predictor)
    bare = RouterFeatures(features.rows, features.offsets, None, features.logits, LAYERS)
    with pytest.raises(ValueError, match="router's input"):
        kl_loss(pi, bare, predictor)


def test_settings_are_checked() -> None:
    """Each setting out of its range is an error that says what came."""
    with pytest.raises(ValueError, match=r"positive learning_rate_multiplier, got 0\.0"):
        PredictorSettings(learning_rate_multiplier=0.0)
    with pytest.raises(ValueError, match="at least 1 position per response, got 0"):
        PredictorSettings(num_positions=0)
    with pytest.raises(ValueError, match="at least one MoE layer"):
        PredictorTrainer([], D, E, PredictorSettings())
