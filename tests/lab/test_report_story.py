"""Laws of the report's first screen: words and crosses are the records', and a run is named by what it alone has."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from lab.levels import trailing_mean
from lab.records import RunFolder
from lab.report.overview import reward_picture
from lab.report.runs import ReportRun, load_runs
from lab.report.story import MANY, Story, Words, first_step, story
from lab.report.treatments import REPLAY
from tests.lab.synthetic_runs import DEMO, FP8, Recipe, write_demo, write_run
from theory import objectives
from theory.routing.passes import PASSES

SIX = DEMO[:6]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[ReportRun]:
    """The six runs of the demo, made up: those without a remedy and with R2 collapsed."""
    return load_runs(write_demo(tmp_path_factory.mktemp("runs"), SIX))


def headline(told: Story) -> str:
    """The headline as text."""
    return " ".join(map(spoken, told.headline))


def spoken(sentence: Sequence[Words]) -> str:
    """A sentence as text."""
    return "".join(words.text for words in sentence)


def change_verdict(folder: RunFolder, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes verdict.json in place."""
    path = folder.path / "verdict.json"
    verdict = json.loads(path.read_text())
    change(verdict)
    path.write_text(json.dumps(verdict))


def test_the_headline_groups_runs_by_their_verdicts(runs: list[ReportRun]) -> None:
    """Collapsed first, then held, each run by what it alone has, in its own colour."""
    told = story(runs)
    assert headline(told) == (
        "Training collapsed without a remedy and with R2. It held with an exact engine, Token-TIS, R3 and MiniRL."
    )
    coloured = [(words.text, words.run) for sentence in told.headline for words in sentence if words.run is not None]
    names = ["without a remedy", "R2", "an exact engine", "Token-TIS", "R3", "MiniRL"]
    assert coloured == list(zip(names, [1, 2, 0, 3, 4, 5], strict=True))


def test_the_sentences_have_the_records_numbers(runs: list[ReportRun]) -> None:
    """Each rule that fired with its step, each run's accuracy and mean KL, and the formula of each weight."""
    text = story(runs).text
    for run in runs:
        assert (first_step(run) is not None) == (run.label in ("none", "r2"))
        for reason in (run.verdict or {})["reasons"]:
            assert f"at step {reason['step']}" in text
    none = (runs[1].verdict or {})["reasons"]
    fall = next(reason for reason in none if reason["rule"] == "reward_fall")
    value = float(f"{fall['value']:.2g}")
    assert f"the reward fell to {value:.2g}, below half of its peak, at step {fall['step']}" in text
    blowup = next(reason for reason in none if reason["rule"] == "kl_blowup")
    assert f"rose above {blowup['threshold']:.2g} nats per token at step {blowup['step']}" in text
    for name, run in zip(("without a remedy", "with R3"), (runs[1], runs[4]), strict=True):
        values = [value for _, value in run.series("eval/accuracy")]
        assert f"from {values[0]:.2f} to {values[-1]:.2f} {name}" in text
        kl = float(f"{fmean(value for _, value in run.series('rollout_corr/k3_kl')):.2g}")
        assert any(f"{shown} {name}" in text for shown in (f"{kl:g}", f"{kl:.1e}".replace("e-0", "e-"))), (kl, text)
    assert "Token-TIS weighs each token by min(old_t/mu_t, 2); " in text
    assert "MiniRL weighs each token by min(pi_t/mu_t, 5)." in text and "R3 replays mu's experts" in text


def test_the_story_follows_the_verdicts(tmp_path: Path) -> None:
    """Another verdict is another story: held, unfinished, undecided, recovered, without entropy, remarked on, a
    rule yet unknown."""
    folders = write_demo(tmp_path, SIX[3:5])
    assert headline(story(load_runs(folders))) == "Both runs held."
    change_verdict(folders[1], lambda v: v.update(remarks=["The reward ends at 0.1, below 0.75 of its 0.2 at first."]))
    assert "With R3 the reward ends at 0.1, below 0.75 of its 0.2 at first." in story(load_runs(folders)).text
    change_verdict(folders[0], lambda v: v.update(verdict="undecided"))
    assert headline(story(load_runs(folders))) == "Training held with R3. It is undecided with Token-TIS."
    (folders[0].path / "verdict.json").unlink()
    assert headline(story(load_runs(folders))) == "Training held with R3. It is unfinished with Token-TIS."
    reason = {"rule": "reward_fall", "step": 9, "threshold": 0.2, "recovered": True, "sentence": "x"}
    change_verdict(folders[1], lambda v: v.update(verdict="collapsed", first_step=9, reasons=[reason], remarks=[]))
    assert ", at step 9, and recovered." in story(load_runs(folders)).text
    lost = {"rule": "entropy_collapse", "step": 9, "threshold": 0.01, "reward_held": True, "sentence": "x"}
    change_verdict(folders[1], lambda v: v.update(reasons=[lost]))
    assert "nats per token at step 9, while the reward held." in story(load_runs(folders)).text
    reason |= {"rule": "another", "sentence": "Something happened at step 9."}
    change_verdict(folders[1], lambda v: v.update(reasons=[reason]))
    assert "With R3 Something happened at step 9." in story(load_runs(folders)).text


