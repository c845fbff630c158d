"""TRL's own functions, compiled from its source files: importing the trainers would need all that they import."""

from __future__ import annotations

import ast
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

_SPEC = importlib.util.find_spec("trl")
IS_INSTALLED = _SPEC is not None
needs_trl = pytest.mark.skipif(not IS_INSTALLED, reason="TRL is not installed")


def methods(path: str, cls: str, *names: str) -> dict[str, Any]:
    """These methods of a class of TRL's, as plain functions: of their decorators, no_grad alone is kept."""
    assert _SPEC is not None and _SPEC.submodule_search_locations
    tree = ast.parse((Path(_SPEC.submodule_search_locations[0]) / path).read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls)
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert len(found) == len(names), f"expected {names} in {cls}, found {[node.name for node in found]}"
    for node in found:
        node.decorator_list = [x for x in node.decorator_list if ast.unparse(x) == "torch.no_grad()"]
    namespace: dict[str, Any] = {"torch": torch, "math": math, "nanmin": torch.min, "nanmax": torch.max}
    module = ast.fix_missing_locations(ast.Module(found, type_ignores=[]))
    exec(compile(module, path, "exec", dont_inherit=True), namespace)
    return {name: namespace[name] for name in names}


def loss(
    pi: Tensor, old: Tensor, mu: Tensor, advantages: Tensor, mask: Tensor, *, trainer: str = "grpo", **settings: Any
) -> Tensor:
    """TRL's loss of these log-probabilities: GRPOTrainer's, or GMPOTrainer's; `settings` are its configuration's.

    `weights`: the importance-sampling ratios of the engine gap; `ref`: the reference's log-probabilities.
    """
    path, cls = {
        "grpo": ("trainer/grpo_trainer.py", "GRPOTrainer"),
        "gmpo": ("experimental/gmpo/gmpo_trainer.py", "GMPOTrainer"),
    }[trainer]
    code = methods(path, cls, "_compute_loss")
    helpers = methods("trainer/grpo_trainer.py", "GRPOTrainer", "get_off_policy_mask", "get_gamma_weights")
    weights, ref = settings.pop("weights", None), settings.pop("ref", None)
    dials = {"delta": None, "use_bias_correction_kl": True, "steps_per_generation": 1, **settings}
    ids, num_tokens = torch.zeros_like(pi, dtype=torch.long), mask.sum()
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
    )
    log = {mode: _Anything() for mode in ("train", "eval")}
    trainer_self = SimpleNamespace(
        args=SimpleNamespace(**dials), accelerator=accelerator, model=SimpleNamespace(training=True), _metrics=log,
        _get_per_token_logps_and_entropies=lambda *_, **__: (pi, torch.zeros_like(pi), None),
        top_entropy_quantile=1.0, aux_loss_enabled=False, current_gradient_accumulation_steps=1,
        use_vllm=weights is not None, vllm_importance_sampling_correction=weights is not None,
        _entropy_bonus_enabled=False, max_completion_length=pi.shape[1],
        **{name: helpers[name] for name in helpers},
        **{
            "beta": 0.0, "off_policy_mask_threshold": None, "importance_sampling_level": "token", "loss_type": "grpo",
            "epsilon_low": 0.2, "epsilon_high": 0.2, **settings,
        },
    )  # fmt: skip
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask.double(),
        "advantages": advantages, "old_per_token_logps": old, "sampling_per_token_logps": mu,
        "num_items_in_batch": num_tokens,
    }  # fmt: skip
    inputs |= {} if weights is None else {"importance_sampling_ratio": weights}
    inputs |= {} if ref is None else {"ref_per_token_logps": ref}
    return code["_compute_loss"](trainer_self, None, inputs)


class _Anything(dict):
    """A dict of lists for the metrics that the loss logs."""

    def __missing__(self, name: str) -> list:
        return self.setdefault(name, [])


__all__ = ["IS_INSTALLED", "loss", "methods", "needs_trl"]
