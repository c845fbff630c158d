"""verl's rollout dump: `trainer.rollout_data_dir` writes <step>.jsonl, a line per response.

verl's own lines hold only texts and rewards (`input`, `output`, `gts`, `score`, `step`, `uid`): no tokens and no
log-probabilities, so they say nothing about the engines. A hook adds the trainer's fields (docs/doctor.md has both):

- with `trainer.use_v1: true`, today's default (`verl/trainer/ppo/v1/trainer_base.py`), the transfer queue holds the
  fields, each a nested tensor without padding; a hook on `PPOTrainer._log_rollout_data` writes them to a file;
- with the old trainer (`verl/trainer/ppo/ray_trainer.py`) the batch holds them, padded: prompts on the left, responses
  on the right, with an `attention_mask`; `reward_extra_infos_to_dump` takes them into the dump.

Both need `actor_rollout_ref.rollout.calculate_log_probs=True` for `rollout_log_probs`. Under
`algorithm.rollout_correction.bypass_mode` `old_log_probs` are mu's own, and the dump is refused unless its tokens alone
show a fault. Under `rollout_rs` `response_mask` lacks the rejected tokens, too. The first has `entropy` if an old pass
ran; the old trainer pops its `entropys` before the hook. Both sides' log-probabilities are at the sampling temperature.

`routed_experts` are mu's under R3. Under R2 they are old's, and a line does not say which: docs/doctor.md asks to leave
them out. The field has a row per token; where the engine recorded none verl leaves zeros (`agent_loop.py`): padding,
and the rows from the last sampled token on, which several tokens of a tool may follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pydantic

from lab.doctor.diagnosis import diagnose
from lab.doctor.importers import rows
from lab.doctor.importers.format import Format, Row
from lab.traces import Trace

NAMES = ("prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs")
COPIED = (
    "old_log_probs are rollout_log_probs to the bit, as in bypass mode: faults of the tokens show, but no gap of the "
    "engines."
)
NO_MU = "set actor_rollout_ref.rollout.calculate_log_probs=True"


def _is_mine(first: Row) -> bool:
    return {"input", "output", "score"} <= set(first) or {"prompts", "responses"} <= set(first)


def _read(raw: Row, place: str) -> Iterator[Row]:
    missing = [name for name in NAMES if name not in raw]
    if missing:
        how = f" and {NO_MU}" if "rollout_log_probs" in missing else ""
        # Without the row's place: a column is missing in all rows alike, and equal reasons are one line.
        raise ValueError(
            f"verl's dump lacks {', '.join(missing)}: add the hook of docs/doctor.md (What to add to verl){how}"
        )
    yield _row(raw, place)


def _caveat(trace: Trace) -> str:
    # Equal to the bit, as a copy is; of an exact engine they differ on a tool's tokens, which mu does not score.
    if not trace.logp_mu.equal(trace.logp_old):
        return ""
    # Entropies, of the old pass or of the training pass, still show tokens that are too likely.
    if trace.entropy_old is not None and diagnose(trace).fault is not None:
        return COPIED
    if_set = "" if trace.entropy_old is None else "; if it is, both engines agree to the bit"
    raise ValueError(
        "old_log_probs: expected those of an old pass, got rollout_log_probs everywhere: no old pass ran: set "
        f"algorithm.rollout_correction.bypass_mode=False for this step{if_set}"
    )


class VerlLine(pydantic.BaseModel):
    """One line: a response of the batch, padded on both sides. rows.py checks the values, without the padding."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore")

    prompts: list[Any]
    responses: list[Any]
    response_mask: list[int | bool]
    rollout_log_probs: list[Any]
    old_log_probs: list[Any]
    attention_mask: list[int | bool] | None = None
    entropy: list[Any] | None = None
    entropys: list[Any] | None = None
    routed_experts: list[Any] | None = None
    score: float | None = None
    step: int | None = None


def _row(raw: Row, place: str) -> dict[str, Any]:
    line = rows.validated(VerlLine, raw, place)
    width, ids = len(line.prompts), [*line.prompts, *line.responses]
    sizes = {"attention_mask": len(ids), "routed_experts": len(ids)}
    for name in (*NAMES[2:], "attention_mask", "entropy", "entropys", "routed_experts"):
        values, size = getattr(line, name), sizes.get(name, len(line.responses))
        if values is not None and len(values) != size:
            raise ValueError(f"{place}: {name}: expected {size} values, got {len(values)}")
    mask = [True] * len(ids) if line.attention_mask is None else line.attention_mask
    # Places of real tokens in prompt + response; `answer` are those of the response, counted from its own start.
    there = [at for at, is_there in enumerate(mask) if is_there]
    answer = [at - width for at in there if at >= width]
    row: dict[str, Any] = {
        "tokens": [ids[at] for at in there],
        "num_prompt": len(there) - len(answer),
        "is_response": [bool(line.response_mask[at]) for at in answer],
        "logp_mu": [line.rollout_log_probs[at] for at in answer],
        "logp_old": [line.old_log_probs[at] for at in answer],
        "reward": line.score,
        "step": line.step,
    }
    entropies = line.entropys if line.entropy is None else line.entropy
    if entropies is not None:
        row["entropy_old"] = [entropies[at] for at in answer]
    if line.routed_experts is not None:
        # The last token is never an input, and its row is filler.
        routes = [line.routed_experts[at] for at in there[:-1]]
        sampled = [at for at, is_one in enumerate(row["is_response"], row["num_prompt"]) if is_one]
        last = max(sampled, default=len(there))
        row["experts_mu"] = [_known(slots_L, at >= last) for at, slots_L in enumerate(routes)]
    return row


def _known(slots_L: Any, is_after: bool) -> Any:
    """A routing row, with -1 in all slots where zeros stand for none; `is_after`: no sampled token follows it."""
    is_zero = isinstance(slots_L, list) and all(
        isinstance(slots, list) and slots.count(0) == len(slots) > 0 for slots in slots_L
    )
    # Two slots never have one expert; a single one may have expert 0 at every layer.
    if not is_zero or not (is_after or any(len(slots) > 1 for slots in slots_L)):
        return slots_L
    return [[-1] * len(slots) for slots in slots_L]


FORMAT = Format(
    steps=(r"(?P<step>\d+)\.engines\.jsonl", r"(?P<step>\d+)\.jsonl"),
    name="verl", files="{step}.jsonl of trainer.rollout_data_dir, with a hook of ten lines",
    has="with the hook: tokens, mu, old, mu's experts (R3), entropy of old (V1), scores (old trainer)",
    lacks="Without the hook: all but texts and scores. With the hook: old's experts.",
    source="verl-project/verl verl/trainer/ppo/v1/trainer_base.py, verl/trainer/ppo/ray_trainer.py at 1dda039",
    uses=tuple(VerlLine.model_fields), is_mine=_is_mine, read=_read, caveat=_caveat,
)  # fmt: skip
