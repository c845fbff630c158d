"""`firstorder plan`: tables, JSON and sentences; test_plan_refusals.py has the configs that it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from firstorder.cli import main
from scaled.model_shape import SHAPES
from scaled.plan import layout, summary
from scaled.plan.day import Chance

CONFIG = "configs/scaled/minirl/n8_r3.yaml"
FILE = re.escape(f"{CONFIG}: ")


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", CONFIG, "--no-dry-run", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_is_the_whole_plan(capsys):
    """--json prints one object whose parts add up, and which says that the recipe fits."""
    code, out, err = plan(capsys, "--json")
    assert code == 0 and err == ""
    found = json.loads(out)
    assert found["fits"] and found["misfits"] == []
    for pool in found["memory_bytes"].values():
        assert sum(pool["parts"].values()) == pool["total"] <= pool["limit"]
    # 8,192 responses of 34,816 tokens at 48 x 8 ids: int8 ours, int32 theirs.
    payloads = found["payload_bytes"]
    assert payloads["mu's routing records, int8"] == 8192 * 34_816 * 48 * 8
    assert payloads["the same in Pr2's int32"] == 4 * payloads["mu's routing records, int8"]
    assert 30_532_122_624 < payloads["weights pushed to one engine"] < 1.03 * 30_532_122_624  # fp8, tables in bf16
    assert found["cluster"]["gpus_needed"] == 64
    assert found["assumptions"]


def test_tables_name_everything_that_is_asked(capsys):
    """The tables show every part of memory, payloads, compute and each assumption's number."""
    words = ("--algorithm.replay.mode", "Pr2", "--algorithm.objective.kl_coefficient", "1e-3")
    code, out, err = plan(capsys, *words)
    assert code == 0 and err == ""
    for part in (
        "weights", "gradients, fp32", "optimizer states", "activations", "logits", "reference weights",
        "replayed experts, int64", "features of a micro-batch", "KV of 80 sequences", "routing records",
        "router features", "weights pushed", "PFLOP", "GPU hours", "Assumptions", "data sheet", "--mean-tokens",
    ):  # fmt: skip
        assert part in out, part


@pytest.mark.parametrize(("steps_off", "label"), [(0, "total"), (1, "total, rollout beside training")])
def test_the_seconds_of_a_step_add_up(capsys, steps_off, label):
    """Those of the stages are the total's, of rollout and training the longer one where sampling runs ahead; the line
    says so. A pass that no KL penalty asks for is not named."""
    words = ("--schedule.steps_off", str(steps_off))
    _, out, _ = plan(capsys, *words)
    lines = [line.strip() for line in out.partition("Compute of a global step")[2].splitlines()]
    rows = [line.split("  ") for line in lines if line[-1:].isdigit() and "  " in line]
    found = {name: float(seconds.replace(",", "")) for name, *_, seconds in rows}
    rollout, training = found["rollout"], found["updates, padded (seconds of both lines)"]
    both = max(rollout, training) if steps_off else rollout + training
    assert found[label] == pytest.approx(both + found["push"], abs=2)
    assert "old pass, padded" in found
    _, out, _ = plan(capsys, *words, "--algorithm.objective.kl_coefficient", "1e-3")
    assert "old and reference pass, padded" in out


def test_tables_say_whose_numbers_they_have(capsys):
    """Memory is that of the fullest machine, it and payloads are at full length, and a push has its rate to each
    machine, whether ranks quantise or not."""
    for weights in ("fp8_block", "same"):
        _, out, _ = plan(capsys, "--rollout.precision.weights", weights)
        text = " ".join(out.split())
        assert "CPU memory of the fullest machine, GiB; 34,816 tokens a sequence" in text
        assert "Payloads of a global step; 34,816 tokens a sequence" in text
        assert "a push 2.8 GB/s into each machine, from ranks to engines over the object store" in text
        assert ", (" not in text


def test_one_thing_is_not_counted_as_several(capsys):
    """An engine of one GPU, and a batch in one mini-batch; several have their s."""
    words = ("--algorithm.batch.num_minibatches", "1", "--rollout.num_engines", "1", "--rollout.tensor_parallel", "1")
    _, one, _ = plan(capsys, *words, "--rollout.precision.weights", "same", "--rollout.max_num_seqs", "4")
    _, several, _ = plan(capsys)
    for text, said in ((one, ("in 1 mini-batch; ", "1 engine of 1 GPU ")),
                       (several, ("in 8 mini-batches; 54 micro-batches ", "16 engines of 2 GPUs "))):  # fmt: skip
        assert [words for words in said if words not in " ".join(text.split())] == []


