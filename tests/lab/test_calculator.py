"""Laws of the calculator task: what is shown earns the reward and is what the calculator says, the answer alone is
verified, in the last turn, and held-out problems are never trained on."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.tasks import DemonstratedTask, build
from lab.tasks.arithmetic import MAX_DRAWS
from lab.tasks.calculator import CalculatorConfig, CalculatorTask
from theory.contracts import Environment, Prompt, Response
from theory.streams import stream
from theory.turns import sampled_tokens

GENERATOR = stream(0, "no demonstration draws from it")


@st.composite
def dials(draw) -> dict[str, Any]:
    """Every dial's values. Tests build the task: the type checks draw from `random`, which strategies must not."""
    low = draw(st.integers(1, 4))
    return {
        "min_operations": low,
        "max_operations": low + draw(st.integers(0, 2)),
        "max_digits": draw(st.integers(1, 4)),
        "multiply": draw(st.booleans()),
        "num_held_out": 1,
        "seed": draw(st.integers(0, 1000)),
    }


def respond(task: CalculatorTask, prompt: Prompt, text: str) -> Response:
    """A response written as the module writes them: `$` ends a turn, and what the calculator says follows it."""
    *turns, rest = text.split("$")
    tokens, is_response = [], []
    for turn in turns:
        said, mark, call = turn.rpartition(";")
        for part, is_own in ((said + mark, False), (call, True)):
            tokens += task.tokenizer.encode(part)
            is_response += [is_own] * len(part)
        tokens.append(task.tokenizer.eos_id)
        is_response.append(True)
    tokens += task.tokenizer.encode(rest)
    mask = torch.tensor(is_response + [True] * len(rest))
    return Response(prompt, torch.tensor(tokens), torch.zeros(len(tokens)), mask, "stop", 0)


def said(task: CalculatorTask, text: str) -> str | None:
    """The calculator's answers to these turns."""
    prompt = task.prompts(0, 1)[0]
    tokens = task.observe(prompt, respond(task, prompt, text))
    return None if tokens is None else task.tokenizer.decode(tokens)


@given(dials(), st.integers(0, 2**62))
def test_a_demonstration_is_a_conversation_that_earns_the_reward(values, step):
    """It holds what the calculator says, turn for turn; it ends, fits, and its last turn is worth 1."""
    task = build(CalculatorConfig(**values))
    assert isinstance(task, Environment) and isinstance(task, DemonstratedTask)
    for prompt in task.prompts(step, 4):
        tokens, end = task.demonstration(prompt, GENERATOR), task.tokenizer.eos_id
        mask = sampled_tokens(task, prompt, tokens, end)
        response = Response(prompt, torch.tensor(tokens), torch.zeros(len(tokens)), mask, "stop", 0)
        num_operations = len(re.findall("[-+*]", prompt.id))
        assert tokens.count(end) == num_operations + 1 and tokens[-1] == end
        assert int((~mask[1:] & mask[:-1]).sum()) == num_operations
        assert len(tokens) <= task.max_response_tokens
        assert task.observe(prompt, response) is None and task.reward(prompt, response) == 1.0
        assert task.tokenizer.decode(prompt.tokens) == prompt.text


@given(dials(), st.integers(0, 2**62))
def test_the_answer_is_what_the_problem_means(values, step):
    """The verified answer is the value that Python gives the problem, whose operations and digits are in range."""
    task = build(CalculatorConfig(**values))
    for prompt in task.prompts(step, 4):
        assert prompt.answer == str(eval(prompt.id))
        numbers = re.split("[-+*]", prompt.id)
        assert len(numbers) - 1 in task.config.levels
        assert all(1 <= len(n) <= task.config.max_digits and n[0] != "0" for n in numbers)
        assert "*" not in prompt.id or task.config.multiply


