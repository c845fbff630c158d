"""Value and gradient of our objectives against verl's own functions, where verl is installed (`make test-peers`).

verl is installed without its dependencies: its losses need torch alone, and what else its modules import is a stub.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.theory.objective_batches import make_batch
from theory.objectives import Objective, correction, preset

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed", allow_module_level=True)

STUBS = ("accelerate", "codetiming", "hydra", "omegaconf", "orjson", "peft", "ray", "tensordict", "torchdata")


class Stub(ModuleType):
    """A module in which every name is an empty class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)})


class Stubs(MetaPathFinder, Loader):
    """Finds a stub for the packages in STUBS that are not installed: it is asked last."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in STUBS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Config(SimpleNamespace):
    """The part of verl's ActorConfig that a loss reads."""

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


@pytest.fixture(scope="module")
def core() -> Iterator[ModuleType]:
    """verl's core_algos; afterwards no stub is left for other tests to import."""
    finder = Stubs()
    sys.meta_path.append(finder)
    try:
        module = importlib.import_module("verl.trainer.ppo.core_algos")
        module.ActorConfig = Config  # pyright: ignore[reportAttributeAccessIssue]
        yield module
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, found in sys.modules.items() if isinstance(found, Stub) or name[:4] == "verl"]:
            del sys.modules[name]


TOKENS, RESPONSES = "token-mean", "seq-mean-token-mean"
TIS = correction("token_tis", cap=1.1)
PEERS: list[tuple[str, str, Objective, dict[str, Any]]] = [
    ("vanilla", TOKENS, preset("grpo_dapo"), {"clip_ratio_c": float("inf")}),
    ("vanilla", RESPONSES, preset("grpo"), {"clip_ratio_c": float("inf")}),
    ("vanilla", TOKENS, preset("ppo_dual_clip", aggregation="token_mean", clip_ratio_c=1.3), {"clip_ratio_c": 1.3}),
    ("vanilla", RESPONSES, preset("grpo", correction=TIS), {"clip_ratio_c": float("inf")}),
    ("gspo", RESPONSES, preset("gspo", ratio="sequence_geometric_token", eps_low=0.1, eps_high=0.2), {}),
    ("cispo", TOKENS, preset("cispo", eps_low=0.1, eps_high=0.2), {}),
    ("cispo", TOKENS, preset("cispo", eps_low=0.1, eps_high=0.2, correction=TIS), {}),
]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("loss", "mode", "objective", "numbers"), PEERS)
def test_value_and_gradient_are_verls(
    core: ModuleType, loss: str, mode: str, objective: Objective, numbers: dict[str, Any], seed: int
) -> None:
    """-J and its gradient are verl's loss and gradient on ragged batches with holes, weights included."""
    batch, region = make_batch(seed, staleness=0.5), objective.trust_region
    config = Config(
        clip_ratio=0.2, clip_ratio_low=vars(region)["eps_low"], clip_ratio_high=vars(region)["eps_high"],
        global_batch_info={}, **numbers,
    )  # fmt: skip
    gap_BT = torch.where(batch.mask, batch.old - batch.mu, 0.0)
    weight_BT = objective.correction.weight(gap_BT, batch.mask) if objective.correction.weighted else None
    pi = batch.pi.clone().requires_grad_()
    advantages_BT = batch.advantages[:, None].expand_as(pi)
    theirs, _ = core.POLICY_LOSS_REGISTRY[loss](
        batch.old, pi, advantages_BT, batch.mask.double(), mode, config, weight_BT
    )
    theirs.backward()
    assert pi.grad is not None
    # verl adds 1e-8 to the length that it divides by.
    torch.testing.assert_close(batch(objective).objective, -theirs.detach(), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(batch.gradient(objective), -pi.grad, rtol=1e-8, atol=1e-12)
    assert batch.gradient(objective).abs().sum() > 0
