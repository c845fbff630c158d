"""The accelerators that `cluster.gpu` can name: memory, its bandwidth, dense matmul rates, as their makers state them.

Rates are dense (no structured sparsity). Memory is what the driver reports, which is less than the name says.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One accelerator: memory in GiB, FLOP/s in 1e12, the memory's bandwidth in GB/s.

    `fp8_tflops` is None where the tensor cores have no fp8.
    """

    name: str
    memory_gib: float
    bf16_tflops: float
    fp8_tflops: float | None
    hbm_gb_s: float
    source: str

    def tflops(self, *, fp8: bool) -> float:
        """Peak dense rate, in 1e12 FLOP/s; without fp8 tensor cores fp8 weights are multiplied in bf16."""
        return self.fp8_tflops if fp8 and self.fp8_tflops is not None else self.bf16_tflops


_ROWS = (
    # name, GiB, bf16 and fp8 TFLOP/s, GB/s of the memory, source
    Gpu("A100-80GB", 80.0, 312.0, None, 2039.0, "NVIDIA A100 80GB SXM data sheet"),
    Gpu("H20-96GB", 95.6, 148.0, 296.0, 4000.0, "NVIDIA H20 product brief"),
    Gpu("H100-80GB", 79.6, 989.0, 1979.0, 3350.0, "NVIDIA H100 SXM data sheet"),
    Gpu("H200-141GB", 140.4, 989.0, 1979.0, 4800.0, "NVIDIA H200 SXM data sheet"),
    Gpu("B200-180GB", 179.0, 2250.0, 4500.0, 7700.0, "NVIDIA DGX B200 data sheet"),
    Gpu("RTX-PRO-6000-96GB", 95.6, 503.0, 1007.0, 1792.0, "NVIDIA RTX PRO 6000 Blackwell data sheet"),
    Gpu("MI300X-192GB", 191.9, 1307.0, 2614.0, 5300.0, "AMD Instinct MI300X data sheet"),
)  # fmt: skip

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _ROWS}
"""The accelerators by the name that a config uses."""


def gpu_named(name: str) -> Gpu:
    """The accelerator of that name; ValueError that lists all names."""
    if name not in GPUS:
        raise ValueError(f"cluster.gpu: expected one of {', '.join(GPUS)}, got {name}")
    return GPUS[name]
