"""Laws of the trace: packing loses and adds nothing, the file is the documented one, and a misfit is one clear line."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lab.records import RecordError, RunFolder
from lab.traces import SCHEMA, Trace
from theory.contracts import Prompt, Response, Rollouts, TokenScores
from theory.routing.payloads import pack_record
from theory.top_tokens import TokenRows, TopTokens

LAYERS = (1, 2, 5)
E, K = 20, 3


def rollouts_and_scores(lengths: list[tuple[int, int]], seed: int = 0) -> tuple[Rollouts, TokenScores]:
    """Responses of these (prompt, response) lengths with random tokens, scores and routes; padding holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    responses = []
    for b, (P, T) in enumerate(lengths):
        tokens = tuple(torch.randint(1, 99, (P,), generator=generator).tolist())
        responses.append(
            Response(
                prompt=Prompt(id=str(b), tokens=tokens, answer=""),
                tokens=torch.randint(1, 99, (T,), generator=generator),
                logp_mu=-torch.rand(T, generator=generator),
                is_response=torch.rand(T, generator=generator) > 0.3,
                finish="stop",
                version=0,
            )
        )
    records = []
    for _ in range(2):
        rows = [torch.rand(P + T - 1, len(LAYERS), E, generator=generator).topk(K).indices for P, T in lengths]
        records.append(pack_record(rows, [P + T for P, T in lengths], LAYERS, E))
    logp_BT = torch.full((len(lengths), max(T for _, T in lengths)), torch.nan)
    for b, (_, T) in enumerate(lengths):
        logp_BT[b, :T] = -torch.rand(T, generator=generator)
    scores = TokenScores(logp_BT=logp_BT, entropy_BT=torch.rand(logp_BT.shape), experts=records[0], natural=records[1])
    return Rollouts(tuple(responses), experts=records[0]), scores


def example(**options: Any) -> Trace:
    """The trace of two responses of unlike lengths."""
    rollouts, scores = rollouts_and_scores([(3, 4), (2, 6)])
    return Trace.of(rollouts, scores, torch.tensor([1.0, 0.0]), step=7, **options)


def same(a: Trace, b: Trace) -> bool:
    """Whether two traces are equal to the bit, types included."""
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(Trace)]
    return all(
        x.dtype == y.dtype and torch.equal(x, y)
        if isinstance(x, Tensor) and isinstance(y, Tensor)
        else x is y or x == y
        for x, y in pairs
    )


LENGTHS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=4)


@given(lengths=LENGTHS, seed=st.integers(0, 100))
def test_packing_keeps_every_token_and_no_padding(lengths: list[tuple[int, int]], seed: int) -> None:
    """Cut along its offsets, a trace gives back each response's tokens, scores and both routing records."""
    rollouts, scores = rollouts_and_scores(lengths, seed)
    trace = Trace.of(rollouts, scores, torch.arange(len(lengths)).float(), step=3)
    assert len(trace) == len(lengths) and not torch.isnan(trace.logp_old).any()
    starts = torch.tensor([0, *(T for _, T in lengths)]).cumsum(0)
    for b, response in enumerate(rollouts.responses):
        tokens = trace.tokens[trace.offsets[b] : trace.offsets[b + 1]].tolist()
        assert tokens == [*response.prompt.tokens, *response.tokens.tolist()]
        part = slice(int(starts[b]), int(starts[b + 1]))
        assert torch.equal(trace.logp_mu[part], response.logp_mu)
        assert torch.equal(trace.is_response[part], response.is_response)
        assert torch.equal(trace.logp_old[part], scores.logp_BT[b, : len(response.tokens)])
        assert trace.entropy_old is not None
        assert torch.equal(trace.entropy_old[part], scores.entropy_BT[b, : len(response.tokens)])
        for record, original in ((trace.record_mu, rollouts.experts), (trace.record_old, scores.natural)):
            assert record is not None and original is not None
            assert torch.equal(record.rows(b), original.rows(b)) and record.layer_numbers == LAYERS


