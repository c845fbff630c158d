"""The KL of a step split by kind of token, and by the layer at which routes part.

Each token counts once, under the first kind that fits, so that the parts sum to the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from lab.doctor.routes import NOWHERE, kl_by_first_layer
from lab.doctor.view import View
from lab.report.figures import Caption, Figure
from lab.report.style import number

OWN, EARLIER, SAME = "own<br>experts<br>differ", "earlier<br>experts<br>differ", "same<br>experts"
FILLED, LAST, OTHERS = "one<br>side<br>is 0", "last<br>token", "all<br>others"
"""Kinds of tokens, broken into lines short enough for five bars on a phone."""


def kinds(view: View) -> dict[str, Bool[Tensor, " n"]]:
    """Masks by kind, disjoint and covering all sampled tokens; kinds by routes only if both sides have routes.

    A token's own row is that of its input. Earlier rows are those of its prompt and response: their experts reach it
    through the keys and values.
    """
    # Exclusive: a 0 on both sides is agreement.
    is_filled, is_any = (view.mu_n == 0) != (view.old_n == 0), torch.ones(len(view), dtype=torch.bool)
    found, rest = {FILLED: is_filled}, OTHERS
    if view.differs_n is not None:
        found, rest = found | {OWN: view.differs_n, EARLIER: _after_a_difference(view)}, SAME
    found |= {LAST: view.is_last_n, rest: is_any}
    is_left, out = is_any, {}
    for name, is_kind in found.items():
        out[name] = is_kind & is_left
        is_left = is_left & ~is_kind
    return out


def _after_a_difference(view: View) -> Bool[Tensor, " n"]:
    """Tokens with other experts in some row of their sequence before their own row."""
    assert view.difference_RL is not None
    differs_R = (view.difference_RL > 0).any(1).long()
    before_R = torch.cat([differs_R.new_zeros(1), differs_R.cumsum(0)])
    # Sequence b has S_b - 1 rows, so its first row is b places before its first token.
    first_n = view.trace.offsets[view.response_n] - view.response_n
    # before_R[r] counts the differing rows before row r, so the token's own row is left out: it is the kind OWN.
    return before_R[view.row_n] > before_R[first_n]


def shares(view: View) -> dict[str, tuple[float, float]] | None:
    """Each kind's share of the sum of k3 and of the tokens, in [0, 1]; None where that sum is 0 or not finite."""
    total = float(view.k3_n.sum())
    if not 0 < total < float("inf"):
        return None
    return {
        name: (float(view.k3_n[is_kind].sum()) / total, float(is_kind.double().mean()))
        for name, is_kind in kinds(view).items()
        if bool(is_kind.any())
    }


def by_kind(patients: Sequence[Any]) -> Figure | None:
    """Bars of each kind's share of the KL; hovering adds its share of the tokens."""
    data = []
    for patient in patients:
        if (found := shares(View.of(patient.newest_trace))) is None:
            continue
        data.append(
            _bars(patient, list(found), [part for part, _ in found.values()])
            | {"customdata": [f"{part:.0%} of the KL on {of:.1%} of the tokens" for part, of in found.values()]}
        )
    if not data:
        return None
    layout = {
        "xaxis": {"type": "category", "automargin": True},
        "yaxis": {"title": {"text": "share of the KL"}, "range": [0, 1.02]}, "bargap": 0.25,
    }  # fmt: skip
    formula = (
        "sum of k3 over the tokens of a kind / over all tokens; each token has the first kind that fits: a "
        "log-probability of 0 on one side, other experts in its own row or in an earlier one, the last token of its "
        "response, none of these"
    )
    return Figure("kl-by-kind", "The KL by kind of token", Caption(formula, "fraction", "here"), data, layout)


def by_layer(patients: Sequence[Any]) -> Figure | None:
    """Bars of the share of the KL by the first layer at which the token's own row has other experts."""
    data = []
    for patient in patients:
        parts = kl_by_first_layer(View.of(patient.newest_trace))
        if not parts or not 0 < (total := sum(parts.values())) < float("inf"):
            continue
        names = ["none" if layer == NOWHERE else str(layer) for layer in sorted(parts)]
        heights = [parts[layer] / total for layer in sorted(parts)]
        data.append(_bars(patient, names, heights) | {"customdata": [number(height) for height in heights]})
    if not data:
        return None
    layout = {
        "xaxis": {"title": {"text": "first layer with other experts"}, "type": "category"},
        "yaxis": {"title": {"text": "share of the KL"}, "range": [0, 1.02]}, "bargap": 0.25,
    }  # fmt: skip
    formula = (
        "sum of k3 over the tokens whose own row first differs at that layer / over all tokens; none: same experts "
        "everywhere"
    )
    return Figure("kl-by-first-layer", "The KL by layer", Caption(formula, "fraction", "here"), data, layout)


def _bars(patient: Any, x: list[str], y: list[float]) -> dict[str, Any]:
    return {
        "type": "bar", "name": patient.label, "meta": {"run": patient.index, "role": "bar"}, "x": x, "y": y,
        "hovertemplate": "%{customdata}",
    }  # fmt: skip
