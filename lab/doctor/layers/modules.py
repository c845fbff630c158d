"""Each module of an engine on its own recorded inputs: the distance of its output from the reference's.

A fault changes everything after it; here it shows in its own module only, as every module of the reference gets the
engine's input. Let r_n = |y_n - f(x_n)| / |f(x_n)| for row n (f the reference in float32, y the engine's output). A
module is outside the band where more than SHARE of the rows have r_n > FACTOR times the 95 % quantile of the same
ratio for the reference rounded to the precision. The band thus comes from these weights and inputs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lab.doctor.layers.reference import Precision, ReferenceModules, hand_on
from lab.doctor.layers.states import States

FACTOR = 3.0
"""Tolerated multiple of the rounding's 95 % quantile: engines round in more places than the reference does."""
SHARE = 0.05
"""Share of rows beyond FACTOR above which a module is out, in [0, 1]."""
FLOOR = 1e-5
"""Smallest relative band: the error of float32 sums in another order."""


@dataclass(frozen=True)
class Check:
    """One module: its rows' relative error (the median), the error from rounding, and the share of rows out."""

    module: str
    error: float
    band: float
    """The 95 % quantile of the rounded reference's relative error, at least FLOOR."""
    share_out: float
    """Rows beyond FACTOR bands, in [0, 1]."""

    @property
    def is_out(self) -> bool:
        """Whether the module is outside the band."""
        return self.share_out > SHARE

    @property
    def layer(self) -> int | None:
        """The decoder layer; None for the embedding and the last norm."""
        parts = self.module.split(".")
        return int(parts[2]) if parts[1] == "layers" else None


def inspect(states: States, reference: ReferenceModules, precision: Precision) -> list[Check]:
    """A check of every module dumped with its input, in the order of the forward pass; ValueError for none."""
    rounded = reference.rounded(precision)
    checks = list(_checks(states, reference, rounded, precision))
    if not checks:
        raise ValueError("expected modules with their inputs (model.layers.0.mlp.in and .out ...), got outputs alone")
    return checks


def _checks(
    states: States, exact: ReferenceModules, rounded: ReferenceModules, precision: Precision
) -> Iterator[Check]:
    embedded = states.get("model.embed_tokens", "out")
    wanted = exact.embedding(states.tokens)
    if embedded is not None:
        yield check("model.embed_tokens", embedded, wanted, rounded.embedding(states.tokens))
    # A norm's input is not dumped: it is the residual stream, rebuilt here from the modules' outputs. It starts
    # from the engine's own embedding, so that a fault there does not show in the norms as well.
    stream = Stream(wanted if embedded is None else embedded, precision)
    for layer in range(exact.num_layers):
        yield from _attention(states, exact, rounded, layer, stream)
        yield from _mlp(states, exact, rounded, layer, stream)
    out = states.get("model.norm", "out")
    if out is not None and stream.is_known:
        yield _norm("model.norm", out, exact, rounded, stream)


class Stream:
    """The residual stream as the sum of the engine's module outputs, in float32 and in the engine's dtype."""

    def __init__(self, x_ND: Float[Tensor, "N D"], precision: Precision) -> None:
        self.exact_ND, self.rounded_ND = x_ND, hand_on(x_ND, precision)
        self.precision: Precision = precision
        self.is_known = True
        """Whether every output so far was dumped."""

    def add(self, out_ND: Tensor | None) -> None:
        """Adds a module's output; without it the stream is unknown from here on."""
        if out_ND is None:
            self.is_known = False
            return
        self.exact_ND = self.exact_ND + out_ND
        # Rounded after every addition, as an engine stores its stream.
        self.rounded_ND = hand_on(self.rounded_ND + out_ND, self.precision)


def _attention(
    states: States, exact: ReferenceModules, rounded: ReferenceModules, layer: int, stream: Stream
) -> Iterator[Check]:
    module, norm = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.input_layernorm"
    x, out = (yield from _input(states, module, norm, exact, rounded, stream)), states.get(module, "out")
    if x is not None and out is not None:
        wanted, near = (side.attention(layer, x, states.lengths) for side in (exact, rounded))
        yield check(module, out, wanted, near)
    stream.add(out)


