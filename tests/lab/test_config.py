"""Laws of the configuration: what is wrong is named in one line, and what is right survives YAML and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field

from lab.config.algorithm import AlgorithmConfig, ObjectiveBlock
from lab.config.load import (
    MOST_KEPT,
    _kept,
    apply,
    config_hash,
    load,
    parse_overrides,
    read,
    read_mapping,
    to_yaml,
)  # fmt: skip
from lab.strict import ConfigError, Strict, validate
from lab.verdict import VerdictRules


class Round(Strict):
    kind: Literal["round"] = "round"
    radius: float = Field(default=1.0, gt=0, allow_inf_nan=True, description="radius, in metres")


class Square(Strict):
    kind: Literal["square"] = "square"
    sides: tuple[float, float] = (1.0, 2.0)
    is_filled: bool = False


Shape = Annotated[Round | Square, Field(discriminator="kind")]


class Toy(Strict):
    """Every kind of field that a run config has."""

    backend: Literal["toy"] = "toy"
    name: str = "toy"
    count: int = Field(default=1, ge=0, description="how many; a long description that has to be wrapped " * 3)
    rate: float = 1e-4
    mode: Literal["none", "R3"] = "none"
    shape: Shape = Field(default_factory=Round)
    shapes: tuple[Shape, ...] = ()
    extra: Round | None = None
    table: dict[str, float] = Field(default_factory=dict)
    output: str = "runs"


SCHEMAS = {"toy": Toy}


def from_text(folder: Path, text: str, *overrides: str) -> Toy:
    (folder / "c.yaml").write_text(text, encoding="utf-8")
    return load(folder / "c.yaml", overrides, SCHEMAS)


# -- there and back


floats = st.floats(allow_nan=False, allow_infinity=False)
shape_values = st.one_of(
    st.builds(Round, radius=st.floats(min_value=1e-300, allow_infinity=True)),
    st.builds(Square, sides=st.tuples(floats, floats), is_filled=st.booleans()),
)
# A surrogate is no character: no UTF-8 file can hold one.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
toys = st.builds(
    Toy,
    name=texts
    | st.sampled_from(["no", "1e-4", "null", "~", "- a", "a: b", "#", "0x1F", "2020-01-01", "é", "\u2028", "😀"]),
    count=st.integers(0, 10**20),
    rate=floats,
    shape=shape_values,
    shapes=st.lists(shape_values, max_size=3).map(tuple),
    extra=st.none() | st.builds(Round),
    table=st.dictionaries(texts, floats, max_size=3),
)


@given(config=toys)
def test_yaml_gives_the_same_config_back(config: Toy, tmp_path_factory: pytest.TempPathFactory) -> None:
    """load(to_yaml(c)) == c, for any text, number, union, list and mapping in it."""
    assert from_text(tmp_path_factory.mktemp("c"), to_yaml(config)) == config


def test_yaml_gives_the_same_algorithm_back(tmp_path: Path) -> None:
    """The round trip holds for the algorithm block and a correction with parameters of its own."""
    raw = {"objective": {"preset": "minirl", "correction": {"name": "icepop", "lo": 0.4}}, "replay": {"mode": "Pr3"}}
    config = validate(AlgorithmConfig, raw, "here")
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    again = validate(AlgorithmConfig, read(tmp_path / "c.yaml"), "there")
    assert again == config and again.build() == config.build()


def test_yaml_explains_every_field() -> None:
    """Every description of the algorithm block stands in the printed config, whatever its line breaks."""
    printed = " ".join(to_yaml(AlgorithmConfig(objective=ObjectiveBlock(preset="minirl"))).replace("#", " ").split())

    def check(model: type[pydantic.BaseModel]) -> int:
        fields = model.model_fields
        for name, field in fields.items():
            assert field.description, f"{model.__name__}.{name} has no description"
            assert name == "numerator" or model.__name__ == "CorrectionBlock" or field.description in printed
        blocks = [f.annotation for f in fields.values() if isinstance(f.annotation, type)]
        return len(fields) + sum(check(b) for b in blocks if issubclass(b, pydantic.BaseModel))

    assert check(AlgorithmConfig) > 25


def test_a_config_cannot_be_changed() -> None:
    """Configs are frozen."""
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        Toy().count = 2  # pyright: ignore[reportAttributeAccessIssue]


# -- the hash


@given(config=toys)
@example(config=Toy(table={"b": 1.0, "a": 2.0}))
def test_the_hash_ignores_the_order_of_keys_and_where_results_go(config: Toy) -> None:
    """Twelve hex digits, the same for any order of keys, any name and any output folder."""
    raw = config.model_dump()
    raw["table"] = dict(reversed(raw["table"].items()))
    shuffled = Toy.model_validate(dict(reversed(raw.items())) | {"output": "elsewhere", "name": "other"})
    assert config_hash(shuffled) == config_hash(config)
    assert len(config_hash(config)) == 12 and set(config_hash(config)) <= set("0123456789abcdef")


@pytest.mark.parametrize("change", [{"count": 2}, {"rate": 2e-4}, {"shape": Square()}, {"shapes": (Round(),)}])
def test_the_hash_depends_on_what_changes_numbers(change: dict[str, Any]) -> None:
    """Any other field changes the hash."""
    assert config_hash(Toy(**change)) != config_hash(Toy())


# -- one line for what is wrong


BOMB = "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 13))])
"""YAML of a kilobyte that stands for a terabyte."""


def test_a_huge_file_is_one_line(tmp_path: Path) -> None:
    """Of a config file at most a megabyte is read, and a longer one is refused before it is parsed."""
    path = tmp_path / "huge.yaml"
    path.write_bytes(bytes(10**6 + 1))
    with pytest.raises(ConfigError, match=r"huge.yaml: expected a config of at most 1000000 bytes, got more$"):
        read_mapping(path)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("cuont: 2", "cuont: unknown key; did you mean 'count'?"),
        ("shape: {kind: round, raduis: 2}", "shape.raduis: unknown key; did you mean 'radius'?"),
        ("shapes: [{kind: round}, {kind: square, side: 2}]", "shapes.1.side: unknown key; did you mean 'sides'?"),
        ("extra: {radios: 2}", "extra.radios: unknown key; did you mean 'radius'?"),
        ("count: 1.5", "count: expected a valid integer, got 1.5"),
        ("count: true", "count: expected a valid integer, got true"),
        ("count: -1", "count: expected a value greater than or equal to 0, got -1"),
        ("count: '1'", 'count: expected a valid integer, got "1"'),
        ("rate: .inf", "rate: expected a finite number, got Infinity"),
        ("rate: .nan", "rate: expected a finite number, got NaN"),
        ("shape: {kind: round, radius: .nan}", "shape.radius: expected a value greater than 0, got NaN"),
        ("name: 3", "name: expected a valid string, got 3"),
        ("mode: r3", "mode: expected 'none' or 'R3', got \"r3\""),
        ("shape: {kind: triangle}", "shape.kind: expected one of 'round', 'square', got triangle"),
        ("shape: {radius: 2}", "shape.kind: missing"),
        ("shape: {kind: square, sides: [1]}", "shape.sides.1: missing"),
        ("shape: {kind: square, sides: [1, x]}", 'shape.sides.1: expected a valid number, got "x"'),
        ("shape: 3", "shape: "),
        ("table: {a: b}", 'table.a: expected a valid number, got "b"'),
        ("count: x\nrate: x\nmode: x", "(and 2 more)"),
        ("count: x\ncuont: 2", "cuont: unknown key; did you mean 'count'? (expected one of: "),
        ("name: &a [*a]", "expected at most 50 levels of lists and mappings, got more"),
        ("name: " + "[" * 60 + "]" * 60, "expected at most 50 levels of lists and mappings, got more"),
        ("name: " + "[" * 1_000, "not valid YAML: lists and mappings are nested too deeply"),
        (BOMB, "expected at most 100000 values, got more (aliases count every time)"),
        ("name: 0x" + "f" * 5_000, "expected integers of at most 1024 bits, got 20000"),
        ("name: 2001-13-45", "not valid YAML: month must be in 1..12"),
        ("name: !!binary aGk=", "got bytes"),
    ],
)
def test_what_does_not_fit_is_one_line_with_the_full_name(text: str, wanted: str, tmp_path: Path) -> None:
    """The message is one line: the file, the field's dotted name as the user wrote it, what came, what was expected."""
    with pytest.raises(ConfigError) as caught:
        from_text(tmp_path, f"backend: toy\n{text}\n")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'c.yaml'}: ") and wanted in message and "\n" not in message


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a: 1\na: 2\n", 'c.yaml:2: not valid YAML: duplicate key "a"'),
        ("a: 1\nb: [1,\n", "c.yaml:3: not valid YAML"),
        ("a: 1\n\tb: 2\n", "c.yaml:2: not valid YAML"),
        ("a: !!python/object:os.system x\n", "c.yaml:1: not valid YAML"),
        ("a: 1\n---\nb: 1\n", "c.yaml:2: not valid YAML"),
        ("- a\n", "expected a mapping of keys to values, got a list"),
        ("", "expected a mapping of keys to values, got nothing"),
        ("count: 1\n", "backend: missing; expected one of: toy"),
        ("backend: toi\n", "backend: unknown backend 'toi'; did you mean 'toy'?"),
        ("backend: 3\n", "backend: unknown backend '3'"),
        ("base: none.yaml\n", "base: no such file"),
        ("base: 3\n", "base: expected a file name, got 3"),
        ("base: c.yaml\n", "base: the files refer to each other in a circle"),
    ],
)
def test_a_file_that_is_no_config_is_one_line(text: str, wanted: str, tmp_path: Path) -> None:
    """A file that cannot be read as a config says where and why, in one line."""
    with pytest.raises(ConfigError) as caught:
        from_text(tmp_path, text)
    assert wanted in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_one_line(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are named as such."""
    (tmp_path / "c.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(ConfigError, match="not a text file in UTF-8"):
        read(tmp_path / "c.yaml")


def test_a_folder_is_one_line(tmp_path: Path) -> None:
    """A folder given for the file is named as one, and the folder of a run with the file that is meant."""
    with pytest.raises(ConfigError, match=r"expected a YAML file, got a folder$"):
        read(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"got a folder; a run's own is config.yaml in it$"):
        read(tmp_path)


# -- YAML 1.2, base files and overrides


def test_yaml_1_2(tmp_path: Path) -> None:
    """`1e-4` is a number and `no` is text, as YAML 1.2 has it; a date is its text."""
    config = from_text(tmp_path, "backend: toy\nrate: 1e-3\nname: no\n")
    assert config.rate == 1e-3 and config.name == "no"
    assert from_text(tmp_path, "backend: toy\nname: 2026-01-31\n").name == "2026-01-31"


def test_base_files_merge_mappings_and_replace_the_rest(tmp_path: Path) -> None:
    """A file over its base, over its base's base: mappings key by key, lists and scalars replaced; paths relative."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "root.yaml").write_text(
        "backend: toy\ncount: 1\ntable: {a: 1, b: 2}\nshapes: [{kind: round}]\n"
    )
    (tmp_path / "middle.yaml").write_text("base: deep/root.yaml\ncount: 2\ntable: {b: 3}\n")
    config = from_text(tmp_path, "base: middle.yaml\ntable: {c: 4}\nshapes: []\n")
    assert config == Toy(count=2, table={"a": 1.0, "b": 3.0, "c": 4.0}, shapes=())


