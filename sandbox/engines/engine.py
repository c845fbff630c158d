"""The sandbox's rollout engine: KV-cached sampling with the routing of every input token recorded.

Without defects it computes what the training engine computes, bit for bit, alone or in any batch; each defect departs
from that in one named way. Extra letters: A active rows of a decoding step, W rows of a response's buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sandbox.checkpoint import load_hf, to_hf
from sandbox.engines.defect import Defect
from sandbox.kv_cache import KVCache
from sandbox.model import MoE
from sandbox.model_config import ModelConfig
from sandbox.numerics import Numerics, compose
from theory.contracts import NamedTensors, Prompt, Response, Rollouts, Sampling
from theory.routing.features import RouterFeatures, draw_rows
from theory.routing.gates import Gate, route
from theory.routing.record import RoutingRecord, index_dtype, offsets_of
from theory.streams import stream

# Rows of finished responses are dropped from the batch once they are this share of it.
DROP_AT = 0.25


class _Recorder:
    """Natural routing that keeps what one forward pass did: experts, router inputs and logits by layer."""

    def __init__(self, keep_features: bool):
        self.keep_features = keep_features
        self.experts: list[Tensor] = []
        self.hidden: list[Tensor] = []
        self.logits: list[Tensor] = []

    def route(
        self,
        layer_number: int,
        hidden_ND: Float[Tensor, "N D"],
        logits_NE: Float[Tensor, "N E"],
        num_slots: int,
        gate: Gate,
        selection_bias_E: Float[Tensor, " E"] | None = None,
    ) -> tuple[Int[Tensor, "N K"], Float[Tensor, "N K"]]:
        experts_NK, weights_NK = route(logits_NE, num_slots, gate, selection_bias_E)
        self.experts.append(experts_NK)
        if self.keep_features:
            self.hidden.append(hidden_ND)
            self.logits.append(logits_NE)
        return experts_NK, weights_NK


@dataclass
class _Buffers:
    """What is gathered for B responses while they grow; rows are input tokens, t are response positions."""

    tokens_BT: Tensor
    logp_BT: Tensor
    lengths_B: Tensor
    experts_BWLK: Tensor | None
    hidden_BWLD: Tensor | None = None
    logits_BWLE: Tensor | None = None
    has_stopped_B: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))

    def store(self, recorder: _Recorder, rows: Tensor, positions: Tensor) -> None:
        """Writes the recorder's forward pass: its n-th row is input token positions[n] of response rows[n]."""
        if self.experts_BWLK is not None:
            self.experts_BWLK[rows, positions] = torch.stack(recorder.experts, 1).to(self.experts_BWLK.dtype)
        if self.hidden_BWLD is not None and self.logits_BWLE is not None:
            self.hidden_BWLD[rows, positions] = torch.stack(recorder.hidden, 1)
            self.logits_BWLE[rows, positions] = torch.stack(recorder.logits, 1)


