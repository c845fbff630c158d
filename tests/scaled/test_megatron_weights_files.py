"""Laws of loading: every rank reads its own part of a file and no more; a file that does not fit is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lab.hf import parse_shape
from scaled.config import ModelBlock, TrainingBlock
from scaled.megatron_engine.names import rule
from scaled.model_shape import load_shape
from tests.scaled.megatron_world import file_tensors, free_ports, joined, said, spawn, tiny_config, tiny_folder
from tests.scaled.rank_world import algorithm, batch, on_host
from theory.contracts import MiniBatch
from theory.objectives import preset
from theory.routing.passes import RoutingPlan

# Sixteen ranks of one layout with every kind of split, four of another; none of them needs another rank to load.
WORLDS: dict[str, dict[str, Any]] = {
    "TP2 PP2 VPP2 EP4": {"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2, "expert_parallel": 4},
    "TP2 EP2 ETP2 PP2": {
        "tensor_parallel": 2,
        "pipeline_parallel": 2,
        "expert_parallel": 2,
        "expert_tensor_parallel": 2,
    },
}
FAMILIES = ("qwen3_moe", "deepseek_v3")


class _Counted:
    """A safetensors file that counts the numbers that were read from it."""

    total = 0

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> _Counted:
        self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.file.__exit__(*error)

    def keys(self) -> Any:
        return self.file.keys()

    def get_slice(self, name: str) -> Any:
        view = self.file.get_slice(name)

        class View:
            def get_shape(self) -> list[int]:
                return view.get_shape()

            def __getitem__(self, index: Any) -> Tensor:
                piece = view[index]
                _Counted.total += piece.numel()
                return piece

        return View()


def run_worlds(rank: int, folders: dict[str, Path]) -> Any:
    """For each world, family and rank of it: numbers read, numbers held, and their sum by Hugging Face name."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from scaled.megatron_engine import parallel, weights
    from scaled.megatron_engine.model import build_model

    real = weights.safe_open
    weights.safe_open = lambda *args, **kwargs: _Counted(real(*args, **kwargs))
    found = {}
    for world, fields in WORLDS.items():
        training = TrainingBlock(num_ranks=16, precision="fp32", **fields)
        for family in FAMILIES:
            shape = load_shape(folders[family])
            for one in range(training.num_ranks):
                dist.init_process_group("fake", store=FakeStore(), rank=one, world_size=training.num_ranks)
                parallel.make_groups(training, create_gloo_process_groups=False)
                chunks, layout = build_model(shape, training), parallel.layout(training, shape.num_layers)
                _Counted.total = 0
                weights.load_hf(chunks, shape, layout, folders[family])
                held = list(weights.weights(chunks, shape, layout))
                # A vocabulary of 97 is two shards of 49 rows: the second rank has one row that is in no file.
                padded = [w for w in held if w.rule.shapes[0][0] == shape.vocab_size]
                rows = layout.tp_rank * shape.hidden_size * len(padded)
                replicas = layout.dp_rank == 0, layout.edp_rank == 0
                sums: dict[str, float] = {}
                for weight in held:
                    is_first = replicas[1] if weight.rule.is_expert else replicas[0]
                    is_own = weight.num_shards > 1 or weight.rule.is_expert or layout.tp_rank == 0
                    if is_first and is_own:
                        for name, part in zip(weight.rule.names, weight.parts(weight.tensor.data), strict=True):
                            sums[name] = sums.get(name, 0.0) + part.double().sum().item()
                found[world, family, one] = (_Counted.total, sum(w.tensor.numel() for w in held) - rows, sums)
                parallel.shutdown()
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    return {family: tiny_folder(root / family, family, vocab_size=97) for family in FAMILIES}


