"""A trace: what one global step sampled and scored, packed without padding, in one safetensors file.

It describes any pair of engines: a system that writes these tensors can be diagnosed and simulated here.

Letters beyond theory/contracts.py: N all tokens, A all response-part tokens, R all routing rows of the B responses; k
of mu's likeliest tokens.
Papers: MiniRL (arXiv 2512.01374) Eq. 5 for the policies, R3 (2510.11370) sec. 3 for the measures of a trace.

The file, version 1. Response b has S_b tokens: num_prompt[b] of its prompt, then T_b = S_b - num_prompt[b] that follow.

| tensor          | shape     | type    | meaning                                                                      |
|-----------------|-----------|---------|------------------------------------------------------------------------------|
| tokens          | (N,)      | int32   | prompt and response tokens, one response after the other; N = sum of S_b     |
| offsets         | (B + 1,)  | int64   | response b has tokens[offsets[b]:offsets[b + 1]]                             |
| num_prompt      | (B,)      | int64   | prompt tokens, at least 1                                                    |
| is_response     | (A,)      | bool    | True where mu sampled the token (False: tool output); A = sum of T_b         |
| logp_mu         | (A,)      | float   | log-probability of the token under mu, at the sampling temperature           |
| logp_old        | (A,)      | float   | the same under old                                                           |
| logp_pi         | (A,)      | float   | optional: the same under pi, before its update                               |
| entropy_old     | (A,)      | float   | optional: entropy of old's next-token distribution there, nats, untruncated  |
| rewards         | (B,)      | float32 | reward of the response                                                       |
| experts_mu      | (R, L, K) | int     | optional: experts of mu; row s of response b is input token s, S_b - 1 rows  |
| experts_old     | (R, L, K) | int     | optional: experts that the training engine's live router logits would choose |
| engines         | (B,)      | int     | optional: number, from 0 on, of the engine or rank that the response is from |
| versions        | (A,)      | int     | optional: weight version that sampled the token (partial rollouts have some) |
| top_ids         | (A, k)    | int     | optional: mu's likeliest tokens at the position, the likeliest first         |
| top_logp_mu     | (A, k)    | float   | optional, with top_ids: their log-probabilities under mu; -inf: no token     |
| top_logp_old    | (A, k)    | float   | optional, with top_ids: the same under old                                   |

Expert ids ascend within a row-layer; -1 marks every slot without a record; the type is the narrowest signed one that
holds every id (wider ones are read, too). The file's metadata (strings): `schema` "firstorder.trace", `version` "1",
`step`, with experts `layer_numbers` (the routers' own numbers, as "1,2,5") and `num_experts`, and optionally `texts`:
the tokens' text, as a JSON object from id to text, `temperature`: T > 0 by which every side divides its logits (1 for
greedy decoding), and `old_pass`: "replay_rollout" where old scored on experts_mu (R3), "predicted" where on predicted
ones (Pr2). Without a temperature, log-probabilities may be those at 1, whatever the temperature of sampling.
Nothing is truncated (top-p, top-k, min-p) on any side.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lab.files import disk_errors
from lab.strict import parse_json
from lab.tensor_files import Blocks, write_tensors
from lab.trace_values import LOG_PROBABILITIES, impossible
from theory.contracts import Rollouts, TokenScores
from theory.routing.packed_rows import offsets_of
from theory.routing.record import RoutingRecord, index_dtype, narrowed
from theory.top_tokens import TokenRows, TopTokens

SCHEMA = "firstorder.trace"
VERSION = "1"
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
TOP = ("top_ids", "top_logp_mu", "top_logp_old")
OLD_PASSES = ("natural", "replay_rollout", "predicted")
METADATA = ("step", "layer_numbers", "num_experts", "texts", "temperature", "old_pass")


@dataclass(frozen=True, eq=False)
class Apart:
    """Records of a step that other processes may hold: experts, mu's likeliest tokens, and log old of these."""

    mu: RoutingRecord | None = None
    old: RoutingRecord | None = None
    top: TopTokens | None = None
    top_old: TokenRows | None = None

    @property
    def top_rows(self) -> dict[str, TokenRows]:
        """The rows of tokens, by the names that they have in a trace."""
        if self.top is None:
            return {}
        found = dict(zip(TOP, (self.top.id_rows, self.top.logp_rows, self.top_old), strict=True))
        return {name: rows for name, rows in found.items() if rows is not None}


