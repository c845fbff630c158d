"""Laws of the updates of one Megatron rank: gradients, splits, recomputation, decay, precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scaled.plan import parameters
from tests.scaled.pretended_gpu import PretendedGpu
from tests.scaled.rank_world import (
    OneRank,
    algorithm,
    altered,
    batch,
    farthest,
    gradient_bytes,
    minibatches,
    one_minibatch,
    optimizer_tensors,
    sandbox_engine,
    sandbox_gradients,
)
from theory.contracts import MiniBatch, Rollouts
from theory.objectives import preset
from theory.routing.passes import RoutingPlan

LOGP, WEIGHTS = 1e-5, 5e-6


def gradients_are_the_objectives(folder: Path) -> None:
    """[17] Under replay `gradients` is that of minus the objective under Hugging Face names, as the sandbox's autograd
    has it, routers included.
    """
    recipe = algorithm("R3", optimizer={"max_grad_norm": 1e9})
    ours, theirs = OneRank(folder, recipe), sandbox_engine(folder, recipe)
    rollouts = batch()
    routing = altered(rollouts)
    minibatch, routing = minibatches(rollouts, theirs.score(rollouts, routing), routing)[0]
    with pytest.raises(ValueError, match="at least 1 update"):
        next(ours.gradients())
    ours.update(minibatch, recipe.objective, routing)
    theirs.update(minibatch, recipe.objective, routing)
    assert farthest(dict(ours.gradients()), sandbox_gradients(theirs)) < 1e-5
    clipped = OneRank(folder, algorithm("R3", optimizer={"max_grad_norm": 0.1}))
    clipped.update(minibatch, recipe.objective, routing)
    assert clipped.rank.optimizer.clipping < 0.1
    assert farthest(dict(clipped.gradients()), dict(ours.gradients())) < 1e-6


def sums_do_not_depend_on_micro_batches(folder: Path) -> None:
    """A mini-batch gives one objective, gradient norm and step, whatever its split, empty fillings included."""
    rollouts = batch(7)
    routing = altered(rollouts)
    results = []
    sizes = [{"micro_batch_size": size} for size in (1, 2, 7)]
    for size in (*sizes, *({"max_tokens_per_micro_batch": budget} for budget in (12, 25))):
        engine = OneRank(folder, algorithm("R3"), **size)
        old = engine.score(rollouts, routing)
        minibatch = one_minibatch(rollouts, old.logp_BT + 0.1)
        for objective in ("grpo", "dr_grpo", "cispo", "gspo"):
            stats = engine.update(minibatch, preset(objective), routing)
            results.append((size, objective, stats.metrics, stats.logp_pi_BT))
    for index, (size, objective, metrics, logp_BT) in enumerate(results):
        _, _, expected, logp_expected_BT = results[index % 4]
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=2e-5, abs=1e-5), (size, objective, name)
        assert (logp_BT - logp_expected_BT).abs().max() < 2 * LOGP, (size, objective)


def a_token_budget_that_keeps_the_order_changes_no_bit(folder: Path) -> None:
    """Responses of one length: as many as the budget holds, in the batch's order, are micro-batches of that size."""
    rollouts = batch(6)
    length = min(len(r.tokens) for r in rollouts.responses)
    equal = [
        replace(
            r,
            prompt=replace(r.prompt, tokens=r.prompt.tokens[:1]),
            tokens=r.tokens[:length],
            logp_mu=r.logp_mu[:length],
            is_response=r.is_response[:length],
        )
        for r in rollouts.responses
    ]
    rollouts, results = Rollouts(tuple(equal)), []
    routing = altered(rollouts)
    for size in ({"micro_batch_size": 2}, {"max_tokens_per_micro_batch": 2 * length}):
        engine = OneRank(folder, algorithm("R3"), **size)
        minibatch = one_minibatch(rollouts, engine.score(rollouts, routing).logp_BT)
        stats = engine.update(minibatch, preset("minirl"), routing)
        results.append({"logp": minibatch.logp_old_BT, "pi": stats.logp_pi_BT, **dict(engine.gradients())})
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name


