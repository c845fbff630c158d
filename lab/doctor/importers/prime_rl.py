"""prime-rl's token export: `token_exports/step_{N}/rank_{R}.jsonl`, a line a sequence (`trainer.enable_token_export`).

`src/prime_rl/trainer/rl/token_export.py`, schema_version 1; a line has S values beside the tokens in each column:

| field               | holds    | meaning                                                                            |
|---------------------|----------|-----------------------------------------------------------------------------------|
| token_ids           | S ints   | prompt and response, without padding                                               |
| loss_mask           | S bools  | true where the sampled token is trained on                                         |
| inference_logprobs  | S floats | mu; null where the value is not finite                                             |
| trainer_logprobs    | S floats | of the gradient pass: pi; both at the token's sampling temperature                 |
| entropy             | S floats | of the same pass                                                                   |
| step, env_name      |          | and schema_version, rank, advantages, mismatch_kl, importance_ratio, is_masked, ... |

There is no old pass. The gradient pass of a step runs before that step's update, so pi is old where a step makes one
update on weights that the engine has; with asynchronous rollouts what differs is the lag besides the engines.
"""

from __future__ import annotations

from collections.abc import Iterator

from lab.doctor.importers.aligned import listed, masked, unprompted
from lab.doctor.importers.format import Format, Row

COLUMNS = ("inference_logprobs", "trainer_logprobs", "entropy")
CAVEAT = (
    "prime-rl exports pi (the gradient pass), not old: they are equal only before updates; with rollouts of earlier "
    "weights that lag is in these numbers, too."
)


def _is_mine(first: Row) -> bool:
    return {"inference_logprobs", "trainer_logprobs"} <= set(first)


def _read(raw: Row, place: str) -> Iterator[Row]:
    tokens = listed(raw, "token_ids", place)
    is_sampled = masked(listed(raw, "loss_mask", place, len(tokens)), "loss_mask", place)
    mu, pi, entropy = (listed(raw, name, place, len(tokens)) for name in COLUMNS)
    columns = {"logp_mu": mu, "logp_old": pi, "entropy_old": entropy}
    yield unprompted(tokens, is_sampled, columns) | {"step": raw.get("step")}


FORMAT = Format(
    steps=(r"step_(?P<step>\d+)/rank_(?P<part>\d+)\.jsonl",),
    name="prime-rl", files="token_exports/step_{N}/rank_{R}.jsonl", has="tokens, mu, pi, entropy of pi",
    lacks="old (pi stands for it: equal only before updates), experts of both, rewards.",
    source="PrimeIntellect-ai/prime-rl src/prime_rl/trainer/rl/token_export.py at 559b447",
    uses=("token_ids", "loss_mask", *COLUMNS, "step"),
    is_mine=_is_mine, read=_read, caveat=lambda trace: CAVEAT, is_pi=lambda trace: True,
)  # fmt: skip
