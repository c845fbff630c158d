"""prime-rl's token export: `token_exports/step_{N}/rank_{R}.jsonl`, a line per sequence.

`src/prime_rl/trainer/rl/token_export.py` (`trainer.enable_token_export`), schema_version 1; each column of a line has a
value for each of S tokens:

| field               | holds    | meaning                                                                            |
|---------------------|----------|-----------------------------------------------------------------------------------|
| token_ids           | S ints   | prompt and response, without padding                                               |
| loss_mask           | S bools  | true where the sampled token is trained on                                         |
| inference_logprobs  | S floats | mu; null where the value is not finite                                             |
| trainer_logprobs    | S floats | pi, from the gradient pass; both at the token's sampling temperature               |
| entropy             | S floats | from the same pass                                                                 |
| step, env_name      |          | and schema_version, rank, advantages, mismatch_kl, importance_ratio, is_masked, ... |

There is no old pass. The gradient pass of a step runs before that step's update, so pi is old if a step makes one
update and the engine has the same weights; with asynchronous rollouts the gap includes the lag.
"""

from __future__ import annotations

from collections.abc import Iterator

from lab.doctor.importers.aligned import listed, mask_of, unprompted
from lab.doctor.importers.format import Format, Row

COLUMNS = ("inference_logprobs", "trainer_logprobs", "entropy")
CAVEAT = (
    "prime-rl exports pi (the gradient pass), not old: they are equal only before updates; if rollouts are from "
    "earlier weights, these numbers include that lag."
)


def _is_mine(first: Row) -> bool:
    return {"inference_logprobs", "trainer_logprobs"} <= set(first)


def _read(raw: Row, place: str) -> Iterator[Row]:
    tokens = listed(raw, "token_ids", place)
    is_sampled = mask_of(raw, "loss_mask", place, len(tokens))
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
