"""vLLM's worker of this platform, which also records routes and features, and takes pushed weights.

A subclass and not an extension, because the recorders must be bound while the model is loaded: a CUDA graph captures
their writes with the rest of the forward pass, before any method of an extension can be called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform

from scaled.vllm_engine.capture import EngineStep, FeatureRequest, FeatureStore, RouteStore
from scaled.vllm_engine.environment import OPTIONS
from scaled.vllm_engine.gates import GateRecorder
from scaled.vllm_engine.push import Push
from theory.streams import derive_seed, stream


def _platform_worker() -> Any:
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def _options(request: Any) -> dict[str, Any]:
    """Our settings in a scheduled request's sampling parameters."""
    return (request.sampling_params.extra_args or {}).get(OPTIONS, {})


class RolloutWorker(_platform_worker()):
    """One rank of the engine. Methods beyond vLLM's are called by name through `collective_rpc`."""

    def load_model(self, **kwargs: Any) -> None:
        """Loads the model and binds the recorders."""
        super().load_model(**kwargs)
        options = self.vllm_config.additional_config[OPTIONS]
        # Gates are whole on every tensor-parallel rank, so that one record is enough.
        self._is_recorder = get_tp_group().is_first_rank
        self._model = self.model_runner.get_model()
        self._capturer = self._bind_capturer() if options["capture"] else None
        self._routes: RouteStore | None = None
        self._features = FeatureStore()
        self._gates: GateRecorder | None = None
        self._has_feature_gates = False
        self._push: Push | None = None
        self._batch: Any = None
        self._token_seeds: dict[str, int] = {}
        if self.vllm_config.use_v2_model_runner:
            self._keep_batches()
        if options["features"]:
            self._record_gates(True)

    @property
    def _num_buffer_rows(self) -> int:
        """The rows of the largest step, with the padding of CUDA graphs."""
        graphs = self.vllm_config.compilation_config.cudagraph_capture_sizes or [0]
        return max(self.vllm_config.scheduler_config.max_num_batched_tokens, *graphs)

    def _bind_capturer(self) -> Any:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            RoutedExpertsCapturer,
            bind_routed_experts_capturer,
        )

        capturer = RoutedExpertsCapturer(self._num_buffer_rows, self.vllm_config)
        bind_routed_experts_capturer(self._model, capturer)
        return capturer

    def _record_gates(self, is_on: bool) -> None:
        if is_on and self._gates is None:
            config = self.vllm_config.model_config
            # At the first use: its buffers hold a whole step at every layer, and only predicted rollouts need them.
            self._gates = GateRecorder(
                self._model,
                self._num_buffer_rows,
                config.get_hidden_size(),
                config.get_num_experts(),
                config.dtype,
                self.device,
            )
        if self._gates is not None and is_on != self._has_feature_gates:
            (self._gates.install if is_on else self._gates.remove)()
            self._has_feature_gates = is_on

    def _keep_batches(self) -> None:
        """Keeps each step's batch, for its order of requests; the second model runner itself keeps none."""
        prepare = self.model_runner.prepare_inputs

        def kept(*args: Any, **kwargs: Any) -> Any:
            self._batch = prepare(*args, **kwargs)
            return self._batch

        self.model_runner.prepare_inputs = kept

    # Steps

    def execute_model(self, scheduler_output: Any) -> Any:
        """Runs one step of the model and records it."""
        output = super().execute_model(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            asked = _options(request)
            if "token_seed" in asked:
                self._token_seeds[request.req_id] = asked["token_seed"]
        # Before the next step overwrites the buffers.
        if scheduler_output.total_num_scheduled_tokens > 0 and self._is_recorder:
            self._record(scheduler_output)
        return output

    def _record(self, scheduler_output: Any) -> None:
        for request in scheduler_output.scheduled_new_reqs:
            asked = _options(request)
            if "num_features" in asked:
                # All keys in one draw of the request's own stream: they do not depend on its neighbours.
                # In float64, as thousands of float32 keys would have ties, which go to early rows.
                keys = torch.rand(asked["max_rows"], generator=stream(asked["seed"]), dtype=torch.float64)
                self._features.open(
                    request.req_id, FeatureRequest(len(request.prompt_token_ids), asked["num_features"], keys)
                )
        step = self._step(scheduler_output)
        if self._capturer is not None:
            num_rows = sum(step.counts)
            experts_NLK = self._capturer.snapshot_routing_data(num_rows).cpu().numpy()
            self._route_store(self._capturer).add(step, experts_NLK, self._cache_slots)
        if self._gates is not None and self._has_feature_gates:
            self._features.add(step, self._gates.hidden_LND, self._gates.logits_LNE)

    def _step(self, scheduler_output: Any) -> EngineStep:
        if self._batch is not None:
            n = self._batch.num_reqs
            starts, counts = self._batch.num_computed_tokens_np[:n], self._batch.num_scheduled_tokens[:n]
            return EngineStep(self._batch.req_ids[:n], starts.tolist(), counts.tolist())
        cached = scheduler_output.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {request.req_id: request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs}
        counts = scheduler_output.num_scheduled_tokens
        # input_batch has the order of the rows; the scheduler's tables do not.
        names = [name for name in self.model_runner.input_batch.req_ids if counts.get(name, 0) > 0]
        return EngineStep(names, [starts[name] for name in names], [counts[name] for name in names])

    def _route_store(self, capturer: Any) -> RouteStore:
        """The store of routes, made at the first step, when the size of the cache is known."""
        if self._routes is None:
            cache = self.vllm_config.cache_config
            tables = self.model_runner.input_batch.block_table.block_tables
            if cache.enable_prefix_caching and len(tables) != 1:
                raise ValueError(
                    f"rollout.prefix_caching: routes of cached prefixes need one kind of cache, got {len(tables)}"
                )
            size = self.model_runner.kv_cache_config.num_blocks * cache.block_size
            num_layers, num_slots = capturer.shape_per_token
            num_experts = self.vllm_config.model_config.get_num_experts()
            size = size if cache.enable_prefix_caching else 0
            self._routes = RouteStore(num_layers, num_slots, num_experts, size)
        return self._routes

    def _cache_slots(self, name: str, start: int, stop: int) -> np.ndarray:
        batch = self.model_runner.input_batch
        table = batch.block_table[0]
        positions = np.arange(start, stop)
        blocks = table.block_table.np[batch.req_id_to_index[name]]
        # As in vLLM's slot mapping: the block's number, then the place in the block.
        return blocks[positions // table.block_size] * table.block_size + positions % table.block_size

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples, without the seeded generators of prompts that are not yet read to their end.

        vLLM's first model runner draws for those too and then rewinds their generators by CUDA's offset, which CPU
        generators do not have.
        """
        if self.vllm_config.use_v2_model_runner:
            return super().sample_tokens(grammar_output)
        self._seed_tokens()
        with self._without_unread_prompts():
            return super().sample_tokens(grammar_output)

    def _seed_tokens(self) -> None:
        """Seeds the generators of requests with a `token_seed` by the position that they sample next.

        So a response that continues in another request draws as if it had not stopped.
        """
        batch = self.model_runner.input_batch
        for i, generator in batch.generators.items():
            seed = self._token_seeds.get(batch.req_ids[i])
            if seed is not None:
                position = self.model_runner.requests[batch.req_ids[i]].num_tokens
                generator.manual_seed(derive_seed(seed, position))

    @contextmanager
    def _without_unread_prompts(self) -> Iterator[None]:
        batch = self.model_runner.input_batch
        unread = np.nonzero(self.model_runner.discard_request_mask.np[: batch.num_reqs])[0]
        # vLLM draws for these from its default generator and throws the token away.
        held = {int(i): batch.generators.pop(int(i)) for i in unread if int(i) in batch.generators}
        try:
            yield
        finally:
            batch.generators.update(held)

    # Calls from the engine

    def start_recording(self, with_features: bool, always: bool) -> None:
        """Forgets earlier requests; `always` leaves the gates as they are (they are part of a captured graph)."""
        if self._routes is not None:
            self._routes.clear()
        self._features.clear()
        self._token_seeds.clear()
        if not always:
            self._record_gates(with_features)

    def take_recorded(self, num_rows: Mapping[str, int], with_features: bool) -> dict[str, Any] | None:
        """Routes (rows, L, K) and features by request; None from ranks that do not record."""
        if not self._is_recorder:
            return None
        routes = None if self._routes is None else {n: self._routes.take(n, rows) for n, rows in num_rows.items()}
        features = {n: self._features.take(n, rows) for n, rows in num_rows.items()} if with_features else None
        numbers = () if self._gates is None else self._gates.layer_numbers
        return {"routes": routes, "features": features, "feature_layers": numbers}

    def begin_push(self) -> None:
        """Opens the model for new weights."""
        with set_current_vllm_config(self.vllm_config):
            self._push = Push(self._model)

    def push(self, named_tensors: list[tuple[str, Tensor]]) -> None:
        """Loads some of the weights."""
        assert self._push is not None
        with set_current_vllm_config(self.vllm_config):
            self._push.add(named_tensors)

    def finish_push(self) -> int:
        """Ends the push and forgets cached routes; returns the number of layers that had to be packed."""
        assert self._push is not None
        with set_current_vllm_config(self.vllm_config):
            num_packed = self._push.finish(self.vllm_config.model_config, get_tp_group().rank_in_group)
        self._push = None
        if self._routes is not None:
            self._routes.forget_cache()
        return num_packed
