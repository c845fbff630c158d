"""NeMo-RL's training data: `train_data_step{N}.jsonl` in its log folder, a line per sample.

`nemo_rl/algorithms/grpo.py` (and grpo_sync.py, ppo.py, distillation.py) writes the batch to it with
`Logger.log_batched_dict_as_jsonl`, unless `grpo` runs under NeMo Gym with `should_log_nemo_gym_responses`. A line is a
micro-batch of one: each value except `idx` is in a list of length 1.

| field                | holds     | meaning                                                                          |
|----------------------|-----------|---------------------------------------------------------------------------------|
| token_ids            | W ints    | prompt and response, padded on the right to the batch's width W                  |
| input_lengths        | int       | S, the number of real tokens                                                     |
| token_loss_mask      | W of 0, 1 | 1 where the engine sampled the token                                             |
| generation_logprobs  | W floats  | mu of token t at place t; 0 where the engine did not sample it                   |
| prev_logprobs        | W floats  | old of token t at place t; place 0 is unused                                     |
| rewards              | float     | of the sample                                                                    |

Also: content, sample_loss_mask, advantages, idx. With `force_on_policy_ratio` the old pass is skipped and
`prev_logprobs` are zeros: such a dump is refused. Under dynamic sampling the reward is `filtered_rewards`.
"""

from __future__ import annotations

from collections.abc import Iterator

from lab.doctor.importers.aligned import listed, masked, unprompted
from lab.doctor.importers.format import Format, Row
from lab.traces import Trace

COLUMNS = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")


def _is_mine(first: Row) -> bool:
    return {"token_ids", "token_loss_mask"} <= set(first)


def _read(raw: Row, place: str) -> Iterator[Row]:
    # Unwraps the micro-batch of one.
    raw = {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in raw.items()}
    width = len(listed(raw, "token_ids", place))
    S = raw.get("input_lengths", width)
    if type(S) is not int or not 1 <= S <= width:
        raise ValueError(f"{place}: input_lengths: expected an int from 1 to {width} tokens, got {S!r}")
    tokens, mask, mu, old = (listed(raw, name, place, width)[:S] for name in COLUMNS)
    is_sampled = masked(mask, "token_loss_mask", place)
    reward = raw.get("filtered_rewards", raw.get("rewards"))
    yield unprompted(tokens, is_sampled, {"logp_mu": mu, "logp_old": old}) | {"reward": reward}


def _caveat(trace: Trace) -> str:
    if trace.is_response.any() and not trace.logp_old[trace.is_response].any():
        raise ValueError(
            "prev_logprobs: all 0: the old pass was skipped; set loss_fn.force_on_policy_ratio=false, or a "
            "grpo.seq_logprob_error_threshold, and dump again"
        )
    return ""


FORMAT = Format(
    steps=(r"train_data_step(?P<step>\d+)\.jsonl",),
    name="NeMo-RL", files="train_data_step{N}.jsonl", has="tokens, mu, old, rewards",
    lacks="Experts of both, entropies. The step is only in the file's name.",
    source="NVIDIA-NeMo/RL nemo_rl/algorithms/grpo.py at 7ea279a",
    uses=(*COLUMNS, "input_lengths", "rewards", "filtered_rewards"),
    is_mine=_is_mine, read=_read, caveat=_caveat,
)  # fmt: skip
