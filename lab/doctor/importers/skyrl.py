"""SkyRL's training input, saved as tensors instead of a pickle (docs/doctor.md has the lines that do it).

`skyrl/backends/skyrl_train/training_batch.py`, `TrainingInput`: B rows, padded on the left.

| field                   | shape         | meaning                                                                    |
|-------------------------|---------------|----------------------------------------------------------------------------|
| sequences               | (B, S)        | prompt and response                                                        |
| attention_mask          | (B, S)        | 1 on tokens, 0 on padding                                                  |
| response_mask           | (B, T)        | 1 on response tokens                                                       |
| loss_mask               | (B, T)        | response_mask, but 0 where no model sampled the token                      |
| rollout_logprobs        | (B, T)        | mu                                                                         |
| action_log_probs        | (B, T)        | old: the forward pass before the updates                                   |
| rollout_expert_indices  | (B, S, L, K)  | optional: mu's experts                                                     |
| router_padding_mask     | (B, S)        | optional: True where they are a filler, since the engine recorded none     |

Release 0.3.0 has no router_padding_mask: zeros stand for no route, on observations and on an end token that it adds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lab.doctor.importers.format import Format, Row

WHOLE = ("sequences", "attention_mask")
RESPONSE = ("response_mask", "loss_mask", "rollout_logprobs", "action_log_probs")
EXPERTS, FILLED = "rollout_expert_indices", "router_padding_mask"


def _is_mine(content: Row) -> bool:
    return {"sequences", "response_mask"} <= set(content)


def _read(content: Row, place: str) -> Iterator[Row]:
    for names, like in ((WHOLE, "sequences"), (RESPONSE, "response_mask")):
        for name in names:
            value, model = content.get(name), content[like]
            shape = tuple(model.shape) if isinstance(model, Tensor) else ()
            if not isinstance(value, Tensor) or value.dim() != 2 or tuple(value.shape) != shape:
                got = tuple(value.shape) if isinstance(value, Tensor) else "none" if value is None else f"{value!r:.40}"
                raise ValueError(f"{name}: expected a tensor (B, tokens) as {like} is, of shape {shape}, got {got}")
    if len(content["sequences"]) != len(content["response_mask"]):
        B = len(content["sequences"])
        raise ValueError(f"response_mask: expected {B} rows as in sequences, got {len(content['response_mask'])}")
    experts, whole = content.get(EXPERTS), tuple(content["sequences"].shape)
    if experts is not None and not (
        isinstance(experts, Tensor) and experts.dim() == 4 and tuple(experts.shape[:2]) == whole
    ):
        got = tuple(experts.shape) if isinstance(experts, Tensor) else f"{experts!r:.40}"
        raise ValueError(f"{EXPERTS}: expected (B, S, layers, slots), (B, S) {whole}, got {got}")
    filled = content.get(FILLED)
    if filled is not None and not (isinstance(filled, Tensor) and tuple(filled.shape) == whole):
        got = tuple(filled.shape) if isinstance(filled, Tensor) else f"{filled!r:.40}"
        raise ValueError(f"{FILLED}: expected a tensor (B, S) {whole}, got {got}")
    # Two masks of two widths: the sequence is padded as a whole, and its response once more by itself.
    for b in range(len(content["sequences"])):
        is_there, is_part = content["attention_mask"][b].bool(), content["response_mask"][b].bool()
        tokens = content["sequences"][b][is_there].tolist()
        mask, mu, old = (content[name][b][is_part].tolist() for name in RESPONSE[1:])
        row = {"tokens": tokens, "num_prompt": len(tokens) - len(mu), "is_response": [x > 0 for x in mask]}
        if experts is not None:
            ids = experts[b][is_there][:-1]  # the last token is never an input
            is_filler = _is_zero(ids) if filled is None else filled[b][is_there][:-1].bool()
            # Signed: the dump's own type may hold no -1.
            row["experts_mu"] = torch.where(is_filler[:, None, None], -1, ids.int()) if is_filler.any() else ids
        yield row | {"logp_mu": mu, "logp_old": old}


def _is_zero(ids: Tensor) -> Tensor:
    """Rows whose every slot is 0, which no router chooses: two slots never have one expert; a single one may."""
    return (ids == 0).flatten(1).all(1) if ids.shape[2] > 1 else torch.zeros(len(ids), dtype=torch.bool)


FORMAT = Format(
    name="SkyRL", files="dumped_data/*.pkl is refused; the same batch as tensors in a .pt is read",
    has="tokens, mu, old, mu's experts", lacks="old's experts, entropies. SkyRL's own dump is a pickle: not opened.",
    source="NovaSky-AI/SkyRL skyrl/train/trainer.py, skyrl/backends/skyrl_train/training_batch.py at a956457",
    uses=(*WHOLE, *RESPONSE, EXPERTS, FILLED), is_mine=_is_mine, read=_read,
)  # fmt: skip
