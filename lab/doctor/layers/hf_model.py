"""A model of transformers as `ReferenceModules`: its own modules in float32, and cast to an engine's precision.

Routes are the model's own: a trace's experts are not replayed, so where a router differs, all later layers do too.
Letters beyond theory/contracts.py, where N means something else: N rows of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lab.doctor.layers.reference import Precision, Routed
from lab.hf.families import UNQUANTISED
from theory.routing.record import RoutingRecord

DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16,
}  # fmt: skip
E4M3_MAX = 448.0
"""The largest number of float8_e4m3fn."""


class TransformersReference:
    """A causal language model of transformers, one module at a time."""

    def __init__(self, model: Any, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.dtype = model.eval(), dtype

    @staticmethod
    def load(folder: Path) -> TransformersReference:
        """The model of a Hugging Face folder with safetensors; ValueError if transformers cannot open it."""
        import transformers

        try:
            # Eager attention takes the additive mask that `attention` builds. Safetensors run no code when opened.
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, use_safetensors=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{folder}: transformers cannot open it ({' '.join(str(error).split())[:200]})") from None
        return TransformersReference(model)

    @property
    def name(self) -> str:
        """The reference in words."""
        return "transformers in float32"

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.model.model.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The decoder layers whose MLP has a router."""
        return tuple(n for n in range(self.num_layers) if hasattr(self._mlp(n), "gate"))

    @torch.no_grad()
    def rounded(self, precision: Precision) -> TransformersReference:
        """The model in the precision's dtype; for FP8 its matrices are also rounded, with a scale per row."""
        # A copy: rounding writes into the weights, and the exact model is still needed.
        model = deepcopy(self.model)
        # Fake quantisation: a weight becomes an E4M3 value times its row's scale; `model.to` then rounds it to bf16.
        for name, weight in model.named_parameters() if precision == "fp8" else ():
            if weight.dim() >= 2 and not any(part in name for part in UNQUANTISED):
                scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / E4M3_MAX
                weight.copy_((weight / scale).to(torch.float8_e4m3fn).float() * scale)
        # Buffers that no checkpoint has, the rotary frequencies, stay in float32, as when transformers loads in bf16.
        stored = model.state_dict().keys()
        kept = {name: value for name, value in model.named_buffers() if name not in stored}
        model.to(DTYPES[precision])
        for name, value in kept.items():
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, value)
        return TransformersReference(model, DTYPES[precision])

    @torch.no_grad()
    def embedding(self, tokens_N: Int[Tensor, " N"]) -> Float[Tensor, "N D"]:
        """The tokens' embeddings; ValueError for tokens outside the vocabulary."""
        table = self.model.get_input_embeddings()
        if int(tokens_N.max()) >= table.num_embeddings:
            raise ValueError(f"tokens: expected ids below {table.num_embeddings}, got {int(tokens_N.max())}")
        return table(tokens_N).float()

    @torch.no_grad()
    def norm(self, name: str, x_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """The norm of this Hugging Face name, of a residual stream."""
        return self.model.get_submodule(name)(x_ND.to(self.dtype)).float()

    @torch.no_grad()
    def attention(self, layer: int, x_ND: Float[Tensor, "N D"], lengths_B: Int[Tensor, " B"]) -> Float[Tensor, "N D"]:
        """Attention over each sequence by itself; ValueError for a layer of neither full nor sliding attention."""
        out, window = [], self._window(layer)
        for x_SD in x_ND.to(self.dtype).split(lengths_B.tolist()):
            S = len(x_SD)
            places = torch.arange(S)[None]
            # The model makes the masks of its layers; a module called alone needs its own, additive and causal.
            back_SS = places.T - places  # key j is back_SS[i, j] tokens before query i
            is_hidden_SS = (back_SS < 0) | (back_SS >= (S if window is None else window))
            mask = torch.zeros((S, S), dtype=self.dtype).masked_fill(is_hidden_SS, torch.finfo(self.dtype).min)
            rotary = self.model.model.rotary_emb(x_SD[None], places)
            found = self.model.model.layers[layer].self_attn(
                hidden_states=x_SD[None], position_embeddings=rotary, attention_mask=mask[None, None]
            )
            out.append(found[0][0])
        return torch.cat(out).float()

    @torch.no_grad()
    def router_logits(self, layer: int, x_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N E"]:
        """The router's logits."""
        return _first(self._mlp(layer).gate(x_ND.to(self.dtype)[None])).flatten(0, -2).float()

    def weights(self, layer: int, logits_NE: Float[Tensor, "N E"]) -> None:
        """None: every class of transformers has its own gate, so the weights are unknown."""
        return

    @torch.no_grad()
    def mlp(
        self, layer: int, x_ND: Float[Tensor, "N D"], weights_NE: Float[Tensor, "N E"] | None
    ) -> Float[Tensor, "N D"]:
        """The MLP on the routes of its own router, since it takes no others; `weights_NE` is ignored."""
        return _first(self._mlp(layer)(x_ND.to(self.dtype)[None]))[0].float()

    @property
    def replays(self) -> bool:
        """False: transformers' routers always choose by themselves."""
        return False

    @torch.no_grad()
    def routed(self, sequences: Sequence[Tensor], record: RoutingRecord | None, temperature: float = 1.0) -> Routed:
        """A pass over each sequence on the model's own routes; `record` is ignored."""
        config = self.model.config
        # A gate with groups or a bias chooses by more than its logits: then scores stay empty, and only
        # log-probabilities are compared.
        is_plain = getattr(config, "n_group", None) in (None, 1) and getattr(config, "scoring_func", None) is None
        layers = self.moe_layers if is_plain and not hasattr(config, "n_routed_experts") else ()
        logits: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        handles = [
            self._mlp(n).gate.register_forward_hook(
                # n=n binds the layer now; a plain closure would see the last n.
                lambda module, inputs, out, n=n: logits[n].append(_first(out).flatten(0, -2).float())
            )
            for n in layers
        ]
        logp = []
        try:
            for tokens_S in sequences:
                # Row s predicts token s + 1, so the last token is not an input.
                scores_SV = self.model(tokens_S[None, :-1]).logits[0].float().div(temperature).log_softmax(-1)
                logp.append(scores_SV.gather(-1, tokens_S[1:, None])[:, 0])
        finally:
            for handle in handles:
                handle.remove()
        scores = {layer: torch.cat(rows) for layer, rows in logits.items()}
        K = getattr(config, "num_experts_per_tok", 1)
        # Ascending, as a record's ids are: routers.py compares the rows slot by slot.
        natural = {layer: rows.topk(K, dim=1).indices.sort(dim=1).values for layer, rows in scores.items()}
        return Routed(scores, natural, torch.cat(logp))

    def _window(self, layer: int) -> int | None:
        """The number of latest tokens that a row of this layer attends to, its own included; None for all."""
        # transformers chooses masks by the layer's type if the config has types; else all layers are alike.
        config = self.model.config
        types = getattr(config, "layer_types", None)
        kind = "sliding_attention" if types is None else types[layer]
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer {layer}: expected full or sliding attention, got the model's {kind}")
        return None if kind == "full_attention" else getattr(config, "sliding_window", None)

    def _mlp(self, layer: int) -> Any:
        own = self.model.model.layers[layer]
        return own.mlp if hasattr(own, "mlp") else own.block_sparse_moe


def _first(value: Any) -> Tensor:
    # Qwen3-MoE's router returns its logits with the weights and the experts, other modules their output alone.
    return value[0] if isinstance(value, tuple) else value
