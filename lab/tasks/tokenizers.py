"""Tokenizers behind one small interface: characters for tasks that write their own text, and the tokenizer of a Hugging
Face folder for a model that was opened from one.

`encode` adds nothing to the text and `decode` drops special tokens; `prompt` and `chat` add the tokens that the model
expects around the start of a sequence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict, runtime_checkable

from lab.tasks.readers import first_line

ROLES = ("system", "user", "assistant")
"""The roles of a chat."""


class Message(TypedDict):
    """One message of a chat; `role` is one of ROLES."""

    role: str
    content: str


@runtime_checkable
class Tokenizer(Protocol):
    """The tokenizer interface of tasks and engines; ids are in [0, vocab_size)."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that is written at the end of a response."""
        ...

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a response where a model samples them; `eos_id` comes first."""
        ...

    @property
    def pad_id(self) -> int:
        """The id that pads the shorter sequences of a batch; never trained on."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of the text alone, without special tokens."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, without special tokens."""
        ...

    def prompt(self, text: str) -> tuple[int, ...]:
        """The ids of a text that starts a sequence: `encode`, after the start token where the model has one."""
        ...

    def chat(self, text: str, before: Sequence[Message] = ()) -> tuple[int, ...]:
        """The ids of a user message and those before it, in the model's chat template, up to where the answer starts.

        ValueError where there is no template, or where it refuses these messages.
        """
        ...


class CharTokenizer:
    """One id per character: 0 pads, 1 ends a response, and character i of `alphabet` is i + 2.

    Law: `decode(encode(text)) == text` for every text over the alphabet. Raises ValueError for an alphabet with a
    repeated character, a character outside it, and an id outside [0, vocab_size).
    """

    pad_id = 0
    eos_id = 1
    end_ids = (1,)

    def __init__(self, alphabet: str) -> None:
        if not alphabet or len(set(alphabet)) < len(alphabet):
            raise ValueError(f"alphabet: expected distinct characters, at least one, got {alphabet!r}")
        self.alphabet = alphabet
        self.vocab_size = len(alphabet) + 2
        self._ids = {c: i + 2 for i, c in enumerate(alphabet)}

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of the characters; ValueError names the first one outside the alphabet and its position."""
        for position, c in enumerate(text):
            if c not in self._ids:
                raise ValueError(f"expected only characters of {self.alphabet!r}, got {c!r} at position {position}")
        return tuple(self._ids[c] for c in text)

    def decode(self, ids: Iterable[int]) -> str:
        """The characters of the ids, without end and padding."""
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"expected ids in [0, {self.vocab_size}), got {i}")
        return "".join(self.alphabet[i - 2] for i in ids if i >= 2)

    def prompt(self, text: str) -> tuple[int, ...]:
        """The same as `encode`: there is no start token."""
        return self.encode(text)

    def chat(self, text: str, before: Sequence[Message] = ()) -> tuple[int, ...]:
        """Raises ValueError: characters have no chat template."""
        raise ValueError("chat_template: expected a tokenizer with a chat template, got a character tokenizer")

    def save(self, folder: Path) -> None:
        """Writes this tokenizer as Hugging Face files, with which a model trained here can read text elsewhere.

        Law: `load_tokenizer(folder)` has the same ids, end and padding, and refuses the same characters.
        """
        import tokenizers

        special = ["<pad>", "<eos>"]
        ids = {name: i for i, name in enumerate([*special, *self.alphabet])}
        # Words of one character, and no token for unknown ones: they are an error here, so they must not vanish there.
        written = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=ids))  # pyright: ignore[reportCallIssue]
        written.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        written.decoder = tokenizers.decoders.Fuse()
        written.add_special_tokens(special)
        written.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": special[self.pad_id],
            "eos_token": special[self.eos_id], "clean_up_tokenization_spaces": False,
        }  # fmt: skip
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def text_after(mark: str, ids: Sequence[int], tokenizer: Tokenizer) -> str | None:
    """The text between the last mark and the first end token; None where either is missing."""
    length = length_to_end(ids, tokenizer)
    if length == len(ids):
        return None
    _, found, text = tokenizer.decode(ids[:length]).rpartition(mark)
    return text if found else None


