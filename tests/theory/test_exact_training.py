"""Laws of exact training: what a run of expected updates must be, and that sampled runs tend to it.

Laws of a single update are in `test_exact_update.py`.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.theory.exact_runs import make_task, sampled_run
from theory.exact import engines
from theory.exact.batch import Batch
from theory.exact.engines import engine
from theory.exact.expected import Update
from theory.exact.groups import Group
from theory.exact.networks import NetworkPolicy, placed
from theory.exact.policies import LinearPolicy, TabularPolicy
from theory.exact.problem import Problem, true_gradient, value
from theory.exact.rates import reinforce, slope
from theory.exact.training import Settings, train
from theory.exact.trajectory import COLUMNS, ExactTask, observe
from theory.objectives import correction, preset
from theory.streams import stream


def exact() -> engines.Engine:
    return engines.Engine("exact", 0.0, lambda policy: [policy.logp()])


# ---- the expected update ---------------------------------------------------------------------------------------------


def test_a_sequence_weight_follows_the_true_gradient() -> None:
    """Whole weights leave no bias, whatever the engine; nor does any weight under an exact one (MiniRL Eq. 2)."""
    task, first = make_task()
    found = train(
        task,
        first,
        engine("fixed", 0.5, first, stream(0, "noise")),
        Settings(reinforce("seq_tis"), rate=0.1, num_updates=3),
    )
    assert max(found["bias"]) < 1e-10
    assert min(found["kl_mu_old"]) > 1e-2


def test_a_temperature_divides_the_logits_and_the_rate_twice() -> None:
    """Logits x at T = 2 make the run of logits x / T at 1 with a rate T^2 times smaller, and its variance / T^2."""
    task, policy = make_task("tabular", T=2)
    assert isinstance(policy, TabularPolicy)
    hot = TabularPolicy(task.forest, tuple(2 * x for x in policy.logits), temperature=2.0)
    own = engine("sharper", 0.3, policy, stream(0, "temperature"))
    objective = reinforce("none")
    one = train(task, policy, own, Settings(objective, "sgd", 1.0, 3))
    two = train(task, hot, own, Settings(objective, "sgd", 4.0, 3))
    assert two["reward"] == pytest.approx(one["reward"], rel=1e-12)
    assert two["variance"] == pytest.approx([x / 4 for x in one["variance"]], rel=1e-12)
    assert two["reward"][-1] != two["reward"][0]


def test_other_policies_at_a_temperature_are_differentiated_as_they_are() -> None:
    """A network's and a linear policy's gradient at T = 2 is the slope of J along it, and its variance the audit's."""
    forest = make_task(T=2)[0].forest
    reward_Y, generator = make_task(T=2)[0].reward_Y, stream(0, "tempered")
    for policy in (
        NetworkPolicy.random(forest, generator, 2.0, num_hidden=4, temperature=2.0),
        LinearPolicy.random(forest, generator, 2.0, placed, temperature=2.0),
    ):
        logp = policy.logp()
        gradient = true_gradient(Problem(policy, logp, logp, reward_Y))
        up, down = (value(Problem(policy.moved(h * gradient), logp, logp, reward_Y)) for h in (1e-4, -1e-4))
        assert (up - down) / 2e-4 == pytest.approx(float(gradient.square().sum()), rel=1e-5)
        (row,) = (forest.paths(y, y + 1) for y in (3,))
        ones_1T = row.is_response_BT.double()
        edges = forest.zero_edges()
        forest.scatter(edges, ones_1T, row)
        norm = float(policy.pullback(edges).square().sum())
        assert float(policy.squared_norms(ones_1T, row)) == pytest.approx(norm, rel=1e-10)


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_under_an_exact_engine_reward_never_falls_along_the_flow() -> None:
    """With N = 1 and mu = pi the flow climbs grad J, so J(t) is monotone: at each of 20 steps of 2 units of time."""
    for seed in range(2):
        task, first = make_task(seed=seed, T=2)
        found = train(task, first, exact(), Settings(reinforce("none"), "flow", rate=2.0, num_updates=20))
        gains = [b - a for a, b in zip(found["reward"], found["reward"][1:], strict=False)]
        assert min(gains) > 0
        assert found["reward"][-1] > found["reward"][0] + 0.05
        assert min(found["distance"]) > 0