def test_simulated_hours_as_json_and_as_a_sentence(capsys):
    """--simulate says the steps in a sentence, and as JSON every scenario; the first one is the recipe."""
    small = ("--algorithm.batch.num_prompts", "64", "--algorithm.batch.num_minibatches", "1", "--simulate", "2")
    code, out, _ = plan(capsys, *small, "--json")
    found = json.loads(out)
    assert code == 0
    assert [one["scenario"] for one in found] == [
        "as it is", "no failures", "engines equally fast", "every length the mean", "fixed shares",
        "schedule.steps_off 1", "schedule.steps_off 2", "schedule.steps_off 4", "16 extra prompts, kept",
        "padded, one at a time", "checkpoint.every 1", "checkpoint.every 50",
    ]  # fmt: skip
    code, out, _ = plan(capsys, *small)
    assert code == 0 and out.startswith(f"{found[0]['num_steps']} steps in 2 hours, ") and "checkpoint.every 1" in out
    # Rates that the plan cannot know are said: on a slow disk a save takes longer.
    assert "checkpoints are written at 2 GB/s" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--simulate", "0"), "--simulate: expected more than 0"),
        (("--simulate", "1", "--failures", "1e-6"), "--failures: expected at least "),
        (("--failures", "5000"), "--failures: expected with --simulate HOURS, got 5000.0 without it"),
        (("--search", "--simulate", "2"), "--simulate: expected without --search, got 2 with it"),
        (("--search", "--dry-run"), "--dry-run: expected without --search, got it with"),
        (("--simulate", "2", "--dry-run"), "--dry-run: expected without --simulate, got it with"),
        (("--search", "--rates", "runs/x"), "--rates: expected with --simulate HOURS, got runs/x without it"),
    ],
)
def test_impossible_hours_are_one_line(capsys, words, said):
    code, out, err = plan(capsys, *words)
    assert code == 2 and out == "" and said in err and len(err.strip().splitlines()[-1]) <= 300


def test_the_help_has_the_failures_that_the_simulation_takes(capsys):
    """The GPU hours between two failures in the help of --failures are those that --simulate says."""
    assert main(["plan", "--help"]) == 0
    assert f"; {Chance().gpu_hours_per_failure:,.0f} (Llama 3" in " ".join(capsys.readouterr().out.split())


