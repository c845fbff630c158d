"""Laws of the search for layouts: what is listed fits and is in order, what is not has a reason."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace

import pytest

from firstorder.cli import main
from lab.strict import ConfigError
from scaled.config import ScaledRun
from scaled.model_shape import load_shape
from scaled.plan import compute, feasibility, search_page
from scaled.plan.division import machines_needed
from scaled.plan.feasibility import with_fields
from scaled.plan.hardware import gpu_named
from scaled.plan.host_memory import peak_host_memory
from scaled.plan.memory import GIB
from scaled.plan.search import Search, _Tally, search
from scaled.plan.summary import make_plan
from tests.scaled.plan_world import OLMOE, QWEN, loaded

CONFIG = "configs/scaled/minirl/n2_r2.yaml"
ONE_MACHINE = ("--cluster.num_nodes", "1", "--algorithm.batch.num_prompts", "8")
H100, A100 = gpu_named("H100-80GB"), gpu_named("A100-80GB")


def config(*words: str) -> ScaledRun:
    return loaded("minirl/n2_r2", *words)


@pytest.fixture(scope="module")
def eight() -> Search:
    """Of Qwen3-30B at 34,816 tokens on 8 H100."""
    return search(config(*ONE_MACHINE), QWEN, H100)


def test_what_is_listed_fits_by_the_plan(eight):
    """Each layout's options make a config whose plan has no misfit, and the listed seconds; the quickest come first."""
    assert len(eight.found) == 11
    assert [found.step_s for found in eight.found] == sorted(found.step_s for found in eight.found)
    # Without context parallelism four fit.
    assert sum(found.config.training.context_parallel == 1 for found in eight.found) == 4
    for found in eight.found:
        words = shlex.split(" ".join(found.options))
        plan = make_plan(config(*ONE_MACHINE, *words))
        assert plan.misfits == []
        assert plan.compute.step_s == pytest.approx(found.step_s)
        assert plan.config.cluster.placement == "colocated" and plan.config.training.offload is not None


def test_a_layout_whose_pieces_last_too_long_is_none():
    """Where a piece outlasts rollout.timeout_s in all engines, no layout is listed, and that is the reason."""
    found = search(config(*ONE_MACHINE, "--rollout.timeout_s", "300"), QWEN, H100)
    reasons = {reason.what for reason in found.reasons}
    assert not found.found and "the longest wait for an engine exceeds rollout.timeout_s" in reasons


def test_a_layout_that_a_machine_has_no_memory_for_is_none(eight):
    """Where cluster.host_gib is given, a layout is listed if a machine has room for it too, and counted if not."""
    needs = sorted(peak_host_memory(found.config, QWEN).total / GIB for found in eight.found)
    less = needs[5] - 0.1
    found = search(config(*ONE_MACHINE, "--cluster.host_gib", f"{less:.3f}"), QWEN, H100)
    assert len(found.found) == sum(need <= less for need in needs) > 0 and found.num_tried == eight.num_tried
    (reason,) = (one for one in found.reasons if "CPU memory" in one.what)
    assert reason.count == len(eight.found) - len(found.found)


def test_every_layout_is_found_or_has_a_reason(eight):
    """Placements x (TP, CP) x PP x EP x recompute x offload: each is tried once; the closest misfit is one by its
    plan.
    """
    # Divisors of the ranks, TP x CP up to a machine: 8 colocated (with and without offload) and 2, 4 and 6 separate
    # ones.
    assert eight.num_tried == 3 * (2 * 10 * 4**2 + 4 * 2**2 + 8 * 3**2 + 10 * 4**2)
    nearest = {reason.what: reason.least for reason in eight.reasons}
    assert nearest["an update does not fit a GPU"].startswith("the closest misses by 0.7 GiB: 8 ranks colocated, TP 2,")
    near = ("--cluster.placement", "colocated", "--training.num_ranks", "8", "--training.tensor_parallel", "2",
            "--training.expert_parallel", "8", "--training.recompute", "full",
            "--rollout.num_engines", "4", "--rollout.gpu_memory_utilization", "0.8", "--rollout.timeout_s", "100000",
            "--training.offload", "[gradients, optimizer]")  # fmt: skip
    (line,) = feasibility.misfits(config(*ONE_MACHINE, *near), QWEN, H100)
    assert line.startswith("training: expected at most 76.6 GiB of H100-80GB's 79.6, got 77.3")