def _mlp(
    states: States, exact: ReferenceModules, rounded: ReferenceModules, layer: int, stream: Stream
) -> Iterator[Check]:
    module, norm = f"model.layers.{layer}.mlp", f"model.layers.{layer}.post_attention_layernorm"
    x, out = (yield from _input(states, module, norm, exact, rounded, stream)), states.get(module, "out")
    weights_NE = None
    router = states.get(f"{module}.gate", "out")
    if x is not None and router is not None and layer in exact.moe_layers:
        wanted, near = (_router(side, layer, x, router) for side in (exact, rounded))
        if wanted is not None and near is not None:
            yield check(f"{module}.gate", router, wanted, near)
        weights_NE = _chosen(exact, layer, router)
    if x is not None and out is not None:
        # Both on the engine's own choice of experts, if the reference takes one (transformers' does not): another
        # choice is the router's fault, and is checked above.
        wanted, near = (side.mlp(layer, x, weights_NE) for side in (exact, rounded))
        yield check(module, out, wanted, near)
    stream.add(out)


def _input(
    states: States, module: str, norm: str, exact: ReferenceModules, rounded: ReferenceModules, stream: Stream
) -> Generator[Check, None, Tensor | None]:
    """The module's normalised input if it was dumped, after a check of the norm where the stream is known."""
    x = states.get(module, "in")
    if x is not None and _is_bare(x, norm, exact, stream):
        # The norm's own output was not dumped: it is not checked, and counts as exact.
        return exact.norm(norm, x)
    if x is not None and stream.is_known:
        yield _norm(norm, x, exact, rounded, stream)
    return x


def _is_bare(x: Tensor, norm: str, exact: ReferenceModules, stream: Stream) -> bool:
    """Whether a module's input is the residual stream itself, as in engines that fuse the norm into the product."""
    if not stream.is_known:
        return False
    return bool(off(x, stream.exact_ND).median() < off(x, exact.norm(norm, stream.exact_ND)).median())


def _norm(name: str, out: Tensor, exact: ReferenceModules, rounded: ReferenceModules, stream: Stream) -> Check:
    return check(name, out, exact.norm(name, stream.exact_ND), rounded.norm(name, stream.rounded_ND))


def kind_of(router_NE: Float[Tensor, "N E"]) -> str:
    """Kind of a router's output: `weights` of the chosen experts (0 elsewhere), `probabilities` of all, or `logits`."""
    # Weights have zeros and probabilities sum to 1; logits may all be positive, but show neither.
    if bool((router_NE < 0).any()):
        return "logits"
    if bool((router_NE == 0).any(1).double().mean() > 0.5):
        return "weights"
    return "probabilities" if bool((router_NE.sum(1) - 1).abs().median() < 0.02) else "logits"


def _router(side: ReferenceModules, layer: int, x: Tensor, router: Tensor) -> Tensor | None:
    logits, kind = side.router_logits(layer, x), kind_of(router)
    if kind == "probabilities":
        return logits.softmax(-1)
    return logits if kind == "logits" else side.weights(layer, logits)


def _chosen(exact: ReferenceModules, layer: int, router: Tensor) -> Tensor | None:
    """The weights of the experts that the engine's own router chose."""
    kind = kind_of(router)
    if kind == "weights":
        return router
    # log p differs from the logits by a constant per row, to which a softmax gate is blind.
    return exact.weights(layer, router if kind == "logits" else router.clamp(min=1e-30).log())


def off(value: Float[Tensor, "N D"], wanted: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
    """Relative error |value - wanted| / |wanted| of every row, in float64; infinite for values not finite."""
    found = (value.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1).clamp(min=1e-30)
    return found.nan_to_num(torch.inf, torch.inf)


def check(module: str, value: Tensor, wanted: Tensor, near: Tensor) -> Check:
    """The check of an engine's module output against the exact and the rounded one; ValueError for another shape."""
    if value.shape != wanted.shape:
        raise ValueError(f"{module}.out: expected {tuple(wanted.shape)} as the model's, got {tuple(value.shape)}")
    band = max(torch.quantile(off(near, wanted), 0.95).item(), FLOOR)
    error_N = off(value, wanted)
    return Check(module, error_N.median().item(), band, (error_N > FACTOR * band).double().mean().item())
