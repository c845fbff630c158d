"""TRL's batch: `trl_engines_{step}.jsonl`, a line per completion, written by the hook of docs/doctor.md.

TRL's own table of completions has only texts and rewards. The hook writes fields of the batch that
`GRPOTrainer._generate_and_score_completions` returns (trl/trainer/grpo_trainer.py at f2cd577):

| field                    | holds    | meaning                                                            |
|--------------------------|----------|--------------------------------------------------------------------|
| prompt_ids, prompt_mask  | P        | the prompt, padded on the left; 1 on tokens                        |
| completion_ids           | T        | the completion, padded on the right                                |
| completion_mask          | T        | 1 up to its end                                                    |
| sampling_per_token_logps | T floats | mu of each completion token; padding is ignored                    |
| old_per_token_logps      | T floats | old of each                                                        |
| tool_mask                | T        | optional: 0 where a tool wrote the token, not the model            |

`old_per_token_logps` exists if the old pass runs (`vllm_importance_sampling_correction`, or more than one update).
"""

from __future__ import annotations

from collections.abc import Iterator

from lab.doctor.importers.aligned import listed, mask_of
from lab.doctor.importers.format import Format, Row

NAMES = (
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "sampling_per_token_logps", "old_per_token_logps",
)  # fmt: skip


def _is_mine(first: Row) -> bool:
    return {"completion_ids", "sampling_per_token_logps"} <= set(first)


def _read(raw: Row, place: str) -> Iterator[Row]:
    prompt, completion = listed(raw, "prompt_ids", place), listed(raw, "completion_ids", place)
    prompt_mask = mask_of(raw, "prompt_mask", place, len(prompt))
    mask = mask_of(raw, "completion_mask", place, len(completion))
    mu, old = (listed(raw, name, place, len(completion)) for name in NAMES[4:])
    is_sampled = [True] * len(completion)
    if raw.get("tool_mask") is not None:
        is_sampled = mask_of(raw, "tool_mask", place, len(completion))
    T = max((at + 1 for at, is_there in enumerate(mask) if is_there), default=0)
    kept = [token for token, is_there in zip(prompt, prompt_mask, strict=True) if is_there]
    yield {
        "tokens": [*kept, *completion[:T]], "num_prompt": len(kept), "logp_mu": mu[:T], "logp_old": old[:T],
        "is_response": [a and b for a, b in zip(mask[:T], is_sampled[:T], strict=True)],
    }  # fmt: skip


FORMAT = Format(
    steps=(r"trl_engines_(?P<step>\d+)(_(?P<part>\d+))?\.jsonl",),
    name="TRL", files="trl_engines_{step}.jsonl, by a hook of ten lines",
    has="with the hook: tokens, mu, old, the mask of tool outputs",
    lacks="Experts of both, entropies, rewards. TRL's own log (completions) lacks both engines' values: it is refused.",
    source="huggingface/trl trl/trainer/grpo_trainer.py at f2cd577",
    uses=(*NAMES, "tool_mask"), is_mine=_is_mine, read=_read,
)  # fmt: skip
