"""YaRN: what a file may state is read as transformers reads it, whatever the engines compute differently is refused."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from lab.hf import ModelShape, config_fields, parse_shape
from lab.hf.families import FAMILIES
from lab.hf.yarn import Yarn
from tests.lab.hf.test_architectures import OURS, sizes

STRETCH: dict[str, Any] = {"factor": 8.0, "original_max_position_embeddings": 16}
YARN = STRETCH | {"type": "yarn"}
BOTH = {"mscale": 0.7, "mscale_all_dim": 1.3}
LATENT = ("deepseek_v2", "deepseek_v3")


def shape_of(family: str, rope: dict[str, Any], name: str = "rope_scaling", **changes: Any) -> ModelShape:
    return parse_shape(sizes(family, **{name: rope}, **changes), "here", "scaled")


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["type", "rope_type"])
@pytest.mark.parametrize("family", [name for name, row in FAMILIES.items() if row.has_yarn])
def test_both_spellings_state_the_same(family: str, kind: str, name: str) -> None:
    """Of transformers 5 and before, with the base inside or beside it; the shape states what a file leaves out."""
    rope = STRETCH | BOTH | {kind: "yarn"}
    inside = shape_of(family, rope | {"rope_theta": 5e4}, name)
    assert inside == shape_of(family, rope, name, rope_theta=5e4)
    assert inside.yarn == Yarn(8.0, 16, 32.0, 1.0, 0.7, 1.3)
    scales = (1.0, 0.0) if family in LATENT else (None, None)
    assert shape_of(family, YARN, name).yarn == Yarn(8.0, 16, 32.0, 1.0, *scales)


SCALES = [(family, scales) for family in (*LATENT, "qwen3_moe") for scales in ({}, BOTH, dict.fromkeys(BOTH, 2))]
SCALES += [(family, {"mscale": 1, "mscale_all_dim": 0}) for family in LATENT]


@pytest.mark.parametrize(("family", "scales"), SCALES)
def test_scales_are_transformers_own(family: str, scales: dict[str, float]) -> None:
    """By the words of `Yarn`, sines and scores have the factors of transformers' own functions for the file."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = sizes(family, rope_scaling=YARN | scales)
    yarn = parse_shape(json.loads(json.dumps(fields)), world="scaled").yarn
    assert yarn is not None
    config = transformers.AutoConfig.for_model(**fields)
    m = {x: 0.1 * x * math.log(8.0) + 1 for x in (1, yarn.mscale, yarn.mscale_all_dim) if x is not None}
    sines = m[1] if yarn.mscale is None or yarn.mscale_all_dim is None else m[yarn.mscale] / m[yarn.mscale_all_dim]
    assert ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[1] == pytest.approx(sines, rel=1e-12)
    if family in LATENT:
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

        assert yarn.mscale_all_dim is not None
        assert yarn_apply_mscale(config.rope_parameters, 1.0) == pytest.approx(m[yarn.mscale_all_dim] ** 2, rel=1e-12)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"type": "linear"}, 'rope_scaling: expected the default rotation or yarn, got {.*"linear"}'),
    ("deepseek_v3", {"rope_type": "default"}, "rope_scaling: expected the default rotation or yarn, got"),
    ("deepseek_v3", {"factor": None}, "rope_scaling.factor: expected a number of at least 1, got null"),
    ("deepseek_v3", {"factor": 0.5}, "rope_scaling.factor: expected a number of at least 1, got 0.5"),
    (
        "deepseek_v3", {"original_max_position_embeddings": 16.0},
        "rope_scaling.original_max_position_embeddings: expected an integer of 1 to 2,147,483,648, got 16.0",
    ),
    ("deepseek_v2", {"beta_fast": 0}, "rope_scaling.beta_fast: expected a positive number, got 0"),
    ("deepseek_v2", {"beta_slow": None}, "rope_scaling.beta_slow: expected a positive number, got null"),
    ("deepseek_v3", {"mscale": True}, "rope_scaling.mscale: expected a positive number, got true"),
    ("deepseek_v3", {"mscale_all_dim": -1}, "rope_scaling.mscale_all_dim: expected a number of at least 0, got -1"),
    ("qwen3_moe", {"truncate": None}, "rope_scaling.truncate: expected true or false, got null"),
    ("deepseek_v3", {"mscale_all_dim": 1}, "rope_scaling.mscale: expected a number beside mscale_all_dim .*, got null"),
    ("deepseek_v3", {"mscale": 0.7}, "rope_scaling.mscale: expected 1 without mscale_all_dim .*, got 0.7"),
    ("deepseek_v3", {"truncate": False}, "rope_scaling.truncate: expected true .*, got false"),
    ("deepseek_v3", {"attention_factor": 1.0}, "rope_scaling.attention_factor: expected null .*, got 1.0"),
    ("qwen3_moe", {"attention_factor": 1.0}, "rope_scaling.attention_factor: expected null .*, got 1.0"),
    ("qwen3_moe", {"mscale": 0.7}, 'rope_scaling.mscale: expected a positive .*, got {"mscale": 0.7, .*: null}'),
    ("qwen3_moe", {"mscale_all_dim": 0}, "rope_scaling.mscale: expected a positive .*, or neither, got"),
    ("qwen3_moe", {"mscale": 1, "mscale_all_dim": 0}, "rope_scaling.mscale: expected a positive .*, or neither, got"),
    ("qwen3_moe", {"partial_rotary_factor": 0.5}, "rope_scaling.partial_rotary_factor: expected 1.0 .*, got 0.5"),
    ("deepseek_v3", {"mrope_section": [4]}, r"rope_scaling.mrope_section: expected none beside factor, .*, got \[4\]"),
    ("deepseek_v3", {"factor": 3}, "max_position_embeddings: expected at most 48 .*, got 64"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "line"), REFUSED)