def test_one_run_is_told_by_its_verdict(tmp_path: Path) -> None:
    """Its verdict and steps, its accuracy from and to, its KL; no name where there is nothing to tell it from."""
    held, fell = write_demo(tmp_path, (SIX[4], SIX[1]))
    told = story(load_runs([held]))
    assert headline(told) == "Training held for 60 steps."
    (run,) = load_runs([held])
    accuracy = [value for _, value in run.series("eval/accuracy")]
    assert (
        f"Held-out accuracy went from {accuracy[0]:.2f} to {accuracy[-1]:.2f}. The KL between mu and old" in told.text
    )
    step = first_step(load_runs([fell])[0])
    assert headline(story(load_runs([fell]))) == f"Training collapsed at step {step} of 60."
    (held.path / "verdict.json").unlink()
    assert headline(story(load_runs([held]))) == "The run is unfinished after 60 steps."
    short = write_run(tmp_path, Recipe("short", 0, 0), 0, 1)
    assert headline(story(load_runs([short]))) == "The run is undecided after 1 step."


def test_no_group_without_a_remedy_seems_to_have_one(tmp_path: Path) -> None:
    """Of two such groups in one list each has its own `without`."""
    recipes = [Recipe("a", 0, 0), Recipe("b", 0, 0, num_minibatches=1), SIX[2]]
    told = story(load_runs([write_run(tmp_path, recipe, 0, 60) for recipe in recipes]))
    assert headline(told) == "Training collapsed with R2. It held without a remedy and without a remedy at N = 1."


def test_a_dual_clip_is_explained(tmp_path: Path) -> None:
    """Its bound stands in the notes, the first word with a capital."""
    folders = [write_run(tmp_path, Recipe(name, 0, 0, preset=name), 0, 5) for name in ("grpo", "grpo_dual_clip")]
    assert story(load_runs(folders)).notes[0] == "A dual clip bounds pi/old at 3 where the advantage is negative."


def test_seeds_of_one_config_are_one_group(tmp_path: Path) -> None:
    """Seeds are counted, not named, and their numbers are means; so are groups where a sentence cannot hold them."""
    seeds = [write_run(tmp_path, recipe, seed, 60) for recipe in SIX[1:5:3] for seed in (1, 2)]
    told = story(load_runs(seeds))
    assert headline(told) == "Training collapsed without a remedy. It held with R3."
    fallen, again = (first_step(run) for run in load_runs(seeds[:2]))
    assert fallen == again and f"Without a remedy 2 of 2 runs collapsed, both at step {fallen}." in told.text
    means = [fmean(run.series("eval/accuracy")[-1][1] for run in load_runs(pair)) for pair in (seeds[:2], seeds[2:])]
    assert f"to {means[0]:.2f} without a remedy" in told.text and f"{means[1]:.2f} with R3" in told.text
    assert "several seeds" in told.text and "One run each" not in told.text
    change_verdict(seeds[0], lambda verdict: verdict.pop("first_step"))  # as edited by hand: its reasons remain
    assert story(load_runs(seeds)).text == told.text
    change_verdict(seeds[0], lambda verdict: [reason.update(step=7) for reason in verdict["reasons"]])
    assert f"Without a remedy 2 of 2 runs collapsed, at steps 7 and {fallen}." in story(load_runs(seeds)).text
    (seeds[1].path / "verdict.json").unlink()
    assert headline(story(load_runs(seeds))) == "Of 4 runs 1 collapsed, 2 held and 1 is unfinished."
    rates = [Recipe(f"rate-{i}", 0, 0, engine=f"{FP8}\ntraining: {{x: {i}}}") for i in range(MANY + 1)]
    many = story(load_runs([write_run(tmp_path / "many", recipe, 0, 5) for recipe in rates]))
    assert headline(many) == f"All {MANY + 1} runs are undecided." and many.sentences == []


@pytest.mark.parametrize("gone", ["eval/accuracy", "rollout_corr/k3_kl"])
def test_a_mean_says_how_many_runs_it_is_over(tmp_path: Path, gone: str) -> None:
    """Where a seed lacks the numbers, the mean is the others', and the sentence counts them; else it counts none."""
    seeds = [write_run(tmp_path, SIX[recipe], seed, 60) for recipe in (1, 4) for seed in (1, 2)]
    assert " of 2 runs)" not in story(load_runs(seeds)).text
    path = seeds[0].path / "metrics.jsonl"
    # The first evaluation stays: one alone has no end.
    rows = [row if row["step"] == 1 and gone == "eval/accuracy" else {k: v for k, v in row.items() if k != gone}
            for row in map(json.loads, path.read_text().splitlines())]  # fmt: skip
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (counted,) = [s for s in map(spoken, story(load_runs(seeds)).sentences) if "(over" in s]
    assert counted.count("(over") == 1 and "(over 1 of 2 runs) without a remedy" in counted
    assert ("Held-out accuracy" in counted) == (gone == "eval/accuracy")
    values = [value for _, value in load_runs(seeds)[1].series(gone)]
    shown = f"to {values[-1]:.2f} (over" if gone == "eval/accuracy" else f"{float(f'{fmean(values):.2g}'):g} (over"
    assert shown in counted


