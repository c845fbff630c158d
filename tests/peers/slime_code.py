"""slime's own loss, from a checkout on PYTHONPATH: it is in no package registry. It imports Megatron-core."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

IS_INSTALLED = all(importlib.util.find_spec(name) is not None for name in ("slime", "megatron"))
needs_slime = pytest.mark.skipif(not IS_INSTALLED, reason="no checkout of slime on PYTHONPATH, or no Megatron-core")

OFF: dict[str, Any] = {
    "loss_type": "policy_loss", "recompute_loss_function": False, "allgather_cp": False, "rollout_top_p": 1.0,
    "use_rollout_logprobs": False, "use_opsm": False, "get_mismatch_metrics": False, "use_tis": False,
    "custom_tis_function_path": None, "custom_pg_loss_reducer_function_path": None, "eps_clip_c": None,
    "calculate_per_token_loss": False, "use_kl_loss": False, "use_unbiased_kl": False,
}  # fmt: skip
"""slime's defaults of what its loss reads."""


@cache
def module() -> ModuleType:
    """slime.backends.megatron_utils.loss, with its functions as they stand instead of compiled by torch."""
    with (
        warnings.catch_warnings(action="ignore"),  # Megatron-core's, that Transformer Engine is not there
        mock.patch.object(torch, "compile", lambda *given, **_: given[0] if given else lambda function: function),
    ):
        return importlib.import_module("slime.backends.megatron_utils.loss")


@contextmanager
def _alone(code: ModuleType, pi: Tensor) -> Iterator[None]:
    """One process without Megatron's groups, in which the model's log-probabilities are pi."""
    scores = {"log_probs": list(pi), "entropy": [torch.zeros_like(row) for row in pi]}
    with (
        # Formulas are compared, not roundings: its KL is in float32.
        mock.patch.object(torch.Tensor, "float", lambda x: x),
        mock.patch.object(code.mpu, "get_context_parallel_group"),
        mock.patch.object(code.mpu, "get_context_parallel_world_size", return_value=1),
        mock.patch.object(code.mpu, "get_data_parallel_world_size", return_value=1),
        mock.patch.object(code, "get_log_probs_and_entropy", return_value=(None, scores)),
    ):
        yield


def loss(pi: Tensor, old: Tensor, mu: Tensor, advantages: Tensor, mask: Tensor, ref: Tensor, **settings: Any) -> Tensor:
    """slime's loss of these log-probabilities as Megatron divides it, under these arguments beside its defaults."""
    code, (B, T) = module(), pi.shape
    masks = list(mask.to(pi.dtype))
    batch = {
        "advantages": [row.expand(T) for row in advantages], "log_probs": list(old), "rollout_log_probs": list(mu),
        "ref_log_probs": list(ref), "loss_masks": masks, "rollout_mask_sums": [row.sum() for row in masks],
        "response_lengths": [T] * B, "total_lengths": [T + 1] * B, "unconcat_tokens": [None] * B,
    }  # fmt: skip
    with _alone(code, pi):
        total, divisor, _ = code.loss_function(SimpleNamespace(**(OFF | settings)), batch, 1, B, torch.zeros(()))
    return total / divisor


def _file(path: str) -> str:
    return (Path(str(importlib.import_module("slime").__path__[0])) / path).read_text(encoding="utf-8")


def advantages(rewards_PG: Tensor, is_scaled: bool) -> Tensor:
    """The rewards that slime's rollout manager hands on to training: its method, compiled from its source alone."""
    tree = ast.parse(_file("ray/rollout.py"))
    (method,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_post_process_rewards"
    )
    namespace: dict[str, Any] = {"torch": torch}
    method = ast.parse(f"from __future__ import annotations\n{ast.unparse(method)}")
    exec(compile(method, "rollout.py", "exec", dont_inherit=True), namespace)
    P, G = rewards_PG.shape
    args = SimpleNamespace(
        advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=is_scaled,
        n_samples_per_prompt=G, rollout_batch_size=P,
    )  # fmt: skip
    manager = SimpleNamespace(args=args, custom_reward_post_process_func=None)
    samples = [SimpleNamespace(get_reward_value=lambda _, x=x: x) for x in rewards_PG.flatten().tolist()]
    return torch.tensor(namespace["_post_process_rewards"](manager, samples)[1]).reshape(P, G)


def arguments() -> set[str]:
    """The names that its command line knows, without dashes: its own, the optimizer's, and its scheduler's."""
    own = set(re.findall(r'"--([\w-]+)"', _file("utils/arguments.py")))
    module()  # which imports it without its warnings
    fields = importlib.import_module("megatron.core.optimizer").OptimizerConfig.__dataclass_fields__
    read = re.findall(r"args\.(lr_\w+)", _file("backends/megatron_utils/model.py"))
    return own | {name.replace("_", "-") for name in [*fields, *read]}


__all__ = ["IS_INSTALLED", "advantages", "arguments", "loss", "needs_slime"]