class SandboxEngine:
    """RolloutEngine over a sandbox MoE with the given defects; no defects is the `exact` engine."""

    def __init__(self, config: ModelConfig, defects: Sequence[Defect], stop_token: int | None = None):
        self.model = MoE(config)
        self.defects = tuple(defects)
        self.stop_token = stop_token
        self.version = -1

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Takes the weights through every defect's storage, in order."""
        load_hf(self.model, ((name, self._stored(name, tensor)) for name, tensor in named_tensors))
        self.version = version

    def _stored(self, name: str, tensor: Tensor) -> Tensor:
        for defect in self.defects:
            tensor = defect.weight(name, tensor)
        return tensor

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        """Samples `num_responses` responses a prompt by inverse transform from the distribution at `temperature`.

        Response b uses the b-th row of the sampling stream alone, so what other responses do changes nothing in it.
        """
        if self.version < 0:
            raise ValueError("generate: expected weights to have been loaded, got none")
        G, T = sampling.num_responses, sampling.max_tokens
        B = len(prompts) * G
        draws_BT = torch.rand(B, T, dtype=torch.float64, generator=stream(sampling.seed, "sampling"))
        noise = stream(sampling.seed, "defects")
        numerics = compose([defect.numerics(noise) for defect in self.defects])
        buffers = self._buffers(prompts, G, T, sampling.num_features > 0)
        cache, logits_AV = self._prefill(prompts, G, T, numerics, buffers)
        active_A = torch.arange(B)
        for t in range(T):
            tokens_A = self._sample(logits_AV, draws_BT[active_A, t], sampling.temperature)
            buffers.tokens_BT[active_A, t] = tokens_A
            buffers.logp_BT[active_A, t] = torch.log_softmax(logits_AV, -1).gather(-1, tokens_A[:, None])[:, 0]
            running_A = ~buffers.has_stopped_B[active_A]
            buffers.lengths_B[active_A[running_A]] = t + 1
            if self.stop_token is not None:
                buffers.has_stopped_B[active_A] |= tokens_A == self.stop_token
            running_A = ~buffers.has_stopped_B[active_A]
            if t + 1 == T or not running_A.any():
                break
            if running_A.float().mean() <= 1 - DROP_AT:
                kept = running_A.nonzero()[:, 0]
                cache, active_A, tokens_A = cache.select(kept), active_A[kept], tokens_A[kept]
            logits_AV = self._decode(tokens_A, active_A, cache, numerics, buffers)
        return self._finish(prompts, sampling, buffers)

    def _buffers(self, prompts: Sequence[Prompt], G: int, T: int, keep_features: bool) -> _Buffers:
        config = self.model.config
        B, W, L = len(prompts) * G, max(len(p.tokens) for p in prompts) + T, len(config.moe_layers)
        experts = None
        if L > 0:
            experts = torch.full((B, W, L, config.experts_per_token), -1, dtype=index_dtype(config.num_experts))
        return _Buffers(
            tokens_BT=torch.zeros(B, T, dtype=torch.int64),
            logp_BT=torch.zeros(B, T),
            lengths_B=torch.zeros(B, dtype=torch.int64),
            experts_BWLK=experts,
            hidden_BWLD=torch.zeros(B, W, L, config.hidden_size) if keep_features and L else None,
            logits_BWLE=torch.zeros(B, W, L, config.num_experts) if keep_features and L else None,
            has_stopped_B=torch.zeros(B, dtype=torch.bool),
        )

    def _prefill(
        self, prompts: Sequence[Prompt], G: int, T: int, numerics: Numerics, buffers: _Buffers
    ) -> tuple[KVCache, Float[Tensor, "B V"]]:
        """Runs each prompt once, copies its cache to the G responses of its group, and gives their first logits."""
        lengths_P = torch.tensor([len(p.tokens) for p in prompts])
        width = int(lengths_P.max())
        tokens_PS = torch.zeros(len(prompts), width, dtype=torch.int64)
        for p, prompt in enumerate(prompts):
            tokens_PS[p, : len(prompt.tokens)] = torch.tensor(prompt.tokens)
        cache = KVCache(self.model.config, len(prompts), width + T)
        recorder = _Recorder(buffers.hidden_BWLD is not None)
        hidden_PSD = self.model.forward_hidden(tokens_PS, recorder, numerics=numerics, cache=cache)
        cache.truncate(lengths_P)
        if buffers.experts_BWLK is not None:
            p_n, s_n = (torch.arange(width) < lengths_P[:, None]).nonzero(as_tuple=True)
            flat_n = p_n * width + s_n
            for values in (recorder.experts, recorder.hidden, recorder.logits):
                values[:] = [v[flat_n] for v in values]
            for g in range(G):
                buffers.store(recorder, p_n * G + g, s_n)
        logits_PV = self.model.logits(hidden_PSD[torch.arange(len(prompts)), lengths_P - 1], numerics=numerics)
        return cache.repeat(G), logits_PV.repeat_interleave(G, 0)

    def _decode(
        self, tokens_A: Tensor, active_A: Tensor, cache: KVCache, numerics: Numerics, buffers: _Buffers
    ) -> Float[Tensor, "A V"]:
        recorder = _Recorder(buffers.hidden_BWLD is not None)
        positions_A = cache.lengths_B.clone()
        hidden_ASD = self.model.forward_hidden(tokens_A[:, None], recorder, numerics=numerics, cache=cache)
        buffers.store(recorder, active_A, positions_A)
        return self.model.logits(hidden_ASD[:, 0], numerics=numerics)

    @staticmethod
    def _sample(logits_AV: Tensor, draws_A: Tensor, temperature: float) -> Int[Tensor, " A"]:
        """The smallest token whose cumulative probability exceeds the draw; float64, as V terms are summed."""
        cdf_AV = torch.softmax(logits_AV.double() / temperature, -1).cumsum(-1)
        target_A1 = draws_A[:, None] * cdf_AV[:, -1:]
        return torch.searchsorted(cdf_AV, target_A1, right=True)[:, 0].clamp(max=logits_AV.shape[1] - 1)

    def _finish(self, prompts: Sequence[Prompt], sampling: Sampling, buffers: _Buffers) -> Rollouts:
        G = sampling.num_responses
        responses = []
        for b, length in enumerate(buffers.lengths_B.tolist()):
            responses.append(
                Response(
                    prompt=prompts[b // G],
                    tokens=buffers.tokens_BT[b, :length].clone(),
                    logp_mu=buffers.logp_BT[b, :length].clone(),
                    is_response=torch.ones(length, dtype=torch.bool),
                    finish="stop" if buffers.has_stopped_B[b] else "length",
                    version=self.version,
                )
            )
        if buffers.experts_BWLK is None:
            return Rollouts(tuple(responses))
        config = self.model.config
        num_rows = [r.num_tokens - 1 for r in responses]
        experts = torch.cat([buffers.experts_BWLK[b, :n] for b, n in enumerate(num_rows)])
        record = RoutingRecord(experts, offsets_of(num_rows), config.moe_layers, config.num_experts)
        return Rollouts(tuple(responses), record, self._features(responses, sampling, buffers))

    def _features(self, responses: Sequence[Response], sampling: Sampling, buffers: _Buffers) -> RouterFeatures | None:
        if buffers.hidden_BWLD is None or buffers.logits_BWLE is None:
            return None
        rows = draw_rows(
            [r.num_tokens - 1 for r in responses],
            [len(r.prompt.tokens) - 1 for r in responses],
            sampling.num_features,
            stream(sampling.seed, "features"),
        )
        return RouterFeatures(
            rows=torch.cat(rows),
            offsets=offsets_of([len(r) for r in rows]),
            hidden=torch.cat([buffers.hidden_BWLD[b, r] for b, r in enumerate(rows)]),
            logits=torch.cat([buffers.logits_BWLE[b, r] for b, r in enumerate(rows)]),
            layer_numbers=self.model.config.moe_layers,
        )

    def load_model(self, model: MoE, version: int) -> None:
        """`load_weights` from a model in this process."""
        self.load_weights(to_hf(model), version)