def test_what_engines_compute_otherwise_is_refused(family: str, changes: dict[str, Any], line: str) -> None:
    """One line with the field, what was expected and what came."""
    with pytest.raises(ValueError, match=f"^here: {line}") as error:
        shape_of(family, YARN | changes)
    assert "\n" not in str(error.value)


def test_a_checkpoint_names_its_model_as_before() -> None:
    """The words for a shape without YaRN are those that older checkpoints hold; those with it tell scalings apart."""
    plain, yarn = parse_shape(sizes("deepseek_v3")), shape_of("deepseek_v3", YARN)
    assert repr(plain).startswith("ModelShape(family='deepseek_v3', vocab_size=40, hidden_size=32, num_layers=2, ")
    assert repr(plain).endswith("position_dim=4, value_dim=8))")
    assert repr(yarn) == repr(plain)[:-1] + f", yarn={yarn.yarn!r})"
    assert repr(shape_of("deepseek_v3", YARN | {"factor": 9})) != repr(yarn)


def test_two_fields_must_agree() -> None:
    """A rotation stated twice is stated alike, and the length of the pretraining once."""
    other = YARN | {"factor": 9.0}
    twice = shape_of("deepseek_v3", YARN, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, **STRETCH})
    assert twice == shape_of("deepseek_v3", YARN)
    assert shape_of("deepseek_v3", YARN, "rope_parameters", rope_scaling={}) == twice
    for unlike in (other, {"rope_type": "default", "rope_theta": 1e4}):
        with pytest.raises(ValueError, match=r"^here: rope_parameters: expected the rotation of rope_scaling, got {"):
            shape_of("deepseek_v3", YARN, rope_parameters=unlike)
    with pytest.raises(ValueError, match=r"^here: rope_parameters: expected the rotation of rope_scaling, got {"):
        shape_of("qwen3_moe", {"type": "default"}, rope_parameters=YARN)
    with pytest.raises(ValueError, match=r"^here: original_max_position_embeddings: expected 16, .* got 32"):
        shape_of("deepseek_v3", YARN, original_max_position_embeddings=32)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_the_sandbox_and_other_families_refuse_it(name: str) -> None:
    """A world or family that does not compute YaRN says so, with the field."""
    plain = [sizes(family, **{name: YARN}) for family, row in FAMILIES.items() if not (row.has_yarn or row.is_own)]
    for fields in (*plain, OURS | {"rope_parameters": None, name: YARN}, sizes("qwen3_moe", **{name: YARN})):
        world = None if fields["model_type"] != "qwen3_moe" else "sandbox"
        with pytest.raises(ValueError, match=f"^here: {name}: expected the default rotation, got") as error:
            parse_shape(fields, "here", world)
        assert re.search('"type": "yarn"', str(error.value))


@pytest.mark.parametrize("yarn", [None, Yarn(4.0, 32), Yarn(4.0, 32, 16.0, 2.0, 0.7, 1.3, False)])
def test_what_is_written_is_read(yarn: Yarn | None) -> None:
    """A shape with YaRN is written with it, under both names."""
    shape = replace(parse_shape(sizes("qwen3_moe")), yarn=yarn)
    fields = json.loads(json.dumps(config_fields(shape)))
    assert parse_shape(fields) == shape
    names = ("rope_scaling", "rope_parameters")
    for name in names[yarn is None :]:
        alone = {each: value for each, value in fields.items() if each not in names} | {name: fields[name]}
        assert parse_shape(alone).yarn == yarn


def test_kimi_k2_is_deepseek_v3_by_another_name() -> None:
    """With its class named or not; the type of another family is still refused."""
    fields = sizes("deepseek_v3", rope_scaling=YARN)
    for named in (fields, {name: value for name, value in fields.items() if name != "architectures"}):
        assert parse_shape(named | {"model_type": "kimi_k2"}, world="scaled") == parse_shape(fields)
    with pytest.raises(ValueError, match="model_type: expected deepseek_v2, that of DeepseekV2ForCausalLM, got"):
        parse_shape(sizes("deepseek_v2") | {"model_type": "kimi_k2"}, world="scaled")