def test_overrides_before_and_after_the_config(capsys):
    """Options may stand on either side of CONFIG, as in `firstorder train`."""
    assert main(["plan", "--cluster.gpu", "H200-141GB", CONFIG, "--no-dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"]["gpu"]["name"] == "H200-141GB"


def test_the_object_stores_sentence_has_the_pushs_rate(capsys):
    """The rate of a push is that of the sentence that sums up the object store, with its routes and its weights."""
    for room, rate, end in (("38", "2.8", "spills to disk."), ("37", "0.14", "object_store_gib avoids that.")):
        code, out, _ = plan(capsys, "--cluster.object_store_gib", room, "--json")
        found = json.loads(out)
        (push,) = (line for line in found["assumptions"] if "; a push" in line)
        (store,) = (line for line in found["assumptions"] if "the fullest object store" in line)
        assert code == 0 and f"; a push {rate} GB/s into each machine, " in push and store.endswith(end)
        assert "routing records, the weights of the last push: 37.4 GiB at the mean length, 104 at full" in store
        assert "after the updates it held 45.5, at full length 130." in store
        sent = found["payload_bytes"]["weights pushed to one engine"] / float(rate) / 1e9
        assert found["compute"]["push_s"] == pytest.approx(sent, abs=7)  # ranks quantise before, for 6 s


def test_a_sandbox_config_is_refused(capsys):
    """Only a config of the cluster can be planned."""
    assert main(["plan", "configs/smoke.yaml"]) == 2
    assert "backend: expected a config of the cluster (scaled), got sandbox" in capsys.readouterr().err


def test_planning_imports_no_engine():
    """Without the dry run, planning imports neither Megatron nor vLLM nor Ray."""
    code = (
        "import sys; from firstorder.cli import main; "
        f"assert main(['plan', '{CONFIG}', '--no-dry-run', '--json']) == 0; "
        "loaded = {name.split('.')[0] for name in sys.modules} & {'megatron', 'vllm', 'ray', 'transformers'}; "
        "sys.exit(f'imported {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_without_megatron_the_dry_run_is_left_out(capsys, monkeypatch):
    """The plan is whole without Megatron-core, and one line on stderr says that nothing was built."""
    monkeypatch.setattr(summary, "has_megatron", lambda: False)
    assert main(["plan", CONFIG, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"] and json.loads(out)["dry_run"] == []
    assert err == "the dry run is skipped: megatron-core, which builds the ranks, is not installed\n"


def test_the_dry_run_is_part_of_the_plan(capsys):
    """By default Megatron builds the stages: its ranks have the plan's weights, and --json holds them."""
    words = ["--training.pipeline_parallel", "2", "--json"]
    assert main(["plan", CONFIG, *words]) == 0
    found = json.loads(capsys.readouterr().out)
    ranks = found["dry_run"]
    assert [rank["layers"] for rank in ranks] == [[list(range(24))], [list(range(24, 48))]]
    assert [rank["num_local_experts"] for rank in ranks] == [16, 16]
    # 2.0094B: TP 4, PP 2, EP 8 of world 32.
    assert {round((rank["dense_parameters"] + rank["expert_parameters"]) / 1e9, 4) for rank in ranks} == {2.0094}


@pytest.mark.parametrize(("num_experts", "said"), [(128, "; 16 experts per MoE layer; "), (0, "; 1.5")])
def test_experts_of_a_rank_are_said_where_it_has_some(capsys, tmp_path, monkeypatch, num_experts, said):
    """The table's row of a built rank names experts per MoE layer, and none for a model without experts."""
    fields = json.loads((SHAPES / "qwen3-30b-a3b.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(fields | {"num_experts": num_experts}), encoding="utf-8")
    rank = layout.RankPlan(0, 0, (tuple(range(48)),), min(num_experts, 16), 1_500_000_000, 0, 0, 8, 1, 0, 0, 0, 0)
    monkeypatch.setattr(summary, "dry_run_layout", lambda plan: [rank])
    monkeypatch.setattr(summary, "has_megatron", lambda: True)
    assert main(["plan", CONFIG, "--model.path", str(tmp_path), "--model.shape", "null"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "built, rank 0" in line)
    assert f"layers 0 to 47{said}" in row and ("experts" in row) == (num_experts > 0)


def test_empty_micro_batches_are_said(capsys):
    """Interleaved, 11 micro-batches become 12, as in the run; in multiples of PP none is added."""
    words = ("--training.pipeline_parallel", "4", "--training.virtual_pipeline", "3", "--training.micro_batch_size",
             "1", "--training.max_tokens_per_micro_batch", "null", "--algorithm.batch.num_minibatches", "1",
             "--algorithm.batch.num_responses", "2", "--algorithm.batch.num_prompts", "--json")  # fmt: skip
    said = {}
    for prompts in ("11", "12"):
        code, out, _ = plan(capsys, *words[:-1], prompts, words[-1])
        found = json.loads(out)
        assert code == 0 and found["compute"]["num_micro"] == 12
        said[prompts] = [line for line in found["assumptions"] if line.startswith("Interleaved 1F1B")]
    assert said["12"] == [] and len(said["11"]) == 1 and "update's 11 are filled up to 12" in said["11"][0]


@pytest.mark.parametrize("mode", ["none", "R3", "Pr2"])
def test_a_model_without_experts_is_planned(capsys, tmp_path, mode):
    """Exit code 0 and 0 bytes of routes in every mode where config.json has num_experts 0."""
    fields = json.loads((SHAPES / "qwen3-30b-a3b.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(fields | {"num_experts": 0}), encoding="utf-8")
    words = ("--model.path", str(tmp_path), "--model.shape", "null", "--algorithm.replay.mode", mode, "--json")
    code, out, err = plan(capsys, *words)
    found = json.loads(out)
    assert (code, err) == (0, "") and found["parameters"]["all"] == found["parameters"]["active"]
    assert not any("rout" in name and size for name, size in found["payload_bytes"].items())


def test_a_dry_run_beyond_its_limit_is_left_out(capsys, monkeypatch):
    """The plan is whole and the exit code 0; one line on stderr has the limit."""
    monkeypatch.setattr(layout, "LIMIT_S", 0.05)
    assert main(["plan", CONFIG, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"] and json.loads(out)["dry_run"] == []
    assert err == "the dry run is left out: it took longer than 0.05 s\n"