@pytest.fixture(scope="module")
def worlds(folders: dict[str, Path]) -> Any:
    return spawn(1, run_worlds, folders)[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_reads_what_it_holds(world: str, family: str, worlds: Any) -> None:
    """As many numbers are read from the files as the rank has weights: not one row or expert of another rank."""
    for one in range(16):
        num_read, num_held, _ = worlds[world, family, one]
        assert num_read == num_held


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world", WORLDS)
def test_one_replica_holds_the_whole_file(world: str, family: str, worlds: Any, folders: dict[str, Path]) -> None:
    """Over the ranks of the first replica each tensor sums to the file's: no part is missing or there twice."""
    file = file_tensors(folders[family])
    sums: dict[str, float] = {}
    for one in range(16):
        for name, value in worlds[world, family, one][2].items():
            sums[name] = sums.get(name, 0.0) + value
    assert sums.keys() == file.keys()
    for name, tensor in file.items():
        assert sums[name] == pytest.approx(tensor.double().sum().item(), abs=1e-9)


def _in_bf16(training: TrainingBlock) -> TrainingBlock:
    return training.model_copy(update={"precision": "bf16"})


def run_errors(rank: int, folder: Path, ports: list[int]) -> Any:
    """Loading: its message for files that do not fit, and its result for other types."""
    from scaled.megatron_engine import parallel
    from scaled.megatron_engine.model import build_model
    from scaled.megatron_engine.weights import export_hf, load_hf

    training, shape = TrainingBlock(precision="fp32"), load_shape(folder)
    file = file_tensors(folder)
    gate, other = "model.layers.2.mlp.gate.weight", "model.layers.0.self_attn.k_proj.weight"

    def written(name: str, *files: dict[str, Tensor]) -> Path:
        to = folder.parent / name
        to.mkdir()
        for number, tensors in enumerate(files):
            save_file(tensors, to / f"{number}.safetensors")
        return to

    wrong = torch.zeros(3, 64)
    predicting = written("predicting", file | {"model.layers.4.eh_proj.weight": wrong})
    (predicting / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 1}))
    beyond = written("beyond", file | {"model.layers.5.eh_proj.weight": wrong})
    (beyond / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 1}))
    cases = {
        "predicting": predicting,
        "beyond": beyond,
        "missing": written("missing", {n: t for n, t in file.items() if n not in (gate, other)}),
        "unexpected": written("unexpected", file | {"model.layers.9.mlp.gate.weight": wrong}),
        "twice": written("twice", file, {gate: file[gate]}),
        "misshapen": written("misshapen", file | {gate: wrong}),
        "no file": written("no file"),
        "derived": written("derived", file | {"model.layers.0.self_attn.rotary_emb.inv_freq": wrong}),
    }
    with joined(training, rank, ports[0]):
        chunks, layout = build_model(shape, training), parallel.layout(training, shape.num_layers)
        words = {name: said(lambda case=case: load_hf(chunks, shape, layout, case)) for name, case in cases.items()}
        load_hf(chunks, shape, layout, written("bf16", {n: t.bfloat16() for n, t in file.items()}))
        is_converted = all(
            torch.equal(t.cpu(), file[n].bfloat16().float()) for n, t in export_hf(chunks, shape, layout)
        )
    with joined(_in_bf16(training), rank, ports[1]):
        chunks = build_model(shape, _in_bf16(training))
        load_hf(chunks, shape, layout, folder)
        types = {str(p.dtype) for chunk in chunks for p in chunk.parameters()}
        is_rounded = all(torch.equal(t.cpu(), file[n].bfloat16()) for n, t in export_hf(chunks, shape, layout))
    return words, is_converted, types, is_rounded


@pytest.fixture(scope="module")
def errors(folders: dict[str, Path]) -> Any:
    return spawn(1, run_errors, folders["qwen3_moe"], free_ports(2))[0]


GATE = "model.layers.2.mlp.gate.weight"
SAID = {
    "missing": f"expected 135 tensors, missing model.layers.0.self_attn.k_proj.weight, {GATE}",
    "unexpected": "expected the tensors of a qwen3_moe model, got besides them model.layers.9.mlp.gate.weight",
    "predicting": "ran",
    "beyond": "expected the tensors of a qwen3_moe model, got besides them model.layers.5.eh_proj.weight",
    "twice": f"expected the tensors of a qwen3_moe model, got besides them {GATE} (twice)",
    "misshapen": f"{GATE}: expected shape [8, 64], got [3, 64]",
    "derived": "ran",
}