def test_equal_engines_leave_nothing_of_mu() -> None:
    """mu = pi: bias, drift, gaps and staleness are 0, J(mu) is J(pi), and every weight gives one and the same run."""
    task, first = make_task()
    ends = []
    for weight in ("none", "token_is", "prefix_tis", "seq_tis"):
        found = train(task, first, exact(), Settings(reinforce(weight), "sgd", 0.5, 10))
        for name in ("bias", "drift_norm", "kl_mu_old", "kl_old_mu", "kl_mu_pi", "kl_old_pi", "draw_error"):
            assert max(found[name]) < 1e-12, name
        assert found["reward_mu"] == found["reward"]
        assert min(found["cosine"]) == pytest.approx(1.0, abs=1e-12)
        ends.append(found.policy.parameters)
    assert all(torch.allclose(end, ends[0], atol=1e-13) for end in ends)


def test_orders_of_the_integrators() -> None:
    """Euler's steps (sgd) are of order 1 and the flow's of order 4, under an engine error: measured by halving."""
    task, first = make_task(T=2)
    own, time = engine("fixed", 0.3, first, stream(0, "order")), 4.0

    def end(optimizer: str, n: int) -> Tensor:
        settings = Settings(reinforce("none"), optimizer, time / n, n, observe_every=n)
        return train(task, first, own, settings).policy.parameters

    truth = end("flow", 32)
    for optimizer, numbers, order, within in (("sgd", (32, 64, 128), 1, 0.05), ("flow", (2, 4, 8), 4, 0.3)):
        errors = [float((end(optimizer, n) - truth).norm()) for n in numbers]
        assert slope([time / n for n in numbers], errors) == pytest.approx(order, abs=within)


@pytest.mark.parametrize("name", ["reinforce", "minirl"])
def test_sampled_runs_tend_to_the_exact_one(name: str) -> None:
    """||theta_n - theta|| after 5 updates falls as n^(-1/2), n responses per prompt: slope from n = 64 to 4096.

    The root mean square over 12 runs has an error of some 5% (a few dozen directions a run), the slope of some 0.02.
    """
    task, first = make_task(T=2)
    own, objective = engine("fixed", 0.3, first, stream(0, "sampled")), preset(name)
    limit = train(task, first, own, Settings(objective, "sgd", 0.5, 5)).policy.parameters
    numbers = (64.0, 512.0, 4096.0)
    errors = []
    for n in numbers:
        runs = [sampled_run(task, first, own, objective, int(n), 0.5, 5, stream(i, "run", str(n))) for i in range(12)]
        errors.append(math.sqrt(sum(float((run - limit).square().sum()) for run in runs) / len(runs)))
    assert slope(numbers, errors) == pytest.approx(-0.5, abs=0.06)


def test_same_seed_same_bits() -> None:
    """A run depends on its arguments alone: every column and parameter again, bit for bit."""
    task, first = make_task(T=2)
    settings = Settings(preset("minirl"), num_updates=4, num_minibatches=2)
    one, two = (train(task, first, engine("fresh", 0.3, first, stream(3, "noise")), settings) for _ in range(2))
    assert one.columns == two.columns
    assert torch.equal(one.policy.parameters, two.policy.parameters)


def test_mini_batches_share_a_rollout() -> None:
    """N updates learn from one rollout, that of its start: staleness is 0 at the first of them and grows."""
    task, first = make_task()
    own, objective = engine("fixed", 0.3, first, stream(0, "n")), preset("minirl")
    found = train(task, first, own, Settings(objective, "sgd", 0.5, 6, num_minibatches=3))
    stale = found["kl_old_pi"]
    assert stale[0] == stale[3] == 0.0
    assert 0 < stale[1] < stale[2] and 0 < stale[4] < stale[5]
    assert found["kl_mu_old"][0] == found["kl_mu_old"][2] != found["kl_mu_old"][3]
    policy = first
    for _ in range(2):
        batch = Batch(task.forest, own.samplers(policy)[0], policy.logp(), task.reward_Y, objective, Group(None))
        for _ in range(3):
            policy = policy.moved(0.5 * Update.at(batch, policy).gradient)
    assert torch.allclose(found.policy.parameters, policy.parameters, atol=1e-14)


def test_an_engine_that_lags_samples_from_former_weights() -> None:
    """mu at step k is the policy of step k - lag; old is the trainer's own present one."""
    task, first = make_task()
    found = train(task, first, exact(), Settings(reinforce("token_is"), "sgd", 0.5, 4, lag=2))
    assert found["kl_mu_old"][0] == 0.0 and min(found["kl_mu_old"][1:]) > 0
    assert found["reward_mu"] == tuple(found["reward"][k] for k in (0, 0, 0, 1, 2))
    assert max(found["kl_old_pi"]) == 0.0


