"""verl's rollout dump: `trainer.rollout_data_dir` writes <step>.jsonl, a line a response.

As it is a line holds texts and rewards alone (`input`, `output`, `gts`, `score`, `step`, and what the reward function
adds): no tokens and no log-probabilities, so nothing can be said of engines. The batch has them, and its rows can be
added to the dump in `RayPPOTrainer._log_rollout_data`, before `_dump_generations` is called:

    for name in ("prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs", "old_log_probs"):
        reward_extra_infos_to_dump[name] = batch.batch[name].tolist()

with `actor_rollout_ref.rollout.calculate_log_probs=True`, without which `rollout_log_probs` is not there, and with
`"routed_experts"` where R3 is on. Under `algorithm.rollout_correction.bypass_mode` `old_log_probs` are mu's own, and
the doctor finds nothing wrong. Prompts are padded on the left, responses on the right; the masks say where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from lab.doctor.importers import rows
from lab.strict import describe
from lab.traces import Trace

NAMES = ("prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs", "old_log_probs")
HOW = {
    "rollout_log_probs": "set actor_rollout_ref.rollout.calculate_log_probs=True and add it to the dump",
    "old_log_probs": "add it to the dump (it is in the batch after the old pass, unless in bypass mode)",
}


def is_verl(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether these lines are verl's: they have its text fields or its batch's names."""
    return {"input", "output", "score"} <= set(lines[0]) or {"prompts", "responses"} <= set(lines[0])


def trace(lines: Sequence[Mapping[str, Any]], places: Sequence[str]) -> Trace:
    """The trace of these lines; ValueError naming the fields that the dump lacks and how to add them."""
    missing = [name for name in NAMES if name not in lines[0]]
    if missing:
        how = "; ".join(f"{name}: {HOW[name]}" for name in missing if name in HOW)
        raise ValueError(
            f"verl's dump lacks {', '.join(missing)}; in _log_rollout_data, put batch.batch[name].tolist() of each in "
            f"reward_extra_infos_to_dump{'; ' + how if how else ''} (docs/doctor.md has the lines)"
        )
    return rows.trace([_row(line, place) for line, place in zip(lines, places, strict=True)], places)


class Line(pydantic.BaseModel):
    """One line: a response of the batch, padded on both sides. What it holds is checked once the padding is off."""

    model_config = pydantic.ConfigDict(strict=True, extra="ignore")

    prompts: list[Any]
    responses: list[Any]
    attention_mask: list[int | bool]
    response_mask: list[int | bool]
    rollout_log_probs: list[Any]
    old_log_probs: list[Any]
    entropys: list[Any] | None = None
    routed_experts: list[Any] | None = None
    score: float | None = None
    step: int | None = None


def _row(raw: Mapping[str, Any], place: str) -> dict[str, Any]:
    rows.refuse_misspelt(raw, Line.model_fields, place)
    try:
        line = Line.model_validate(dict(raw))
    except pydantic.ValidationError as error:
        raise ValueError(f"{place}: {describe(Line, error.errors(include_url=False)[0])}") from error
    width, ids = len(line.prompts), [*line.prompts, *line.responses]
    sizes = {"attention_mask": len(ids), "routed_experts": len(ids)}
    for name in (*NAMES[2:], "entropys", "routed_experts"):
        values, size = getattr(line, name), sizes.get(name, len(line.responses))
        if values is not None and len(values) != size:
            raise ValueError(f"{place}: {name}: expected {size} values, got {len(values)}")
    there = [at for at, is_there in enumerate(line.attention_mask) if is_there]
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
    if line.entropys is not None:
        row["entropy_old"] = [line.entropys[at] for at in answer]
    if line.routed_experts is not None:
        # One row a token, padding included; the last token's row is filler.
        row["experts_mu"] = [line.routed_experts[at] for at in there[:-1]]
    return row
