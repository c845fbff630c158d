"""Laws of mu's likeliest tokens, and log old of them, that stay in the object store: every answer has the bits of one
process.

Ray's store is stood for by the objects themselves; groups of engines have it for real (test_cluster_early_end.py), and
so has a run (test_scaled_run.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lab.backlog import to_tensors
from lab.traces import Apart, Trace
from scaled.cluster import stretches
from scaled.cluster.storing import pack_apart, unpack_apart
from scaled.cluster.token_rows import StoredTokenRows
from scaled.megatron_engine.parts import BatchSizes, ScorePart, TokenPart, assemble_scores
from tests.contracts import worlds
from tests.scaled.test_stored_features import Apart as ApartActor
from tests.scaled.test_stored_routes import ROWS, HereGroup
from theory.algorithm import Algorithm, OptimizerSettings, Oversampling
from theory.loop import StepResult, global_step, hand_over
from theory.objectives import preset
from theory.oversampling import Backlog
from theory.routing.packed_rows import offsets_of
from theory.streams import stream
from theory.top_tokens import TokenRows, TopTokens

pytestmark = pytest.mark.usefixtures("references_are_objects")

K, V = 3, 11


def draw_top(seed: int, num_rows: Sequence[int]) -> TopTokens:
    logp_AV = torch.randn(sum(num_rows), V, generator=stream(seed, "stored-top")).log_softmax(-1)
    return TopTokens.of(logp_AV, K, offsets_of(num_rows))


def travelled(top: TopTokens, num: int, group: HereGroup) -> TopTokens:
    """The record as its receiver has it, its ids and log-probabilities in `num` objects each and nowhere else."""
    parcel, *stored = pack_apart({"top": top}, 2 * num, least=1)
    assert all(len(entry.shape) < 2 for entry in parcel.bucket.entries), "rows travelled with the answer"
    return unpack_apart(parcel, stored, group, 0)["top"]


def same(stored: TopTokens, here: TopTokens) -> None:
    """Equal in ids, log-probabilities, their types and counts; what is stored stays so."""
    for a, b in ((stored.id_rows, here.id_rows), (stored.logp_rows, here.logp_rows)):
        assert isinstance(a, StoredTokenRows) and not isinstance(b, StoredTokenRows)
        assert torch.equal(a.values, b.values) and torch.equal(a.offsets, b.offsets)
        assert (a.width, a.dtype, a.nbytes, len(a)) == (b.width, b.dtype, b.nbytes, len(b))
        assert torch.equal(torch.cat(list(a.blocks())), b.values)
        assert len(b) == 0 or torch.equal(a.padded(20), b.padded(20))
    assert stored.num_bytes == here.num_bytes and stored.is_complete == here.is_complete


@given(st.integers(0, 99), ROWS, st.integers(1, 4), st.data())
def test_stored_tokens_are_the_tokens(seed: int, rows: list[int], num: int, data: st.DataObject) -> None:
    """Selecting, concatenating, cutting short and joining with gaps give the same rows, however many objects they lie
    in; a joined record can be joined again."""
    here = draw_top(seed, rows)
    stored = travelled(here, num, HereGroup(1))
    same(stored, here)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=8))
    same(stored.select(chosen), here.select(chosen))
    assert torch.equal(stored.rows(chosen[0])[1], here.rows(chosen[0])[1])
    both = [TopTokens.concat([top.select(chosen), top]) for top in (stored, here)]
    same(*both)
    kept = [data.draw(st.integers(0, n)) for n in rows]
    same(stored.beginnings(kept), here.beginnings(kept))
    # A gap of one row before every part but the first: an observation between two turns.
    places = [[(b, 0), (chosen[0], rows[b] + 1)] for b in chosen]
    lengths = [rows[b] + 1 + rows[chosen[0]] for b in chosen]
    for _ in range(2):
        joined = [
            TopTokens.placed([[(top, i, at) for i, at in parts] for parts in places], lengths) for top in (stored, here)
        ]
        same(*joined)
        gaps = joined[0].logp[[int(start) + rows[b] for start, b in zip(joined[0].offsets, chosen, strict=False)]]
        assert bool((gaps == -torch.inf).all())
        stored, here = joined
        places, lengths = [[(0, 1)]], [1 + lengths[0]]
        chosen, rows = [0], [0]


def test_a_selection_keeps_no_object_that_it_does_not_need() -> None:
    """The object store may drop the tokens of responses that nobody holds."""
    stored = travelled(draw_top(0, [2, 2, 2, 2]), 4, HereGroup(1)).logp_rows
    assert isinstance(stored, StoredTokenRows) and len(stored.sources) == 4
    assert len(stored.select([3, 1]).sources) == 2


def test_blocks_are_whole_responses_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they are the record; each is within the bound, or one response."""
    monkeypatch.setattr(stretches, "BLOCK_BYTES", 10 * K * 4)
    here = draw_top(3, [3, 3, 4, 1, 12, 0, 9, 2]).logp_rows
    found = list(travelled(TopTokens(here, here, V), 3, HereGroup(1)).logp_rows.blocks())
    assert [len(block) for block in found] == [10, 1, 12, 9, 2] and torch.equal(torch.cat(found), here.values)