def test_overrides_win_in_order(tmp_path: Path) -> None:
    """Overrides come after the file, the later over the earlier, in both spellings, into blocks that were not there."""
    text = "backend: toy\ncount: 1\nshapes: [{kind: round}, {kind: round}]\nextra: null\n"
    words = ["--count", "5", "--count=0", "--rate", "-1e-4", "--mode", "R3"]
    words += ["--extra.radius", "3", "--shapes.1.radius=7", "--table", "{a: 1}"]
    config = from_text(tmp_path, text, *words)
    shapes = (Round(), Round(radius=7.0))
    assert config == Toy(count=0, rate=-1e-4, mode="R3", extra=Round(radius=3.0), shapes=shapes, table={"a": 1.0})


def test_an_override_changes_only_what_it_names(tmp_path: Path) -> None:
    """Blocks that the file shares by an alias or a merge key are each their own, in lists and for later readers too."""
    (tmp_path / "c.yaml").write_text("a: &a {in: &one {k: 1}}\nb: {<<: *a}\nc: *one\nd: [*one, *one]\n")
    one = {"k": 1}
    for key, change in (("c", {"c": {"k": 7}}), ("b.in", {"b": {"in": {"k": 7}}}), ("d.1", {"d": [one, {"k": 7}]})):
        raw = read(tmp_path / "c.yaml")
        apply(raw, [(f"{key}.k", "7")])
        assert raw == {"a": {"in": one}, "b": {"in": one}, "c": one, "d": [one, one]} | change


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--count"], "--count: expected a value after it, got nothing"),
        (["--count", "--rate", "1"], "--count: expected a value after it, got --rate"),
        (["count", "1"], "unexpected argument 'count'"),
        (["--", "1"], "unexpected argument '--'"),
        (["--a..b", "1"], "unexpected argument '--a..b'"),
        (["--name.x", "1"], "--name.x: name is the text 'toy', not a block of keys"),
        (["--shapes.2.radius", "1"], "--shapes.2.radius: expected a position in a list of 1, counting from 0, got '2'"),
        (["--count", "[1"], "--count:1: not valid YAML"),
    ],
)
def test_a_bad_override_is_one_line(words: list[str], wanted: str, tmp_path: Path) -> None:
    """An override that cannot be taken is named as the user wrote it."""
    with pytest.raises(ConfigError) as caught:
        from_text(tmp_path, "backend: toy\nname: toy\nshape: {kind: round}\nshapes: [{kind: round}]\n", *words)
    assert wanted in str(caught.value) and "\n" not in str(caught.value)