def length_to_end(ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """The number of ids before the first one that ends a response; all of them where none does."""
    return next((i for i, id in enumerate(ids) if id in tokenizer.end_ids), len(ids))


class HuggingFaceTokenizer:
    """A transformers tokenizer behind the interface; where it names no padding token, the end token pads.

    `end_ids` are those of the model's generation config, which end a response beside the tokenizer's own end token.
    """

    def __init__(self, tokenizer: Any, where: str, end_ids: Sequence[int] = ()) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"{where}: expected a tokenizer with an end-of-sequence token, got one without")
        self._tokenizer = tokenizer
        self._where = where
        # Not the tokenizer's own vocab_size, which leaves out added tokens.
        self.vocab_size: int = len(tokenizer)
        self.eos_id: int = tokenizer.eos_token_id
        self.end_ids = (self.eos_id, *(id for id in end_ids if id != self.eos_id))
        self.pad_id: int = self.eos_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        # Some tokenizers put a start token before every text (Mixtral), others none (Qwen3): ask, rather than assume.
        around: Sequence[int] = tokenizer.encode("", add_special_tokens=True)
        self._start = tuple(around[:1]) if around and around[0] == tokenizer.bos_token_id else ()
        # For a million short prompts the library below transformers takes 9 s, and with transformers around it 26.
        self._below = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._below is not None:  # a file may ask for both
            self._below.no_truncation()
            self._below.no_padding()

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of the text alone, without special tokens; ValueError for text that the tokenizer cannot encode."""
        try:
            if self._below is not None:
                return tuple(self._below.encode(text, add_special_tokens=False).ids)
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # the tokenizers library raises no narrower type
            raise ValueError(
                f"expected a text that the tokenizer of {self._where} knows, got {text!r}: {error}"
            ) from error

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, without special tokens."""
        return self._tokenizer.decode(
            [int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def prompt(self, text: str) -> tuple[int, ...]:
        """The start token, if the model has one, and the text."""
        return self._start + self.encode(text)

    def chat(self, text: str, before: Sequence[Message] = ()) -> tuple[int, ...]:
        """As in `Tokenizer.chat`; ValueError where there is no template, or where it refuses these messages."""
        if not self._tokenizer.chat_template:
            raise ValueError(f"chat_template: expected a tokenizer with a chat template, got {self._where} without one")
        messages = [*before, {"role": "user", "content": text}]
        try:
            written = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs, and some raise errors of their own for a role
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"chat_template: expected messages that the template of {self._where} takes, got {roles}: {error}"
            ) from error
        # The template writes the special tokens itself, as text, so the encoding must not add them again.
        return self.encode(written)

    def other_turn_end(self) -> str | None:
        """The special token that the chat template writes after an assistant's text, if it is not an end token.

        A model that was taught the template ends its turns with it, and is not stopped there.
        """
        text = "answer"
        try:
            messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": text}]
            written = self._tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # a template may refuse any messages, such as those without a system message
            return None
        after = self.encode(written.rpartition(text)[2])
        if not after or after[0] in self.end_ids or after[0] not in self._tokenizer.added_tokens_decoder:
            return None
        return self._tokenizer.convert_ids_to_tokens(after[0])


# transformers would make an empty tokenizer from config.json alone, so the files are checked first.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def load_tokenizer(hf_folder: str | Path) -> HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face folder, read from the disk alone; ValueError in one line where there is none."""
    folder = Path(hf_folder)
    if not folder.is_dir():
        found = "a file" if folder.exists() else "no such folder"
        raise ValueError(f"model.path: expected a model's folder with a tokenizer, got {found}: {folder}")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"{folder}: expected a tokenizer (one of {', '.join(TOKENIZER_FILES)}), got none of them")
    from transformers import AutoTokenizer  # seconds to import, and only some tasks need it

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # a broken file makes transformers raise errors of any type
        if fault := _config_fault(folder):  # transformers reads it to find the tokenizer's class
            raise ValueError(f"{folder / 'config.json'}: {fault}") from error
        raise ValueError(f"{folder}: expected a readable tokenizer, got: {first_line(error)}") from error
    return HuggingFaceTokenizer(tokenizer, str(folder), _end_ids(folder / "generation_config.json", len(tokenizer)))


def _end_ids(path: Path, vocab_size: int) -> list[int]:
    """`eos_token_id` of a model's generation config, one id or several, at which vLLM and transformers end a response.

    None where there is no such file; ValueError, in one line, where it cannot be read or has an id of no token.
    """
    if not path.is_file():
        return []
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        ids = written.get("eos_token_id")
    except (OSError, ValueError, RecursionError, AttributeError):
        raise ValueError(f"{path}: expected a JSON object, got a file that is none") from None
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    for id in ids:
        if type(id) is not int or not 0 <= id < vocab_size:
            raise ValueError(f"{path}: eos_token_id: expected ids in [0, {vocab_size}), got {str(id)[:40]}")
    return ids


def _config_fault(folder: Path) -> str:
    """The reason why transformers cannot read the folder's config.json; empty where it can, or where there is none."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        return ""
    try:
        AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        return f"expected a model's config, got: {first_line(error)}"
    return ""
