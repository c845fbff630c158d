"""Laws of a cluster run's export that need no Megatron: pieces of any layout, memory, files, and what is refused.

The checkpoints are torch's own, under the keys of Megatron's; tests/scaled/test_export.py has Megatron's own.
"""

from __future__ import annotations

import json
import shutil
import tracemalloc
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

from firstorder.cli import main
from firstorder.worlds import Schemas
from lab.config.load import load
from lab.hf import parse_shape, read_json
from lab.records import RunFolder
from lab.tasks.tokenizers import load_tokenizer
from sandbox.bench.memory import peak_bytes
from scaled.export import export
from scaled.megatron_engine.checkpoint_index import COMMON
from scaled.megatron_engine.names import stored
from tests.scaled.megatron_world import file_tensors, tiny_config
from theory.streams import stream

pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = """
name: tiny
backend: scaled
num_steps: 8
task: {{kind: arithmetic}}
model: {{path: {model}}}
training: {{precision: bf16, micro_batch_size: 2}}
algorithm: {{objective: {{preset: minirl}}, batch: {{num_prompts: 4, num_responses: 2}}, sampling: {{max_tokens: 8}}}}
"""


def megatron_tensors(fields: dict[str, Any]) -> dict[str, Tensor]:
    """Random weights of the model under Megatron's keys: experts stacked, the vocabulary in multiples of 4."""
    draws, found = stream(0, "export-files"), {}
    experts: dict[str, list[Tensor]] = {}
    for one in stored(parse_shape(fields)):
        sizes = one.rule.shapes
        rows = sum(size[0] for size in sizes)
        if one.key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            rows = -(-rows // 4) * 4
        dtype = torch.float32 if one.key.endswith("expert_bias") else torch.bfloat16
        tensor = torch.randn((rows, *sizes[0][1:]), generator=draws).to(dtype)
        if one.expert is None:
            found[one.key] = tensor
        else:
            experts.setdefault(one.key, []).append(tensor)
    return found | {key: torch.stack(tensors) for key, tensors in experts.items()}


def write_run(home: Path, fields: dict[str, Any], tensors: dict[str, Tensor]) -> RunFolder:
    """A run folder with the checkpoints of steps 2 and 4, the second with all weights doubled."""
    (home / "model").mkdir(parents=True)
    (home / "model" / "config.json").write_text(json.dumps(fields))
    path = home / "runs" / "tiny" / "20260101T000000Z-0"
    path.mkdir(parents=True)
    folder = RunFolder(path)
    folder.write_config(CONFIG.format(model=home / "model"))
    about = {"shape": repr(parse_shape(fields)), "precision": "bf16"}
    for step in (2, 4):
        scaled = {key: tensor * (step // 2) for key, tensor in tensors.items()}
        with folder.sharded(step) as target:
            writer = FileSystemWriter(target, single_file_per_rank=True)
            dcp.save({"optimizer": torch.zeros(3), **scaled}, storage_writer=writer, no_dist=True)
            torch.save({"num_updates": step, "about": about}, target / COMMON)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a run of a model that has a dense layer, shared experts, a selection bias and an odd vocabulary."""
    home = tmp_path_factory.mktemp("export-files")
    fields = tiny_config("deepseek_v3", vocab_size=97)
    write_run(home, fields, megatron_tensors(fields))
    return home


@pytest.fixture
def run(made: Path, tmp_path: Path) -> RunFolder:
    """A copy of the run."""
    return RunFolder(Path(shutil.copytree(made / "runs" / "tiny" / "20260101T000000Z-0", tmp_path / "run")))


def exported(words: list[str], to: Path) -> dict[str, Tensor]:
    assert main(["export", *words, "--to", str(to)]) == 0
    return file_tensors(to)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main(["export", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def test_names_and_rows(made: Path, run: RunFolder, tmp_path: Path) -> None:
    """Every tensor of config.json's model is there with its type; gates and padded rows are where they belong."""
    tensors = megatron_tensors(read_json(made / "model" / "config.json"))
    ours = exported([str(run.path), "--step", "2"], tmp_path / "out")
    shape = parse_shape(read_json(made / "model" / "config.json"))
    assert {name: tuple(tensor.shape) for name, tensor in ours.items()} == shape.weights()
    assert torch.equal(ours["lm_head.weight"], tensors["output_layer.weight"][:97])
    gate, up = tensors["decoder.layers.2.mlp.experts.experts.linear_fc1.weight"][5].chunk(2)
    assert torch.equal(ours["model.layers.2.mlp.experts.5.gate_proj.weight"], gate)
    assert torch.equal(ours["model.layers.2.mlp.experts.5.up_proj.weight"], up)
    bias = ours["model.layers.3.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32 and torch.equal(bias, tensors["decoder.layers.3.mlp.router.expert_bias"])
    assert ours["model.norm.weight"].dtype == torch.bfloat16


def test_the_step_is_chosen(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--step takes that step's checkpoint, by default the newest; for one not kept, the line lists those that are."""
    first = exported([str(run.path), "--step", "2"], tmp_path / "first")
    newest = exported([str(run.path)], tmp_path / "newest")
    assert all(torch.equal(newest[name], 2 * tensor) for name, tensor in first.items())
    line = refused(capsys, run.path, "--step", 3, "--to", tmp_path / "third")
    assert "--step: expected a step whose checkpoint the run has kept (2, 4), got 3" in line
    assert not (tmp_path / "third").exists()


def test_config_and_tokenizer_go_along(made: Path, run: RunFolder, tmp_path: Path) -> None:
    """config.json is the start's with the trainer's type; the tokenizer is the task's where that folder has none."""
    exported([str(run.path)], tmp_path / "out")
    fields = read_json(made / "model" / "config.json")
    assert read_json(tmp_path / "out" / "config.json") == fields | {"dtype": "bfloat16", "topk_method": "noaux_tc"}
    files = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o444 == 0o444


def test_what_the_export_lacks_is_not_named(made: Path, run: RunFolder, tmp_path: Path) -> None:
    """Without its Python files config.json names no class of theirs; without a tokenizer the end is the task's own."""
    source = tmp_path / "model"
    shutil.copytree(made / "model", source)
    fields = read_json(source / "config.json") | {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (source / "config.json").write_text(json.dumps(fields))
    (source / "generation_config.json").write_text('{"eos_token_id": 163586}')
    config = run.path / "config.yaml"
    config.write_text(config.read_text().replace(str(made / "model"), str(source)))
    exported([str(run.path)], tmp_path / "out")
    assert "auto_map" not in read_json(tmp_path / "out" / "config.json")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.end_ids == (tokenizer.eos_id,)


def test_what_is_exported_opens_without_other_code(tmp_path: Path) -> None:
    """Kimi-K2's type is the one that transformers knows, layers that were not trained are 0, the scaling is kept."""
    yarn = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.3}
    fields = tiny_config("deepseek_v3", rope_parameters=None, rope_scaling=yarn)
    fields |= {"model_type": "kimi_k2", "num_nextn_predict_layers": 1}
    run = write_run(tmp_path, fields, megatron_tensors(fields))
    exported([str(run.path)], tmp_path / "out")
    ours = read_json(tmp_path / "out" / "config.json")
    assert (ours["model_type"], ours["num_nextn_predict_layers"], ours["rope_scaling"]) == ("deepseek_v3", 0, yarn)
    assert parse_shape(ours) == parse_shape(fields)


def test_files_of_a_bounded_size(run: RunFolder, tmp_path: Path) -> None:
    """Files hold at most max_shard_bytes of tensors, the index names each tensor's, and no number depends on them."""
    config: Any = load(run.path / "config.yaml", [], Schemas())
    export(run, config, tmp_path / "many", max_shard_bytes=60_000)
    one = exported([str(run.path)], tmp_path / "one")
    index = read_json(tmp_path / "many" / "model.safetensors.index.json")
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 5 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    many = {file.name: load_file(file) for file in files}
    for name, tensors in many.items():
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 60_000
        assert all(
            index["weight_map"][key] == name and torch.equal(one[key], tensor) for key, tensor in tensors.items()
        )
    assert index["weight_map"].keys() == one.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())


@pytest.mark.parametrize("num_layers", [2, 8])
def test_one_parameter_is_held_at_a_time(num_layers: int, tmp_path: Path) -> None:
    """However many layers there are, an export holds at most three times its largest parameter. Measured 2.25."""
    fields = tiny_config("qwen3_moe", vocab_size=256, num_hidden_layers=num_layers, hidden_size=128, head_dim=32)
    tensors = megatron_tensors(fields)
    run = write_run(tmp_path, fields, tensors)
    config: Any = load(run.path / "config.yaml", [], Schemas())
    largest = 2 * max(prod(size) for size in parse_shape(fields).weights().values())
    total = sum(tensor.nbytes for tensor in tensors.values())
    held = peak_bytes(lambda: export(run, config, tmp_path / "out"))
    tracemalloc.start()
    export(run, config, tmp_path / "again")
    _, objects = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held <= 3 * largest
    # Bytes of a piece on their way through Python, the index with its 300 to 900 entries, the config.
    assert objects <= 3 * largest + 2500 * len(parse_shape(fields).weights())
    assert total > 6 * largest or num_layers == 2


def test_what_is_not_whole_is_refused(made: Path, run: RunFolder, tmp_path: Path, capsys) -> None:
    """A file that is missing, cut, or has other bytes in it, a damaged index or damaged facts: the file's name."""
    checkpoint, to = run.path / "checkpoints" / "step-000004", tmp_path / "out"
    (data,) = checkpoint.glob("*.distcp")
    whole = data.read_bytes()
    data.unlink()
    assert f"{data}: damaged checkpoint (expected {len(whole)} bytes, got None)" in refused(
        capsys, run.path, "--to", to
    )
    data.write_bytes(whole[: len(whole) // 2])
    assert f"{data}: damaged checkpoint (expected {len(whole)} bytes" in refused(capsys, run.path, "--to", to)
    data.write_bytes(whole.replace(b"PK\x03\x04", b"PK\x00\x00"))
    assert f"{data}: damaged checkpoint, cannot read " in refused(capsys, run.path, "--to", to)
    data.write_bytes(whole)
    for name in (".metadata", COMMON):
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(bytes(len(content)))
        line = refused(capsys, run.path, "--to", to)
        assert line.startswith(f"error: {checkpoint / name}: expected"), line
        (checkpoint / name).write_bytes(content)
    assert not to.exists() and not list(tmp_path.glob(".tmp-*"))
    exported([str(run.path)], to)


def test_what_is_no_such_run_is_refused(made: Path, run: RunFolder, tmp_path: Path, capsys) -> None:
    """Another model than the checkpoint's, a run without one, a config alone, a start that is gone: one line each."""
    config = run.path / "config.yaml"
    line = refused(capsys, config, "--to", tmp_path / "out")
    assert "expected the folder of a run on the cluster, got a config; its model.path" in line
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(tiny_config("deepseek_v3", vocab_size=98)))
    text = config.read_text()
    config.write_text(text.replace(str(made / "model"), str(other)))
    assert "expected a checkpoint of the config's model" in refused(capsys, run.path, "--to", tmp_path / "out")
    config.write_text(text.replace(str(made / "model"), str(tmp_path / "gone")))
    assert "model.path: expected a Hugging Face folder" in refused(capsys, run.path, "--to", tmp_path / "out")
    shutil.rmtree(run.path / "checkpoints")
    config.write_text(text)
    assert "expected a run with a checkpoint, got none" in refused(capsys, run.path, "--to", tmp_path / "out")
    assert not (tmp_path / "out").exists()
