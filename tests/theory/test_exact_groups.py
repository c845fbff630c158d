"""Classes of responses, and the float64 that everything exact is computed in."""

from __future__ import annotations

import torch

from theory.exact.estimator import Problem, estimate, true_gradient
from theory.exact.groups import Group, classes
from theory.exact.levels import REWARDS, disturbed, logit_noise
from theory.exact.policies import TabularPolicy
from theory.exact.tree import PrefixTree
from theory.objectives import preset
from theory.streams import stream


def test_the_default_dtype_is_no_input() -> None:
    """Rewards and moments are float64 computations also where torch's default is float32: the same bits."""

    def everything() -> list[torch.Tensor]:
        tree = PrefixTree(3, 4)
        rewards = [shape(tree, stream(0, "rewards")) for shape in REWARDS.values()]
        draws = [torch.randn(n, 3, generator=stream(0, "policy"), dtype=torch.float64) for n in tree.sizes]
        policy = TabularPolicy(tree, tuple(draws))
        mu = disturbed(policy.logp(), logit_noise(tree, stream(0, "noise")), 0.1)
        problem = Problem(policy, mu, mu, rewards[0])
        found = [estimate(problem, preset(name), Group(4)) for name in ("minirl", "grpo_dapo")]
        return [*rewards, true_gradient(problem), *(e.mean for e in found)]

    wide = everything()
    torch.set_default_dtype(torch.float32)  # the fixture of tests/theory puts it back
    for x, y in zip(everything(), wide, strict=True):
        assert x.dtype == torch.float64
        assert torch.equal(x, y)


def test_classes_are_no_more_than_needed() -> None:
    """Lengths tell classes apart only where a denominator counts tokens; rejected responses are one length."""
    probability, reward = torch.full((4,), 0.25), torch.tensor([1.0, 1.0, 0.0, 0.0])
    kept, length = torch.tensor([True, True, True, False]), torch.tensor([1, 2, 3, 3])
    by_response = classes(probability, reward, kept, length, False)
    assert by_response.probability_C.tolist() == [0.25, 0.25, 0.5]
    assert classes(probability, reward, kept, length, True).num_tokens_C.tolist() == [0, 3, 1, 2]