@pytest.mark.parametrize("case", SAID)
def test_what_does_not_fit_is_named(case: str, errors: Any) -> None:
    """Missing, unexpected, repeated and misshapen tensors are errors that name them; what a model does not
    train is not: constants of old files, and as many layers for later tokens as config.json says."""
    words = errors[0][case]
    assert sorted(words.split()) == sorted(SAID[case].split()) if case == "missing" else words == SAID[case]


def test_a_folder_without_weights_is_refused(errors: Any) -> None:
    """A folder without safetensors is an error that names it."""
    assert errors[0]["no file"].startswith("expected a folder with safetensors files, got ")


@pytest.mark.filterwarnings("ignore")  # Megatron-core's at its import
@pytest.mark.parametrize("kept", [0, 5, 200, -10])
def test_a_torn_file_is_named(kept: int, folders: dict[str, Path], tmp_path: Path) -> None:
    """A file of which only a part was written is one line with its name."""
    from scaled.megatron_engine.weights import _entries

    for file in folders["qwen3_moe"].glob("*.safetensors"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    torn = tmp_path / "model-1.safetensors"
    torn.write_bytes(torn.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"/model-1\.safetensors: not a valid safetensors file \(") as caught:
        list(_entries(tmp_path))
    assert "\n" not in str(caught.value)


def test_types_are_converted(errors: Any) -> None:
    """Files in bf16 fill an fp32 rank with their values; a bf16 rank rounds those of fp32 files."""
    _, is_converted, types, is_rounded = errors
    assert is_converted
    assert types == {"torch.bfloat16"}
    assert is_rounded


def run_bf16(rank: int, folder: Path, port: int) -> list[dict[str, Tensor]]:
    """A bf16 rank's exports: of its reference, as loaded, and after an update."""
    from scaled.megatron_engine.rank import MegatronRank
    from scaled.megatron_engine.weights import export_hf

    training, rollouts, natural = TrainingBlock(precision="bf16"), batch(4), RoutingPlan("natural")
    with joined(training, rank, port):
        engine = MegatronRank(ModelBlock(path=str(folder)), training, algorithm("none"), keep_reference=True)
        assert engine.reference is not None
        reference = on_host(export_hf(engine.reference.chunks, engine.shape, engine.layout))
        loaded = on_host(engine.export())
        minibatch = MiniBatch(rollouts, -torch.ones(rollouts.padded().is_response_BT.shape), torch.ones(4), 0, 1)
        engine.update(minibatch, preset("reinforce"), natural)
        return [reference, loaded, on_host(engine.export())]


def test_bf16_keeps_the_selection_bias(folders: dict[str, Path]) -> None:
    """In bf16 training the selection bias has the file's fp32 bits: in policy and reference, and after an update."""
    file = file_tensors(folders["deepseek_v3"])
    biases = {name: tensor for name, tensor in file.items() if name.endswith("e_score_correction_bias")}
    assert biases and not any(torch.equal(tensor, tensor.bfloat16().float()) for tensor in biases.values())
    reference, loaded, updated = spawn(1, run_bf16, folders["deepseek_v3"], free_ports(1)[0])[0]
    for exported in (reference, loaded, updated):
        for name, tensor in biases.items():
            assert exported[name].dtype == torch.float32
            assert torch.equal(exported[name], tensor)
    assert any(not torch.equal(updated[name], tensor) for name, tensor in loaded.items())


def test_an_unknown_parameter_is_refused() -> None:
    """A Megatron parameter without a rule is an error that lists those that have one, never left as it is."""
    shape = parse_shape(tiny_config())
    with pytest.raises(ValueError, match="got linear_fc3"):
        rule(shape, "linear_fc3.weight", 0, expert=1)
    with pytest.raises(ValueError, match="got linear_q_proj"):
        rule(replace(shape, qk_norm="head"), "self_attention.linear_q_proj.weight", 0)