def test_a_saved_trace_comes_back_to_the_bit(tmp_path: Path) -> None:
    """Save and load are inverse, with and without the optional tensors, and through the run folder too."""
    run = RunFolder(tmp_path)
    full = replace(example(old_pass="replay_rollout"), texts={1: "ein „ä“ \u2028", 2: '"\\', 3: " the", 4: "\n"})
    bare = replace(
        full,
        old_pass="natural",
        texts={},
        experts_mu=None,
        experts_old=None,
        layer_numbers=(),
        num_experts=0,
        entropy_old=None,
    )
    for step, trace in ((1_000_000, full), (999_999, bare)):
        assert same(Trace.load(run.save_trace(step, trace)), trace)
    assert [path.stem for path in run.traces()] == ["step-999999", "step-1000000"]


def test_the_file_is_the_documented_one(tmp_path: Path) -> None:
    """A reader that knows safetensors and the docstring alone finds the types and the metadata written there."""
    example().save(tmp_path / "t.safetensors")
    with safetensors.safe_open(tmp_path / "t.safetensors", "pt") as file:
        metadata = file.metadata()
        types = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118 (not a dict)
    assert metadata == {
        "schema": SCHEMA, "version": "1", "step": "7", "layer_numbers": "1,2,5", "num_experts": "20",
        "temperature": "1.0",
    }  # fmt: skip
    assert types == {
        "tokens": torch.int32, "offsets": torch.int64, "num_prompt": torch.int64, "is_response": torch.bool,
        "logp_mu": torch.float32, "logp_old": torch.float32, "rewards": torch.float32, "experts_mu": torch.int8,
        "experts_old": torch.int8, "entropy_old": torch.float32,
    }  # fmt: skip


def test_a_trace_says_its_temperature_and_one_of_before_says_none(tmp_path: Path) -> None:
    """T comes with the rollouts and goes through the file to the bit; a file without it opens, and claims none."""
    rollouts, scores = rollouts_and_scores([(3, 4)])
    trace = Trace.of(replace(rollouts, temperature=0.1 + 0.2), scores, torch.zeros(1), step=1)
    trace.save(tmp_path / "t.safetensors")
    assert Trace.load(tmp_path / "t.safetensors").temperature == trace.temperature == 0.1 + 0.2
    replace(trace, temperature=None).save(tmp_path / "before.safetensors")
    assert Trace.load(tmp_path / "before.safetensors").temperature is None
    with safetensors.safe_open(tmp_path / "before.safetensors", "pt") as file:
        assert "temperature" not in file.metadata()


def test_old_scored_on_mus_experts_where_it_replayed_them() -> None:
    """`as_scored` has mu's experts as old's, and old's own in any other pass."""
    for old_pass, name in (("replay_rollout", "experts_mu"), ("natural", "experts_old"), ("predicted", "experts_old")):
        trace = example(old_pass=old_pass)
        assert trace.as_scored.experts_old is getattr(trace, name) and trace.as_scored.experts_mu is trace.experts_mu
    assert not torch.equal(trace.experts_mu, trace.experts_old)


def with_top(k: int = 4) -> Trace:
    """The example with the likeliest tokens of a made-up mu, and log old of them."""
    rollouts, scores = rollouts_and_scores([(3, 4), (2, 6)])
    generator = torch.Generator().manual_seed(1)
    top = TopTokens.of(torch.randn(10, 99, generator=generator).log_softmax(-1), k, torch.tensor([0, 4, 10]))
    old_BTK = -torch.rand(2, 6, k, generator=generator)
    scores = replace(scores, logp_top=TokenRows.packed(old_BTK, torch.tensor([4, 6])))
    trace = Trace.of(replace(rollouts, top=top), scores, torch.tensor([1.0, 0.0]), step=7)
    assert trace.top_logp_old is not None
    assert torch.equal(trace.top_logp_old, torch.cat([old_BTK[0, :4], old_BTK[1]]))
    return trace