def gradients_that_are_given_up_come_back(folder: Path) -> None:
    """Between updates offloaded gradients take no memory, 4 bytes a weight less by plan's count; no bit changes."""
    rollouts, results = batch(), []
    routing = altered(rollouts)
    for offload in (None, ("gradients",)):
        engine = OneRank(folder, algorithm("R3"), offload=offload, distributed_optimizer=True)
        optimizer = engine.rank.optimizer
        held = [gradient_bytes(engine.rank)]
        for _ in range(2):
            minibatch = one_minibatch(rollouts, engine.score(rollouts, routing).logp_BT)
            engine.rank.give_way()
            held.append(gradient_bytes(engine.rank))
            minibatch = replace(minibatch, logp_old_BT=engine.score(rollouts, routing).logp_BT)
            engine.update(minibatch, preset("minirl"), routing)
            optimizer.take_back()  # changes nothing where nothing was given up
            held.append(gradient_bytes(engine.rank))
        results.append((held, dict(engine.named_tensors())))
    (whole, kept), (freed, given) = results
    counted = 4 * parameters.rank_parameters(engine.rank.shape, engine.rank.training).total
    assert whole == [whole[0]] * 5 and whole[0] == pytest.approx(counted, rel=0.01)
    assert freed == [whole[0], 0, whole[0], 0, whole[0]]
    for name, value in kept.items():
        assert torch.equal(given[name], value), name


def optimizer_states_go_to_the_host_and_back(folder: Path) -> None:
    """Given up, AdamW's moments and fp32 weights lie on the host, as many bytes as plan counts, and the model's weights
    stay; taken back, all are on the GPU, the same bits. Updates have the bits of those that gave nothing up.
    """
    rollouts = batch()
    routing = altered(rollouts)
    for distributed in (False, True):
        results = []
        for offload in (None, ("optimizer",), ("gradients", "optimizer")):
            fields = {"precision": "bf16", "distributed_optimizer": distributed, "offload": offload}
            engine, gpu = OneRank(folder, algorithm("R3"), **fields), PretendedGpu()
            counted = parameters.most_optimizer_bytes(engine.rank.shape, engine.rank.training)
            for update in range(3):
                before = {name: tensor.clone() for name, tensor in optimizer_tensors(engine.rank).items()}
                with gpu.present():
                    engine.rank.give_way()
                away = {name: t for name, t in optimizer_tensors(engine.rank).items() if not gpu.has(t)}
                assert away.keys() == (before.keys() if "optimizer" in (offload or ()) else set())
                # There are no moments before the first update.
                if away and update > 0:
                    assert sum(t.nbytes for t in away.values()) == pytest.approx(counted, rel=0.01)
                assert all(gpu.has(p) for chunk in engine.rank.policy.chunks for p in chunk.parameters())
                logp_BT = engine.score(rollouts, routing).logp_BT
                with gpu.present():
                    engine.rank.optimizer.take_back()
                back = optimizer_tensors(engine.rank)
                assert all(gpu.has(t) and torch.equal(t, before[name]) for name, t in back.items())
                engine.update(one_minibatch(rollouts, logp_BT), preset("minirl"), routing)
            results.append(dict(engine.named_tensors()) | optimizer_tensors(engine.rank))
        for given in results[1:]:
            assert all(torch.equal(given[name], tensor) for name, tensor in results[0].items()), distributed


def recomputation_changes_no_bit(folder: Path) -> None:
    """With routes replayed that no router would choose, recomputation gives the same gradients bit for bit."""
    rollouts = batch()
    gradients = {}
    for recompute in ("none", "selective", "full"):
        engine = OneRank(folder, algorithm("R3"), recompute=recompute)
        routing = altered(rollouts)
        minibatch = one_minibatch(rollouts, engine.score(rollouts, routing).logp_BT)
        engine.update(minibatch, preset("minirl"), routing)
        gradients[recompute] = dict(engine.gradients())
        assert [replay.num_waiting for replay in engine.rank.policy.replays] == [0]
    for recompute in ("selective", "full"):
        for name, gradient in gradients["none"].items():
            assert torch.equal(gradients[recompute][name], gradient), (recompute, name)


