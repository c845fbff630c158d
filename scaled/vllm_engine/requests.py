"""One request and its output so far: vLLM's sampling parameters from theory's, and the collected deltas.

Output is collected at every step, because an aborted request returns nothing at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from scaled.config import RolloutBlock
from scaled.vllm_engine.environment import OPTIONS
from theory.contracts import Prompt, Response, Sampling
from theory.routing.packed_rows import offsets_of
from theory.streams import derive_seed
from theory.top_tokens import TopTokens, id_dtype


@dataclass
class Request:
    """An unfinished response; `name` is the engine's own name for it, `num_top` the number of mu's tokens it keeps."""

    prompt: Prompt
    name: str = ""
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    prompt_logp: list[float] = field(default_factory=list)
    finish: str = ""
    routes: Any = None
    num_top: int = 0
    top: list[list[tuple[int, float]]] = field(default_factory=list)

    def add(self, output: Any) -> None:
        """Adds the tokens that one engine step sampled.

        RuntimeError where the engine reports a failure of this request, or tokens without their log-probabilities.
        """
        completion = output.outputs[0]
        if output.prompt_logprobs:
            # Nothing predicts the first token: vLLM gives None for it.
            pairs = zip(self.prompt.tokens[1:], output.prompt_logprobs[1:], strict=True)
            self.prompt_logp = [logp[token].logprob for token, logp in pairs]
        new = list(completion.token_ids)
        if new:
            if completion.logprobs is None:
                raise RuntimeError(f"prompt {self.prompt.id}: expected {len(new)} log-probabilities, vLLM gave none")
            self.tokens += new
            self.logp += [logp[token].logprob for token, logp in zip(new, completion.logprobs, strict=True)]
            if self.num_top:
                self.top += [self._likeliest(logp) for logp in completion.logprobs]
        if output.finished:
            if completion.finish_reason not in ("stop", "length", "abort"):
                raise RuntimeError(f"prompt {self.prompt.id}: vLLM ended the request with {completion.finish_reason}")
            self.finish, self.routes = completion.finish_reason, completion.routed_experts

    def _likeliest(self, logp: Any) -> list[tuple[int, float]]:
        """The likeliest tokens of a position; vLLM adds the sampled one where it is not among them."""
        each = sorted(((token, one.logprob) for token, one in logp.items()), key=lambda pair: -pair[1])
        if len(each) < self.num_top:
            raise RuntimeError(
                f"prompt {self.prompt.id}: expected the log-probabilities of {self.num_top} tokens at every position, "
                f"vLLM gave {len(each)}"
            )
        return each[: self.num_top]

    def response(self, version: int) -> Response:
        """The response so far; one that did not finish was aborted."""
        return Response(
            prompt=self.prompt,
            tokens=torch.tensor(self.tokens, dtype=torch.int64),
            logp_mu=torch.tensor(self.logp, dtype=torch.float32),
            is_response=torch.ones(len(self.tokens), dtype=torch.bool),
            finish=self.finish or "abort",  # type: ignore[arg-type]
            version=version,
        )


def sampling_params(
    sampling: Sampling, rollout: RolloutBlock, stop_tokens: Sequence[int], index: int, num_top: int = 0
) -> Any:
    """vLLM's parameters of response `index`, which draws from derive_seed(sampling.seed, "vllm", index).

    Where `sampling.draws` gives the response its own seed and max_tokens, it draws from derive_seed(seed, "vllm"); with
    `sampling.enough`, token t of prompt and response together draws from derive_seed(derive_seed(seed, "vllm"), t), so
    that a later call continues the draws. Every position has the log-probabilities of its `num_top` likeliest tokens.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if sampling.draws:
        seed, names, max_tokens = sampling.draws[index].seed, [], sampling.draws[index].max_tokens
    else:
        seed, names, max_tokens = sampling.seed, [index], sampling.max_tokens
    options: dict[str, Any] = {}
    if sampling.num_features > 0:
        options |= {
            "num_features": sampling.num_features,
            "max_rows": max_tokens,
            "seed": derive_seed(seed, "features", *names),
        }
    if sampling.enough:
        options["token_seed"] = derive_seed(seed, "vllm")
    params = SamplingParams(
        max_tokens=max_tokens,
        seed=derive_seed(seed, "vllm", *names),
        stop_token_ids=list(stop_tokens),
        ignore_eos=True,  # no token but these ends a response
        detokenize=False,
        # 0 still gives the sampled token's own.
        logprobs=num_top,
        # The cache itself may be on without `prefix_caching`: vLLM's own routes need it (arguments.py).
        skip_reading_prefix_cache=not rollout.prefix_caching,
        extra_args={OPTIONS: options} if options else None,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,  # a deep copy would run the constructor again
    )
    # Set here because SamplingParams' constructor raises a temperature below 0.01 to 0.01.
    params.temperature = sampling.temperature
    return params


def scoring_params() -> Any:
    """vLLM's parameters for the log-probabilities of a prompt; vLLM must sample one token, which is dropped."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0,
        logprobs=0,
        # With these vLLM does not read its prefix cache, whose tokens would have no log-probabilities.
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def top_tokens(requests: Sequence[Request], num: int, vocab_size: int) -> TopTokens:
    """mu's `num` likeliest tokens of every position of every response, one after the other."""
    pairs = [pair for request in requests for position in request.top for pair in position]
    ids = torch.tensor([token for token, _ in pairs], dtype=id_dtype(vocab_size)).view(-1, num)
    logp = torch.tensor([logp for _, logp in pairs], dtype=torch.float32).view(-1, num)
    return TopTokens.packed(ids, logp, offsets_of([len(request.top) for request in requests]), vocab_size)


def check_tokens(sequences: Sequence[Sequence[int]], field_name: str, longest: int, vocab_size: int) -> None:
    """Raises ValueError for a sequence that is empty, longer than the engine holds, or outside the vocabulary."""
    for i, tokens in enumerate(sequences):
        if not 1 <= len(tokens) <= longest:
            raise ValueError(
                f"{field_name}[{i}]: expected 1 to {longest} tokens (rollout.max_model_len - 1), got {len(tokens)}"
            )
        outside = [token for token in tokens if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(f"{field_name}[{i}]: expected token ids in [0, {vocab_size}), got {outside[0]}")


def check_room(prompts: Sequence[Prompt], limits: Sequence[int], max_model_len: int) -> None:
    """Raises ValueError for a prompt that leaves its response less than its limit: vLLM would cut it short."""
    for prompt, limit in zip(prompts, limits, strict=True):
        if len(prompt.tokens) + limit > max_model_len:
            raise ValueError(
                f"rollout.max_model_len: expected at least {len(prompt.tokens)} + {limit} = "
                f"{len(prompt.tokens) + limit} for prompt {prompt.id} and its response, got {max_model_len}"
            )
