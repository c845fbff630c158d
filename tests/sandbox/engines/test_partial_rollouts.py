"""Laws of responses that the engine samples in several calls: the same bits at one version, each part's own at two."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import safetensors.torch
import torch

from lab.backlog import from_tensors, to_tensors
from lab.traces import Trace
from sandbox.config import SandboxRun
from sandbox.engines.engine import SandboxEngine
from sandbox.model import MoE
from tests.contracts import worlds
from tests.sandbox.engines.turns_world import assert_same
from theory.algorithm import Algorithm, Oversampling
from theory.collection import collect
from theory.contracts import Rollouts
from theory.objectives import preset
from theory.oversampling import Backlog, StartedGroup, continued
from theory.routing.passes import RoutingPlan

P, G = 5, 2
INTACT = ("exact", "weights-bf16", "weights-fp8-channel", "experts-one-place-on", "truncated")
"""Engines that leave the links `batch` and `prefill` intact: a continued response has the bits of a whole one."""


def algorithm(**changes) -> Algorithm:
    settings = {
        "objective": preset("minirl"),
        "num_prompts": 3,
        "num_responses": G,
        "max_tokens": 24,
        "oversampling": Oversampling(extra_prompts=2, max_staleness=50),
    }
    return Algorithm(**{**settings, **changes})


def groups() -> list[StartedGroup]:
    return [StartedGroup(n, worlds.EvenTokens().prompts(n, 1)[0]) for n in range(P)]


def grown(
    engine: SandboxEngine, recipe: Algorithm, enough: Sequence[int], start: Sequence[StartedGroup]
) -> list[StartedGroup]:
    """The groups after a call for each number of complete groups."""
    found = list(start)
    for call, number in enumerate(enough):
        found = continued(engine, found, number, recipe, seed=2, call=call)
    return found


def together(found: Sequence[StartedGroup]) -> Rollouts:
    return Rollouts.concat([group.rollouts for group in found if group.rollouts is not None])


@pytest.mark.parametrize("name", INTACT)
def test_parts_at_one_version_are_the_whole(name: str) -> None:
    """A response in up to five parts, all from the same weights, equals in every bit the one sampled at a go: tokens,
    log-probabilities, routes and likeliest tokens."""
    engine = worlds.rollout_engine(name, worlds.model())
    recipe = algorithm(objective=preset("minirl", centering="top_k", centering_k=3), temperature=0.8)
    parts = grown(engine, recipe, range(1, P + 1), groups())
    whole = grown(engine, recipe, [P], groups())
    lengths = [len(r.tokens) for r in together(whole).responses]
    assert all(group.is_complete for group in parts) and len(set(lengths)) > 3
    assert_same(together(parts), together(whole))


@pytest.mark.parametrize("name", ["exact", "router-noise", "reduction-order"])
def test_a_call_ends_where_enough_groups_have(name: str) -> None:
    """The call ends at the first position at which `enough` groups are complete: ended responses are the whole call's,
    every other one has just the tokens up to there, the same ones, and finishes abort."""
    engine = worlds.rollout_engine(name, worlds.model())
    whole = grown(engine, algorithm(), [P], groups())
    ends = sorted(max(len(r.tokens) for r in group.responses) for group in whole)
    for enough in range(1, P):
        cut = grown(engine, algorithm(), [enough], groups())
        for a, b in zip(together(cut).responses, together(whole).responses, strict=True):
            n = min(len(b.tokens), ends[enough - 1])
            assert torch.equal(a.tokens, b.tokens[:n]) and torch.equal(a.logp_mu, b.logp_mu[:n])
            assert a.finish == ("abort" if n < len(b.tokens) else b.finish)


def two_versions() -> tuple[list[StartedGroup], MoE, MoE]:
    """Groups whose first parts are of one model, as version 3, and whose last are of another, as version 4."""
    old, new = worlds.model(seed=0), worlds.model(seed=1)
    engine = worlds.rollout_engine("exact", old)
    engine.load_model(old, version=3)
    first = grown(engine, algorithm(), [1], groups())
    engine.load_model(new, version=4)
    return grown(engine, algorithm(), [P], first), old, new


def test_each_part_is_its_versions() -> None:
    """Scored under the weights of version 3 and of version 4, every token's log-probability is, to the bit, that of its
    own version, and its row of the record is the row of that version; the other version's differ."""
    found, old, new = two_versions()
    rollouts = together(found)
    scores = [worlds.training_engine(model).score(rollouts, RoutingPlan("natural")) for model in (old, new)]
    several = 0
    for b, response in enumerate(rollouts.responses):
        n, which_T = len(response.tokens), response.version_T - 3
        own = torch.stack([s.logp_BT[b, :n] for s in scores])
        assert torch.equal(response.logp_mu, own.gather(0, which_T[None])[0])
        assert not torch.isclose(own[0], own[1]).any()
        # Row num_prompt - 1 + t predicts token t; the prompt's rows are the first part's.
        num_prompt = len(response.prompt.tokens)
        row_version = torch.cat([which_T[:1].expand(num_prompt - 1), which_T])
        assert rollouts.experts is not None and all(s.natural is not None for s in scores)
        rows = [s.natural.rows(b) for s in scores]  # type: ignore[union-attr]
        for row, version in enumerate(row_version.tolist()):
            assert torch.equal(rollouts.experts.rows(b)[row], rows[version][row])
        several += len(response.versions) == 2
        assert response.version == 3 and (response.versions == ()) == (len(which_T.unique()) == 1)
    assert 3 < several < len(rollouts)