def reference_stays(folder: Path) -> None:
    """log pi_ref is that of the folder's weights, naturally routed, after any updates; a KL penalty uses it."""
    recipe = algorithm("none")
    ours, theirs = OneRank(folder, recipe, keep_reference=True), sandbox_engine(folder, recipe, keep_reference=True)
    rollouts = batch()
    natural = RoutingPlan("natural")
    before = ours.score_reference(rollouts)
    assert torch.equal(before, ours.score(rollouts, natural).logp_BT)
    objective = replace(preset("grpo"), kl_coefficient=0.1)
    minibatch = one_minibatch(rollouts, before, logp_ref_BT=before - 0.3)
    a, b = (engine.update(minibatch, objective, natural) for engine in (ours, theirs))
    assert a.metrics["actor/kl_penalty"] == pytest.approx(b.metrics["actor/kl_penalty"], rel=1e-5)
    assert farthest(dict(ours.named_tensors()), dict(theirs.named_tensors())) < WEIGHTS
    assert torch.equal(ours.score_reference(rollouts), before)
    assert not torch.equal(ours.score(rollouts, natural).logp_BT, before)
    with pytest.raises(ValueError, match="keep_reference=False"):
        OneRank(folder, recipe).score_reference(rollouts)


def every_parameter_decays_but_a_frozen_router_stays(folder: Path) -> None:
    """With no advantage AdamW is decay alone, of norms too: times 1 - rate x decay; a frozen router keeps its bits."""
    recipe = algorithm("R3", freeze_router=True, optimizer={"warmup_steps": 4})
    ours = OneRank(folder, recipe)
    before = dict(ours.named_tensors())
    rollouts = batch()
    routing = altered(rollouts)
    minibatch = MiniBatch(rollouts, ours.score(rollouts, routing).logp_BT, torch.zeros(8), 0, 1)
    rates = [ours.update(minibatch, preset("minirl"), routing).metrics["actor/lr"] for _ in range(2)]
    assert rates == pytest.approx([2.5e-3, 5e-3])
    factor = (1 - 2.5e-4) * (1 - 5e-4)
    for name, tensor in ours.named_tensors():
        expected = before[name] if name.endswith("mlp.gate.weight") else before[name] * factor
        torch.testing.assert_close(tensor, expected, rtol=2e-7, atol=0, msg=name)


def a_gradient_that_is_not_finite_changes_nothing(folder: Path) -> None:
    """An advantage of inf raises an ArithmeticError that names weights; weights and the count stay as they were."""
    ours = OneRank(folder, algorithm("R3"))
    rollouts = batch()
    routing = altered(rollouts)
    old = ours.score(rollouts, routing)
    good = one_minibatch(rollouts, old.logp_BT)
    ours.update(good, preset("minirl"), routing)
    before = {name: tensor.clone() for name, tensor in ours.named_tensors()}
    bad = replace(good, advantages_B=torch.full((8,), float("inf")))
    with pytest.raises(ArithmeticError, match=r"actor/grad_norm is .*decoder|embedding"):
        ours.update(bad, preset("minirl"), routing)
    assert ours.rank.num_updates == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.named_tensors())
    ours.update(good, preset("minirl"), routing)
    assert all(bool(torch.isfinite(tensor).all()) for _, tensor in ours.named_tensors())


def bf16_is_near_fp32(folder: Path) -> None:
    """In bf16 with fp32 masters: log-probs within bf16's rounding of fp32's, a step moves the exported bf16 weights."""
    rollouts = batch()
    routing = altered(rollouts)
    for distributed in (False, True):
        ours = OneRank(folder, algorithm("R3"), precision="bf16", distributed_optimizer=distributed)
        scores, exact = ours.score(rollouts, routing), OneRank(folder, algorithm("R3")).score(rollouts, routing)
        difference = (scores.logp_BT - exact.logp_BT).abs()
        assert 1e-4 < difference.max() < 0.3  # measured 0.08: four layers of 8-bit mantissas, logits of size 10
        before = {name: tensor.clone() for name, tensor in ours.named_tensors()}
        minibatch = one_minibatch(rollouts, scores.logp_BT)
        ours.update(minibatch, preset("minirl"), routing)
        after = dict(ours.named_tensors())
        assert all(tensor.dtype == torch.bfloat16 for tensor in after.values())
        assert farthest(after, before) > 1e-3
    with pytest.raises(ValueError, match="distributed_optimizer: expected false"):
        next(ours.gradients())


UPDATE_LAWS = (
    gradients_are_the_objectives,
    sums_do_not_depend_on_micro_batches,
    a_token_budget_that_keeps_the_order_changes_no_bit,
    gradients_that_are_given_up_come_back,
    optimizer_states_go_to_the_host_and_back,
    recomputation_changes_no_bit,
    reference_stays,
    every_parameter_decays_but_a_frozen_router_stays,
    a_gradient_that_is_not_finite_changes_nothing,
    bf16_is_near_fp32,
)
