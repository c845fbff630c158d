"""vLLM as a RolloutEngine: an engine core in this process, weights pushed into it, tokens, log-probs and routes out.

The engine reads no checkpoint: it starts from config.json with unset weights and takes them from the training ranks,
which quantise them.
"""

from __future__ import annotations

import gc
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lab.hf import in_full
from scaled.config import RolloutBlock
from scaled.model_shape import load_shape
from scaled.vllm_engine import environment, quantize, routes
from scaled.vllm_engine.arguments import engine_arguments
from scaled.vllm_engine.pieces import OpenPiece, OpenPieces
from scaled.vllm_engine.push import in_parts
from scaled.vllm_engine.requests import Request, check_room, check_tokens, sampling_params, scoring_params, top_tokens
from scaled.vllm_engine.weights_check import check_weights
from theory.contracts import NamedTensors, Prompt, Rollouts, Sampling
from theory.routing.record import RoutingRecord

LOWEST_TEMPERATURE = 0.01  # vLLM's SamplingParams raises any lower one to this, other than 0
GREEDY_BELOW = 1e-5  # vLLM's _SAMPLING_EPS: a lower one is greedy, with log-probabilities at temperature 1


class VllmEngine:
    """RolloutEngine over vLLM; `routes` is the source of its routes, `kernels` are those of its quantised weights.

    logp_mu is of the sampling distribution, the model's at the sampling temperature (`processed_logprobs`; vLLM leaves
    temperature 0, greedy, at 1). `features_under_graphs` is needed for sampling.num_features > 0 where
    rollout.enforce_eager is false, as graphs are captured once. One engine per process at a time; `close()` ends it.
    `timeout_s` may be changed between calls.
    """

    def __init__(
        self,
        shape_folder: Path,
        rollout: RolloutBlock,
        stop_tokens: Sequence[int],
        *,
        features_under_graphs: bool = False,
    ):
        self.shape = load_shape(shape_folder)
        environment.prepare(rollout)
        from vllm.platforms import current_platform

        self._is_cpu = current_platform.is_cpu()
        if self._is_cpu and rollout.enforce_eager:
            environment.compile_nothing()
        self.kernels: quantize.Kernels = quantize.choose_kernels(rollout.precision, self._is_cpu)
        quantize.check_precision(self.shape, rollout, self.kernels, self._is_cpu)
        environment.check_model(self.shape, self._is_cpu)
        self.routes: Literal["official", "capture"] = environment.choose_routes(rollout.routes)
        self.timeout_s = rollout.timeout_s
        self.version = -1
        self.num_packed_layers = 0
        self._rollout, self._stop_tokens = rollout, tuple(stop_tokens)
        self._has_graph_features = features_under_graphs
        self._expected = quantize.sent(self.shape.weights(), rollout.precision.weights)
        self._folder = Path(tempfile.mkdtemp(prefix="firstorder-vllm-"))
        try:
            self._write_config(Path(shape_folder) / "config.json")
            self._engine: Any = self._start()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._open_pieces = OpenPieces(self._engine)

    def _write_config(self, source: Path) -> None:
        fields = in_full(json.loads(source.read_text(encoding="utf-8")), self.shape)
        quantization = quantize.quantization_config(self.shape, self._rollout.precision, self.kernels)
        if quantization is not None:
            fields["quantization_config"] = quantization
        (self._folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")

    def _start(self) -> Any:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = engine_arguments(
            self._folder,
            self._rollout,
            is_official=self.routes == "official",
            has_graph_features=self._has_graph_features,
            is_cpu=self._is_cpu,
        )
        return LLMEngine.from_engine_args(EngineArgs(**arguments))

    # Weights

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Takes all weights as `quantize.quantised` gives them for `rollout.precision`, one tensor per expert.

        Later responses carry `version`. All tensors are collected and compared with the model before the engine is
        touched: ValueError names those that are missing, unexpected, repeated or misshapen. Cached prefixes of the old
        weights are dropped.
        """
        # On a cluster they are views of shared memory, so that collecting them copies nothing.
        given: dict[str, Tensor] = {}
        repeated: list[str] = []
        for name, tensor in named_tensors:
            repeated += [name] if name in given else []
            given[name] = tensor
        check_weights(given, repeated, self._expected)
        self.version = -1  # no weights to sample from until the push is complete
        # In the table's order, in which a scale follows its weight; pop frees each tensor once it is loaded.
        in_order = ((name, given.pop(name)) for name in self._expected)
        loaded = quantize.rounded(in_order, self._rollout.precision) if self.kernels == "rounded" else in_order
        self._call("begin_push")
        for part in in_parts(loaded):
            self._call("push", part)
        self.num_packed_layers = self._call("finish_push")
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")
        self.version = version

    def _call(self, method: str, *arguments: Any) -> Any:
        """The first rank's answer to a call of all workers."""
        with self._watched():
            return self._engine.collective_rpc(method, args=arguments)[0]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Raises TimeoutError, by which the driver knows a lost engine, where one of vLLM's own processes has ended."""
        try:
            yield
        except RuntimeError as error:
            # Of tensor parallelism's executor alone, which says no more than "cancelled" or "Executor failed."
            core = getattr(self._engine.engine_core, "engine_core", None)
            if getattr(getattr(core, "model_executor", None), "is_failed", False):
                raise TimeoutError("one of the engine's worker processes ended") from error
            raise

    # Generation

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, first_response: int = 0) -> Rollouts:
        """`num_responses` responses per prompt, adjacent; response b draws from seed number first_response + b.

        Law: two calls over parts of the prompts, with consecutive numbers, equal one call over all (in fp32, where the
        batch changes no bits). With `sampling.draws` responses have their own seeds and no numbers. A prompt may hold
        earlier responses (multi-turn). A response that `sampling.enough` cut short keeps its tokens. Raises
        ValueError for a prompt that the engine cannot hold or draws that are not the responses', RuntimeError without
        weights, and TimeoutError, after aborting all, if no token comes for `timeout_s`.
        """
        self.begin(0, prompts, sampling, first_response)
        ((_, rollouts),) = self.sample()
        return rollouts

    def begin(self, number: int, prompts: Sequence[Prompt], sampling: Sampling, first_response: int = 0) -> None:
        """Puts these prompts, with responses as those of `generate`, in flight beside earlier pieces, for `sample`.

        All pieces in flight ask for features, or none does. Raises generate's ValueError and RuntimeError, and earlier
        pieces go on.
        """
        self._check_ready(sampling)
        limits = sampling.limits(len(prompts) * sampling.num_responses)  # raises for draws of other responses
        longest = self._rollout.max_model_len - 1
        check_tokens([p.tokens for p in prompts], "prompts", longest, self.shape.vocab_size)
        num_top = min(sampling.num_top, self.shape.vocab_size)
        requests = [Request(prompt, num_top=num_top) for prompt in prompts for _ in range(sampling.num_responses)]
        check_room([r.prompt for r in requests], limits, self._rollout.max_model_len)
        numbers = [b if sampling.draws else first_response + b for b in range(len(requests))]
        params = [sampling_params(sampling, self._rollout, self._stop_tokens, n, num_top) for n in numbers]
        self._open(number, OpenPiece(requests, sampling, num_top), params)

    def sample(self, room: int = 0, most: int | None = None, steps: int | None = None) -> list[tuple[int, Rollouts]]:
        """Samples until a piece has ended, or at most `room` responses are unfinished; the pieces that have ended.

        A response ends, as "abort", once it has `most` tokens; the call ends after `steps` decoding steps. None: no
        such end. Raises TimeoutError, after giving all pieces up, if no token comes for `timeout_s`.
        """
        return [(number, self._rollouts(piece)) for number, piece in self._run(room, most, steps)]

    @property
    def num_unfinished(self) -> int:
        """The responses of all pieces in flight that have not ended."""
        return self._open_pieces.num_unfinished

    def give_up(self) -> None:
        """Aborts all pieces in flight, so that the engine is idle."""
        self._open_pieces.give_up()

    def _rollouts(self, piece: OpenPiece) -> Rollouts:
        requests, sampling = piece.requests, piece.sampling
        responses = tuple(request.response(self.version) for request in requests)
        # The last token of a response was never an input: it has no row.
        num_rows = {q.name: r.num_tokens - 1 for q, r in zip(requests, responses, strict=True)}
        with_features = sampling.num_features > 0
        recorded = self._call("take_recorded", num_rows, with_features)
        features = piece.features(recorded) if with_features else None
        record = self._record(requests, recorded, num_rows)
        top = top_tokens(requests, piece.num_top, self.shape.vocab_size) if piece.num_top else None
        return Rollouts(responses, record, features, sampling.scored_temperature, top)

    def _check_ready(self, sampling: Sampling) -> None:
        if self.version < 0:
            raise RuntimeError("generate: expected weights to have been loaded, got none since the start, wake or push")
        if 0 < sampling.temperature < GREEDY_BELOW:
            raise ValueError(
                f"sampling.temperature: expected 0 or at least {GREEDY_BELOW:g} (vLLM takes lower ones as 0), "
                f"got {sampling.temperature}"
            )
        if 0 < sampling.temperature < LOWEST_TEMPERATURE and self._rollout.tensor_parallel > 1:
            raise ValueError(
                f"sampling.temperature: expected 0 or at least {LOWEST_TEMPERATURE} with rollout.tensor_parallel above "
                f"1 (vLLM raises lower ones to that for other processes), got {sampling.temperature}"
            )
        if sampling.num_features > 0 and not self._rollout.enforce_eager and not self._has_graph_features:
            raise ValueError(
                f"sampling.num_features: expected 0 with rollout.enforce_eager false, unless the engine is made with "
                f"features_under_graphs, got {sampling.num_features}"
            )

    def _open(self, number: int, piece: OpenPiece, params: Sequence[Any]) -> None:
        """Puts the piece in flight, its requests with these parameters of vLLM's."""
        if self._open_pieces.is_empty:
            # Forgets what an aborted request has left: nothing else is recorded now.
            self._call("start_recording", piece.sampling.num_features > 0, self._has_graph_features)
        self._open_pieces.open(number, piece, params)

    def _run(self, room: int, most: int | None = None, steps: int | None = None) -> list[tuple[int, OpenPiece]]:
        """Steps as `sample` says; the pieces that have ended, which are no longer in flight."""
        with self._watched():
            return self._open_pieces.run(room, self.timeout_s, most, steps)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[Float[Tensor, " T"]]:
        """log mu of tokens 1.. of each sequence, in nats: at temperature 1, whatever responses are sampled at."""
        sampling = Sampling(max_tokens=1)
        self._check_ready(sampling)
        check_tokens(sequences, "sequences", self._rollout.max_model_len - 1, self.shape.vocab_size)
        requests = [Request(Prompt(str(i), tuple(tokens), "")) for i, tokens in enumerate(sequences)]
        self._open(0, OpenPiece(requests, sampling), [scoring_params() for _ in requests])
        self._run(room=0)
        return [torch.tensor(request.prompt_logp, dtype=torch.float32) for request in requests]

    # Routes and features

    def _record(self, requests: Sequence[Request], recorded: Any, num_rows: dict[str, int]) -> RoutingRecord:
        num_tokens = [rows + 1 for rows in num_rows.values()]
        if self.routes == "official":
            # Over all decoder layers, as vLLM's own rows are: `record` cuts both to the MoE layers.
            lost = (self.shape.num_layers, self.shape.experts_per_token)
            rows = [
                routes.unknown(num_rows[r.name], *lost) if r.routes is None else routes.joined(r.routes)
                for r in requests
            ]
        else:
            rows = [routes.joined(recorded["routes"][request.name]) for request in requests]
        return routes.record(rows, num_tokens, self.shape)

    # Sharing a GPU

    def sleep(self) -> None:
        """Frees the GPU memory of weights and cache; weights must be pushed after `wake`. Does nothing on a CPU."""
        self.version = -1
        if not self._is_cpu:
            self._engine.sleep(level=2)  # level 1 would keep the weights on the host, which the next push replaces

    def wake(self) -> None:
        """Takes the GPU's memory again. Does nothing on a CPU."""
        if not self._is_cpu:
            self._engine.wake_up()

    def close(self) -> None:
        """Ends the engine and frees its memory, so that this process may start another; a second call does nothing."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if self._engine is None:
            return
        self._engine.engine_core.shutdown()
        self._engine, self.version = None, -1
        gc.collect()
        cleanup_dist_env_and_memory()
        shutil.rmtree(self._folder, ignore_errors=True)
