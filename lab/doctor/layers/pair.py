"""Two dumps of hidden states without a model: the first module whose outputs differ more than its inputs explain.

Both engines ran freely, so everything after a fault differs too. With e_in and e_out the medians over rows of
|a - b| / |b| for a module's inputs and outputs, a module is out where e_out > AMPLIFIED max(e_in, ROUNDINGS u), u the
precision's rounding error (UNIT).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.doctor.layers.modules import off
from lab.doctor.layers.reference import Precision
from lab.doctor.layers.states import States

AMPLIFIED = 3.0
"""Largest ratio of a sound module's output difference to its input difference."""
ROUNDINGS = 2.0
"""Successive roundings in a module, each of size u."""
UNIT: dict[Precision, float] = {"fp32": 2**-20, "bf16": 2**-9, "fp16": 2**-12, "fp8": 2**-4}
"""Relative size u of one rounding error; for fp32, of a float32 sum in another order."""


@dataclass(frozen=True)
class Jump:
    """A module of both dumps: the relative differences of its inputs and of its outputs (medians over rows)."""

    module: str
    error_in: float
    error_out: float
    floor: float

    @property
    def is_out(self) -> bool:
        """Whether the outputs differ more than the inputs and rounding explain."""
        return self.error_out > AMPLIFIED * max(self.error_in, self.floor)


def compare(a: States, b: States, precision: Precision) -> list[Jump]:
    """The modules that both dumps have with inputs, in the order of the forward pass; ValueError for other tokens.

    A norm's input is the residual stream: the sum of all earlier modules' outputs, if all were dumped.
    """
    if not torch.equal(a.tokens, b.tokens) or not torch.equal(a.lengths, b.lengths):
        raise ValueError("tokens: expected the same sequences in both dumps, got different ones")
    jumps = list(_jumps(a, b, ROUNDINGS * UNIT[precision]))
    if not jumps:
        raise ValueError("expected modules that both dumps have with inputs and outputs, got none")
    return jumps


def _jumps(a: States, b: States, floor: float) -> Iterator[Jump]:
    # Of one dump alone: a layer that only the other has cannot be compared.
    layers = {int(name.split(".")[2]) for name in a.values if ".layers." in name}
    streams = [side.get("model.embed_tokens", "out") for side in (a, b)]
    for layer in sorted(layers):
        for norm, module in (("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp")):
            name = f"model.layers.{layer}.{module}"
            into, out = (_apart(f"{name}.{end}", a.get(name, end), b.get(name, end)) for end in ("in", "out"))
            before = _apart(name, *streams)
            if before is not None and into is not None:
                yield Jump(f"model.layers.{layer}.{norm}", before, into, floor)
            gate = _apart(f"{name}.gate.out", a.get(f"{name}.gate", "out"), b.get(f"{name}.gate", "out"))
            if gate is not None and into is not None:
                yield Jump(f"{name}.gate", into, gate, floor)
            if into is not None and out is not None:
                yield Jump(name, into, out, floor)
            streams = [_after(x, side.get(name, "out")) for x, side in zip(streams, (a, b), strict=True)]
    last = _apart("model.norm.out", a.get("model.norm", "out"), b.get("model.norm", "out"))
    before = _apart("model.norm", *streams)
    if last is not None and before is not None:
        yield Jump("model.norm", before, last, floor)


def _after(x: Tensor | None, out: Tensor | None) -> Tensor | None:
    """The residual stream after a module; None where it is unknown."""
    return None if x is None or out is None else x + out


def _apart(name: str, x: Tensor | None, y: Tensor | None) -> float | None:
    """Median over rows of |x - y| / |y|; None where one of the two was not dumped."""
    if x is None or y is None:
        return None
    if x.shape != y.shape:
        raise ValueError(f"{name}: expected one width in both dumps, got {x.shape[1]} and {y.shape[1]}")
    return off(x, y).median().item()
