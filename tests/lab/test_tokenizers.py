"""Laws of the tokenizers: text comes back as it was, special tokens leave no trace, and what is missing is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lab.tasks.tokenizers import CharTokenizer, Tokenizer, length_to_end, load_tokenizer, text_after

CHAT = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}bot:{% endif %}"
)


@st.composite
def alphabets_and_texts(draw) -> tuple[str, str]:
    alphabet = "".join(draw(st.lists(st.characters(), min_size=1, max_size=30, unique=True)))
    return alphabet, draw(st.text(alphabet=alphabet, max_size=50))


def test_characters_are_the_same_in_hugging_faces_files(tmp_path):
    """A saved character tokenizer has the same ids, end and padding in transformers, and refuses the same text."""
    ours = CharTokenizer("0aZ<>#= \n\té́漢🙂")
    ours.save(tmp_path)
    theirs = load_tokenizer(tmp_path)
    assert (theirs.vocab_size, theirs.eos_id, theirs.pad_id) == (ours.vocab_size, ours.eos_id, ours.pad_id)
    for text in ("", "0", " a  Z\n\t=#", "<a>", "é́é́漢🙂🙂", ours.alphabet[::-1]):
        assert theirs.encode(text) == theirs.prompt(text) == ours.encode(text)
        assert theirs.decode((*ours.encode(text), ours.eos_id, ours.pad_id)) == text
    with pytest.raises(ValueError, match="knows, got '0b'"):
        theirs.encode("0b")


@given(alphabets_and_texts())
def test_characters_come_back(pair):
    """decode(encode(text)) == text over any alphabet, among end and padding too; an id is the character's place + 2."""
    alphabet, text = pair
    tokenizer = CharTokenizer(alphabet)
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.pad_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.encode(alphabet) == tuple(range(2, tokenizer.vocab_size))
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and tokenizer.prompt(text) == ids
    assert tokenizer.decode(ids) == tokenizer.decode([0, *ids, 1, 0, 0]) == text


def test_what_a_character_tokenizer_refuses():
    """An unknown character is named with its place, an id out of range with the range, a repeated letter, a chat."""
    tokenizer = CharTokenizer("0123456789+=")
    with pytest.raises(ValueError, match=r"got 'x' at position 2"):
        tokenizer.encode("1+x=")
    for i in (-1, 14):
        with pytest.raises(ValueError, match=rf"\[0, 14\), got {i}"):
            tokenizer.decode([3, i])
    for alphabet in ("", "abca"):
        with pytest.raises(ValueError, match="expected distinct characters"):
            CharTokenizer(alphabet)
    with pytest.raises(ValueError, match="chat_template"):
        tokenizer.chat("1+1=")


def write_tokenizer(folder, *, start: bool, chat: str | None = None, **names: str) -> str:
    """A byte-level tokenizer without merges, as a Hugging Face folder."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2}
    vocab |= {c: i + 3 for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.add_special_tokens(["<pad>", "<s>", "</s>"])
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    if start:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **names)
    tokenizer.chat_template = chat
    tokenizer.save_pretrained(str(folder))
    return str(folder)


@pytest.fixture(scope="module")
def with_start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return load_tokenizer(write_tokenizer(folder, start=True, chat=CHAT, **names))


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_hugging_face_text_comes_back(with_start, text):
    """decode(encode(text)) == text for a byte-level tokenizer: no token and no space is added or lost."""
    assert with_start.decode(with_start.encode(text)) == text


def test_ids_are_those_of_transformers(tmp_path):
    """Also of texts with special tokens, and where the file asks for truncation and padding, which nobody wants."""
    folder = Path(write_tokenizer(tmp_path, start=True, bos_token="<s>", eos_token="</s>", pad_token="<pad>"))
    file = json.loads((folder / "tokenizer.json").read_text())
    file["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Left", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(file))
    theirs = PreTrainedTokenizerFast.from_pretrained(str(folder))
    ours = load_tokenizer(folder)
    for text in ("", "1", "12+34=", "a" * 20, "<s>1</s><pad>2"):
        assert ours.encode(text) == tuple(theirs.encode(text, add_special_tokens=False))
    assert len(ours.encode("a" * 20)) == 20 and len(ours.encode("<s>1")) == 2


def test_hugging_face_special_tokens(with_start):
    """The start token is put before a prompt and not before plain text, and decoding leaves special tokens out."""
    assert isinstance(with_start, Tokenizer)
    assert (with_start.pad_id, with_start.eos_id, with_start.vocab_size) == (0, 2, 259)
    assert with_start.prompt("1+1=") == (1, *with_start.encode("1+1="))
    assert with_start.decode([1, *with_start.encode("2"), 2, 0]) == "2"


def test_chat_template_is_written_once(with_start):
    """A chat prompt is the template's text with its special tokens as they stand there, and no second start token."""
    ids = with_start.chat("hi")
    assert ids == (1, *with_start.encode("user:hi"), 2, *with_start.encode("bot:"))