def test_fresh_noise_states_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines of 32 draws differ in their gradients by sqrt(2) stated errors, to within a factor of 1.6."""
    monkeypatch.setattr(engines, "NUM_DRAWS", 32)
    task, first = make_task()
    found = []
    for seed in range(6):
        own = engine("fresh", 0.3, first, stream(seed, "fresh"))
        run = train(task, first, own, Settings(reinforce("none"), "sgd", 1.0, 1))
        found.append((run.policy.parameters - first.parameters, run["draw_error"][0] * run["gradient_norm"][0]))
    mean = torch.stack([g for g, _ in found]).mean(0)
    actual = math.sqrt(sum(float((g - mean).square().sum()) for g, _ in found) / (len(found) - 1))
    stated = math.sqrt(sum(e**2 for _, e in found) / len(found))
    assert 1 / 1.6 < actual / stated < 1.6
    one = train(task, first, engine("fixed", 0.3, first, stream(0, "x")), Settings(reinforce("none"), num_updates=0))
    assert one["draw_error"] == (0.0,)


def test_a_gradient_of_0_has_no_error_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws that cancel have an error without a share, nan; where all are 0, as if all is rejected, it is 0."""
    monkeypatch.setattr(engines, "NUM_DRAWS", 2)
    task, first = make_task()
    nothing = preset("reinforce", correction=correction("geo_rs", lo=20.0, hi=30.0))
    found = train(task, first, engine("fresh", 0.3, first, stream(0, "fresh")), Settings(nothing, num_updates=1))
    assert found["gradient_norm"] == found["draw_error"] == (0.0, 0.0)
    logp = first.logp()
    batch = Batch(task.forest, logp, logp, task.reward_Y, reinforce("none"), Group(None))
    one, other = Update.at(batch, first), Update.at(batch, first)
    vars(other)["gradient"] = -one.gradient  # in the place of the cached one
    seen = observe(task, first, [one, other], has_variance=False)
    assert seen["gradient_norm"] == 0.0 and one.gradient.norm() > 0 and math.isnan(seen["draw_error"])


def test_a_trajectory_holds_what_is_asked_for() -> None:
    """All columns, a value for every observed update, the last included; the first row is about the first policy."""
    task, first = make_task()
    found = train(task, first, exact(), Settings(reinforce("none"), num_updates=7, observe_every=3))
    assert found.updates == (0, 3, 6, 7)
    assert set(found.columns) == set(COLUMNS)
    assert all(len(values) == 4 for values in found.columns.values())
    logp = first.logp()
    truth = true_gradient(Problem(first, logp, logp, task.reward_Y))
    assert found["true_norm"][0] == float(truth.norm())
    best = task.reward_Y.view(task.forest.num_contexts, -1).max(1).values.mean()
    assert found["reward"][0] + found["distance"][0] == pytest.approx(float(best))


def test_bad_settings_are_refused() -> None:
    """An unknown optimizer, numbers out of range, a KL penalty, a flow with N > 1, wrong rewards: each in one line."""
    objective = preset("minirl")
    with pytest.raises(ValueError, match=r"optimizer.*'adamw'.*adam"):
        Settings(objective, "adamw")
    with pytest.raises(ValueError, match="num_minibatches: expected at least 1, got 0"):
        Settings(objective, num_minibatches=0)
    with pytest.raises(ValueError, match="rate: expected a rate > 0, got 0"):
        Settings(objective, rate=0.0)
    with pytest.raises(ValueError, match=r"minirl: expected kl_coefficient 0 .*, got 0\.1"):
        Settings(preset("minirl", kl_coefficient=0.1))
    with pytest.raises(ValueError, match="flow: expected num_minibatches 1 and lag 0, got 2 and 0"):
        Settings(objective, "flow", num_minibatches=2)
    tokens = preset("grpo", advantage="optimal_token")
    with pytest.raises(ValueError, match=r"grpo: advantage optimal_token: expected an infinite group .*, got one of 3"):
        Settings(tokens, group=Group(3))
    with pytest.raises(ValueError, match=r"expected centred false or batch_size inf beside an advantage per token"):
        Settings(preset("reinforce", advantage="optimal_token"), centred=True, batch_size=8.0)
    task, first = make_task()
    shifted = preset("gmpo", router_shift_floor=0.8)
    with pytest.raises(ValueError, match=r"router_shift_floor 0.8: expected a policy with routers.*got NetworkPolicy"):
        train(task, first, exact(), Settings(shifted))
    with pytest.raises(ValueError, match="expected finite rewards, got nan"):
        ExactTask(task.forest, torch.full_like(task.reward_Y, math.nan))
    with pytest.raises(ValueError, match=f"expected {task.forest.num_responses} rewards, one per response"):
        ExactTask(task.forest, task.reward_Y[1:])
    other, _ = make_task(prompts=3)
    with pytest.raises(ValueError, match="first: expected a policy on the task's forest"):
        train(other, first, exact(), Settings(objective))
