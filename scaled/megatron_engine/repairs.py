"""The repairs that megatron-core 0.16.1 needs without Transformer Engine and Apex, GPU or not; see `cpu_shims`."""

from __future__ import annotations

import importlib


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


REPAIRS = {shim.__name__: shim for shim in (router_gemm, latent_attention)}

__all__ = ["REPAIRS"]
