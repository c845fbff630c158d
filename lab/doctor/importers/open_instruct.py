"""open-instruct's rollouts: `{run}_rollouts_{shard}.jsonl` (`--save_traces --rollouts_save_path`), a line per response.

`open_instruct/rl_utils.py`, `RolloutRecord`: step, sample_idx, prompt_idx, prompt_tokens, response_tokens, reward,
advantage, finish_reason, dataset, ground_truth, request_info, logprobs (the engine's, one per response token, or null).
It has mu only: `--old` supplies the trainer's log-probabilities. A shard holds several steps. Tool outputs are among
the response tokens, and the record does not mark them.
"""

from __future__ import annotations

from collections.abc import Iterator

from lab.doctor.importers.aligned import listed
from lab.doctor.importers.format import Format, Row


def _is_mine(first: Row) -> bool:
    return {"prompt_tokens", "response_tokens", "finish_reason"} <= set(first)


def _read(raw: Row, place: str) -> Iterator[Row]:
    prompt, response = (listed(raw, name, place) for name in ("prompt_tokens", "response_tokens"))
    yield {
        "tokens": [*prompt, *response], "num_prompt": len(prompt), "reward": raw.get("reward"), "step": raw.get("step"),
        "logp_mu": listed(raw, "logprobs", place, len(response)),
    }  # fmt: skip


FORMAT = Format(
    name="open-instruct", files="{run}_rollouts_{shard}.jsonl", has="tokens, mu, rewards",
    lacks="old (pass it with --old), experts of both, entropies, the mask of tool outputs.",
    source="allenai/open-instruct open_instruct/rl_utils.py at e6c3044",
    uses=("prompt_tokens", "response_tokens", "logprobs", "reward", "step"),
    is_mine=_is_mine, read=_read, has_old=False,
)  # fmt: skip