@pytest.mark.parametrize(("seeds", "wanted"), [((1, 2), "with several seeds"), ((1, 1), "several times")])
def test_runs_of_one_seed_are_no_several_seeds(tmp_path: Path, seeds: tuple[int, ...], wanted: str) -> None:
    """The note on means names seeds only where the runs of a config differ in them."""
    told = story(load_runs([write_run(tmp_path, SIX[1], seed, 5) for seed in seeds]))
    assert told.notes[-1].startswith(f"Where a config ran {wanted}, accuracy and KL are ")


ACROSS = "Configs are compared across seeds"
SEEDS: dict[str, tuple[list[tuple[int, int]], str]] = {
    "one seed": ([(1, 7), (4, 7)], ""),
    "one seed twice": ([(1, 7), (1, 7)], ""),
    "replicates": ([(1, 2), (1, 1)], "The runs are replicates of one config, with seeds 1 and 2."),
    "the same seeds each": ([(1, 1), (1, 2), (4, 2), (4, 1)], "Runs of one config are replicates, with seeds 1 and 2."),
    "a seed each": ([(1, 1), (4, 2)], f"{ACROSS}: seed 1 without a remedy and seed 2 with R3."),
    "both": (
        [(1, 1), (1, 2), (4, 1)],
        f"{ACROSS}, and runs of one config are replicates: seeds 1 and 2 without a remedy and seed 1 with R3.",
    ),
}


@pytest.mark.parametrize("case", SEEDS)
def test_runs_of_different_seeds_are_said_to_be(tmp_path: Path, case: str) -> None:
    """One sentence tells replicates of a config from configs that are compared across seeds; none where all agree."""
    made, wanted = SEEDS[case]
    told = story(load_runs([write_run(tmp_path, SIX[recipe], seed, 5) for recipe, seed in made]))
    found = [said for said in map(spoken, told.sentences) if "replicates" in said or ACROSS in said]
    assert found == [wanted] * bool(wanted)


def test_many_configs_are_compared_across_seeds_that_are_listed_or_counted(tmp_path: Path) -> None:
    """Where the configs are too many to be named, their seeds are; where these are too many, their number is said."""
    rates = [Recipe(f"rate-{i}", 0, 0, engine=f"{FP8}\ntraining: {{x: {i}}}") for i in range(MANY + 1)]
    for num, wanted in ((2, "seeds 0 and 1"), (MANY + 1, f"{MANY + 1} seeds")):
        runs = [write_run(tmp_path / f"{num}", recipe, i % num, 5) for i, recipe in enumerate(rates)]
        told = story(load_runs(runs))
        assert told.sentences == [[Words(f"Configs are compared across {wanted}.")]]


def test_every_remedy_has_its_words() -> None:
    """Each preset, correction and replay mode of theory/ is spelt as papers spell it."""
    for table in (objectives.PRESETS, objectives.CORRECTIONS):
        titles = [part.title for part in table.values()]
        assert all(titles) and len(set(titles)) == len(titles)
    assert set(REPLAY) == set(PASSES) - {"none"}


def test_the_picture_marks_each_collapse_on_its_curve(runs: list[ReportRun]) -> None:
    """A cross at the verdict's first step, at the height of the bold line; its hover text and its label say so."""
    picture = reward_picture(runs)
    assert picture is not None
    by_role: dict[str, dict[int, dict[str, Any]]] = {}
    for trace in picture.data:
        by_role.setdefault(trace["meta"]["role"], {})[trace["meta"]["run"]] = trace
    assert set(by_role["collapse"]) == {1, 2} and len(by_role["line"]) == len(by_role["raw"]) == 6
    for index, cross in by_role["collapse"].items():
        line, step = by_role["line"][index], first_step(runs[index])
        assert (cross["x"], cross["y"]) == ([step], [line["y"][line["x"].index(step)]])
        assert f"at step {step}" in cross["customdata"][0].replace("<br>", " ")
        wide, narrow = [a["text"] for a in picture.layout["annotations"] if a["name"].split(" ")[0] == f"run-{index}"]
        assert (wide, narrow) == (f"{runs[index].label} ✕ step {step}", f"{runs[index].label} ✕")
    # The bold line is what the rule looked at: the mean over the verdict's own window.
    assert by_role["line"][0]["y"] == [value for _, value in trailing_mean(runs[0].series("reward/mean"), 5)]
    assert by_role["raw"][0]["y"] == [value for _, value in runs[0].series("reward/mean")]
