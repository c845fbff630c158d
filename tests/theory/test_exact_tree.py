"""The tree holds every response once, and knows where each runs."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.theory.exact_world import log_probabilities, make_world
from theory.exact.tree import MAX_RESPONSES, PrefixTree

TREES = [(2, 1, False), (2, 5, False), (4, 3, False), (3, 1, True), (3, 4, True), (5, 3, True)]


def responses(V: int, T: int, has_end: bool) -> set[tuple[int, ...]]:
    """All of them, by brute force."""
    if not has_end:
        return set(itertools.product(range(V), repeat=T))
    ended = {(*y, V - 1) for t in range(T) for y in itertools.product(range(V - 1), repeat=t)}
    return ended | set(itertools.product(range(V - 1), repeat=T))


@pytest.mark.parametrize(("V", "T", "has_end"), TREES)
def test_every_response_stands_once(V: int, T: int, has_end: bool) -> None:
    """The paths are all strings that end with the end token or at T tokens, each once."""
    tree = PrefixTree(V, T, has_end)
    paths = tree.paths(0, tree.num_responses)
    rows = zip(paths.tokens_BT, paths.is_response_BT, strict=True)
    found = [tuple(tokens[mask].tolist()) for tokens, mask in rows]
    assert len(found) == len(set(found)) == tree.num_responses
    assert set(found) == responses(V, T, has_end)
    assert [len(y) for y in found] == tree.lengths.tolist() == paths.length_B.tolist()


@pytest.mark.parametrize(("V", "T", "has_end"), TREES)
def test_a_node_is_the_number_of_its_prefix(V: int, T: int, has_end: bool) -> None:
    """The node at depth t of a path has the path's first t tokens as its prefix."""
    tree = PrefixTree(V, T, has_end)
    paths = tree.paths(0, tree.num_responses)
    for t in range(T):
        on = paths.is_response_BT[:, t]
        assert torch.equal(tree.prefixes(t)[paths.nodes_BT[on, t]], paths.tokens_BT[on, :t])


@pytest.mark.parametrize("size", [7, 1000])
def test_chunks_are_the_whole_in_order(size: int) -> None:
    """The chunks' paths one after the other are all paths."""
    tree = PrefixTree(3, 4, True)
    whole = tree.paths(0, tree.num_responses)
    parts = [paths.tokens_BT for _, paths in tree.chunks(size)]
    assert torch.equal(torch.cat(parts), whole.tokens_BT)
    assert [rows.start for rows, _ in tree.chunks(size)] == list(range(0, tree.num_responses, size))


@pytest.mark.parametrize("kind", ["bigram", "counts", "tabular"])
@pytest.mark.parametrize("has_end", [False, True])
def test_log_probabilities_by_another_way(kind: str, has_end: bool) -> None:
    """A policy's log-probabilities are those of its conditionals on each response's own prefixes, and sum to 1."""
    world = make_world(kind, has_end=has_end)
    policy = world.problem.target
    written_out_BT = log_probabilities(policy, policy.parameters, world.paths)
    gathered_BT = world.tree.gather(policy.logp(), world.paths)
    assert torch.allclose(gathered_BT, written_out_BT, atol=1e-13)
    log_p_Y = world.tree.log_probabilities(policy.logp())
    assert torch.allclose(log_p_Y, written_out_BT.sum(1), atol=1e-13)
    assert log_p_Y.exp().sum().item() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("has_end", [False, True])
def test_scatter_is_the_transpose_of_gather(has_end: bool) -> None:
    """<gather(e), c> = <e, scatter(c)> for all edges e and path values c."""
    world = make_world(has_end=has_end)
    tree, paths = world.tree, world.paths
    generator = torch.Generator().manual_seed(1)
    edges = [torch.randn(n, tree.num_tokens, generator=generator) for n in tree.sizes]
    values_BT = torch.randn(paths.tokens_BT.shape, generator=generator)
    sums = tree.zero_edges()
    tree.scatter(sums, values_BT, paths)
    left = (tree.gather(edges, paths) * values_BT).sum()
    right = sum((e * s).sum() for e, s in zip(edges, sums, strict=True))
    assert left.item() == pytest.approx(float(right), rel=1e-12)


def test_reach_is_the_share_of_responses_that_pass() -> None:
    """The probability of a node is that of the responses through it."""
    world = make_world()
    tree, paths = world.tree, world.paths
    probability_Y = tree.log_probabilities(world.problem.logp_mu).exp()
    for t, reach_n in enumerate(tree.reach(world.problem.logp_mu)):
        on = paths.is_response_BT[:, t]
        through_n = torch.zeros_like(reach_n).index_add_(0, paths.nodes_BT[on, t], probability_Y[on])
        assert torch.allclose(reach_n, through_n, atol=1e-14)


def test_sizes_that_make_no_tree_are_refused() -> None:
    """Too few tokens, no position, and too many responses: one line each with the numbers."""
    with pytest.raises(ValueError, match="num_tokens: expected at least 3, got 2"):
        PrefixTree(2, 3, has_end=True)
    with pytest.raises(ValueError, match="max_length: expected at least 1, got 0"):
        PrefixTree(2, 0)
    with pytest.raises(ValueError, match=rf"at most {MAX_RESPONSES:,} responses to enumerate, got 16,777,216"):
        PrefixTree(8, 8)
    for length in (65, 2**62):  # at once: a power of that length would never end
        with pytest.raises(ValueError, match=r"to enumerate, got more than 2\^64 \(2 tokens, up to \d+ of them\)"):
            PrefixTree(2, length)