def test_a_trace_has_the_versions(tmp_path) -> None:
    """A trace has the version of every token where there are several, and reads them back; of one version, none."""
    found, old, _ = two_versions()
    rollouts = together(found)
    trainer, rewards = worlds.training_engine(old), torch.zeros(P * G)
    trace = Trace.of(rollouts, trainer.score(rollouts, RoutingPlan("natural")), rewards, step=4)
    trace.save(tmp_path / "trace.safetensors")
    read = Trace.load(tmp_path / "trace.safetensors").versions
    assert read is not None and read.tolist() == [v for r in rollouts.responses for v in r.version_T.tolist()]
    assert set(read.tolist()) == {3, 4}
    one = together(grown(worlds.rollout_engine("exact", old), algorithm(), [P], groups()))
    assert Trace.of(one, trainer.score(one, RoutingPlan("natural")), rewards, step=0).versions is None


def test_what_goes_on_does_not_depend_on_when() -> None:
    """The same weights in every step: each trained response is the same whether steps cut it or not."""
    engine, recipe = worlds.rollout_engine("exact", worlds.model()), algorithm(max_tokens=40)
    task, backlog, seen = worlds.EvenTokens(), None, {}
    for step in range(8):
        collected = collect(step, recipe, engine, task, seed=2, backlog=backlog)
        backlog = collected.backlog
        for p in range(3):
            own = collected.rollouts.select(range(p * G, (p + 1) * G))
            seen[own.responses[0].prompt.id] = own
    for number in range(8):
        prompt = task.prompts(number, 1)[0]
        (alone,) = continued(engine, [StartedGroup(number, prompt)], 1, recipe, seed=2, call=99)
        assert alone.rollouts is not None
        assert_same(seen[prompt.id], alone.rollouts)


def test_a_stored_backlog_is_the_backlog(tmp_path) -> None:
    """Written to a safetensors file and read, a backlog continues to the same bits: mixed versions, routes, likeliest
    tokens; the prompts come from the task by number. An empty one keeps its number, and none at all stays none."""
    recipe = algorithm(objective=preset("minirl", centering="top_k", centering_k=3))
    engine = worlds.rollout_engine("exact", worlds.model())
    first = grown(engine, recipe, [1], groups())
    engine.load_model(worlds.model(seed=1), version=1)
    backlog = Backlog(P, tuple(grown(engine, recipe, [3], first)))
    assert any(r.versions for group in backlog.groups for r in group.responses)
    safetensors.torch.save_file(to_tensors(backlog), tmp_path / "backlog.safetensors")
    read = from_tensors(safetensors.torch.load_file(tmp_path / "backlog.safetensors"), worlds.EvenTokens())
    assert read is not None and read.next_number == P
    assert [(g.number, g.prompt) for g in read.groups] == [(g.number, g.prompt) for g in backlog.groups]
    assert_same(together(read.groups), together(backlog.groups))
    ended = [grown(engine, recipe, [P], state.groups) for state in (read, backlog)]
    assert_same(together(ended[0]), together(ended[1]))
    empty = from_tensors(to_tensors(Backlog(7)), worlds.EvenTokens())
    assert empty is not None and (empty.next_number, empty.groups) == (7, ())
    assert from_tensors({"weight": torch.zeros(1)}, worlds.EvenTokens()) is None and to_tensors(None) == {}


RUN = """{"name": "partial", "num_steps": 1, "task": {"kind": "arithmetic"}, "engine": {"defects": [DEFECT]},
"algorithm": {"objective": {"preset": "minirl"}, "oversampling": {"extra_prompts": 2, "unfinished": "KIND"}}}"""


@pytest.mark.parametrize(
    ("defect", "kind", "wanted"),
    [
        (
            '{"kind": "stale_weights", "versions": 2}', "keep",
            "algorithm.oversampling.max_staleness: expected at least 3 .* that are 2 behind.*, got 1",
        ),
        (
            '{"kind": "stale_weights", "switch_at": 0.5}', "drop",
            "engine.defects: expected stale_weights with switch_at = 1 beside algorithm.oversampling .*, got 0.5",
        ),
        ('{"kind": "stale_weights", "versions": 2}', "drop", None),
        ('{"kind": "stale_weights", "versions": 0}', "keep", None),
    ],
)  # fmt: skip
def test_stale_weights_must_leave_room(defect: str, kind: str, wanted: str | None) -> None:
    """Weights that lag make a kept response staler than the bound allows, and a switch counts one call's tokens: both
    are one line that names the field. What is dropped, or does not lag, is fine."""
    text = RUN.replace("DEFECT", defect).replace("KIND", kind)
    if wanted is None:
        assert SandboxRun.model_validate_json(text).algorithm.build().oversampling is not None
        return
    with pytest.raises(ValueError, match=wanted):
        SandboxRun.model_validate_json(text)
