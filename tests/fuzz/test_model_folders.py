"""A model folder that was edited or torn: it is opened as its config.json says, or refused in one line."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lab.hf import config_fields, parse_shape
from lab.hf.families import FAMILIES
from sandbox.model.checkpoint import INDEX, WEIGHTS, load, save
from sandbox.model.config import config_of
from sandbox.model.decoder import MoE
from scaled.model_shape import load_shape
from tests.fuzz.mutations import TooLongError, edited, misfit, misspelt, note, num_cases, torn, within
from tests.lab.hf.test_architectures import sizes
from theory.streams import stream

Files = dict[str, bytes]
OPENED = [name for name, row in FAMILIES.items() if "sandbox" in row.worlds and not row.is_own]
SIZES = (10**7, 10**12, 2**62, 1e30, 0.5, 3, 16, 64)
KINDS = (torch.int64, torch.float16, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """The files of a whole folder of every architecture that the sandbox opens, as transformers names its fields."""
    found = {}
    for family in OPENED:
        fields = sizes(family, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
        folder = tmp_path_factory.mktemp(family)
        save(MoE(config_of(parse_shape(fields, family, "sandbox")), stream(0, family)), folder)
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**fields, **written}))
        names = dict.fromkeys(load_file(folder / WEIGHTS), WEIGHTS)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
        found[family] = {path.name: path.read_bytes() for path in folder.iterdir()}
    return found


def spoil_config(files: Files, folder: Path, rng: random.Random) -> None:
    if rng.random() < 0.15:
        files["config.json"] = torn(files["config.json"], rng)
    else:
        files["config.json"] = json.dumps(edited(json.loads(files["config.json"]), rng, SIZES)).encode()


def spoil_weights(files: Files, folder: Path, rng: random.Random) -> None:
    """One tensor gone, renamed, of another shape or of another kind of numbers."""
    path = folder / "spoiled"
    path.write_bytes(files[WEIGHTS])
    tensors = load_file(path)
    name = rng.choice(sorted(tensors))
    tensor = tensors.pop(name)
    how = rng.randrange(5)
    if how == 1:
        tensors[misspelt(name, rng)] = tensor
    elif how == 2:
        tensors[name] = rng.choice([tensor[..., :-1], tensor[None], torch.empty(0), tensor.flatten()]).contiguous()
    elif how == 3:
        tensors[name] = tensor.to(rng.choice(KINDS))
    elif how == 4:
        tensors[name] = tensor
        tensors[name + rng.choice([".scale", "_scale_inv", "2"])] = tensor.clone()
    save_file(tensors, path)
    files[WEIGHTS] = path.read_bytes()
    path.unlink()


def spoil_header(files: Files, folder: Path, rng: random.Random) -> None:
    data = files[WEIGHTS]
    if rng.random() < 0.4:
        files[WEIGHTS] = torn(data, rng)
        return
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(misfit(json.loads(data[8 : 8 + size]), rng)).encode()
    files[WEIGHTS] = len(header).to_bytes(8, "little") + header + data[8 + size :]


def spoil_index(files: Files, folder: Path, rng: random.Random) -> None:
    how = rng.randrange(3)
    if how == 0:
        files[INDEX] = torn(files[INDEX], rng)
    elif how == 1:
        files[INDEX] = json.dumps(edited(json.loads(files[INDEX]), rng, SIZES)).encode()
    else:
        del files[rng.choice([INDEX, WEIGHTS, "config.json"])]


ACCIDENTS = (spoil_config, spoil_config, spoil_weights, spoil_header, spoil_index)


def test_a_spoiled_folder_is_opened_as_it_says_or_one_line(
    folders: dict[str, Files], tmp_path: Path, record_property: Any
) -> None:
    """`load` ends within 20 s with a model that has every size of config.json, or with one line that names a file."""
    folder = tmp_path / "model"
    outcomes = [outcome(case, folders, folder) for case in range(num_cases(150))]
    note(record_property, outcomes)
    assert not (faults := [each for each in outcomes if each not in ("opened", "refused")]), "\n".join(faults)
    assert 0.3 < outcomes.count("refused") / len(outcomes) < 0.9


def outcome(case: int, folders: dict[str, Files], folder: Path) -> str:
    """`opened`, `refused`, or what went wrong with the case."""
    family, rng = OPENED[case % len(OPENED)], random.Random(f"folder {case}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    files = dict(folders[family])
    if rng.random() < 0.5:
        del files[INDEX]
    rng.choice(ACCIDENTS if INDEX in files else ACCIDENTS[:-1])(files, folder, rng)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    said = f"case {case}, {family}: "
    try:
        with within(20):
            model = load(folder)
    except (ValueError, OSError) as error:
        is_clear = str(folder) in str(error) and "\n" not in str(error) and len(str(error)) < 1_000
        return "refused" if is_clear else f"{said}{error}"
    except (Exception, TooLongError) as error:
        return f"{said}{type(error).__name__}: {error}"
    fields = json.loads(files["config.json"])
    lost = differences(fields, config_fields(model.config.shape())) or read_by_the_cluster(folder, fields)
    return f"{said}{lost}" if lost else "opened"


def read_by_the_cluster(folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that the other world reads otherwise than the file says; none where it refuses the file in a line."""
    try:
        shape = load_shape(folder)
    except ValueError as error:
        return {"a line": str(error)} if "\n" in str(error) else {}
    return differences(fields, config_fields(shape))


def differences(given: dict[str, Any], read: dict[str, Any]) -> dict[str, Any]:
    """Fields that the file states and the model that was read does not have: (there, here)."""
    # A window that no layer has (`layer_types`, `max_window_layers`) may have any width.
    passed_over = {"architectures", "model_type", "bos_token_id", "eos_token_id", "pad_token_id", "sliding_window"}
    if (given.get("rope_parameters") or {}).get("rope_theta") is not None:
        passed_over |= {"rope_theta"}
    found = {}
    for name in given.keys() & read.keys() - passed_over:
        there, here = given[name], read[name]
        if name == "rope_parameters":
            there, here = (each and each.get("rope_theta") for each in (there, here))
        same = there == here and isinstance(there, bool) is isinstance(here, bool)
        if there is not None and not same:
            found[name] = (there, here)
    return found
