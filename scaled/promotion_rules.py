"""The fate of each field of the algorithm block on the way from a sandbox run to a cluster config: one table.

Fields that identify the algorithm keep the runs' values. Fields of scale and speed come from the target or, where they
depend on N (mini-batches per global step), from the numbers that the papers print for the target's model.
Papers: MiniRL (arXiv 2512.01374) sec. 4.2, R3 (2510.11370) sec. 5.1 and Table 12, Pr2 (2606.00395) App. E and F.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pydantic_core import to_jsonable_python

from lab.config.algorithm import AlgorithmConfig, ObjectiveBlock
from theory.objectives import NUMBERS
from theory.routing.passes import PASSES

QWEN, MOONLIGHT, OLMOE = "qwen3-30b-a3b", "moonlight-16b-a3b", "olmoe-1b-7b"
"""Models of the tables, by their names in scaled/shapes."""

_PR2 = "Pr2 App. E.1"

# Learning rates of updates on 1/N of the rollout batch, by model and N. At N = 4 the papers differ: R3 App. E trains
# at 2e-6, and the lower rate is taken.
LEARNING_RATES: dict[str, dict[int, tuple[float, str]]] = {
    QWEN: {
        1: (3e-6, "R3 sec. 5.1 and Table 12"),
        2: (2e-6, _PR2),
        4: (1.5e-6, _PR2),
        8: (1e-6, f"R3 sec. 5.1 and Table 12; {_PR2}"),
    },
    MOONLIGHT: {2: (5e-7, _PR2), 4: (3.7e-7, _PR2), 8: (2.5e-7, _PR2)},
    OLMOE: {2: (5e-7, _PR2), 4: (3.7e-7, _PR2), 8: (2.5e-7, _PR2)},
}

# Pr3's multipliers are printed for Qwen3-30B only: a hundredth of Pr2's at every N. Other models get the same ratio.
_PR3 = "Pr2 App. F"
_PR3_RATIO = "not printed for Pr3 on this model: a hundredth of Pr2's (App. E.1), as on Qwen3-30B (App. F)"
MULTIPLIERS: dict[tuple[str, str], dict[int, tuple[float, str]]] = {
    ("Pr2", QWEN): {2: (1e4, _PR2), 4: (1e3, _PR2), 8: (1e3, _PR2)},
    ("Pr3", QWEN): {2: (1e2, _PR3), 4: (1e1, _PR3), 8: (1e1, _PR3)},
    ("Pr2", MOONLIGHT): {2: (1e2, _PR2), 4: (5e1, _PR2), 8: (5e1, _PR2)},
    ("Pr3", MOONLIGHT): {2: (1.0, _PR3_RATIO), 4: (0.5, _PR3_RATIO), 8: (0.5, _PR3_RATIO)},
    ("Pr2", OLMOE): {2: (1e3, _PR2), 4: (1e3, _PR2), 8: (1e3, _PR2)},
    ("Pr3", OLMOE): {2: (1e1, _PR3_RATIO), 4: (1e1, _PR3_RATIO), 8: (1e1, _PR3_RATIO)},
}

MAX_POSITIONS = 2048
"""T_c of Qwen3-30B, whose responses have 16K tokens; the other models keep all of their 1K (Pr2 App. E.1)."""

# MiniRL fixes the mini-batch, and its rollout batch is N of them: an update has the same size at every N. R3 and Pr2
# fix the rollout batch and split it into N: updates get smaller as N grows, and so do their learning rates.
FIXED_MINIBATCH = ("minirl", "minirl_lengthnorm", "minirl_no_is", "reinforce")


@dataclass(frozen=True)
class Move:
    """A promotion from the runs' algorithm block to that of the target; `model` is None for one in no table."""

    runs: AlgorithmConfig
    target: AlgorithmConfig
    model: str | None

    @property
    def same_n(self) -> bool:
        """Whether the target was written for the runs' N."""
        return self.runs.batch.num_minibatches == self.target.batch.num_minibatches


Computed = tuple[Any, str]
"""A value, and the source or reason of it."""


@dataclass(frozen=True)
class FieldRule:
    """The fate of one field: it is kept, taken from the target, or computed; `source` says why."""

    field: str
    action: Literal["keep", "target", "rule"]
    source: str
    compute: Callable[[Move], Computed] | None = None

    def apply(self, move: Move) -> Computed:
        """The promoted value and its source. Raises ValueError where no rule gives one."""
        if self.compute is not None:
            return self.compute(move)
        return value_of(move.runs if self.action == "keep" else move.target, self.field), self.source


