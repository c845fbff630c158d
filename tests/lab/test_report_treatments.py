"""Laws of treatments: what a run is named by."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.report.runs import load_runs
from lab.report.treatments import groups
from tests.lab.synthetic_runs import BF16, EXACT, FP8, Recipe, write_run

NAMES: dict[str, tuple[list[Recipe], list[str]]] = {
    "one engine, three objectives": (
        [Recipe("a", 0, 0), Recipe("b", 0, 0, preset="gspo"), Recipe("c", 0, 0, preset="minirl", mode="R3")],
        ["without a remedy", "with GSPO", "with MiniRL + R3"],
    ),
    "exact engines alone have no gap to remedy": (
        [Recipe("a", 0, 0, engine=EXACT), Recipe("b", 0, 0, preset="gspo", engine=EXACT)],
        ["with GRPO", "with GSPO"],
    ),
    "engines differ in more than being exact": (
        [Recipe("a", 0, 0, engine=FP8), Recipe("b", 0, 0, engine=BF16), Recipe("c", 0, 0, engine=EXACT)],
        ["without a remedy under weight precision fp8_e4m3 channel", "without a remedy under kv precision bf16",
         "with an exact engine"],
    ),
    "a weight of its own, and one put in its place": (
        [Recipe("a", 0, 0, preset="minirl"), Recipe("b", 0, 0, preset="minirl_no_is"),
         Recipe("c", 0, 0, preset="minirl", correction="{name: icepop}")],
        ["with MiniRL", "without a remedy", "with MiniRL + IcePop"],
    ),
    "a dual clip is a remedy, of the objective without it": (
        [Recipe("a", 0, 0), Recipe("b", 0, 0, preset="grpo_dual_clip"),
         Recipe("c", 0, 0, preset="ppo_dual_clip", mode="R3")],
        ["without a remedy", "with a dual clip", "with PPO + R3 + a dual clip"],
    ),
    "a dual clip is a remedy where engines differ": (
        [Recipe("a", 0, 0, engine=FP8), Recipe("b", 0, 0, preset="grpo_dual_clip", engine=BF16)],
        ["without a remedy under weight precision fp8_e4m3 channel", "with a dual clip + kv precision bf16"],
    ),
    "centering is a remedy, and so is a region that holds pi/mu": (
        [Recipe("a", 0, 0), Recipe("b", 0, 0, correction="null, centering: full"), Recipe("c", 0, 0, preset="vespo")],
        ["without a remedy", "with score centering", "with VESPO"],
    ),
    "an exact engine beside a trainer with arithmetic of its own is none": (
        [Recipe("a", 0, 0, engine=FP8), Recipe("b", 0, 0, engine=f"{EXACT}\ntraining: {{products: fp8_e4m3}}"),
         Recipe("c", 0, 0, engine=f"{EXACT}\ntraining: {{reduction_order: {{units: 4}}}}")],
        ["without a remedy under weight precision fp8_e4m3 channel",
         "without a remedy under exact (training products in fp8_e4m3)",
         "without a remedy under exact (training sums in up to 4 parts)"],
    ),
    "N alone": (
        [Recipe("a", 0, 0), Recipe("b", 0, 0, num_minibatches=1)],
        ["without a remedy at N = 4", "without a remedy at N = 1"],
    ),
    "N is told where most have another": (
        [Recipe("a", 0, 0), Recipe("b", 0, 0, mode="R3"), Recipe("c", 0, 0, mode="R3", num_minibatches=1),
         Recipe("d", 0, 0, engine=EXACT), Recipe("e", 0, 0, num_minibatches=2)],
        ["without a remedy", "with R3", "with R3 at N = 1", "with an exact engine", "without a remedy at N = 2"],
    ),
    "N and the engine": (
        [Recipe("a", 0, 0, engine=FP8), Recipe("b", 0, 0, engine=BF16, num_minibatches=1)],
        ["without a remedy under weight precision fp8_e4m3 channel at N = 4",
         "without a remedy under kv precision bf16 at N = 1"],
    ),
    "what the config does not name is told by label": (
        [Recipe("rate-1", 0, 0, engine=f"{FP8}\ntraining: {{x: 1}}"), Recipe("rate-2", 0, 0)],
        ["in 1", "in 2"],
    ),
    "an objective that nobody knows": ([Recipe("a", 0, 0, preset="later")], ["in a"]),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMES)
def test_a_run_is_named_by_what_it_alone_has(tmp_path: Path, case: str) -> None:
    """Objective, correction, replay and engine, as far as they differ; two runs never share a name."""
    recipes, names = NAMES[case]
    found = groups(load_runs([write_run(tmp_path, recipe, 0, 5) for recipe in recipes]))
    assert [group.words for group in found] == names


SWEEPS: dict[str, tuple[list[tuple[str, int, int]], list[str]]] = {
    "one name per config": ([("hot", 1, 0), ("hot", 1, 1), ("cold", 2, 0), ("cold", 2, 1)], ["in hot", "in cold"]),
    "a name per run": ([("hot-a", 1, 0), ("hot-b", 1, 1), ("cold", 2, 0)], ["in hot", "in cold"]),
    "one name for all": ([("a", 1, 0), ("a", 1, 1), ("a", 2, 2), ("a", 2, 3)], ["in 0 and 1", "in 2 and 3"]),
    "a prefix that another config's run has too": (
        [("x-1", 1, 0), ("x-2", 1, 1), ("x-3", 2, 0), ("y", 3, 0)], ["in x-1 and x-2", "in x-3", "in y"]
    ),
    "a prefix that is another config's name": (
        [("x-1", 1, 0), ("x-2", 1, 1), ("x", 2, 0), ("x", 2, 1)], ["in x-1 and x-2", "in x"]
    ),
    "one config that has no treatment": ([("a", 1, 0), ("a", 1, 1)], ["in a"]),
}  # fmt: skip


@pytest.mark.parametrize("case", SWEEPS)
def test_several_runs_are_named_by_what_they_share(tmp_path: Path, case: str) -> None:
    """Where configs share a treatment, a group has no single run's name, and no name that fits another group."""
    made, names = SWEEPS[case]
    preset = "later" if case == "one config that has no treatment" else "grpo"
    recipes = [(Recipe(name, 0, 0, preset, engine=f"{FP8}\ntraining: {{x: {rate}}}"), s) for name, rate, s in made]
    found = groups(load_runs([write_run(tmp_path, recipe, seed, 5) for recipe, seed in recipes]))
    assert [group.words for group in found] == names
