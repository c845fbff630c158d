"""The law of the shim that computes bfloat16 products in float32 on a CPU (`cpu_shims.bf16_products`)."""

from __future__ import annotations

from typing import Any

import torch

from scaled.config import TrainingBlock
from tests.scaled.megatron_world import free_ports, joined, spawn


def run_products(rank: int, port: int) -> Any:
    """The products of bfloat16 and float32 matrices as Megatron's layers compute them, and the same ones by torch."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import dot_product_attention

    with joined(TrainingBlock(precision="bf16"), rank, port):
        made: list[tuple[torch.Tensor, ...]] = []
        for dtype in (torch.bfloat16, torch.float32):
            generator = torch.Generator().manual_seed(0)
            x_SD, weight_ED, grad_SE = (
                torch.randn(*shape, generator=generator).to(dtype) for shape in ((512, 512), (256, 512), (512, 256))
            )
            x_SD.requires_grad_()
            weight_ED.requires_grad_()
            out_SE = layers.linear_with_grad_accumulation_and_async_allreduce(
                x_SD,
                weight_ED,
                None,
                gradient_accumulation_fusion=False,
                allreduce_dgrad=False,
                sequence_parallel=False,
            )
            out_SE.backward(grad_SE)
            assert x_SD.grad is not None and weight_ED.grad is not None
            made.append((out_SE.detach(), x_SD.grad, weight_ED.grad))
            attend: Any = dot_product_attention.torch
            scores = attend.baddbmm(out_SE.new_empty(1, 256, 256), out_SE.T[None], out_SE[None], beta=0.0, alpha=0.5)
            made[-1] += (
                scores.detach(),
                attend.bmm(scores, out_SE.T[None]).detach(),
                attend.matmul(x_SD, weight_ED.T).detach(),
            )
            x, w, g, o = (each.detach().float() for each in (x_SD, weight_ED, grad_SE, out_SE))
            s = scores.detach().float()
            wanted = (x @ w.T, g @ w, g.T @ x, torch.baddbmm(s, o.T[None], o[None], beta=0.0, alpha=0.5))
            made.append(tuple(each.to(dtype) for each in (*wanted, s @ o.T[None], x @ w.T)))
        left, right = (torch.empty(3, 3, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(2))
        meta: Any = attend.matmul(left, right)
    return made, meta.grad_fn.name(), bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def test_bfloat16_products_are_rounded_once() -> None:
    """Each is the float32 product of the same values, rounded; float32's own are untouched, bit for bit.

    Where the CPU has bfloat16 instructions torch's own kernels stay, whose sums of 512 terms have another order: a
    unit of the last place, 2^-7 of the largest.
    """
    (ours, wanted, ours_fp32, wanted_fp32), on_meta, has_instructions = spawn(1, run_products, free_ports(1)[0])[0]
    assert on_meta == "MmBackward0"  # no copy in float32 where a dry run counts bytes
    for one, other in zip(ours_fp32, wanted_fp32, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(ours, wanted, strict=True):
        if has_instructions:
            assert (one - other).abs().max() <= other.abs().max() / 128
        else:
            assert torch.equal(one, other)
