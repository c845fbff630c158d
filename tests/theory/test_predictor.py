"""The predictor: its losses are the paper's, and its trainer starts at zero, resumes to the bit and refuses misfits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from torch import Tensor

from sandbox.bench.memory import peak_bytes
from tests.theory.predictor_batches import LAYERS, D, E, draw_features, draw_pi, draw_predictor, loss_of, rows, seeds
from theory.routing import predictor as module
from theory.routing.features import RouterFeatures
from theory.routing.predictor import (
    LOSSES,
    PredictorSettings,
    PredictorTrainer,
    fold,
    learns,
    loss_and_gradients,
)
from theory.streams import stream


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
    for name in LOSSES:
        # Sixty terms of order one.
        assert loss_of(pi, features, predictor, name).item() == pytest.approx(expected[name], rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@given(seed=seeds)
def test_the_gradient_written_out_is_that_of_the_loss(name: Literal["kl", "delta"], seed: int) -> None:
    """The gradient is what differentiating the loss gives; on the first step already."""
    features, pi = draw_features(seed), draw_pi(seed)
    for size in (0.5, 0.0):
        learnt = {n: w.requires_grad_() for n, w in draw_predictor(seed, size).items()}
        loss, gradient_LDE = loss_and_gradients(name, pi, features, learnt)
        expected = torch.stack(torch.autograd.grad(loss, list(learnt.values())))
        # Sums of five float64 terms of order one.
        torch.testing.assert_close(gradient_LDE.detach(), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [1e-4, 1e-5, 1e-6])
def test_the_loss_of_two_close_routers_keeps_its_digits(name: Literal["kl", "delta"], size: float) -> None:
    """In float32 it is that of the same numbers in float64: the papers' rates move logits by some 1e-5."""
    wide, predictor = draw_features(0, F=64), {n: torch.zeros(D, E, dtype=torch.float32) for n in LAYERS}
    assert wide.hidden is not None
    features = replace(wide, hidden=wide.hidden.float(), logits=wide.logits.float())
    pi = features.logits + size * draw_pi(0, F=64).float()
    found = loss_of(pi, features, predictor, name).item()
    of_same = replace(features, hidden=wide.hidden.double(), logits=features.logits.double())
    expected = loss_of(pi.double(), of_same, {n: w.double() for n, w in predictor.items()}, name).item()
    assert found == pytest.approx(expected, rel=1e-6, abs=0) and found > 0
    metrics = PredictorTrainer(LAYERS, D, E, PredictorSettings(loss=name)).step(features, pi, lr=1e-6)
    assert metrics["predictor/loss"] == found


def test_fold_keeps_the_type_of_the_gate_and_finds_every_gate() -> None:
    """The sum is rounded once into the gate's type; a gate of another shape, or absent, is an error."""
    predictor = draw_predictor(0)
    gate = torch.randn(E, D, generator=stream(0, "gate")).to(torch.bfloat16)
    first, second = gates = [f"layer {n}" for n in LAYERS]
    named = dict(zip(LAYERS, gates, strict=True))
    folded = dict(fold([(first, gate), (second, gate)], predictor, named))
    assert torch.equal(folded[first], (gate.double() + predictor[1].T).to(torch.bfloat16))
    with pytest.raises(ValueError, match=rf"got none named \['{second}'\]"):
        list(fold([(first, gate)], predictor, named))
    with pytest.raises(ValueError, match=rf"{first}: expected a gate of shape \(6, 4\), got \(4, 6\)"):
        list(fold([(first, gate.T)], predictor, named))


def test_the_first_mini_step_teaches_nothing() -> None:
    """The predictor learns from the second mini-batch on, as on the first pi is still old (Pr2 Alg. 3)."""
    assert [learns(i) for i in range(4)] == [False, True, True, True]
    features = draw_features(0)
    assert loss_of(features.logits, features, draw_predictor(0, size=0.0)).item() == 0


