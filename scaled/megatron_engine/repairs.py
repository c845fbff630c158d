"""The repairs that megatron-core 0.16.1 needs without Transformer Engine and Apex, GPU or not; see `cpu_shims`."""

from __future__ import annotations

import importlib
from typing import Any

import torch


def router_gemm() -> None:
    """`moe_utils.te_general_gemm` exists, as None, where Transformer Engine does not.

    A defect of Megatron, on GPUs too: the name is bound only if Transformer Engine imports, but always read.
    Upstream: transformer/moe/moe_utils.py:RouterGatingLinearFunction.forward.
    """
    utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    utils.__dict__.setdefault("te_general_gemm", None)


def latent_attention() -> None:
    """`multi_latent_attention.HAVE_TE` is False where Transformer Engine is not installed.

    A defect of Megatron, on GPUs too: TELinear is None there, and `isinstance` needs a class.
    Upstream: transformer/multi_latent_attention.py:MultiLatentAttention.__init__.
    """
    attention = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    attention.__dict__["HAVE_TE"] = False


def optimizer_load() -> None:
    """The distributed optimiser takes a checkpoint into torch's AdamW.

    Megatron expects Apex's or Transformer Engine's Adam, whose state has no `step` by parameter, and writes into views
    of leaves that need gradients. `load_state_dict` has already set `step` when this runs; the tensor that the
    dp_reshardable format brings for it is the loader's own stale one. Needed on GPUs without the two, too.
    Upstream: optimizer/distrib_optimizer.py:DistributedOptimizer._set_main_param_and_optimizer_states.
    """
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")

    @torch.no_grad()
    def set_state(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, position = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][position]
        state = {"param": main, **self.optimizer.state[main]}
        state.pop("step", None)
        for name, tensor in state.items():
            tensor.copy_(tensors[name])

    distributed.DistributedOptimizer._set_main_param_and_optimizer_states = set_state


REPAIRS = {shim.__name__: shim for shim in (router_gemm, latent_attention, optimizer_load)}

__all__ = ["REPAIRS"]
