"""Laws of export: a folder computes what the sandbox's model computes, is whole or absent, and never overwritten."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from firstorder.cli import main
from firstorder.worlds import Schemas
from lab.config.load import load
from lab.records import RunFolder
from lab.tasks.tokenizers import load_tokenizer
from sandbox.config import SandboxRun
from sandbox.export import initial, trained, write
from sandbox.model import MoE
from sandbox.model.checkpoint import load as load_model
from sandbox.run import open_task
from scaled.model_shape import load_shape

ROOT = Path(__file__).parents[2]
TINY = f"""
base: {ROOT / "configs" / "smoke.yaml"}
name: tiny
algorithm: {{optimizer: {{learning_rate: 1e-2, weight_decay: 10.0}}, replay: {{mode: Pr3}}}}
evaluation: {{every: 4}}
"""


OPENED = """
name: opened
backend: sandbox
num_steps: 1
task: {kind: jsonl, path: p.jsonl, held_out_fraction: 0.5}
model: {path: opened}
cold_start: null
algorithm: {objective: {preset: minirl}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, a run of it, and its exports."""
    home = tmp_path_factory.mktemp("export")
    (home / "tiny.yaml").write_text(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(["train", "tiny.yaml", "--progress", "none"]) == 0
        assert main(["export", "tiny.yaml", "--to", "out/initial"]) == 0
        assert main(["export", "runs/tiny", "--to", "out/trained"]) == 0
    return home


@pytest.fixture
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it as the working folder."""
    shutil.copytree(home, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


def config_of(path: Path) -> SandboxRun:
    config = load(path, [], Schemas())
    assert isinstance(config, SandboxRun)
    return config


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(["export", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err


def logits(model: MoE, tokens_BS: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model.forward_hidden(tokens_BS).flatten(0, 1)).unflatten(0, tuple(tokens_BS.shape))


def test_transformers_computes_the_same(home: Path) -> None:
    """transformers opens both exports and gives the sandbox's logits to fp32 rounding; training had moved them."""
    config = config_of(home / "tiny.yaml")
    folder = RunFolder.open(next((home / "runs" / "tiny").iterdir()))
    after, step = trained(folder, config)
    tokens_BS = torch.randint(2, 17, (3, 12), generator=torch.Generator().manual_seed(0))
    seen = {}
    for name, model in (("initial", initial(config, report=False)), ("trained", after)):
        hf = transformers.AutoModelForCausalLM.from_pretrained(home / "out" / name, dtype=torch.float32)
        assert type(hf).__name__ == "Qwen3MoeForCausalLM"
        with torch.no_grad():
            theirs = hf(tokens_BS).logits
        seen[name] = logits(model, tokens_BS)
        # Measured 1e-6 on logits of up to 4; 20 times that.
        torch.testing.assert_close(seen[name], theirs, rtol=0, atol=2e-5)
    assert step == 4 and (seen["initial"] - seen["trained"]).abs().max() > 1e-2


def test_the_trained_weights_are_the_newest_checkpoints(home: Path) -> None:
    """The exported weights are bit for bit the model's in the last checkpoint, without the predictor."""
    folder = RunFolder.open(next((home / "runs" / "tiny").iterdir()))
    checkpoint = folder.latest_checkpoint()
    assert checkpoint is not None and any(name.startswith("predictor.") for name in checkpoint.tensors)
    model = load_model(home / "out" / "trained")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, checkpoint.tensors[f"model.{name}"]), name
    assert not any("predictor" in name for name in load_file(home / "out" / "trained" / "model.safetensors"))


def test_a_kept_step_is_exported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--step takes the checkpoint of that step, and names those that the run has kept where it is none of them."""
    run = next(Path("runs/tiny").iterdir())
    kept = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").iterdir())
    assert len(kept) == 2 and kept[-1] == 4
    assert main(["export", "runs/tiny", "--step", str(kept[0]), "--to", "earlier"]) == 0
    saved = load_file(run / "checkpoints" / f"step-{kept[0]:06d}" / "tensors.safetensors")
    for name, tensor in load_model("earlier").state_dict().items():
        assert torch.equal(tensor, saved[f"model.{name}"]), name
    words = f"--step: expected a step whose checkpoint the run has kept ({kept[0]}, 4), got 99"
    assert words in refused(capsys, "runs/tiny", "--step", "99", "--to", "new")


def test_an_export_is_made_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same export again changes nothing and says so; an empty folder is filled."""
    before = {p: p.stat().st_mtime_ns for p in Path("out/initial").iterdir()}
    assert main(["export", "tiny.yaml", "--to", "out/initial"]) == 0
    said = capsys.readouterr()
    assert said.out == "out/initial\n" and said.err == "already there: the model that RL starts from\n"
    assert {p: p.stat().st_mtime_ns for p in Path("out/initial").iterdir()} == before
    Path("empty").mkdir()
    assert main(["export", "tiny.yaml", "--to", "empty"]) == 0
    said = capsys.readouterr()
    assert said.out == "empty\n" and said.err == "exported the model that RL starts from\n"
    for name in ("config.json", "model.safetensors"):
        assert Path("empty", name).read_bytes() == Path("out/initial", name).read_bytes()
        assert Path("empty", name).stat().st_mode & 0o444 == 0o444
    files = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {p.name for p in Path("empty").iterdir()} == files


def test_a_folder_with_anything_else_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another model, one more file, one byte less, a file in the folder's place: refused, and left as they were."""
    words = "--to: expected a folder that is empty, absent or holds exactly this export"
    assert words in refused(capsys, "tiny.yaml", "--to", "out/trained")
    Path("out/initial/notes.txt").write_text("mine")
    assert words in refused(capsys, "tiny.yaml", "--to", "out/initial")
    assert Path("out/initial/notes.txt").read_text() == "mine"
    Path("out/initial/notes.txt").unlink()
    config = Path("out/initial/config.json")
    config.write_text(config.read_text()[:-1])
    assert words in refused(capsys, "tiny.yaml", "--to", "out/initial")
    assert words in refused(capsys, "tiny.yaml", "--to", "tiny.yaml")
    assert not list(Path("out").glob(".tmp-*"))


def test_what_cannot_be_exported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run without a checkpoint, a model of no public class, another world's config, no such path: one line each."""
    shutil.rmtree(next(Path("runs/tiny").iterdir()) / "checkpoints")
    assert "expected a run with a checkpoint, got none" in refused(capsys, "runs/tiny", "--to", "new")
    Path("own.yaml").write_text("base: tiny.yaml\nmodel: {shared_expert_size: 8}\n")
    assert "model: expected one that transformers has a class for" in refused(capsys, "own.yaml", "--to", "new")
    scaled = str(ROOT / "configs" / "demo_scaled" / "base.yaml")
    words = f"{scaled}: expected the folder of a run on the cluster, got a config"
    assert words in refused(capsys, scaled, "--to", "new")
    # A shipped config's name begins like the value of its field `backend`.
    assert refused(capsys, "scaled/minirl/n1", "--to", "new").startswith(
        "error: scaled/minirl/n1: expected the folder of a "
    )
    words = "--step: expected the folder of a run for it, got a config and step 2"
    assert words in refused(capsys, "tiny.yaml", "--step", "2", "--to", "new")
    assert "none.yaml: no such file" in refused(capsys, "none.yaml", "--to", "new")
    assert not Path("new").exists()


def test_a_checkpoint_of_another_model_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config that was edited to other sizes after the run does not fit its checkpoint, and the weight is named."""
    path = next(Path("runs/tiny").iterdir()) / "config.yaml"
    path.write_text(path.read_text().replace("expert_size: 24", "expert_size: 32"))
    assert "expected a checkpoint of the config's model with layers." in refused(capsys, "runs/tiny", "--to", "new")


def test_a_tasks_own_characters_go_along(home: Path) -> None:
    """The export of a model with a task of characters has them as its tokenizer: the ids that it was trained on."""
    task = open_task(config_of(home / "tiny.yaml"))
    tokenizer = load_tokenizer(home / "out" / "initial")
    prompt = task.prompts(0, 1)[0].tokens
    assert tokenizer.encode(task.tokenizer.decode(prompt)) == prompt
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (task.tokenizer.eos_id, task.tokenizer.vocab_size)


def test_an_opened_models_tokenizer_goes_along(here: Path) -> None:
    """The export of a model that was opened from a folder has its tokenizer, which encodes the same."""
    shutil.copytree("out/initial", "opened")
    alphabet = "0123456789+-=?"  # with <eos> no more than the model's 17 tokens
    raw = Tokenizer(models.BPE(vocab={"<eos>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>").save_pretrained("opened")
    Path("p.jsonl").write_text("".join(json.dumps({"problem": f"{i}?", "answer": "1"}) + "\n" for i in range(4)))
    Path("own.yaml").write_text(OPENED)
    assert main(["export", "own.yaml", "--to", "copy"]) == 0
    assert load_tokenizer("copy").encode("1+1=2") == load_tokenizer("opened").encode("1+1=2")
    ours, theirs = (load_file(Path(name, "model.safetensors")) for name in ("copy", "opened"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_folder_without_a_tokenizer_gets_the_tasks_own(here: Path) -> None:
    """A model opened without a tokenizer is exported with its task's characters, and with no ids of other tokens."""
    shutil.copytree("out/initial", "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path("bare", name).unlink()
    Path("bare", "generation_config.json").write_text('{"eos_token_id": 50279}')
    Path("bare.yaml").write_text("base: tiny.yaml\nmodel: {path: bare}\n")
    assert main(["export", "bare.yaml", "--to", "copy"]) == 0
    assert load_tokenizer("copy").encode("1+1=") == load_tokenizer("out/initial").encode("1+1=")
    files = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {p.name for p in Path("copy").iterdir()} == files


@pytest.mark.parametrize(
    "ids", [{"bos_token_id": 3, "eos_token_id": [5, 6], "pad_token_id": None}, {"bos_token_id": 1}]
)
def test_special_tokens_go_along(here: Path, ids: dict[str, Any]) -> None:
    """config.json of an opened model's export names the start, end and padding tokens that its own did."""
    shutil.copytree("out/initial", "opened")
    path = Path("opened", "config.json")
    fields = json.loads(path.read_text())
    fields = {name: value for name, value in fields.items() if not name.endswith("_token_id")} | ids
    path.write_text(json.dumps(fields))
    assert write(load_model("opened"), Path("opened"), Path("copy"))
    exported = json.loads(Path("copy", "config.json").read_text())
    assert {name: value for name, value in exported.items() if name.endswith("_token_id")} == ids
    theirs, ours = (transformers.AutoConfig.from_pretrained(name) for name in ("opened", "copy"))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(theirs, name) == getattr(ours, name)


def test_the_demo_model_suits_fp8_blocks() -> None:
    """Where an FP8 kernel has blocks of 128 x 128, the demo model's widths are multiples of 128."""
    block = config_of(ROOT / "configs" / "demo_scaled" / "model.yaml").model
    widths = [block.hidden_size, block.expert_size, block.num_heads * block.head_dim]
    assert all(width % 128 == 0 for width in widths), widths
    assert (block.num_experts, block.experts_per_token, block.num_layers) == (8, 2, 2)


def test_the_cluster_world_reads_the_export(home: Path) -> None:
    """scaled's one source of sizes takes the exported config.json, and its count of weights is the file's."""
    shape = load_shape(home / "out" / "initial")
    tensors = load_file(home / "out" / "initial" / "model.safetensors")
    assert shape.family == "qwen3_moe" and shape.num_parameters == sum(t.numel() for t in tensors.values())