def test_training_starts_at_zero_and_scales_the_learning_rate() -> None:
    """W_p = 0 at the start; AdamW's first step moves every entry by lr x multiplier, against its gradient."""
    features, pi = draw_features(0), draw_pi(0)
    trainer = PredictorTrainer(LAYERS, D, E, PredictorSettings(learning_rate_multiplier=100.0), dtype=torch.float64)
    assert all(float(w.abs().max()) == 0 for w in trainer.weights().values())
    zero = {n: w.requires_grad_() for n, w in trainer.weights().items()}
    grads = torch.autograd.grad(loss_of(pi, features, zero), list(zero.values()))
    metrics = trainer.step(features, pi, lr=1e-5)
    for weight, grad in zip(trainer.weights().values(), grads, strict=True):
        # AdamW's eps of 1e-8 against gradients above 1e-4.
        torch.testing.assert_close(weight, -1e-3 * grad.sign(), rtol=1e-3, atol=0)
    assert metrics["predictor/loss"] == pytest.approx(loss_of(pi, features, zero).item(), rel=1e-12)
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


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_in_blocks_is_a_step(loss: Any, is_weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of three of seven rows, the last of one, give the loss and the W_p of all rows at once."""
    features, pi = draw_features(0, F=7), draw_pi(0, F=7)
    weight_F = torch.rand(7, generator=stream(0, "weights"), dtype=torch.float64) if is_weighted else None
    whole, blocks = (PredictorTrainer(LAYERS, D, E, PredictorSettings(loss=loss), dtype=torch.float64) for _ in "ab")
    sizes = []
    measured = module.loss_and_gradients
    monkeypatch.setattr(module, "loss_and_gradients", lambda *given: sizes.append(len(given[1])) or measured(*given))
    of_whole = [whole.step(features, pi, 0.1, weight_F=weight_F) for _ in range(2)]
    monkeypatch.setattr(module, "BLOCK_BYTES", 3 * len(LAYERS) * D * 8 + 1)
    of_blocks = [blocks.step(features, pi, 0.1, weight_F=weight_F) for _ in range(2)]
    assert sizes == [7, 7, 3, 3, 1, 3, 3, 1]
    for one, other in zip(of_blocks, of_whole, strict=True):
        assert one == pytest.approx(other, rel=1e-12)  # float64 sums of seven rows in another order
    for number in LAYERS:
        torch.testing.assert_close(blocks.weights()[number], whole.weights()[number], rtol=1e-9, atol=0)
    with pytest.raises(ValueError, match=r"expected logits of shape \(7, 2, 6\), got \(6, 2, 6\)"):
        blocks.step(features, pi[:6], 0.1)


def test_a_steps_memory_is_that_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16-bit inputs a step holds a copy in float32; in sixteen blocks its peak is an eighth or less."""
    wide, pi = draw_features(0, F=4096), draw_pi(0, F=4096).bfloat16()
    assert wide.hidden is not None
    features = replace(wide, hidden=wide.hidden.bfloat16(), logits=wide.logits.bfloat16())

    def peak() -> int:
        trainer = PredictorTrainer(LAYERS, D, E, PredictorSettings())
        return peak_bytes(lambda: trainer.step(features, pi, 0.1))

    whole = peak()
    monkeypatch.setattr(module, "BLOCK_BYTES", 4096 // 16 * len(LAYERS) * D * 4)
    assert 0 < peak() <= whole / 8


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
        loss_of(pi[:4], features, predictor)
    with pytest.raises(ValueError, match=r"predictor for layers \[1, 3\], got \[1\]"):
        loss_of(pi, features, {1: predictor[1]})
    with pytest.raises(ValueError, match="at least 1 feature row, got 0"):
        loss_of(pi[:0], rows(features, []), predictor)
    bare = RouterFeatures(features.rows, features.offsets, None, features.logits, LAYERS)
    with pytest.raises(ValueError, match="router's input"):
        loss_of(pi, bare, predictor)


def test_settings_are_checked() -> None:
    """Each setting out of its range is an error that says what came."""
    with pytest.raises(ValueError, match=r"learning_rate_multiplier: expected learning_rate_multiplier > 0, got 0\.0"):
        PredictorSettings(learning_rate_multiplier=0.0)
    with pytest.raises(ValueError, match="num_positions: expected num_positions >= 1, got 0"):
        PredictorSettings(num_positions=0)
    with pytest.raises(ValueError, match="at least one MoE layer"):
        PredictorTrainer([], D, E, PredictorSettings())
