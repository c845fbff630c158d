"""The doctor inside a training loop: the diagnosis of a batch in memory, given as tensors or as lists of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from lab.doctor.diagnosis import Diagnosis
from lab.doctor.diagnosis import diagnose as diagnose_trace
from lab.doctor.importers import rows
from lab.doctor.importers.aligned import masked, unprompted
from lab.doctor.importers.format import Placed

Batch = Tensor | Sequence[Any]
"""B rows: a padded tensor, or a list of rows of different lengths (tensors or lists)."""


def diagnose(
    tokens: Batch,
    logp_mu: Batch,
    logp_old: Batch,
    is_sampled: Batch,
    *,
    prompts: Batch | None = None,
    entropy_old: Batch | None = None,
    experts_mu: Batch | None = None,
    experts_old: Batch | None = None,
    is_dense: bool = False,
) -> Diagnosis:
    """The diagnosis of the two engines that scored this batch, with its clues by name in `seen`.

    Place s of each row holds tokens[s], its log-probability in nats under mu (the engine that sampled) and under old
    (the trainer at the same weights), and whether mu sampled it: `is_sampled` is 0 on prompts, tool output and padding,
    whose values are ignored. With `prompts` the rows are responses, and each follows its prompt; padding is harmless if
    equal prompts are padded alike. Tokens after the last sampled one are dropped. Experts are (tokens of prompt and
    response, L, K), -1 where unknown; the last row may be missing. `is_dense`: the model has no routers.

    Raises ValueError, with row and field, for values that do not fit, and where no token was sampled.

    >>> from lab.doctor import diagnose
    >>> found = diagnose([[7, 4, 4]], [[0, -1.0, -2.0]], [[0, -1.0, -2.0]], [[0, 1, 1]])
    >>> found.fault is None, found.seen["k3_kl"]
    (True, 0.0)
    """
    values = {"logp_mu": logp_mu, "logp_old": logp_old, "entropy_old": entropy_old}
    values = {name: batch for name, batch in values.items() if batch is not None}
    routes = {"experts_mu": experts_mu, "experts_old": experts_old}
    routes = {name: batch for name, batch in routes.items() if batch is not None}
    for name, batch in {"is_sampled": is_sampled, **values, **routes, "prompts": prompts}.items():
        if batch is not None and len(batch) != len(tokens):
            raise ValueError(f"{name}: expected {len(tokens)} rows as in tokens, got {len(batch)}")
    return diagnose_trace(rows.packed(_rows(tokens, is_sampled, values, prompts, routes)), is_dense=is_dense)


def _rows(
    tokens: Batch, is_sampled: Batch, values: dict[str, Batch], prompts: Batch | None, routes: dict[str, Batch]
) -> Iterator[Placed]:
    for b in range(len(tokens)):
        place, ids = f"row {b}", _list(tokens[b])
        mask = masked(_list(is_sampled[b]), "is_sampled", place)
        columns = {name: _list(batch[b]) for name, batch in values.items()}
        for name, values_S in (("is_sampled", mask), *columns.items()):
            if len(values_S) != len(ids):
                raise ValueError(f"{place}: {name}: expected {len(ids)} values, one per token, got {len(values_S)}")
        # Padding that is kept would count as an observation, and `alignment.end_share` has no value where there is one.
        stop = max((at + 1 for at, is_one in enumerate(mask) if is_one), default=0)
        if stop == 0:
            continue  # a fully masked response has no sampled token
        ids, mask = ids[:stop], mask[:stop]
        columns = {name: values_S[:stop] for name, values_S in columns.items()}
        if prompts is None:
            row = unprompted(ids, mask, columns)
        else:
            prompt = _list(prompts[b])
            row = {"tokens": [*prompt, *ids], "num_prompt": len(prompt), "is_response": mask, **columns}
        # S tokens have S - 1 routing rows: the last token is never an input.
        num_rows = len(row["tokens"]) - 1
        yield row | {name: batch[b][:num_rows] for name, batch in routes.items()}, place


def _list(row: Any) -> list[Any]:
    return row.tolist() if hasattr(row, "tolist") else list(row)