def test_a_trace_holds_mus_likeliest_tokens(tmp_path: Path) -> None:
    """Ids, log mu and log old come back to the bit, in their types, a row per response token; without them none do."""
    trace = with_top()
    trace.save(tmp_path / "t.safetensors")
    back = Trace.load(tmp_path / "t.safetensors")
    assert same(trace, back) and back.top_ids is not None and back.top_ids.dtype == torch.int16
    assert back.top_ids.shape == (10, 4)
    assert example().top_ids is example().top_logp_mu is example().top_logp_old is None


IDS = torch.zeros(9, 4, dtype=torch.int16)
TOP_MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "ids alone": ({"top_logp_mu": None}, "top_ids and top_logp_mu: expected both or neither, got top_ids, top_logp_o"),
    "rows of another batch": ({"top_ids": IDS}, r"top_ids: expected 10 rows of 4 tokens, got shape \(9, 4\)"),
    "another width": ({"top_logp_old": torch.zeros(10, 3)}, r"top_logp_old: expected 10 rows.*got shape \(10, 3\)"),
    "a token that is none": ({"top_ids": torch.full((10, 4), -1)}, "top_ids: expected numbers from 0 on, got -1"),
    "probabilities": ({"top_logp_mu": torch.full((10, 4), 0.5)}, r"top_logp_mu: expected log-prob.*got 0\.5"),
}


@pytest.mark.parametrize("misfit", TOP_MISFITS)
def test_likeliest_tokens_that_do_not_fit_are_one_line(misfit: str) -> None:
    """Their shapes and values are those of the tokens, or one line says what was expected."""
    change, message = TOP_MISFITS[misfit]
    with pytest.raises(ValueError, match=message):
        replace(with_top(), **change)


def with_value(tensor: Tensor, index: int, value: float) -> Tensor:
    """A copy with one entry changed."""
    out = tensor.clone()
    out.view(-1)[index] = value
    return out


ENTROPIES, SAMPLED = torch.full((10,), 0.25), example().is_response.nonzero()[:, 0].tolist()
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "offsets that do not end at the tokens": ({"offsets": torch.tensor([0, 7, 14])}, "expected to rise from 0 to 15"),
    "offsets that fall": ({"offsets": torch.tensor([0, 16, 15])}, r"got \[0, 16, 15\]"),
    "a prompt longer than all": ({"num_prompt": torch.tensor([3, 9])}, "from 1 to 8 prompt tokens in response 1"),
    "a response without a prompt": ({"num_prompt": torch.tensor([0, 2])}, "in response 0, got 0"),
    "scores of another length": ({"logp_old": torch.zeros(9)}, "logp_old: expected 10 values, .*got 9"),
    "probabilities, not log": ({"logp_mu": torch.full((10,), 0.9)}, r"logp_mu: expected log-prob.*got 0\.9"),
    "a probability in the second response": (
        {"logp_old": with_value(example().logp_old, 4, 0.5)}, r"logp_old: .* \(at most 0\), got 0\.5 in response 1$",
    ),
    "an entropy below 0": (
        {"entropy_old": with_value(ENTROPIES, SAMPLED[0], -0.5)},
        r"entropy_old: .* \(at least 0\), got -0\.5 in response 0$",
    ),
    "an infinite entropy": (
        {"entropy_old": with_value(ENTROPIES, SAMPLED[-1], math.inf)}, "entropy_old: .*got inf in response 1$",
    ),
    "a version below 0": ({"versions": torch.full((10,), -1)}, "versions: expected numbers from 0 on, got -1"),
    "rewards for others": ({"rewards": torch.zeros(3)}, "rewards: expected 2 values for 2 responses, got 3"),
    "a row too many": ({"experts_mu": torch.zeros(14, 3, 3, dtype=torch.int8)}, "experts_mu: expected 13 rows.*got 14"),
    "an expert that is none": (
        {"experts_old": with_value(example().experts_old, 2, 77)}, "experts_old: response 0, row 0, layer 1.*77",
    ),
    "a temperature of 0": ({"temperature": 0.0}, r"temperature: expected a number above 0, got 0\.0"),
    "an old pass that is none": ({"old_pass": "R3"}, "old_pass: expected one of natural, replay_rollout, pred.*'R3'"),
    "too few layers": ({"layer_numbers": (1, 2)}, "experts_mu: .*3 layer numbers.*got 2"),
}  # fmt: skip


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_one_line(misfit: str, tmp_path: Path) -> None:
    """Every misfit is refused with what was expected and what came, in memory and (with its name) from a file."""
    change, message = MISFITS[misfit]
    good = example()
    with pytest.raises(ValueError, match=message) as caught:
        replace(good, **change)
    assert "\n" not in str(caught.value)
    values = {f.name: change.get(f.name, getattr(good, f.name)) for f in fields(Trace)}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    layers = ",".join(str(n) for n in values["layer_numbers"])
    metadata = {"schema": SCHEMA, "version": "1", "step": "7", "layer_numbers": layers, "num_experts": "20"}
    metadata |= {"temperature": repr(values["temperature"]), "old_pass": values["old_pass"]}
    path = tmp_path / "t.safetensors"
    path.write_bytes(safetensors.torch.save(tensors, metadata))
    with pytest.raises(ValueError, match=rf"t\.safetensors: .*{message}"):
        Trace.load(path)