def test_without_start_padding_and_template(tmp_path):
    """No start token is invented, the end token pads, and a chat needs a template."""
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, start=False, eos_token="</s>"))
    assert tokenizer.prompt("12") == tokenizer.encode("12")
    assert tokenizer.pad_id == tokenizer.eos_id == 2
    with pytest.raises(ValueError, match=r"chat_template: .* without one"):
        tokenizer.chat("12")


@pytest.mark.parametrize(
    ("written", "ends"), [(2, (2,)), (200, (2, 200)), ([200, 2, 100], (2, 200, 100)), (None, (2,)), ([], (2,))]
)
def test_end_tokens_are_those_of_the_generation_config(written: object, ends: tuple[int, ...], tmp_path: Path) -> None:
    """The tokenizer's own end token, which is the one that is written, and the model's: one, several or none."""
    folder = Path(write_tokenizer(tmp_path, start=False, eos_token="</s>"))
    assert load_tokenizer(folder).end_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": written, "top_k": 20}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.end_ids, tokenizer.eos_id) == (ends, 2)
    one = tokenizer.encode("#1")
    for end in ends:
        assert text_after("#", (*one, end, *tokenizer.encode("#2")), tokenizer) == "1"
    assert length_to_end(one, tokenizer) == len(one) and text_after("#", one, tokenizer) is None


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        ("{", "expected a JSON object"), ("[7]", "expected a JSON object"), ("[" * 10**5, "expected a JSON object"),
        ('{"eos_token_id": [7, 259]}', "eos_token_id: expected ids in [0, 259), got 259"),
        ('{"eos_token_id": "</s>"}', "eos_token_id: expected ids in [0, 259), got </s>"),
        ('{"eos_token_id": true}', "eos_token_id: expected ids in [0, 259), got True"),
    ],
)  # fmt: skip
def test_a_broken_generation_config_is_one_line(written: str, fault: str, tmp_path: Path) -> None:
    """A file that is no JSON object, and an id of no token: the file and what was expected, in one line."""
    folder = Path(write_tokenizer(tmp_path, start=False, eos_token="</s>"))
    (folder / "generation_config.json").write_text(written)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(folder)
    assert str(caught.value).startswith(f"{folder / 'generation_config.json'}: {fault}") and "\n" not in str(
        caught.value
    )


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path):
    """No folder, a model without a tokenizer, a broken one, one without an end token: one line names the folder."""
    model_only, broken, endless = (tmp_path / name for name in ("model_only", "broken", "endless"))
    for folder in (model_only, broken, endless):
        folder.mkdir()
    (model_only / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    (broken / "tokenizer.json").write_text("{")
    write_tokenizer(endless, start=False)
    for folder, words in (
        (tmp_path / "absent", "model.path: expected a model's folder with a tokenizer, got no such folder: "),
        (model_only, "expected a tokenizer (one of tokenizer.json"),
        (broken, "expected a readable tokenizer, got: "),
        (endless, "expected a tokenizer with an end-of-sequence token"),
    ):
        with pytest.raises(ValueError) as caught:
            load_tokenizer(folder)
        assert words in str(caught.value)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)