def value_of(algorithm: AlgorithmConfig, field: str) -> Any:
    """The plain value at a dotted name."""
    value: Any = algorithm
    # Not from the whole dump, which leaves out fields newer than some runs at their defaults.
    for name in field.split("."):
        value = getattr(value, name)
    return to_jsonable_python(value)


def _row(rows: Mapping[int, tuple[float, str]], N: int, field: str, model: str | None) -> Computed:
    """The row of N; between rows, the row of the next larger N, as it has the smaller step."""
    listed = [n for n in sorted(rows) if n >= N]
    if not listed:
        raise ValueError(
            f"algorithm.batch.num_minibatches: expected at most {max(rows)}, the largest N for which a paper prints "
            f"{field} on {model}, got {N}; a target with this N brings its own"
        )
    value, source = rows[listed[0]]
    return value, source if listed[0] == N else f"{source}, row of N = {listed[0]} (there is none of N = {N})"


def _learning_rate(move: Move) -> Computed:
    rate, N = move.target.optimizer.learning_rate, move.runs.batch.num_minibatches
    if move.same_n:
        return rate, f"the target's, which has the same N = {N}"
    if move.runs.objective.preset in FIXED_MINIBATCH:
        return rate, "the target's: MiniRL prints none, and an update has as many responses at every N (sec. 4.2)"
    if move.model is None:
        return rate, "the target's: no paper trains its model"
    return _row(LEARNING_RATES[move.model], N, "a learning rate", move.model)


def _num_prompts(move: Move) -> Computed:
    P, M, N = move.target.batch.num_prompts, move.target.batch.num_minibatches, move.runs.batch.num_minibatches
    if move.same_n:
        return P, f"the target's, which has the same N = {N}"
    if move.runs.objective.preset in FIXED_MINIBATCH:
        return P // M * N, f"the target's mini-batch of {P // M} prompts, times N = {N} (MiniRL sec. 4.2 and 4.4)"
    if P % N:
        raise ValueError(
            f"algorithm.batch.num_prompts: expected a rollout batch of the target that the runs' num_minibatches = {N} "
            f"divides, got {P}"
        )
    return P, f"the target's rollout batch, split into N = {N} (R3 sec. 5.1; {_PR2})"


def _multiplier(move: Move) -> Computed:
    runs, target = move.runs.replay, move.target.replay
    own = target.predictor.learning_rate_multiplier
    if not PASSES[runs.mode].trains_predictor:
        return own, f"the target's: {runs.mode} trains no predictor"
    # Before the tables: a target of this mode and N has a multiplier that was chosen for both.
    if runs.mode == target.mode and move.same_n:
        return own, f"the target's, which has the same mode and N = {move.runs.batch.num_minibatches}"
    if move.model is not None:
        rows = MULTIPLIERS[runs.mode, move.model]
        return _row(rows, move.runs.batch.num_minibatches, "a predictor multiplier", move.model)
    if runs.mode == target.mode:
        return own, "the target's: no paper trains its model"
    multiplier, before = runs.predictor.learning_rate_multiplier, move.runs.optimizer.learning_rate
    if multiplier is None:
        return (
            None,
            "the runs' default, which follows the learning rate: no paper trains the target's model with this mode",
        )
    after = _learning_rate(move)[0] or before  # a rate of 0 moves nothing, whatever the multiplier
    # As the default: AdamW moves a weight by about its rate, so the product with the model's rate is kept.
    return multiplier * before / after, (
        f"the runs' {multiplier:g} x {before:g} / {after:g}, the same predictor rate: no paper trains the target's "
        "model with this mode"
    )


def _num_positions(move: Move) -> Computed:
    if not PASSES[move.runs.replay.mode].trains_predictor:
        own = move.target.replay.predictor.num_positions
        return own, f"the target's: {move.runs.replay.mode} trains no predictor"
    longest = move.target.sampling.max_tokens
    return min(MAX_POSITIONS, longest), f"T_c = min(2K, longest response of {longest}) ({_PR2})"


_SAME = "part of the algorithm that the runs validated"


