"""The gradients that single responses give an objective with centering, which adds to edges off their paths.

Letters: theory/exact/tree.py; E edges of all depths, J mu's likeliest tokens at a node.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from theory.exact.policies import TreePolicy
from theory.exact.tree import Paths
from theory.objectives import Objective, Top, Totals


def response_gradients(
    policy: TreePolicy,
    logp_mu: list[Float[Tensor, "_n V"]],
    logp_old: list[Float[Tensor, "_n V"]],
    objective: Objective,
    sign: float,
) -> Float[Tensor, "Y Q"]:
    """u(y) of every response at advantage `sign` and denominator 1, from the objective's own code.

    Takes one pullback per response: for trees of up to a few thousand responses.
    """
    tree = policy.tree
    pi_NV, old_NV, mu_NV = (torch.cat(list(x)) for x in (policy.logp(), logp_old, logp_mu))
    # At the nodes, not per response: mu's likeliest tokens depend on the prefix alone.
    ids_NJ = mu_NV.topk(min(objective.num_top, tree.num_tokens), dim=1).indices
    # From here on nodes are numbered over all depths, so that one index finds an edge.
    rows = []
    # Few at a time: `_edges` holds every edge of the tree once per response.
    for _, paths in tree.chunks(4096):
        node_BT = paths.nodes_BT + tree.first_nodes_T
        for edges_NV in _edges(objective, sign, paths, node_BT, ids_NJ, (pi_NV, old_NV, mu_NV)):
            rows.append(policy.pullback(edges_NV.split(list(tree.sizes))))
    return torch.stack(rows)


def _edges(
    objective: Objective, sign: float, paths: Paths, node_BT: Tensor, ids_NJ: Tensor, logp: tuple[Tensor, ...]
) -> Float[Tensor, "B N V"]:
    """d J / d log pi of every edge, of each response alone."""
    on_BT, taken_BT = paths.is_response_BT, paths.tokens_BT
    ids_BTJ = ids_NJ[node_BT]
    # 0 after the end, as in the other enumerations; the mask leaves it out.
    pi_BT, old_BT, mu_BT = (torch.where(on_BT, x_NV[node_BT, taken_BT], 0.0) for x_NV in logp)
    pi_BTJ, old_BTJ, mu_BTJ = (x_NV[node_BT].gather(2, ids_BTJ) for x_NV in logp)
    leaf_BT, leaf_BTJ = pi_BT.detach().requires_grad_(), pi_BTJ.detach().requires_grad_()
    top = Top(leaf_BTJ, old_BTJ, mu_BTJ, is_complete=ids_NJ.shape[1] == logp[0].shape[1])
    advantages_B = torch.full((len(on_BT),), sign, dtype=torch.float64)
    output = objective(leaf_BT, old_BT, mu_BT, advantages_B, on_BT, top=top, totals=Totals(1, 1))
    each_BT, each_BTJ = torch.autograd.grad(output.objective, (leaf_BT, leaf_BTJ))
    edges_BNV = torch.zeros(len(on_BT), *logp[0].shape, dtype=torch.float64)
    b_BT = torch.arange(len(on_BT))[:, None].expand_as(node_BT)
    edges_BNV.index_put_((b_BT, node_BT, taken_BT), torch.where(on_BT, each_BT, 0.0), accumulate=True)
    # Added, not assigned: the taken token is often among mu's likeliest, and its edge gets both terms.
    where = (b_BT[..., None].expand_as(ids_BTJ), node_BT[..., None].expand_as(ids_BTJ), ids_BTJ)
    edges_BNV.index_put_(where, torch.where(on_BT[..., None], each_BTJ, 0.0), accumulate=True)
    return edges_BNV