def test_the_calculator_says_what_it_reads():
    """The value of a call; `=?;` to whatever is none; nothing to a turn with the mark."""
    task = CalculatorTask(CalculatorConfig())
    values = {
        "<37*6>$": "=222;", "<222+58>$": "=280;", "<3-58>$": "=-55;", "<-55+20>$": "=-35;", "<0*7>$": "=0;",
        "<999999999*999999999>$": "=999999998000000001;", "<37*6>$=222;<222+58>$": "=280;", "<007+1>$": "=8;",
    }  # fmt: skip
    unreadable = [
        "$", "37*6$", "<37*6$", "<37>$", "<37*-6>$", "<1+2+3>$", "<37*6>>$", "<1000000000+1>$", "<<1+1>$", "<+1>$",
    ]  # fmt: skip
    assert {text: said(task, text) for text in values} == values
    assert {said(task, text) for text in unreadable} == {"=?;"}
    assert said(task, "#280$") is said(task, "<1+1>#$") is said(task, "<1+1>$=2;#2$") is None
    assert said(task, "<1+1>$=2;<2+2>$") == "=4;"


def test_only_the_last_turns_answer_counts():
    """1 for the answer after the last mark of the last turn, to the character, with its end; 0 for all else, and what
    the calculator says is never the model's answer."""
    task = CalculatorTask(CalculatorConfig())
    prompt = Prompt("37*6+58", task.tokenizer.encode("37*6+58="), "280", "37*6+58=")
    right = ["<37*6>$=222;<222+58>$=280;#280$", "#280$", "$=?;#280$", "<1+1>$=2;#1#280$", "<3+4>#280$"]
    wrong = ["<37*6>$=222;<222+58>$", "<222+58>$=280;280$", "280$", "$"]
    wrong += ["#280", "#28$", "#2800$", "#0280$", "#280#$", "#-280$"]
    assert [task.reward(prompt, respond(task, prompt, text)) for text in right] == [1.0] * len(right)
    assert [task.reward(prompt, respond(task, prompt, text)) for text in wrong] == [0.0] * len(wrong)


@given(dials())
def test_problems_are_named_by_seed_and_step(values):
    """The same step gives the same problems, the first of more are the same, another step and seed give others."""
    task, other = (CalculatorTask(CalculatorConfig(**values | own)) for own in ({}, {"seed": 1001}))
    assert task.prompts(3, 8)[:5] == task.prompts(3, 5)
    assert task.prompts(3, 8) != task.prompts(4, 8) and task.prompts(3, 8) != other.prompts(3, 8)


def test_held_out_problems_are_distinct_and_never_drawn():
    """Operation counts in turn, no problem twice, and none of 4,000 training problems among them, an eighth of whose
    space is held out (a share of the held-out class in them would be 500)."""
    task = CalculatorTask(CalculatorConfig(max_digits=1, max_operations=2, num_held_out=14))
    held_out = [prompt.id for prompt in task.held_out()]
    assert len(set(held_out)) == 14
    assert [len(re.findall("[-+*]", p)) for p in held_out] == [1, 2] * 7
    drawn = {prompt.id for prompt in task.prompts(0, 4000)}
    assert not drawn & set(held_out) and len(drawn) > 1000
    # Of the 243 problems with one operation, those never drawn in 2,000 are the held-out ones: about an eighth.
    assert 15 <= 243 - len({p for p in drawn if len(p) == 3}) <= 45


def test_the_longest_response_is_reached():
    """`max_response_tokens` is what the widest values take, and no more than their signs beyond what they need."""
    task = CalculatorTask(CalculatorConfig(min_operations=1, max_operations=1, max_digits=2, multiply=True))
    prompt = Prompt("99*99", task.tokenizer.encode("99*99="), "9801", "99*99=")
    needed = len(task.demonstration(prompt, GENERATOR))
    assert needed == len("<99*99>$=9801;#9801$")
    assert needed <= task.max_response_tokens <= needed + 7


@pytest.mark.parametrize(("side", "words"), [(False, "hold out"), (True, "train on")])
def test_a_side_without_problems_is_refused(side, words, monkeypatch):
    """Where a seed holds no problem out, or every one, one line says so, and no search goes on for ever."""
    monkeypatch.setattr("lab.tasks.calculator.is_held_out", lambda *_: side)
    with pytest.raises(ValueError) as caught:
        CalculatorTask(CalculatorConfig(num_held_out=1)).prompts(0, 1)
    found = re.fullmatch(
        rf"num_held_out: expected problems of (\d) operations to {words} under seed 0, got none in {MAX_DRAWS} draws; "
        "raise max_digits or change the seed",
        str(caught.value),
    )
    assert found and found.group(1) in "12"
