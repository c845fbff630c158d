"""The record of mu's likeliest tokens: packing loses nothing, and turns are merged at their own places."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from theory.contracts import Prompt, Response, Rollouts, Sampling
from theory.streams import stream
from theory.top_tokens import TokenRows, TopTokens, id_dtype
from theory.turns import roll_out

V, END = 9, 1
PROMPTS = [Prompt("a", (2, 3), ""), Prompt("b", (4,), "")]


class Speaker:
    """An engine that says two tokens a turn and records distributions that are a function of the whole text before."""

    def generate(self, prompts, sampling: Sampling) -> Rollouts:
        responses, rows = [], []
        for prompt in prompts:
            tokens = torch.tensor([len(prompt.tokens) % V, END])
            rows += [distribution(prompt.tokens), distribution((*prompt.tokens, int(tokens[0])))]
            responses.append(Response(prompt, tokens, torch.zeros(2), torch.ones(2, dtype=torch.bool), "stop", 0))
        offsets = torch.arange(len(prompts) + 1) * 2
        return Rollouts(tuple(responses), top=TopTokens.of(torch.stack(rows), sampling.num_top, offsets))

    def load_weights(self, named_tensors, version: int) -> None:
        """Nothing is held."""


class Calculator:
    """Answers the first prompt's first turn with two tokens, and no other."""

    def prompts(self, step, num_prompts):
        return PROMPTS

    def held_out(self):
        return []

    def reward(self, prompt, response):
        return 0.0

    def observe(self, prompt, response):
        return (7, 8) if prompt.id == "a" and len(response.tokens) == 2 else None


def distribution(text: tuple[int, ...]) -> torch.Tensor:
    """log mu after this text."""
    return torch.randn(V, generator=stream(0, "top", *map(str, text))).log_softmax(-1)


def test_turns_keep_their_places_and_observations_have_no_mass() -> None:
    """The merged record has every sampled token's distribution after all that stood before it; -inf on what came
    back."""
    rollouts = roll_out(Speaker(), Calculator(), PROMPTS, Sampling(max_tokens=20, num_top=3), max_turns=2)
    assert rollouts.top is not None
    for b, response in enumerate(rollouts.responses):
        ids, logp = rollouts.top.rows(b)
        text = [*response.prompt.tokens, *response.tokens.tolist()]
        assert len(ids) == len(response.tokens)
        for t, is_sampled in enumerate(response.is_response.tolist()):
            expected = distribution(tuple(text[: len(response.prompt.tokens) + t])).topk(3)
            if is_sampled:
                assert torch.equal(ids[t].long(), expected.indices) and torch.equal(logp[t], expected.values)
            else:
                assert bool((logp[t] == -torch.inf).all())
    assert [len(r.tokens) for r in rollouts.responses] == [6, 2]


def test_packed_rows_come_back_from_select_concat_and_padding() -> None:
    """Any order of responses, joined or apart, has each response's own rows; padding has no mass."""
    logp = torch.randn(7, V, generator=stream(0, "rows"), dtype=torch.float32).log_softmax(-1)
    top = TopTokens.of(logp, 4, torch.tensor([0, 3, 5, 7]))
    joined = TopTokens.concat([top.select([2]), top.select([0, 1])])
    for new, old in enumerate((2, 0, 1)):
        assert all(torch.equal(a, b) for a, b in zip(joined.rows(new), top.rows(old), strict=True))
    ids_BTK, logp_BTK = top.padded()
    assert torch.equal(logp_BTK[1, :2], top.rows(1)[1]) and bool((logp_BTK[1, 2] == -torch.inf).all())
    assert torch.equal(ids_BTK[0], top.rows(0)[0].long())
    assert top.num_bytes == 7 * 4 * (2 + 4)
    with pytest.raises(ValueError, match=r"expected one \(tokens, vocabulary\) in all parts"):
        TopTokens.concat([top, TopTokens.of(logp, 5, torch.tensor([0, 7]))])
    with pytest.raises(ValueError, match="got 7 of 4 and 7 of 3"):
        replace(top, logp_rows=TokenRows(top.logp[:, :3], top.offsets))
    with pytest.raises(ValueError, match="offsets that rise from 0 to 6 rows"):
        TopTokens.packed(top.ids[:6], top.logp, top.offsets, V)


def test_ids_are_as_narrow_as_the_vocabulary_allows() -> None:
    """16 bits hold 2^15 tokens."""
    assert [id_dtype(n) for n in (2**15, 2**15 + 1)] == [torch.int16, torch.int32]