@dataclass(frozen=True, eq=False)
class Trace:
    """One step's rollouts and scores (the module's docstring has the shapes); ValueError where they do not fit."""

    # The underscores keep the shape checks of the tests from refusing a misfit before our own message does.
    step: int
    tokens: Int[Tensor, " _N"]
    offsets: Int[Tensor, " _B_plus_1"]
    num_prompt: Int[Tensor, " _B"]
    is_response: Bool[Tensor, " _A"]
    logp_mu: Float[Tensor, " _A"]
    logp_old: Float[Tensor, " _A"]
    rewards: Float[Tensor, " _B"]
    experts_mu: Int[Tensor, "_R _L _K"] | None = None
    experts_old: Int[Tensor, "_R _L _K"] | None = None
    layer_numbers: tuple[int, ...] = ()
    num_experts: int = 0
    logp_pi: Float[Tensor, " _A"] | None = None
    entropy_old: Float[Tensor, " _A"] | None = None
    engines: Int[Tensor, " _B"] | None = None
    top_ids: Int[Tensor, "_A _k"] | None = None
    top_logp_mu: Float[Tensor, "_A _k"] | None = None
    top_logp_old: Float[Tensor, "_A _k"] | None = None
    texts: dict[int, str] = field(default_factory=dict)
    temperature: float | None = None
    versions: Int[Tensor, " _A"] | None = None
    old_pass: str = "natural"

    def __post_init__(self) -> None:
        if self.old_pass not in OLD_PASSES:
            raise ValueError(f"old_pass: expected one of {', '.join(OLD_PASSES)}, got {self.old_pass!r}")
        offsets = self.offsets.tolist()
        is_rising = all(a < b for a, b in itertools.pairwise(offsets))
        if not offsets or offsets[0] != 0 or offsets[-1] != len(self.tokens) or not is_rising:
            raise ValueError(f"offsets: expected to rise from 0 to {len(self.tokens)} tokens, got {_short(offsets)}")
        if len(self) == 0:
            raise ValueError("offsets: expected at least 1 response, got none")
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature: expected a number above 0, got {self.temperature}")
        for name, value in self._given("tokens", "engines", "top_ids", "versions"):
            if value.numel() and int(value.min()) < 0:
                raise ValueError(f"{name}: expected numbers from 0 on, got {int(value.min())}")
        self._check_lengths()

    def _check_lengths(self) -> None:
        B, S_B, num_prompt_B = len(self), self.offsets.diff(), self.num_prompt
        for name, value in self._given("num_prompt", "rewards", "engines"):
            if len(value) != B:
                raise ValueError(f"{name}: expected {B} values for {B} responses, got {len(value)}")
        if wrong := ((num_prompt_B < 1) | (num_prompt_B > S_B)).nonzero()[:, 0].tolist():
            b, most, got = wrong[0], int(S_B[wrong[0]]), int(num_prompt_B[wrong[0]])
            raise ValueError(f"num_prompt: expected from 1 to {most} prompt tokens in response {b}, got {got}")
        A, R = int((S_B - num_prompt_B).sum()), len(self.tokens) - B
        for name, value in self._given("is_response", "logp_mu", "logp_old", "logp_pi", "entropy_old", "versions"):
            if len(value) != A:
                raise ValueError(f"{name}: expected {A} values, one per response token, got {len(value)}")
        for name, value in self._given("experts_mu", "experts_old"):
            if len(value) != R:
                raise ValueError(f"{name}: expected {R} rows, one less than tokens in each response, got {len(value)}")
            try:
                # Made for its checks alone; `record_mu` and `record_old` make it again.
                self._record(value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        found, k = self._given(*TOP), 0 if self.top_ids is None else self.top_ids.shape[1]
        if found and (self.top_ids is None or self.top_logp_mu is None):
            raise ValueError(f"top_ids and top_logp_mu: expected both or neither, got {', '.join(dict(found))}")
        for name, value in found:
            if value.shape != (A, k):
                raise ValueError(f"{name}: expected {A} rows of {k} tokens, got shape {tuple(value.shape)}")
        ends = (S_B - num_prompt_B).cumsum(0)
        for name, value in self._given(*LOG_PROBABILITIES, "entropy_old"):
            if found := impossible(name, value, self.is_response):
                b = int((ends <= found[0]).sum())
                raise ValueError(f"{found[1]} in response {b}")

    def _given(self, *names: str) -> list[tuple[str, Tensor]]:
        """Those of these tensors that the trace has."""
        return [(name, value) for name in names if (value := getattr(self, name)) is not None]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @staticmethod
    def of(
        rollouts: Rollouts,
        scores: TokenScores,
        rewards_B: Float[Tensor, " B"],
        step: int,
        decode: Callable[[tuple[int, ...]], str] | None = None,
        old_pass: str = "natural",
    ) -> Trace:
        """The trace of one global step; experts_old are the old pass's natural ones, `decode` gives tokens' `texts`.

        `old_pass` is `ModePlan.old` of the replay mode.
        """
        responses = rollouts.responses
        lengths = [len(r.tokens) for r in responses]
        mu, old, top = rollouts.experts, scores.natural, rollouts.top
        known = mu if mu is not None else old
        version_A = torch.cat([r.version_T for r in responses])
        tokens = torch.cat([torch.cat([torch.tensor(r.prompt.tokens), r.tokens.cpu()]) for r in responses]).int()
        return Trace(
            step=step,
            tokens=tokens,
            offsets=offsets_of([r.num_tokens for r in responses]),
            num_prompt=torch.tensor([len(r.prompt.tokens) for r in responses], dtype=torch.int64),
            is_response=torch.cat([r.is_response.cpu() for r in responses]),
            logp_mu=torch.cat([r.logp_mu.detach().cpu() for r in responses]),
            logp_old=_pack(scores.logp_BT, lengths),
            rewards=rewards_B.detach().float().cpu(),
            experts_mu=None if mu is None else mu.experts.cpu(),
            experts_old=None if old is None else old.experts.cpu(),
            layer_numbers=() if known is None else known.layer_numbers,
            num_experts=0 if known is None else known.num_experts,
            entropy_old=_pack(scores.entropy_BT, lengths),
            texts={} if decode is None else {token: decode((token,)) for token in tokens.unique().tolist()},
            temperature=rollouts.temperature,
            top_ids=None if top is None else top.ids.cpu(),
            top_logp_mu=None if top is None else top.logp.cpu(),
            top_logp_old=None if top is None or scores.logp_top is None else scores.logp_top.values.cpu(),
            # One version of all tokens needs no column.
            versions=version_A.int() if len(version_A.unique()) > 1 else None,
            old_pass=old_pass,
        )

    @property
    def as_scored(self) -> Trace:
        """The trace with the experts on which old scored in the place of its own: mu's, where it replayed them."""
        return replace(self, experts_old=self.experts_mu) if self.old_pass == "replay_rollout" else self

    @property
    def num_choices(self) -> int:
        """L K, the expert choices of a token; 0 without experts."""
        experts = self.experts_mu if self.experts_mu is not None else self.experts_old
        return 0 if experts is None else experts.shape[1] * experts.shape[2]

    @property
    def record_mu(self) -> RoutingRecord | None:
        """mu's experts as a routing record."""
        return None if self.experts_mu is None else self._record(self.experts_mu)

    @property
    def record_old(self) -> RoutingRecord | None:
        """The training engine's natural experts as a routing record."""
        return None if self.experts_old is None else self._record(self.experts_old)

    def _record(self, experts: Int[Tensor, "R L K"]) -> RoutingRecord:
        # A response's last token is no input, so each response has one routing row less than tokens.
        offsets = self.offsets - torch.arange(len(self.offsets))
        return RoutingRecord(narrowed(experts, self.num_experts), offsets, self.layer_numbers, self.num_experts)

    def save(self, path: Path, apart: Apart | None = None) -> None:
        """Writes the trace as one safetensors file, whole or not at all.

        `apart`: what a trace was made without; of what is not in this process, a part is here at a time. Raises
        ValueError where it is not of the trace's rows.
        """
        apart = Apart() if apart is None else apart
        given = self._given(*(f.name for f in fields(self) if f.name not in METADATA))
        tensors: dict[str, Tensor | Blocks] = dict(given)
        layer_numbers, num_experts = self.layer_numbers, self.num_experts
        for name, record in (("experts_mu", apart.mu), ("experts_old", apart.old)):
            if record is None:
                continue
            if record.num_rows_B != (self.offsets.diff() - 1).tolist():
                raise ValueError(f"{name}: expected one row less than tokens in each of {len(self)} responses")
            shape = (sum(record.num_rows_B), len(record.layer_numbers), record.num_slots)
            tensors[name] = Blocks(shape, index_dtype(record.num_experts), record.blocks)
            layer_numbers, num_experts = record.layer_numbers, record.num_experts
        for name, rows in apart.top_rows.items():
            if not torch.equal(rows.offsets.diff(), self.offsets.diff() - self.num_prompt):
                raise ValueError(f"{name}: expected a row per response token of {len(self)} responses")
            tensors[name] = Blocks((int(rows.offsets[-1]), rows.width), rows.dtype, rows.blocks)
        metadata = {"schema": SCHEMA, "version": VERSION, "step": str(self.step)}
        if layer_numbers:
            metadata["layer_numbers"] = ",".join(str(n) for n in layer_numbers)
            metadata["num_experts"] = str(num_experts)
        if self.temperature is not None:
            metadata["temperature"] = repr(self.temperature)
        if self.old_pass != "natural":
            metadata["old_pass"] = self.old_pass
        if self.texts:
            metadata["texts"] = json.dumps(self.texts, ensure_ascii=False)
        write_tensors(path, tensors, metadata)

    @staticmethod
    def load(path: Path) -> Trace:
        """The trace in a file; ValueError names a file that is no trace or does not fit the schema."""
        path = Path(path)
        with disk_errors(path, "read"), open(path, "rb"):
            pass  # the reasons why it cannot be read come before those why it is no trace
        try:
            # Mapped, not read: the system may drop the pages of a trace that is larger than memory.
            with safetensors.safe_open(path, "pt") as file:
                stated = _stated(file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            _check_names(tensors)
            return Trace(**tensors, **stated)
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path}: expected a safetensors file, got {error}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _check_names(tensors: dict[str, Tensor]) -> None:
    """Raises ValueError unless every tensor of the schema is there, with its rank and kind of number, and no other."""
    ranks = {"experts_mu": 3, "experts_old": 3, **dict.fromkeys(TOP, 2)}
    known = {f.name: f.default is MISSING for f in fields(Trace) if f.name not in METADATA}
    missing = sorted(name for name, is_required in known.items() if is_required and name not in tensors)
    if missing or not known.keys() >= tensors.keys():
        raise ValueError(f"missing tensors: {missing}, unknown tensors: {sorted(tensors.keys() - known.keys())}")
    for name, tensor in tensors.items():
        if tensor.dim() != ranks.get(name, 1):
            raise ValueError(f"{name}: expected {ranks.get(name, 1)} axes, got shape {tuple(tensor.shape)}")
        is_float = "logp" in name or name in ("rewards", "entropy_old")
        # Signed, because -1 marks the slots without a record.
        kind = "float" if is_float else "bool" if name == "is_response" else "signed int"
        fits = tensor.dtype in SIGNED if kind == "signed int" else kind in str(tensor.dtype)
        if not fits:
            raise ValueError(f"{name}: expected a type of {kind}, got {tensor.dtype}")


def _stated(metadata: dict[str, str]) -> dict[str, Any]:
    """The fields that a file's metadata state; ValueError unless they are those of a trace of this version."""
    if metadata.get("schema") != SCHEMA:
        raise ValueError(f"expected a trace (schema {SCHEMA!r} in the metadata), got {metadata.get('schema')!r}")
    if metadata.get("version") != VERSION:
        raise ValueError(f"expected trace version {VERSION!r}, got {metadata.get('version')!r}")
    if not metadata.get("step", "").isdigit():
        raise ValueError(f"expected a step in the metadata, got {metadata.get('step')!r}")
    layers, temperature = metadata.get("layer_numbers", ""), metadata.get("temperature")
    try:
        T = None if temperature is None else float(temperature)
    except ValueError:
        raise ValueError(f"temperature: expected a number above 0, got {temperature!r}") from None
    return {
        "step": int(metadata["step"]), "num_experts": int(metadata.get("num_experts", 0)), "temperature": T,
        "layer_numbers": tuple(map(int, layers.split(","))) if layers else (),
        "texts": _texts(metadata.get("texts", "{}")), "old_pass": metadata.get("old_pass", "natural"),
    }  # fmt: skip


def _texts(text: str) -> dict[int, str]:
    """The text of each token; ValueError for JSON that is no object from numbers to text."""
    with contextlib.suppress(ValueError):
        texts = parse_json(text)
        if isinstance(texts, dict) and all(token.isdecimal() for token in texts):
            return {int(token): str(words) for token, words in texts.items()}
    raise ValueError(f"texts: expected a JSON object from token numbers to text, got {text[:40]!r}")


def _pack(values_BT: Float[Tensor, "B T ..."], lengths: list[int]) -> Float[Tensor, "A ..."]:
    """The first `lengths[b]` values of each row, one row after the other."""
    return torch.cat([values_BT[b, :n] for b, n in enumerate(lengths)]).detach().cpu()


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"{str(values[:7])[:-1]}, ...]"