def test_overrides_are_read_as_pairs() -> None:
    """Both spellings, values with spaces, equals signs and leading dashes."""
    words = ["--a.b", "c d", "--e=f=g", "--h", "-1", "--i="]
    assert parse_overrides(words) == [("a.b", "c d"), ("e", "f=g"), ("h", "-1"), ("i", "")]


# -- the verdict block


def test_the_verdict_block_is_the_verdicts_rules() -> None:
    """The block is `VerdictRules` itself: every threshold explained, a value out of range one line that names it."""
    assert validate(VerdictRules, {"kl_limit": 0.5}, "here") == VerdictRules(kl_limit=0.5)
    assert all(field.description for field in VerdictRules.model_fields.values())
    with pytest.raises(ConfigError, match=r"here: kl_factor: .*greater than 1.*got 0\.5"):
        validate(VerdictRules, {"kl_factor": 0.5}, "here")


def test_only_small_texts_are_kept_in_memory(tmp_path: Path) -> None:
    """A config of a run is parsed once for the run and its report; a larger text is parsed anew and not kept."""
    for length, num_kept in ((100, 1), (MOST_KEPT, 0)):
        (tmp_path / "a.yaml").write_text(f"a: {'x' * length}\n")
        before = _kept.cache_info()
        assert read(tmp_path / "a.yaml") == read(tmp_path / "a.yaml") == {"a": "x" * length}
        after = _kept.cache_info()
        assert (after.misses - before.misses, after.hits - before.hits) == (num_kept, num_kept)
