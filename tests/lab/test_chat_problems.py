"""Problems as chat messages: all of them reach the template, and a fault among them is named by its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lab.tasks import build
from lab.tasks.jsonl import DatasetConfig, JsonlConfig
from lab.tasks.tokenizers import HuggingFaceTokenizer
from tests.lab.test_data_formats import Rows, Write, fails, jsonl, nested, parquet, saved


def chat_tokenizer(template: str, *special: str) -> HuggingFaceTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={"<eos>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", chat_template=template)
    fast.add_special_tokens({"additional_special_tokens": list(special)})
    return HuggingFaceTokenizer(fast, "folder")


TEMPLATE = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE


def chats(n: int = 4) -> Rows:
    return [
        {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{i}?"}], "answer": "1"}
        for i in range(n)
    ]


@pytest.mark.parametrize("make", [jsonl, parquet, saved])
def test_messages_before_the_problem_reach_the_template(make: Write, tmp_path: Path) -> None:
    """The chat template gets all messages in their order; the prompt template is put around the last one's text."""
    config = DatasetConfig(
        path=str(make(tmp_path, chats())), problem_key="prompt", chat_template=True, prompt_template="<{problem}>",
        held_out_fraction=0.5,
    )  # fmt: skip
    tokenizer = chat_tokenizer(TEMPLATE)
    task = build(config, tokenizer)
    prompts = {tokenizer.decode(p.tokens) for p in (*task.prompts(0, 2), *task.held_out())}
    assert prompts == {f"[system|Be brief.][user|<{i}?>]>" for i in range(4)}


@pytest.mark.parametrize("end", ["<eos>", "<end>", "]", ""])
def test_a_turn_that_ends_with_another_token_is_said(
    end: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line on stderr where the template closes an assistant's turn with a special token that does not end responses:
    as of a base model's tokenizer beside a chat template. Plain text closes nothing. No line where that token, too,
    ends responses."""
    template = TEMPLATE.replace("]", end)
    tokenizer = chat_tokenizer(template, "<end>")
    config = JsonlConfig(
        path=str(jsonl(tmp_path, chats())), problem_key="prompt", chat_template=True, held_out_fraction=0.5
    )
    build(config, tokenizer)
    err = capsys.readouterr().err
    assert ("ends an assistant's turn with <end>, at which no response ends" in err and err.count("\n") == 1) == (
        end == "<end>"
    )
    assert bool(err) == (end == "<end>")
    tokenizer.end_ids += tuple(tokenizer.encode("<end>"))
    build(config, tokenizer)
    assert not capsys.readouterr().err


def test_the_same_question_under_another_system_message_is_another_problem(tmp_path: Path) -> None:
    """Two rows are copies only if all their messages are equal."""
    rows = chats(2)
    rows[1]["prompt"] = [{"role": "system", "content": "Be long."}, rows[0]["prompt"][1]]
    config = JsonlConfig(
        path=str(jsonl(tmp_path, rows)), problem_key="prompt", chat_template=True, held_out_fraction=0.5
    )
    assert len(build(config, chat_tokenizer(TEMPLATE)).held_out()) == 1
    config = config.model_copy(update={"path": str(jsonl(tmp_path, [rows[0], rows[0]]))})
    with pytest.raises(ValueError, match=r"problems\.jsonl:2: expected a new problem, got that of .*:1 again"):
        build(config, chat_tokenizer(TEMPLATE))


BAD_VALUES = [
    ("prompt", ["hi"], 'prompt.0: expected a message with role and content, got str "hi"'),
    ("prompt", [{"role": "user"}], "prompt.0: expected a message with role and content, got dict"),
    ("prompt", [{"role": "tool", "content": "x"}], "prompt.0.role: expected one of system, user, assistant, got str"),
    ("prompt", [{"role": "user", "content": [{"type": "image"}]}], "prompt.0.content: expected a string such as"),
    ("prompt", [{"role": "assistant", "content": "x"}], "prompt: expected a user's message as the last, got one of"),
    ("prompt", chats(1)[0]["prompt"], "prompt: expected one user message where chat_template is off, got system, user"),
    ("reward_model", {"style": "rule"}, "expected the key 'reward_model.ground_truth', got 'style' in reward_model"),
    ("reward_model", "5", "expected an object with the key 'ground_truth' at reward_model, got str \"5\""),
    ("reward_model", None, "expected an object with the key 'ground_truth' at reward_model, got NoneType null"),
]


@pytest.mark.parametrize(("key", "value", "words"), BAD_VALUES, ids=lambda value: str(value)[:30])
def test_a_bad_nested_value_is_named(key: str, value: Any, words: str, tmp_path: Path) -> None:
    """A fault inside messages and objects is named by its dotted place."""
    path = jsonl(tmp_path, [*nested(2), nested(3)[2] | {key: value}])
    message = fails(
        DatasetConfig(
            path=str(path), problem_key="prompt", answer_key="reward_model.ground_truth", held_out_fraction=0.4
        )
    )
    assert message.startswith(f"{path}:3: ") and words in message


def test_a_template_that_refuses_is_one_line(tmp_path: Path) -> None:
    """A chat template that does not take a role says so with the row, the roles and its own words."""
    path = jsonl(tmp_path, chats())
    config = JsonlConfig(path=str(path), problem_key="prompt", chat_template=True)
    message = fails(config.model_copy(update={"held_out_fraction": 0.5}), chat_tokenizer(NO_SYSTEM))
    assert message.startswith(f"{path}:") and "got system, user: no system role" in message
