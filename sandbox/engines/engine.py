"""The sandbox's rollout engine: KV-cached sampling that records the routing of every input token.

Without defects its results equal the training engine's bit for bit, alone or in any batch; each defect departs from
that in one named way. Extra letters: A active rows of a decoding step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sandbox.engines.buffers import Buffers, PassRecorder, empty_buffers
from sandbox.engines.defect import Defect, kept_weights
from sandbox.engines.enumeration import Walk, by_response, walk
from sandbox.engines.partial_weights import FirstWeights
from sandbox.engines.prefix_cache import PrefixCache
from sandbox.engines.prompt_pass import padded, run_prompts
from sandbox.engines.rollouts import rollouts_of
from sandbox.engines.stale_weights import WeightHistory, lagging
from sandbox.engines.step_log import StepLog
from sandbox.kernels import EAGER, Kernels
from sandbox.kernels.numerics import EXACT, Numerics, compose
from sandbox.model import MoE
from sandbox.model.checkpoint import load_hf, to_hf
from sandbox.model.config import ModelConfig
from sandbox.model.kv_cache import KVCache
from theory.contracts import NamedTensors, Prompt, Rollouts, Sampling
from theory.exact.tree import PrefixTree
from theory.oversampling import OpenGroups
from theory.streams import stream
from theory.temperature import tempered

# Finished rows leave the batch once they are this share of it: dropping them copies the KV cache.
DROP_AT = 0.25


class SandboxEngine:
    """RolloutEngine over a sandbox MoE with the given defects; the `exact` engine has none.

    `numerics` is the training engine's own arithmetic, from which defects depart. With `prefixes`, a prompt that shares
    a prefix with an earlier sequence is computed only after that prefix; engines must not share the cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        defects: Sequence[Defect],
        stop_tokens: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        numerics: Numerics = EXACT,
        prefixes: PrefixCache | None = None,
        kernels: Kernels = EAGER,
    ):
        self.model = MoE(config, kernels=kernels).to(dtype)
        self.defects = tuple(defects)
        self.stop_tokens = tuple(stop_tokens)
        self.base = numerics
        self.prefixes = prefixes
        self.version = -1
        self.stale = lagging(self.defects)
        self.history = None if self.stale is None else WeightHistory(self.model, self.stale.versions)
        self.first = FirstWeights(self.defects)

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Stores the weights as every defect changes them, in order; the engine then samples from `version`.

        Under stale weights it samples from an older set, with that set's version; withheld tensors keep their first
        values.
        """
        stored = kept_weights(self.defects, self.first.arrived(named_tensors))
        if self.history is None:
            load_hf(self.model, stored)
        else:
            version = self.history.push(stored, version, self.model)
        self.first.keep()
        if self.prefixes is not None:
            self.prefixes.clear()  # its keys and values are those of the old weights
        self.version = version

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self.model.held(), nullcontext() if self.history is None else self.history.newest.held():
            yield

    def state_tensors(self) -> dict[str, Tensor]:
        """The state that a resumed run needs besides the newest weights, which it hands over again."""
        older = {} if self.history is None else self.history.state_tensors()
        return older | self.first.state_tensors()

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_tensors`, called before the newest weights are loaded; other tensors are ignored."""
        if self.history is not None:
            self.history.load_state_tensors(tensors)
        self.first.load_state_tensors(tensors)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        """Samples `num_responses` responses per prompt by inverse transform from the distribution at `temperature`.

        At temperature 0 every token is the likeliest, scored at temperature 1. Response b uses only row b of the
        sampling stream, or its own stream if it has one, so that it does not depend on other responses. With
        `sampling.enough` the call ends at the first position at which enough groups have ended. If stale weights are
        switched, the newest weights sample from the switch's position on, and nothing goes to the prefix cache.
        """
        self.check_loaded("generate")
        with self._held():
            return self._generate(prompts, sampling)

    def _generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Rollouts:
        G, T = sampling.num_responses, sampling.max_tokens
        B = len(prompts) * G
        draws_AT, limits_A = _draws(sampling, B)
        numerics = self.numerics(sampling.seed)
        switch = None if self.stale is None else self.stale.switch_position(T)
        keeps_features, num_top = sampling.num_features > 0, sampling.num_top
        buffers = empty_buffers(prompts, G, T, self.model.config, self.model.norm.dtype, keeps_features, num_top)
        open_groups = OpenGroups(sampling)
        cache, logits_AV = run_prompts(self.model, prompts, G, T, numerics, buffers, self.prefixes)
        # After a switch the KV cache has keys of the newest weights: the prefix cache holds those of `self.model`.
        prefixes = None if switch is not None else self.prefixes
        log = StepLog(buffers, partial(self.scored, temperature=sampling.scored_temperature))
        model, active_A, running_A = self.model, torch.arange(B), torch.ones(B, dtype=torch.bool)
        num_running, nearest = B, min(sampling.limits(B))
        for t in range(T):
            drawn_AV = self.drawn(logits_AV, sampling.scored_temperature)
            is_greedy = sampling.temperature == 0
            tokens_A = drawn_AV.argmax(-1) if is_greedy else self._sample(drawn_AV, draws_AT[:, t])
            log.sampled(active_A, t, tokens_A, logits_AV)
            is_end_A = self._is_end(tokens_A)
            # Nothing ends at most positions.
            if t + 1 >= nearest or bool(is_end_A.any()):
                was_running_A, running_A = running_A, running_A & ~is_end_A & (limits_A > t + 1)
                num_running, ended_E = int(running_A.sum()), (was_running_A & ~running_A).nonzero()[:, 0]
                buffers.end(active_A[ended_E], t + 1, is_end_A[ended_E])
                open_groups.end(active_A[ended_E].tolist())
            if num_running == 0 or open_groups.are_enough_complete:
                buffers.cut(active_A[running_A], t + 1)
                break
            if self._is_time_to_drop(num_running, cache):
                log.write()
                # Before finished rows leave the KV cache: later turns need their keys, values and routes.
                if prefixes is not None:
                    prefixes.keep(cache, ~running_A, active_A, prompts, buffers)
                kept = running_A.nonzero()[:, 0]
                cache, active_A, tokens_A = cache.select(kept), active_A[kept], tokens_A[kept]
                running_A, draws_AT, limits_A = running_A[kept], draws_AT[kept], limits_A[kept]
                nearest = int(limits_A.min())
            # This iteration's decoding step gives the logits of position t + 1.
            if t + 1 == switch:
                log.write()
                own = [prompts[b // G] for b in active_A.tolist()]
                model, cache = self._switched(cache, own, active_A, buffers, numerics)
            recorder, positions_A = PassRecorder(buffers.features is not None), cache.lengths_B
            logits_AV = self.decode(model, tokens_A, cache, numerics, recorder)
            log.decoded(recorder, active_A, positions_A)
        log.write()
        if prefixes is not None:
            prefixes.keep(cache, torch.ones_like(active_A, dtype=torch.bool), active_A, prompts, buffers)
        return rollouts_of(prompts, sampling, buffers, self.model.config, self.version)

    @torch.no_grad()
    def enumerate(self, prompt: Prompt, tree: PrefixTree, seed: int = 0, temperature: float = 1.0) -> Rollouts:
        """Every response of the tree, in tree order, with generation's log-probabilities (at `temperature`) and routes.

        It runs the prefill and decoding steps of `generate` with every continuation instead of a sampled one; each node
        is one row of one step. So a defect draws once per node: mu is a function of the prefix and of `seed`. (In
        `generate` two responses with a common prefix have separate draws.)
        Raises ValueError if the tree has another vocabulary or end token, if the engine does not score the distribution
        that it samples from (a sampling mismatch), or if it samples from two sets of weights (a switch).
        """
        found = self.walk([prompt], tree, seed, temperature)
        sampling = Sampling(tree.max_length, tree.num_responses, temperature, seed)
        return rollouts_of([prompt], sampling, by_response(tree, found), self.model.config, self.version)

    @torch.no_grad()
    def walk(
        self,
        prompts: Sequence[Prompt],
        tree: PrefixTree,
        seed: int = 0,
        temperature: float = 1.0,
        keep_features: bool = False,
    ) -> Walk:
        """The tree below each of several prompts, in shared passes; errors as in `enumerate`."""
        self.check_loaded("enumerate")
        return walk(self, prompts, tree, seed, temperature, keep_features)

    def check_loaded(self, call: str) -> None:
        """Raises ValueError, naming the call, if no weights have been loaded."""
        if self.version < 0:
            raise ValueError(f"{call}: expected weights to have been loaded, got none")

    def numerics(self, seed: int) -> Numerics:
        """The arithmetic of one call: the trainer's, then each defect's, which draws from its own stream."""
        parts, seen = [self.base], Counter[str]()
        for defect in self.defects:
            # By kind and count: a defect's draws do not change with the kinds beside it.
            name = type(defect).__name__
            parts.append(defect.numerics(stream(seed, "defects", name, seen[name])))
            seen[name] += 1
        return compose(parts)

    def scored(self, logits_AV: Float[Tensor, "A V"], temperature: float = 1.0) -> Float[Tensor, "A V"]:
        """The logits whose log-softmax this engine reports: those at the temperature, changed by its defects."""
        scored_AV = tempered(logits_AV, temperature)
        for defect in self.defects:
            scored_AV = defect.scored(scored_AV, logits_AV, temperature)
        return scored_AV

    def _switched(
        self, cache: KVCache, prompts: Sequence[Prompt], active_A: Tensor, buffers: Buffers, numerics: Numerics
    ) -> tuple[MoE, KVCache]:
        """The newest weights, and the cache with which they continue: `cache`, or their own for the same tokens."""
        assert self.stale is not None and self.history is not None, "only stale weights are switched"
        newest = self.history.newest
        if self.stale.cache == "kept":
            return newest, cache
        sequences = []
        for prompt, b, length in zip(prompts, active_A.tolist(), cache.lengths_B.tolist(), strict=True):
            # Without the token that was just sampled: it is the next decoding step's input.
            sequences.append([*prompt.tokens, *buffers.tokens_BT[b, : length - len(prompt.tokens)].tolist()])
        fresh = KVCache(self.model.config, len(sequences), cache.capacity, self.model.norm.dtype)
        # Without a recorder: a row keeps the route of the pass that computed its successor.
        newest.forward_hidden(padded(sequences), numerics=numerics, cache=fresh)
        fresh.truncate(cache.lengths_B)
        return newest, fresh

    @staticmethod
    def decode(
        model: MoE, tokens_A: Tensor, cache: KVCache, numerics: Numerics, recorder: PassRecorder
    ) -> Float[Tensor, "A V"]:
        """The logits after these tokens, one per row of the cache."""
        hidden_ASD = model.forward_hidden(tokens_A[:, None], recorder, numerics=numerics, cache=cache)
        return model.logits(hidden_ASD[:, 0], numerics=numerics)

    def drawn(self, logits_AV: Float[Tensor, "A V"], temperature: float) -> Float[Tensor, "A V"]:
        """The logits of the distribution that tokens are drawn from, in float64 for the sum over V terms."""
        logits_AV = logits_AV.double() / temperature
        for defect in self.defects:
            logits_AV = defect.drawn(logits_AV)
        return logits_AV

    def _is_end(self, tokens_A: Int[Tensor, " A"]) -> Bool[Tensor, " A"]:
        is_end_A = torch.zeros_like(tokens_A, dtype=torch.bool)
        for stop in self.stop_tokens:
            is_end_A |= tokens_A == stop
        return is_end_A

    def _is_time_to_drop(self, num_running: int, cache: KVCache) -> bool:
        """Whether finished rows leave the batch before the next step."""
        num_rows = len(cache.lengths_B)
        # Finished rows are decoded too: those of long prompts would run out of positions before the others end.
        is_full = num_running < num_rows and cache.longest == self.model.config.max_positions
        return is_full or num_running <= (1 - DROP_AT) * num_rows

    @staticmethod
    def _sample(drawn_AV: Tensor, draws_A: Tensor) -> Int[Tensor, " A"]:
        """The smallest token whose cumulative probability exceeds the draw."""
        # The draw is scaled by the last cumulative probability, which rounding keeps from being exactly 1.
        cdf_AV = torch.softmax(drawn_AV, -1).cumsum(-1)
        target_A1 = draws_A[:, None] * cdf_AV[:, -1:]
        # right: a draw of 0 then takes no token of probability 0.
        # Only NaN needs the clamp: its search ends at V. The loop reports NaN itself, with the step.
        return torch.searchsorted(cdf_AV, target_A1, right=True)[:, 0].clamp(max=drawn_AV.shape[1] - 1)

    def load_model(self, model: MoE, version: int) -> None:
        """Calls `load_weights` with the weights of a model in this process."""
        self.load_weights(to_hf(model), version)


def _draws(sampling: Sampling, B: int) -> tuple[Float[Tensor, "B T"], Int[Tensor, " B"]]:
    """The uniform random numbers for each response's tokens, and each response's largest length."""
    T, limits = sampling.max_tokens, torch.tensor(sampling.limits(B))
    if not sampling.draws:
        # Filled row by row: row b does not depend on B. In float32 a draw would be a multiple of 2^-24.
        return torch.rand(B, T, dtype=torch.float64, generator=stream(sampling.seed, "sampling")), limits
    draws_BT = torch.zeros(B, T, dtype=torch.float64)
    for b, draw in enumerate(sampling.draws):
        generator = stream(draw.seed, "sampling")
        # From the start of the stream: earlier parts have used its first numbers.
        own = torch.rand(draw.first + draw.max_tokens, dtype=torch.float64, generator=generator)
        draws_BT[b, : draw.max_tokens] = own[draw.first :]
    return draws_BT, limits