def test_the_command(capsys, monkeypatch):
    """--search prints the layouts with the options of the first and all reasons; where none fits, exit code 2. On a
    terminal of 80 columns no word of the table is cut or broken.
    """
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", CONFIG, "--search", *ONE_MACHINE]) == 0
    out = capsys.readouterr().out
    row = r" 8: TP \d CP \d PP \d EP \d +4 x 2 at 0\.\d +[\d., ]+kept +\d+ "
    rows = [line for line in out.splitlines() if re.fullmatch(row, line)]
    assert len(rows) == 10 and "\u2026" not in out
    assert "11 of 1704 layouts fit 8 H100-80GB" in out and "--training.offload '[gradients, optimizer]'" in out
    (command,) = (line for line in out.splitlines() if line.startswith("firstorder plan "))
    assert command.startswith(f"firstorder plan {CONFIG} {' '.join(ONE_MACHINE)} --cluster.placement colocated ")
    assert main([*shlex.split(command)[1:], "--no-dry-run"]) == 0
    capsys.readouterr()
    assert "an update does not fit a GPU; the closest misses by 0.7 GiB" in out.replace("\n", " ")
    assert main(["plan", CONFIG, "--search", "--json", *ONE_MACHINE, "--cluster.gpus_per_node", "4"]) == 2
    printed, err = capsys.readouterr()
    assert json.loads(printed)["found"] == []
    assert err.startswith(f"error: {CONFIG}: cluster: expected a layout of its GPUs that fits, got none of ")


def test_the_seconds_of_a_listed_step_add_up(eight):
    """Rollout and training follow each other, or the longer one counts; with push and turns they are the step's."""
    found = eight.found[0]
    for steps_off, between in ((0, sum), (1, max)):
        config = with_fields(found.config, "schedule", steps_off=steps_off)
        both = compute.together_seconds(config, found.rollout_s, found.training_s)
        one = replace(found, config=config, step_s=both + 20.0)
        (table,) = (search_page.search_table(config, Search([one], [])),)
        total, below = (cell.replace(",", "") for cell in next(iter(table.columns[3].cells)).split("\n"))
        numbers = [float(number) for number in re.findall(r"\d+", below)]
        assert len(numbers) == 3 and float(total) == pytest.approx(between(numbers[:2]) + numbers[2], abs=2)


