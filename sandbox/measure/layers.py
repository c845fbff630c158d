"""The sandbox's decoder, one module at a time: the reference of `firstorder doctor --localise`.

Extra letters: N rows of all sequences, one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lab.doctor.layers.reference import Precision, Routed, hand_on
from sandbox.engines import ActivationPrecision, WeightPrecision
from sandbox.engines.defect import Defect, kept_weights
from sandbox.kernels import EAGER
from sandbox.kernels.numerics import compose
from sandbox.model import MoE
from sandbox.model.checkpoint import load, load_hf, to_hf
from sandbox.model.layers import Layer, Pass, linear
from theory.routing.gates import Gate, route
from theory.routing.passes import RoutingPlan
from theory.routing.record import RoutingRecord
from theory.routing.replay import NaturalRouting, ReplayContext

AS_PRECISION: dict[Precision, tuple[Defect, ...]] = {
    "fp32": (),
    "bf16": (WeightPrecision(format="bf16"), ActivationPrecision(format="bf16")),
    "fp16": (WeightPrecision(format="fp16"), ActivationPrecision(format="fp16")),
    "fp8": (WeightPrecision(format="fp8_e4m3"), ActivationPrecision(format="bf16"), ActivationPrecision()),
}
"""An engine of each precision: weights, inputs and outputs of products rounded; FP8 scales per channel and token."""
NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
ROWS = 2**14
"""Largest number of rows in one pass, padding included."""


class DecoderReference:
    """A sandbox decoder as a Reference, in the arithmetic of one precision."""

    def __init__(self, model: MoE, precision: Precision = "fp32") -> None:
        self.model = model.compute_with(EAGER)
        self.precision: Precision = precision
        # Nothing draws from it: rounding is not random.
        generator = torch.Generator()
        self.numerics = compose([defect.numerics(generator) for defect in AS_PRECISION[precision]])

    @staticmethod
    def load(folder: Path) -> DecoderReference:
        """The model of a Hugging Face folder; ValueError if the sandbox cannot open it."""
        return DecoderReference(load(folder))

    @property
    def name(self) -> str:
        """The reference in words."""
        return "the sandbox's exact engine"

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return self.model.config.num_layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The decoder layers with a router."""
        return self.model.config.moe_layers

    def rounded(self, precision: Precision) -> DecoderReference:
        """The same weights as an engine of that precision stores them, with its arithmetic."""
        model = MoE(self.model.config)
        load_hf(model, kept_weights(AS_PRECISION[precision], to_hf(self.model)))
        return DecoderReference(model, precision)

    def embedding(self, tokens_N: Int[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """The tokens' embeddings; ValueError for tokens outside the vocabulary."""
        if int(tokens_N.max()) >= self.model.config.vocab_size:
            raise ValueError(f"tokens: expected ids below {self.model.config.vocab_size}, got {int(tokens_N.max())}")
        return hand_on(self.model.embedding.detach()[tokens_N], self.precision)

    @torch.no_grad()
    def norm(self, name: str, x_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """The output of the RMS norm of this name."""
        parts = name.split(".")
        weight = self.model.norm if parts[1] == "norm" else getattr(self._layer(int(parts[2])), NORMS[parts[3]])
        return hand_on(EAGER.rms_norm(x_ND, weight, self.model.config.norm_eps), self.precision)

    @torch.no_grad()
    def attention(self, layer: int, x_ND: Float[Tensor, "N D"], lengths_B: Int[Tensor, " B"]) -> Float[Tensor, "N D"]:
        """The output of attention over each sequence by itself."""
        out = []
        for x_SD in x_ND.split(lengths_B.tolist()):
            shared = self._pass(len(x_SD), NaturalRouting())
            out.append(self._layer(layer).attention(x_SD[None], shared)[0])
        return hand_on(torch.cat(out), self.precision)

    @torch.no_grad()
    def router_logits(self, layer: int, x_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N E"]:
        """The router's logits, in float32 at every precision; only its inputs are rounded."""
        # A pass of one position: a product reads neither positions nor keys.
        return linear(x_ND, self._mlp(layer).router, "router", self._pass(1, NaturalRouting()))

    @torch.no_grad()
    def weights(self, layer: int, logits_NE: Float[Tensor, "N E"]) -> Float[Tensor, "N E"]:
        """The gate's weights for these logits; 0 for experts that are not chosen."""
        config = self.model.config
        experts, weights = route(logits_NE, config.experts_per_token, config.gate, self._mlp(layer).selection_bias)
        return torch.zeros_like(logits_NE).scatter(1, experts, weights)

    @torch.no_grad()
    def mlp(
        self, layer: int, x_ND: Float[Tensor, "N D"], weights_NE: Float[Tensor, "N E"] | None
    ) -> Float[Tensor, "N D"]:
        """The output of the MLP, or of the experts on these routes."""
        routing = NaturalRouting() if weights_NE is None else Given(weights_NE)
        return hand_on(self._mlp(layer)(x_ND, self._pass(1, routing)), self.precision)

    @property
    def replays(self) -> bool:
        """Always."""
        return True

    @torch.no_grad()
    def routed(self, sequences: Sequence[Tensor], record: RoutingRecord | None, temperature: float = 1.0) -> Routed:
        """The routers' scores in passes over some sequences at a time, with the record's experts where it has rows."""
        if record is not None and record.layer_numbers != self.moe_layers:
            raise ValueError(f"layer_numbers: expected the model's {self.moe_layers}, got {record.layer_numbers}")
        if record is not None and record.num_experts < self.model.config.num_experts:
            # A dump tells their number only by the largest id, which may never have been chosen.
            record = replace(record, num_experts=self.model.config.num_experts)
        scores: dict[int, list[Tensor]] = defaultdict(list)
        natural: dict[int, list[Tensor]] = defaultdict(list)
        logp: list[Tensor] = []
        size = max(1, ROWS // max(len(tokens) for tokens in sequences))
        for start in range(0, len(sequences), size):
            part = range(start, min(start + size, len(sequences)))
            found = self._routed(
                [sequences[b] for b in part], None if record is None else record.select(part), temperature
            )
            logp.append(found.logp_R)
            for layer in found.scores:
                scores[layer].append(found.scores[layer])
                natural[layer].append(found.natural[layer])
        by_layer, chosen = ({layer: torch.cat(parts) for layer, parts in of.items()} for of in (scores, natural))
        gate = self.model.config.gate
        # With a choice of groups an expert may lose by its group: its own score then has no margin to the chosen ones.
        return Routed(by_layer, chosen, torch.cat(logp), has_margins=gate.num_top_groups == gate.num_groups)

    def _routed(self, sequences: Sequence[Tensor], record: RoutingRecord | None, temperature: float) -> Routed:
        num_rows = [len(tokens) - 1 for tokens in sequences]
        tokens_BS = pad_sequence(list(sequences), batch_first=True)  # right padding: causal passes do not see it
        kept = tuple(torch.arange(n) for n in num_rows)
        how = RoutingPlan("natural" if record is None else "replay", record, feature_rows=kept)
        with ReplayContext(how, num_rows, max(num_rows), self.moe_layers) as routing:
            hidden_BSD = self.model.forward_hidden(tokens_BS[:, :-1], routing, numerics=self.numerics)
            logits_BSV = self.model.logits(hidden_BSD.flatten(0, 1), numerics=self.numerics).unflatten(
                0, hidden_BSD.shape[:2]
            )
        # Row s scores token s + 1.
        logp_BS = (logits_BSV / temperature).log_softmax(-1).gather(-1, tokens_BS[:, 1:, None])[..., 0]
        logp_R = torch.cat([logp_BS[b, :n] for b, n in enumerate(num_rows)])
        features, natural = routing.features, routing.natural
        if features is None or natural is None:
            return Routed({}, {}, logp_R)
        by_layer = zip(features.layer_numbers, features.logits.unbind(1), strict=True)
        scores = {layer: self._scores(layer, logits_RE) for layer, logits_RE in by_layer}
        return Routed(scores, {layer: natural.layer(layer) for layer in scores}, logp_R)

    def _scores(self, layer: int, logits_RE: Float[Tensor, "R E"]) -> Float[Tensor, "R E"]:
        bias = self._mlp(layer).selection_bias
        # The numbers that top-k ranks, up to a monotone map.
        return logits_RE if self.model.config.gate.score == "softmax" else logits_RE.sigmoid() + bias

    def _layer(self, number: int) -> Layer:
        layer = self.model.layers[number]
        assert isinstance(layer, Layer)
        return layer

    def _mlp(self, number: int) -> Any:
        return self._layer(number).mlp

    def _pass(self, num_positions: int, routing: Any) -> Pass:
        positions_BS = torch.arange(num_positions)[None]
        return self.model.prepare(positions_BS, routing, self.numerics, None)


class Given:
    """A routing with given experts and weights."""

    def __init__(self, weights_NE: Float[Tensor, "N E"]) -> None:
        self.weights_NE = weights_NE

    def route(
        self,
        layer_number: int,
        hidden_ND: Float[Tensor, "N D"],
        logits_NE: Float[Tensor, "N E"],
        num_slots: int,
        gate: Gate,
        selection_bias_E: Float[Tensor, " E"] | None = None,
    ) -> tuple[Int[Tensor, "N K"], Float[Tensor, "N K"]]:
        """The experts with the largest weights, ascending, and these weights."""
        # Experts that are not chosen have weight 0; if a chosen one has underflowed to 0, either adds nothing.
        experts_NK = self.weights_NE.topk(num_slots, dim=-1).indices.sort(dim=-1).values
        return experts_NK, self.weights_NE.gather(1, experts_NK).to(logits_NE.dtype)