def test_experts_of_a_wider_type_are_read(tmp_path: Path) -> None:
    """A writer that kept ids wider, as int16 for 128 experts or a tool's int32, gives the same records."""
    trace = example()
    assert trace.experts_mu is not None and trace.experts_old is not None and trace.record_mu is not None
    for dtype in (torch.int16, torch.int32):
        wide = replace(trace, experts_mu=trace.experts_mu.to(dtype), experts_old=trace.experts_old.to(dtype))
        wide.save(tmp_path / "wide.safetensors")
        found = Trace.load(tmp_path / "wide.safetensors").record_mu
        assert found is not None and found.experts.dtype == torch.int8
        assert torch.equal(found.experts, trace.record_mu.experts)


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    """Nothing there, other bytes, other tensors, another version or another type: each says which file and why."""
    path = tmp_path / "t.safetensors"
    with pytest.raises(RecordError, match=r"cannot read .*t\.safetensors: No such file"):
        Trace.load(path)
    path.write_bytes(b"not tensors")
    with pytest.raises(ValueError, match=r"t\.safetensors: expected a safetensors file"):
        Trace.load(path)
    good = {f.name: getattr(example(), f.name) for f in fields(Trace)}
    tensors = {name: value for name, value in good.items() if isinstance(value, Tensor)}
    metadata = {"schema": SCHEMA, "version": "1", "step": "7", "layer_numbers": "1,2,5", "num_experts": "20"}
    cases = [
        (tensors, {}, "expected a trace"),
        (tensors, metadata | {"version": "2"}, "expected trace version '1', got '2'"),
        (tensors, metadata | {"step": "soon"}, "expected a step in the metadata, got 'soon'"),
        ({k: v for k, v in tensors.items() if k != "offsets"}, metadata, r"missing tensors: \['offsets'\]"),
        (tensors | {"extra": torch.zeros(1)}, metadata, r"unknown tensors: \['extra'\]"),
        (tensors | {"tokens": torch.zeros(15)}, metadata, "tokens: expected a type of signed int, got torch.float32"),
        (tensors | {"rewards": torch.zeros(2, 1)}, metadata, r"rewards: expected 1 axes, got shape \(2, 1\)"),
    ]
    for changed, told, message in cases:
        path.write_bytes(safetensors.torch.save(changed, told or None))
        with pytest.raises(ValueError, match=rf"t\.safetensors: .*{message}"):
            Trace.load(path)