def test_the_command_gives_the_time_that_the_search_listed(capsys):
    """The lengths that were given are in the printed command: its plan has the first layout's seconds."""
    lengths = ("--mean-tokens", "2000", "--longest-tokens", "9000")
    words = ("plan", CONFIG, "--search", *ONE_MACHINE, *lengths)
    assert main([*words, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["found"][0]["step_s"]
    assert main(words) == 0
    (command,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("firstorder plan "))
    assert main([*shlex.split(command)[1:], "--no-dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compute"]["step_s"] == pytest.approx(listed)


def test_what_is_listed_has_places_on_the_machines():
    """Two machines of 3 GPUs: pairs of ranks, which fit six GPUs by number alone, are not listed but counted."""
    sizes = ("--cluster.num_nodes", "2", "--cluster.gpus_per_node", "3", "--algorithm.batch.num_prompts", "6")
    found = search(config(*sizes), OLMOE, H100)
    assert found.found and {machines_needed(one.config) for one in found.found} == {2}
    counts = {reason.what: reason.count for reason in found.reasons}
    # Pairs of ranks by TP, CP or EP, six ways, one beside CP 3, and five beside PP 3, whose last stage has 4 of 16
    # layers; three kinds of recomputation, with and without offloading.
    assert counts["does not divide: cluster.num_nodes"] == 66
    # By what, with both numbers: the refusal that most of them get.
    usual = {reason.what.removeprefix("does not divide: "): reason.usual for reason in found.reasons}
    product = "tensor_parallel x context_parallel x pipeline_parallel"
    assert re.fullmatch(rf"mostly: expected a multiple of {product} = \d+, got 6", usual["training.num_ranks"])
    assert usual["cluster.num_nodes"].startswith("mostly: expected at least 3 machines of 3 GPUs for 6 ranks")
    assert all((reason.usual is None) != reason.what.startswith("does not divide: ") for reason in found.reasons)
    assert all(str(reason) == f"{reason.what}; {reason.usual or reason.least}" for reason in found.reasons)


def test_numbers_of_gpus_that_are_no_powers_of_two_have_layouts():
    """Two machines of 6 H100 hold Qwen3-30B, in 6 or 3 stages among others; without sizes of 3 and more nothing fits.
    Five GPUs of a machine are split between ranks and engines as well, though a quarter of them is no whole number.
    """
    sizes = ("--cluster.num_nodes", "2", "--cluster.gpus_per_node", "6", "--algorithm.batch.num_prompts", "8")
    found = search(config(*sizes), QWEN, H100).found
    stages = [one.config.training.pipeline_parallel for one in found]
    assert {3, 6} <= set(stages) and not {1, 2, 4} & set(stages)
    for one in found:
        assert make_plan(config(*sizes, *shlex.split(" ".join(one.options)))).misfits == []
    five = search(loaded("pr2/olmoe_off2", "--cluster.gpus_per_node", "5", "--cluster.gpu", "A100-80GB"), OLMOE, A100)
    splits = {(one.config.training.num_ranks, one.config.rollout.num_engines) for one in five.found}
    assert {(3, 2), (2, 3)} <= splits


def test_layers_that_do_not_divide_have_a_smaller_last_stage():
    """Qwen3-235B has 94 layers: four stages have 24, 24, 24 and 22, and the command that is printed plans them."""
    sizes = ("--model.shape", "qwen3-235b-a22b", "--cluster.num_nodes", "32", "--algorithm.batch.num_prompts", "128")
    own = config(*sizes)
    found = search(own, load_shape("nowhere", "qwen3-235b-a22b"), H100).found
    last = {one.config.training.pipeline_parallel: one.config.training.uneven_stages for one in found}
    assert last[4] == (None, 22) and last[2] == (None, None)
    four = next(one for one in found if one.config.training.pipeline_parallel == 4)
    assert make_plan(config(*sizes, *shlex.split(" ".join(four.options)))).misfits == []
    uneven = with_fields(own, "training", pipeline_parallel=4, num_layers_in_last_pipeline_stage=22)
    with pytest.raises(ConfigError, match="num_layers_in_last_pipeline_stage: expected null with --search"):
        search(uneven, QWEN, H100)


@pytest.mark.parametrize(("over", "words"), [(0.7, "0.7 GiB"), (0.06, "0.1 GiB"), (0.04, "41 MiB"), (1e-6, "1 MiB")])
def test_a_near_miss_is_more_than_nothing(over, words):
    """A miss that rounds to 0.0 GiB is said in MiB, of which there is at least one."""
    tally = _Tally()
    tally.add("an update does not fit a GPU", over, config())
    assert tally.reasons()[0].least.startswith(f"the closest misses by {words}: ")


def test_without_a_layout_there_is_no_table(capsys):
    """The reasons and the error stay; a table of headings and its legend would say nothing."""
    assert main(["plan", CONFIG, "--search", *ONE_MACHINE, "--cluster.gpus_per_node", "4"]) == 2
    out, err = capsys.readouterr()
    first, *reasons = out.splitlines()
    assert first.startswith("No layout fits: ") and "the closest misses by " in out
    assert reasons and all(set("\u2500\u2501\u2502").isdisjoint(line) for line in reasons)
    assert err.startswith(f"error: {CONFIG}: cluster: expected a layout of its GPUs that fits, got none of ")
