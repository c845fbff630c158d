"""The objective's own centering in exact updates: with all of mu it takes the whole drift, with k tokens a part."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.theory.exact_runs import make_task
from theory.exact.batch import Batch
from theory.exact.engines import engine
from theory.exact.expected import Update
from theory.exact.groups import Group
from theory.exact.noise import variance
from theory.exact.training import Settings, train
from theory.objectives import Objective, Top, Totals, correction, preset
from theory.streams import stream

CENTRED = preset("reinforce", centering="full")


def updates(objective: Objective, group: Group) -> tuple[Update, Update]:
    """The update of the objective under a fixed engine error, and that without its centering."""
    task, policy = make_task()
    mu = engine("fixed", 0.5, policy, stream(0, "drift")).samplers(policy)[0]
    plain = replace(objective, centering="none")
    batches = [Batch(task.forest, mu, policy.logp(), task.reward_Y, one, group) for one in (objective, plain)]
    return Update.at(batches[0], policy), Update.at(batches[1], policy)


@pytest.mark.parametrize("group", [Group(None), Group(4)], ids=["infinite", "of four"])
def test_with_all_of_mu_the_whole_drift_goes(group: Group) -> None:
    """Without a weight the objective's own centering is `centred`: gradient less drift, and no drift is left."""
    centred, plain = updates(CENTRED, group)
    assert float(plain.drift.norm()) > 1e-3
    assert torch.allclose(centred.gradient, plain.gradient - plain.drift, atol=1e-14)
    assert float(centred.drift.norm()) < 1e-14


def test_what_k_tokens_leave_of_the_drift_falls_with_k() -> None:
    """Of three tokens one leaves some drift, and two none, as the tail is then one token."""
    left = [
        float(updates(replace(CENTRED, centering="top_k", centering_k=k), Group(None))[0].drift.norm()) for k in (1, 2)
    ]
    whole = float(updates(CENTRED, Group(None))[1].drift.norm())
    assert 1e-3 < left[0] < whole and left[1] < 1e-14


@pytest.mark.parametrize("name", ["minirl", "ppo"])
def test_a_step_is_the_mean_of_the_objectives_own(name: str) -> None:
    """Expected from nodes, or a response at a time by the objective with all of mu at hand: the same gradient."""
    objective = preset(name, centering="full", advantage="group_mean")
    batch = updates(objective, Group(None))[0].batch
    first = make_task()[1]
    # A step away from old, so that bounds bind and weights part.
    policy = first.moved(torch.randn(len(first.parameters), generator=stream(0, "step"), dtype=torch.float64))
    centred, forest = Update.at(batch, policy), batch.forest
    pi_NV, old_NV, mu_NV = (torch.cat(list(x)) for x in (policy.logp(), batch.logp_old, batch.logp_mu))
    leaf_NV = pi_NV.clone().requires_grad_()
    tops = (x_NV[forest.node_BT] for x_NV in (leaf_NV, old_NV, mu_NV))
    pi_BT = leaf_NV.view(-1)[forest.edge_BT]
    mask_BT = forest.whole.is_response_BT
    total = torch.zeros((), dtype=torch.float64)
    top = Top(*tops, is_complete=True)
    for sign, share_Y in zip((1.0, -1.0), batch.shares_sY, strict=True):
        for b in (share_Y > 0).nonzero()[:, 0].tolist():
            one = slice(b, b + 1)
            of = Top(top.logp_pi_BTK[one], top.logp_old_BTK[one], top.logp_mu_BTK[one], is_complete=True)
            output = objective(
                pi_BT[one], batch.old_BT[one], batch.mu_BT[one], torch.tensor([sign]), mask_BT[one],
                top=of, totals=Totals(1, 1),
            )  # fmt: skip
            total = total + batch.probability_Y[b] * share_Y[b] * output.objective
    (edges_NV,) = torch.autograd.grad(total, leaf_NV)
    expected_Q = policy.pullback(edges_NV.split(list(forest.sizes)))
    assert float(centred.policy.pullback(centred.centering_edges).norm()) > 1e-3
    assert torch.allclose(centred.gradient, expected_Q, atol=1e-13)


def test_a_run_with_it_is_the_run_with_the_score_centred() -> None:
    """Ten updates with `centering: full` end where ten with `centred` do, and elsewhere than ten without."""
    task, first = make_task(T=2)
    error = engine("fixed", 0.5, first, stream(0, "drift"))
    ends = []
    for objective, centred in ((CENTRED, False), (preset("reinforce"), True), (preset("reinforce"), False)):
        ends.append(train(task, first, error, Settings(objective, "sgd", 0.5, 10, centred=centred)).policy.parameters)
    assert torch.allclose(ends[0], ends[1], atol=1e-12)
    assert float((ends[0] - ends[2]).norm()) > 1e-2


def test_its_rows_have_no_variance() -> None:
    """The column is of the score as it is: nan beside centering, and an error where it is asked for directly."""
    task, first = make_task(T=2)
    error = engine("fixed", 0.5, first, stream(0, "drift"))
    columns = {
        one.centering: train(task, first, error, Settings(one, "sgd", 0.5, 1))["variance"]
        for one in (CENTRED, preset("reinforce"))
    }
    assert all(math.isnan(value) for value in columns["full"]) and all(value > 0 for value in columns["none"])
    with pytest.raises(ValueError, match="variance: expected an objective without centering, got reinforce's"):
        variance([updates(CENTRED, Group(None))[0]])


def test_what_does_not_know_it_refuses_it() -> None:
    """`centred` would take the drift off twice, and the noise is that of another estimator."""
    with pytest.raises(ValueError, match="reinforce: expected centred false beside the objective's own centering"):
        Settings(CENTRED, centred=True)
    with pytest.raises(ValueError, match=r"expected batch_size inf beside the objective's own centering, got 64\.0"):
        Settings(CENTRED, batch_size=64.0)
    weighted = preset("reinforce", correction=correction("token_is", numerator="pi"), centering="full")
    assert Settings(weighted).objective.num_top > 0
