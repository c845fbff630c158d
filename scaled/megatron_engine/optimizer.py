"""Megatron's optimisers as theory's `OptimizerSettings` describe them: AdamW, warm-up, clipping by the global norm.

Every parameter decays (Megatron's default excludes norms and biases), and a gradient that is not finite is an error
before any weight has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer

from lab.recording import NonFiniteError
from scaled.config import TrainingBlock
from theory.algorithm import OptimizerSettings


class RankOptimizer:
    """One rank's share of AdamW over all model chunks; every rank must call `step`.

    `clipping` is the factor that the last step's gradients were multiplied by, in (0, 1].
    """

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], settings: OptimizerSettings, training: TrainingBlock
    ) -> None:
        self.settings = settings
        self.clipping = 1.0
        self._offload = training.offload or ()
        self._chunks = list(chunks)
        is_bf16 = training.precision == "bf16"
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            min_lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            adam_eps=settings.eps,
            decoupled_weight_decay=True,
            clip_grad=settings.max_grad_norm,
            bf16=is_bf16,
            params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
            use_distributed_optimizer=training.distributed_optimizer,
        )
        # Megatron's own overrides put norms and biases into a group that its scheduler would not decay.
        wrapped: Any = self._chunks  # annotated as bare modules upstream
        optimizer = get_megatron_optimizer(config, wrapped, config_overrides={})
        self.megatron = optimizer if isinstance(optimizer, ChainedOptimizer) else ChainedOptimizer([optimizer])
        for one in self.megatron.chained_optimizers:
            if torch.cuda.is_available() and isinstance(one.optimizer, torch.optim.AdamW):
                # Without Transformer Engine Megatron takes torch's AdamW; unfused, it needs 4 more bytes per weight.
                for group in one.optimizer.param_groups:
                    group["fused"] = True

    def give_way(self) -> None:
        """Frees the memory that `training.offload` names, and on a GPU torch's cached blocks."""
        is_gpu = torch.cuda.is_available()
        if "gradients" in self._offload:
            for chunk in self._chunks:
                chunk.offload_grad_buffers(synchronize=is_gpu, empty_cache=False)
        if is_gpu and "optimizer" in self._offload:
            self.megatron.offload_to_cpu()
        if is_gpu:
            torch.cuda.empty_cache()

    def take_back(self) -> None:
        """Undoes `give_way`, except that gradients are zero; may be called without it."""
        is_gpu = torch.cuda.is_available()
        if "gradients" in self._offload:
            for chunk in self._chunks:
                chunk.restore_grad_buffers(synchronize=is_gpu)
        if is_gpu and "optimizer" in self._offload:
            self.megatron.restore_from_cpu()

    def zero_grad(self) -> None:
        """Sets the gradients to zero."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self, num_updates: int) -> dict[str, float]:
        """One clipped AdamW step at the rate of update `num_updates`: actor/grad_norm (before clipping) and actor/lr.

        Raises NonFiniteError, on every rank and before any weight changes, where the norm is not finite.
        """
        # The parts of Megatron's own `step`, with a check of the norm before any weight changes.
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not torch.isfinite(torch.tensor(norm)):
            raise NonFiniteError(f"actor/grad_norm is {norm}: the gradient of {self._culprits()} is not finite")
        rate = self.settings.rate_at(num_updates)
        for group in self.megatron.param_groups:
            group["lr"] = rate
        self._clip(norm)
        self.megatron.step_with_ready_grads()
        return {"actor/grad_norm": norm, "actor/lr": rate}

    @torch.no_grad()
    def _clip(self, norm: float) -> None:
        # 1e-6 as in torch.nn.utils.clip_grad_norm_.
        self.clipping = min(1.0, self.settings.max_grad_norm / (norm + 1e-6))
        if self.clipping == 1.0:
            return
        # `grad` shares its memory with the model's main_grad: `MegatronRank.gradients` divides by the factor again.
        for optimizer in self.megatron.chained_optimizers:
            for parameter in optimizer.get_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.clipping)

    def _culprits(self) -> str:
        names = [
            name.replace("module.", "")
            for chunk in self._chunks
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad and not bool(torch.isfinite(parameter.main_grad).all())  # type: ignore[attr-defined]
        ]
        return ", ".join(names[:3]) if names else "another rank's weights"


__all__ = ["RankOptimizer"]
