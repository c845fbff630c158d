"""Laws of treatments: what a run is named by, and the one colour of those that differ in the seed alone."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.records import RunFolder
from lab.report.overview import reward_picture
from lab.report.run_page import render
from lab.report.runs import load_runs
from lab.report.story import story
from lab.report.treatments import groups
from tests.lab.browser import payload
from tests.lab.synthetic_runs import BF16, DEMO, EXACT, FP8, Recipe, write_demo, write_run

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
        ["without a remedy under FP8 weights, scaled per channel", "without a remedy under BF16 KV cache",
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
        ["without a remedy under FP8 weights, scaled per channel", "with a dual clip + BF16 KV cache"],
    ),
    "centering is a remedy, and so is a region that holds pi/mu": (
        [Recipe("a", 0, 0), Recipe("b", 0, 0, correction="null, centering: full"), Recipe("c", 0, 0, preset="vespo")],
        ["without a remedy", "with score centering", "with VESPO"],
    ),
    "an exact engine beside a trainer with arithmetic of its own is none": (
        [Recipe("a", 0, 0, engine=FP8), Recipe("b", 0, 0, engine=f"{EXACT}\ntraining: {{products: fp8_e4m3}}"),
         Recipe("c", 0, 0, engine=f"{EXACT}\ntraining: {{reduction_order: {{units: 4}}}}")],
        ["without a remedy under FP8 weights, scaled per channel",
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
        ["without a remedy under FP8 weights, scaled per channel at N = 4",
         "without a remedy under BF16 KV cache at N = 1"],
    ),
    "most have one engine and one N": (
        [Recipe("a", 0, 0), Recipe("b", 0, 0, engine=BF16), Recipe("c", 0, 0, num_minibatches=1)],
        ["without a remedy", "without a remedy under BF16 KV cache", "without a remedy at N = 1"],
    ),
    "an exact engine is named where most are": (
        [Recipe("a", 0, 0, engine=EXACT), Recipe("b", 0, 0, engine=EXACT, mode="R3"), Recipe("c", 0, 0)],
        ["with an exact engine", "with R3 + an exact engine", "without a remedy"],
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


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """Three seeds each without a remedy and with R3, by turns; two of those without a remedy fell."""
    root, fell = tmp_path_factory.mktemp("runs"), 30
    none = [Recipe("demo-none", 4e-3, 0.12, collapses_at=at) for at in (None, fell, fell)]
    r3 = [Recipe("demo-r3", 4e-4, 0.08, mode="R3") for _ in none]
    pairs = enumerate(zip(none, r3, strict=True))
    return [write_run(root, recipe, seed, 60) for seed, pair in pairs for recipe in pair]


def test_runs_of_one_treatment_share_colour_and_name(seeds: list[RunFolder], tmp_path: Path) -> None:
    """They are counted within it. Each run has a colour where no two are of one treatment, and where all are."""
    found = [(run.index, run.replicate, run.treatment) for run in load_runs(seeds)]
    assert found == [(i % 2, i // 2, ("none", "r3")[i % 2]) for i in range(6)]
    for folders in (write_demo(tmp_path, DEMO, num_steps=1), seeds[::2]):
        alone = load_runs(folders)
        assert [(run.index, run.replicate) for run in alone] == [(i, 0) for i in range(len(folders))]
        assert [run.treatment for run in alone] == [run.label for run in alone]


def test_a_treatment_has_one_button_one_label_and_one_colour(seeds: list[RunFolder]) -> None:
    """Legend, labels, tables and story have two colours for six runs; dashes tell the three lines of a colour apart."""
    html = render(seeds)
    buttons = re.findall(r'<button [^>]*data-run="(\d)".*?</button>', html, re.DOTALL)
    assert buttons == ["0", "1"] and payload(html)["num_runs"] == 2
    legend = html.split('aria-label="Runs"')[1].split("</nav>")[0]
    badges = [re.findall(r'badge \w+">(.*?)<', button) for button in legend.split("</button>")[:2]]
    assert badges == [["2 collapsed", "1 stable"], ["3 stable"]]
    assert re.findall(r'<tr class="ink-(\d)"', html.split("<tbody>")[1].split("</tbody>")[0]) == list("010101")
    figures = {figure["id"]: figure for figure in payload(html)["figures"]}
    for figure in figures.values():
        assert {trace["meta"]["run"] for trace in figure["data"]} <= {0, 1}
    for name in ("reward", "k3-kl", "entropy", "extreme-curve"):
        dashes = {run: _dashes(figures[name], run) for run in (0, 1)}
        assert len(set(dashes[0])) == 3 and dashes[0] == dashes[1]
    assert [label["name"] for label in figures["entropy"]["layout"]["annotations"]] == ["run-0", "run-1"]
    texts = [label["text"] for label in figures["reward"]["layout"]["annotations"]]
    assert texts == ["none ✕ 2 of 3", "r3", "none ✕", "r3"]
    inks = {
        (words.text, words.run) for said in story(load_runs(seeds)).sentences for words in said if words.run is not None
    }
    assert {("Without a remedy", 0), ("without a remedy", 0), ("R3", 1)} == inks


def test_the_first_picture_says_which_dash_is_which_seed(tmp_path: Path) -> None:
    """By seed where the treatments agree, by run where they do not; hovering names more runs than a note can."""
    r3 = Recipe("r3", 4e-4, 0.08, mode="R3")
    noted = [
        ([("none", 1), ("r3", 1), ("none", 2), ("r3", 2)], "apart (solid: seed 1; dashed: seed 2)."),
        ([("none", 1), ("none", 2), ("r3", 2)], "apart (solid: none-1 and r3-2; dashed: none-2)."),
        ([("none", 1)] + [("r3", seed) for seed in range(8)], "apart, and hovering names them."),
        ([("none", 1), ("r3", 2)], ""),
    ]
    for number, (wanted, words) in enumerate(noted):
        made = [
            write_run(tmp_path / str(number), replace(r3 if name == "r3" else DEMO[0], name=f"{name}-{seed}"), seed, 5)
            for name, seed in wanted
        ]
        picture = reward_picture(load_runs(made))
        assert picture is not None and picture.note.endswith(words) and ("dashes" in picture.note) == bool(words)
    twice = [replace(DEMO[0], name="here"), replace(DEMO[0], name="elsewhere"), r3]
    picture = reward_picture(load_runs([write_run(tmp_path / "twice", recipe, 3, 5) for recipe in twice]))
    assert picture is not None and picture.note.endswith("apart (solid: here and r3; dashed: elsewhere).")


def _dashes(figure: dict[str, Any], run: int) -> list[str]:
    return [t["line"]["dash"] for t in figure["data"] if t["meta"] == {"run": run, "role": "line"}]


def test_a_treatments_label_stands_at_the_middle_of_its_ends(seeds: list[RunFolder]) -> None:
    """Of three lines, at the end of the one that ends between the others."""
    (figure,) = (figure for figure in payload(render(seeds))["figures"] if figure["id"] == "entropy")
    for run, label in enumerate(figure["layout"]["annotations"]):
        ends = sorted(t["y"][-1] for t in figure["data"] if t["meta"] == {"run": run, "role": "line"})
        assert (label["x"], label["y"]) == (60, ends[1]) and len(ends) == 3


def test_bars_of_one_colour_have_gaps(seeds: list[RunFolder]) -> None:
    """Three bars of one treatment are no block; where each run has its colour, bars touch as ever."""
    gaps = [
        {figure["layout"].get("bargroupgap", 0) for figure in payload(render(some))["figures"] if _is_bars(figure)}
        for some in (seeds, seeds[:2])
    ]
    assert gaps[0] == {0.12} and gaps[1] == {0}


def _is_bars(figure: dict[str, Any]) -> bool:
    return figure["data"][0]["type"] == "bar"


def test_another_trainer_is_another_treatment(tmp_path: Path) -> None:
    """Its own settings may be a remedy, so that such a run is not one without."""
    made = [write_run(tmp_path, replace(DEMO[1], name=name), 3, 5) for name in ("here", "there", "masked")]
    for folder, own in zip(made[1:], ({}, {"vllm_importance_sampling_correction": True}), strict=True):
        folder.write_manifest(folder.manifest() | {"trainer": "GRPOTrainer of TRL 1.16.0", "trainer_settings": own})
    words = [group.words for group in groups(load_runs(made))]
    assert words == ["without a remedy", "with another trainer", "with another trainer and its own settings"]
    other = write_run(tmp_path, replace(DEMO[1], name="other", engine=BF16), 3, 5)
    masked = groups(load_runs([made[2], other]))[0]
    assert masked.preposition == "with" and masked.name.startswith("another trainer and its own settings")