def _oversampling(move: Move) -> Computed:
    own = value_of(move.runs, "oversampling")
    if own is None:
        return None, _SAME
    P, runs_P = _num_prompts(move)[0], move.runs.batch.num_prompts
    # Rounded up, so that a small share is at least one prompt.
    extra = -(-own["extra_prompts"] * P // runs_P)
    return own | {"extra_prompts": extra}, f"{_SAME}; {own['extra_prompts']} of {runs_P} prompts is {extra} of {P}"


def _overlong_buffer(move: Move) -> Computed:
    # The target's factor would be that of another penalty: both come from the runs, but for the buffer's length.
    own, L, runs_L = move.runs.overlong_buffer, move.target.sampling.max_tokens, move.runs.sampling.max_tokens
    if own is None:
        return None, f"{_SAME}: no penalty of long responses"
    if move.target.overlong_buffer is not None:
        return move.target.overlong_buffer, "scale: a length in tokens, as max_tokens is"
    buffer = -(-own * L // runs_L)
    return buffer, f"{_SAME}; {own} of {runs_L} tokens is {buffer} of {L}"


def _with_verls_bounds(part: str, move: Move) -> Computed:
    # Of the built objective: a preset brings a correction where the block has null.
    verl = getattr(move.runs.objective.build(), part).verl
    return value_of(move.runs, f"objective.{part}"), f"{_SAME}; in verl: {verl}" if verl else _SAME


_PRINTED = {
    "eps_low": f"0.2 in MiniRL sec. 4.2, R3 Table 12 and {_PR2}",
    "eps_high": f"0.27 in MiniRL sec. 4.2, R3 Table 12; 0.28 and 0.1 in {_PR2}",
    "cap": "5 in MiniRL sec. 4.2, 2 in R3 Table 12",
}


def _source(name: str) -> str:
    """The source of an objective's field: one of the three papers, or that of the theory's number."""
    printed = _PRINTED.get(name) or (NUMBERS[name].source if name in NUMBERS else "")
    return f"{_SAME} ({printed})" if printed else _SAME


_OWN = ("correction", "rejection")

RULES: tuple[FieldRule, ...] = (
    *(
        FieldRule(f"objective.{name}", "keep", _source(name))
        for name in ObjectiveBlock.model_fields
        if name not in _OWN
    ),
    *(FieldRule(f"objective.{part}", "keep", _SAME, partial(_with_verls_bounds, part)) for part in _OWN),
    FieldRule("replay.mode", "keep", _SAME),
    FieldRule("replay.old_gates", "keep", _SAME),
    FieldRule("replay.predictor.loss", "keep", _SAME),
    FieldRule("replay.predictor.learning_rate_multiplier", "rule", f"{_PR2} and F, by model, mode and N", _multiplier),
    FieldRule("replay.predictor.num_positions", "rule", f"{_PR2}, by the longest response", _num_positions),
    FieldRule("batch.num_minibatches", "keep", f"{_SAME}: N is the degree of off-policiness (MiniRL sec. 4.4)"),
    FieldRule("batch.shuffle", "keep", _SAME),
    FieldRule("batch.num_prompts", "rule", f"MiniRL sec. 4.2, R3 sec. 5.1, {_PR2}, by objective and N", _num_prompts),
    FieldRule("batch.num_responses", "target", f"scale: 16 in MiniRL sec. 4.2, 8 in R3 Table 12, 8 or 16 in {_PR2}"),
    FieldRule(
        "sampling.max_tokens", "target", f"scale: 32K in MiniRL sec. 4.2, 30K in R3 Table 12, 16K or 1K in {_PR2}"
    ),
    FieldRule("sampling.max_turns", "keep", _SAME),
    FieldRule("sampling.temperature", "target", "the model's: no paper prints one for training"),
    FieldRule("dynamic_sampling.enabled", "keep", _SAME),
    FieldRule("dynamic_sampling.max_rounds", "keep", _SAME),
    FieldRule("optimizer.learning_rate", "rule", f"R3 Table 12, {_PR2}, by objective, model and N", _learning_rate),
    FieldRule("optimizer.betas", "target", "scale: 0.9 and 0.999 in R3 Table 12; short runs forget faster"),
    FieldRule("optimizer.eps", "target", "scale: 1e-8 in R3 Table 12"),
    FieldRule("optimizer.weight_decay", "target", "scale: 0.1 in R3 Table 12"),
    FieldRule("optimizer.warmup_steps", "target", "scale: a constant rate in R3 Table 12"),
    FieldRule("optimizer.max_grad_norm", "target", "scale: 1.0 in R3 Table 12"),
    FieldRule("freeze_router", "keep", f"{_SAME} (R3 App. C)"),
    FieldRule("oversampling", "rule", f"{_SAME}, its extra prompts in proportion to num_prompts", _oversampling),
    FieldRule("overlong_buffer", "rule", f"{_SAME}, its length in proportion to max_tokens", _overlong_buffer),
    FieldRule("overlong_factor", "keep", _SAME),
    FieldRule("label_noise", "target", "a dial of the sandbox: a real verifier errs as it does"),
)  # fmt: skip
"""One rule for every field of `lab.config.algorithm.AlgorithmConfig`."""
