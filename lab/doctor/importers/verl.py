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

from lab.doctor.importers import rows
from lab.traces import Trace

NAMES = ("prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs", "old_log_probs")
HOW = {
    "rollout_log_probs": "set actor_rollout_ref.rollout.calculate_log_probs=True and add it to the dump",
    "old_log_probs": "add it to the dump (it is in the batch after the old pass, unless in bypass mode)",
}


def is_verl(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether these lines are verl's: they have its text fields or its batch's names."""
    return {"input", "output", "score"} <= set(lines[0]) or {"prompts", "responses"} <= set(lines[0])


def trace(lines: Sequence[Mapping[str, Any]]) -> Trace:
    """The trace of these lines; ValueError naming the fields that the dump lacks and how to add them."""
    missing = [name for name in NAMES if name not in lines[0]]
    if missing:
        how = "; ".join(f"{name}: {HOW[name]}" for name in missing if name in HOW)
        raise ValueError(
            f"verl's dump lacks {', '.join(missing)}; in _log_rollout_data, put batch.batch[name].tolist() of each in "
            f"reward_extra_infos_to_dump{'; ' + how if how else ''} (docs/doctor.md has the lines)"
        )
    return rows.trace([_row(line, b) for b, line in enumerate(lines)])


def _row(line: Mapping[str, Any], b: int) -> dict[str, Any]:
    width = len(line["prompts"])
    ids, mask = [*line["prompts"], *line["responses"]], line["attention_mask"]
    if len(mask) != len(ids):
        raise ValueError(f"attention_mask: expected {len(ids)} values in response {b}, got {len(mask)}")
    places = [place for place, is_there in enumerate(mask) if is_there]
    answer = [place - width for place in places if place >= width]
    row = {
        "tokens": [ids[place] for place in places],
        "num_prompt": len(places) - len(answer),
        "is_response": [bool(_at(line, "response_mask", place, b)) for place in answer],
        "logp_mu": [_at(line, "rollout_log_probs", place, b) for place in answer],
        "logp_old": [_at(line, "old_log_probs", place, b) for place in answer],
        "reward": line.get("score", 0.0),
        "step": line.get("step", 0),
    }
    if line.get("entropys") is not None:
        row["entropy_old"] = [_at(line, "entropys", place, b) for place in answer]
    if line.get("routed_experts") is not None:
        # One row a token, padding included; the last token's row is filler.
        row["experts_mu"] = [line["routed_experts"][place] for place in places[:-1]]
    return row


def _at(line: Mapping[str, Any], name: str, place: int, b: int) -> Any:
    values = line[name]
    if place >= len(values):
        raise ValueError(f"{name}: expected {len(line['responses'])} values in response {b}, got {len(values)}")
    return values[place]