def test_parts_of_ranks_become_log_old_in_the_order_of_responses() -> None:
    """Two ranks, each with micro-batches of responses dealt in turn: stored or here, assembled rows are the whole's."""
    lengths = [5, 0, 2, 6, 3]
    logp_old, sizes = draw_top(1, lengths).logp_rows, BatchSizes(tuple(lengths), 6)
    group, here, there = HereGroup(2), [], []
    for home, share in enumerate(([[4, 0], [2]], [[3, 1]])):
        tokens = []
        for indices in share:
            zeros = torch.zeros(len(indices), 6)
            own = TokenRows(*_rows(logp_old, indices))
            tokens.append(TokenPart(tuple(indices), zeros, zeros, zeros, own))
        here.append(ScorePart(sizes, tuple(tokens), ()))
        parcel, *stored = pack_apart(here[-1], 4)
        there.append(unpack_apart(parcel, stored, group, home))
    for parts, kind in ((here, TokenRows), (there, StoredTokenRows)):
        found = assemble_scores(parts).logp_top
        assert type(found) is kind and torch.equal(found.values, logp_old.values)
        assert torch.equal(found.offsets, logp_old.offsets)


def _rows(rows: TokenRows, indices: list[int]) -> tuple[Tensor, Tensor]:
    some = rows.select(indices)
    return some.values, some.offsets


def values_there(self: StoredTokenRows) -> Tensor:
    """All numbers, but not in the driver, where sources know the group of actors that made them."""
    assert all(source.owner.group is None for source in self.sources), "the driver reads stored tokens"
    return VALUES.fget(self)


VALUES = StoredTokenRows.__dict__["values"]


def steps(is_apart: bool, recipe: Algorithm, num_steps: int) -> Iterator[StepResult]:
    """Global steps in one process, or with engine and trainer apart."""
    engine, learner = worlds.rollout_engine("weights-bf16", worlds.model()), worlds.training_engine(worlds.model())
    if is_apart:
        engine, learner = ApartActor(engine), ApartActor(learner)
    hand_over(recipe, engine, learner, version=0)
    backlog = None if recipe.oversampling is None else Backlog.at(0, recipe)
    for step in range(num_steps):
        result = global_step(step, recipe, engine, learner, worlds.EvenTokens(), seed=3, backlog=backlog)
        backlog = result.backlog
        yield result


@pytest.mark.parametrize("oversampling", [None, Oversampling(extra_prompts=2, max_staleness=50)])
@pytest.mark.parametrize("objective", ["top_k", "full"])
def test_global_steps_are_the_same(
    objective: str, oversampling: Oversampling | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics, traces and kept responses have the bits of one process, with partial rollouts, too; training and traces
    read no stored row in the driver, and only a checkpoint of kept responses does."""
    recipe = Algorithm(
        objective=preset("minirl", centering=objective, centering_k=4), num_prompts=4, num_responses=2,
        num_minibatches=2, max_tokens=24, optimizer=OptimizerSettings(learning_rate=1e-2), oversampling=oversampling,
    )  # fmt: skip
    pairs = zip(steps(True, recipe, 3), steps(False, recipe, 3), strict=True)
    monkeypatch.setattr(StoredTokenRows, "values", property(values_there))
    for step, (found, expected) in enumerate(pairs):
        assert found.metrics == expected.metrics and found.metrics["rollout/top_tokens_bytes"] > 0
        assert found.rollouts.top is not None and isinstance(found.rollouts.top.id_rows, StoredTokenRows)
        assert isinstance(found.scores.logp_top, StoredTokenRows)
        paths = [tmp_path / f"{name}-{step}.safetensors" for name in ("apart", "here")]
        for path, result in zip(paths, (found, expected), strict=True):
            save_trace(result, path)
        assert paths[0].read_bytes() == paths[1].read_bytes()
        assert Trace.load(paths[0]).top_logp_old is not None
        with monkeypatch.context() as patch:
            patch.setattr(StoredTokenRows, "values", VALUES)
            kept, theirs = to_tensors(found.backlog), to_tensors(expected.backlog)
        assert kept.keys() == theirs.keys() and all(torch.equal(kept[name], theirs[name]) for name in kept)
        assert ("backlog.top_ids" in kept) == (oversampling is not None)


def save_trace(result: StepResult, path: Path) -> None:
    """As lab/recording.py."""
    rollouts, scores = result.rollouts, result.scores
    apart = Apart(rollouts.experts, scores.natural, rollouts.top, scores.logp_top)
    bare = replace(rollouts, experts=None, top=None), replace(scores, natural=None, logp_top=None)
    Trace.of(*bare, result.rewards_B, 1).save(path, apart)
