"""Laws of the place where engines part: a model of transformers is its own reference, and no row is no evidence."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lab.doctor.layers.hf_model import TransformersReference
from lab.doctor.layers.modules import Check, inspect
from lab.doctor.layers.reference import Precision, Routed
from lab.doctor.layers.routers import trace_routes
from lab.doctor.layers.states import States
from lab.doctor.layers.words import of_modules, of_trace
from lab.traces import Trace
from tests.lab.doctor.hooks import dumped
from tests.lab.doctor.test_importers import K, L
from theory.routing.record import RoutingRecord
from theory.streams import stream

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "attn_implementation": "eager", "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
WINDOW, S = 8, 40


def windowed(name: str) -> torch.nn.Module:
    """A tiny model whose layers all have a window (Mistral), or whose second layer alone has one (Qwen2)."""
    import transformers

    torch.manual_seed(0)
    if name == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=WINDOW)).eval()
    config = transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    assert config.layer_types == ["full_attention", "sliding_attention"]
    return transformers.Qwen2ForCausalLM(config).eval()


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_every_layer_has_the_window_that_the_model_gives_it(name: str, tmp_path: Path) -> None:
    """Attention over five windows of tokens is the model's own to float32's rounding in every layer."""
    model = windowed(name)
    tokens = torch.randint(0, 40, (S,), generator=stream(0, "windows")).tolist()
    states = dumped(model, lambda own: model(torch.tensor([own])), [tokens, tokens[:5]], tmp_path)
    checks = inspect(states, TransformersReference(model), "fp32")
    assert sum("self_attn" in check.module for check in checks) == 2
    assert max(check.error for check in checks) < 1e-5 and not any(check.share_out for check in checks)


def test_a_layer_that_is_neither_full_nor_of_a_window_is_one_line() -> None:
    """Its attention cannot be told from a causal mask: the layer and its type are named."""
    model: Any = windowed("qwen2")
    model.config.layer_types = ["chunked_attention", "full_attention"]
    reference = TransformersReference(model)
    with pytest.raises(ValueError, match=r"^layer 0: expected full or sliding attention, got the model's chunked_at"):
        reference.attention(0, torch.zeros(3, 32), torch.tensor([3]))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_a_rounded_model_turns_positions_by_exact_frequencies(precision: Precision) -> None:
    """Over 1,000 positions its cosines are the exact ones, rounded once; its weights are rounded, the model's are not.

    Frequencies in bf16 are off by up to 1 in 512: by about a radian at position 1,000.
    """
    exact = TransformersReference(windowed("mistral"))
    near = exact.rounded(precision)
    x, places = torch.zeros(1, 1000, 32), torch.arange(1000)[None]
    wanted, found = (side.model.model.rotary_emb(x.to(side.dtype), places) for side in (exact, near))
    assert all(torch.equal(a.to(near.dtype), b) for a, b in zip(wanted, found, strict=True))
    assert {weight.dtype for weight in near.model.parameters()} == {near.dtype}
    assert {weight.dtype for weight in exact.model.parameters()} == {torch.float32}


# ---- a trace alone ---------------------------------------------------------------------------------------------------

E = 8


class Model(TransformersReference):
    """A model whose routers have these scores in every precision, and whose log-probabilities are all -1."""

    def __init__(self, scores: dict[int, Tensor]) -> None:
        self.scores = scores

    @property
    def num_layers(self) -> int:
        """All of them have a router."""
        return len(self.scores)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(self.scores)

    def routed(self, sequences: Sequence[Tensor], record: RoutingRecord | None, temperature: float = 1.0) -> Routed:
        """The same whatever the tokens."""
        natural = {layer: own.topk(K, dim=1).indices.sort(dim=1).values for layer, own in self.scores.items()}
        return Routed(self.scores, natural, torch.full((sum(len(one) - 1 for one in sequences),), -1.0))

    def rounded(self, precision: Precision) -> Model:
        """Itself."""
        return self


def test_a_layer_without_a_recorded_row_counts_as_not_looked_at() -> None:
    """It has no check, the report names it, and routes are said to match only where some layer was looked at."""
    R, logp = 7, torch.full((6,), -1.0)
    model = Model({layer: torch.randn(R, E, generator=stream(layer, "routers")) for layer in range(L)})
    experts = torch.stack([model.scores[n].topk(K, dim=1).indices.sort(dim=1).values for n in range(L)], 1).to(
        torch.int8
    )
    experts[:, 1] = -1
    trace = Trace(
        step=1, tokens=torch.arange(R + 1), offsets=torch.tensor([0, R + 1]), num_prompt=torch.tensor([2]),
        is_response=torch.ones(6, dtype=torch.bool), logp_mu=logp, logp_old=logp, rewards=torch.zeros(1),
        experts_mu=experts, layer_numbers=tuple(range(L)), num_experts=E,
    )  # fmt: skip
    found = trace_routes(trace, "mu", model, "bf16")
    assert [one.layer for one in found.routers] == [0, 2] and found.unseen == [1] and not found.is_out
    told = of_trace("t", found, "bf16", "a model")
    assert told.verdict == "routes and log-probabilities match the model in bf16."
    assert "not looked at, as no row of it is recorded: layer 1" in told.evidence
    bare = trace_routes(replace(trace, experts_mu=torch.full_like(experts, -1)), "mu", model, "bf16")
    assert not bare.routers and of_trace("t", bare, "bf16", "a model").verdict.startswith("log-probabilities match")


def test_an_infinite_error_is_null_for_a_program() -> None:
    """JSON has no infinity: a module whose outputs are not finite has null for its error."""
    (check,) = of_modules("t", [Check("model.norm", torch.inf, 1e-5, 1.0)], "bf16", "a model").as_object()["checks"]
    assert check["error"] is None and check["band"] == 1e-5 and json.dumps(check, allow_nan=False)


# ---- a dump of hidden states -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "lengths", "words"),
    [
        ([1, 2, 3], [], r"lengths: expected counts above 0 that sum up to 3 tokens, got \[\]"),
        ([1, 2, 3], [3, 0], r"lengths: expected counts above 0 that sum up to 3 tokens, got \[3, 0\]"),
        ([1, 2, 3], 3, r"lengths: expected one dimension, got shape \(\)"),
        ([[1, 2, 3]], [3], r"tokens: expected one dimension, got shape \(1, 3\)"),
    ],
)
def test_tokens_and_lengths_that_do_not_fit_are_one_line(
    tokens: object, lengths: object, words: str, tmp_path: Path
) -> None:
    """No sequence, an empty one, a single number, a batch."""
    whole = {"tokens": torch.tensor(tokens), "lengths": torch.tensor(lengths, dtype=torch.long)}
    save_file(whole | {"model.norm.out": torch.zeros(3, 2)}, path := tmp_path / "mu.states.safetensors")
    with pytest.raises(ValueError, match=f"^{path}: {words}$"):
        States.load(path)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("model.layers.0.mlp.gate.out",), "model.layers.0.mlp.gate.out: expected finite values, got 2 of 6 that are "
         "NaN or infinite"),
        (("model.norm.out", "model.layers.10.mlp.out", "model.layers.2.mlp.out", "model.layers.2.mlp.in"),
         "model.layers.2.mlp.in: expected finite values, got 2 of 6 that are NaN or infinite; it is the first in the "
         "forward pass of 4 such tensors"),
    ],
)  # fmt: skip
def test_states_and_router_scores_that_are_not_finite_are_one_line(
    names: tuple[str, ...], words: str, bad: float, tmp_path: Path
) -> None:
    """The field, the number of values and what was expected; of several the first that the engine computed."""
    every = ("model.embed_tokens.out", *names, "model.layers.0.self_attn.out", "model.layers.0.mlp.out")
    values = {name: torch.zeros(3, 2) for name in every}
    for name in names:
        values[name][1:, 0] = bad
    whole = {"tokens": torch.tensor([1, 2, 3]), "lengths": torch.tensor([3])}
    save_file(whole | values, path := tmp_path / "mu.states.safetensors")
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {words}')}$"):
        States.load(path)
