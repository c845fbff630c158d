"""Laws of the report's words: what differs is what the configs differ in, and every linked word has its entry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markupsafe import escape

from lab.records import RunFolder
from lab.report.differences import PRESETS_OWN, UNSET, differences
from lab.report.glossary import TERMS, Glossary
from lab.report.run_page import render
from lab.report.runs import load_runs
from lab.report.watching import EVERY_S, watch
from tests.lab.synthetic_runs import DEMO, write_demo


def change(folder: RunFolder, old: str, new: str) -> None:
    """Changes config.yaml in place; the old text must be there."""
    path = folder.path / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.fixture
def folders(tmp_path: Path) -> list[RunFolder]:
    """Three runs of one config under three names and seeds."""
    found = write_demo(tmp_path, (DEMO[1],) * 3, num_steps=5)
    for i, folder in enumerate(found):
        change(folder, "name: demo-none", f"name: demo-{i}")
    return found


def test_names_seeds_and_places_are_no_difference(folders: list[RunFolder]) -> None:
    """Runs that differ in name, seed, output, loggers and threads alone have no such column."""
    change(folders[1], "backend: sandbox", "backend: sandbox\noutput: elsewhere\nthreads: 7\nlogging: [csv]")
    assert differences(load_runs(folders)) == []
    assert "differing fields" not in render(folders)


@pytest.mark.parametrize(
    ("old", "new", "name", "values"),
    [
        ("num_steps: 5", "num_steps: 50", "num_steps", ("5", "50", "5")),
        ("correction: null", "correction: null, eps_low: 0.2", "objective.eps_low", (UNSET, "0.2", UNSET)),
        (
            "correction: null",
            "correction: {name: token_is}",
            "objective.correction",
            (PRESETS_OWN, "token_is", PRESETS_OWN),
        ),
        ("correction: null", "correction: {name: none}", "objective.correction", (PRESETS_OWN, "none", PRESETS_OWN)),
        ("backend: sandbox", "backend: sandbox\nnew: null", "new", (UNSET, "null", UNSET)),
        ("backend: sandbox", "backend: sandbox\nnew: {x: null}", "new", (UNSET, "x null", UNSET)),
        ("num_prompts: 16", "num_prompts: 17", "batch.num_prompts", ("16", "17", "16")),
        ("backend: sandbox", "backend: sandbox\nnew: {block: {x: 1.0e-9}}", "new", (UNSET, "block x 1e-09", UNSET)),
        ("scale: channel", "scale: channel, seed: 5", "engine.defects", None),
    ],
)
def test_any_field_that_differs_is_found(
    folders: list[RunFolder], old: str, new: str, name: str, values: tuple[str, ...] | None
) -> None:
    """One field changed in one run is the one difference, with the values as they stand, whatever the field."""
    change(folders[1], old, new)
    (found,) = differences(load_runs(folders))
    assert found.name == name and (values is None or found.values == values)
    assert found.usual == found.values[0] == found.values[2] != found.values[1]
    html = render(folders)
    cells = re.findall(r'<td class="differs">(.*?)</td>', html, re.DOTALL)
    assert [f'title="{found.field}">{found.name} <b>{found.values[1]}</b>' in cell for cell in cells] == [
        False, True, False
    ]  # fmt: skip


def test_many_differing_fields_are_folded(folders: list[RunFolder]) -> None:
    """Of up to eight all are seen. Of more the first six are, those that every run has, and each stands once."""
    fields = "".join(f"\nnew{i}: {i}" for i in range(7))
    change(folders[1], "backend: sandbox", f"backend: sandbox{fields}")
    assert "<details><summary>" not in render(folders[:2]).split('<td class="differs">', 1)[1].split("</td>")[0]
    change(folders[1], "num_prompts: 16", "num_prompts: 17")
    change(folders[1], "backend: sandbox", "backend: sandbox\nnew7: 7")
    _, cell = re.findall(r'<td class="differs">(.*?)</td>', render(folders[:2]), re.DOTALL)
    seen, folded = cell.split("<details>")
    assert re.findall(r'title="([\w.]+)"', seen) == [
        "algorithm.batch.num_prompts", "new7", "new0", "new1", "new2", "new3"
    ]  # fmt: skip
    assert re.findall(r'title="([\w.]+)"', folded) == ["new4", "new5", "new6"] and "<summary>3 more<" in folded


def test_a_column_of_its_own_tells_what_it_tells(folders: list[RunFolder]) -> None:
    """Replay, preset and N are not said twice; a setting that the engine's words leave out is said."""
    change(folders[1], "mode: none", "mode: R3")
    change(folders[2], "preset: grpo", "preset: minirl")
    assert differences(load_runs(folders)) == []
    change(folders[1], "defects: [", "prefix_cache: false, defects: [")
    (found,) = differences(load_runs(folders))
    assert found.field == "engine.prefix_cache"


def precision(**changes: str) -> str:
    """The blocks of a cluster run that state precisions."""
    fields = {"compute": "bf16", "weights": "same", "kernels": "auto", "kv_cache": "same", "batch_invariant": "null"}
    trained, fields = changes.pop("training", "fp32"), fields | changes
    block = ", ".join(f"{name}: {value}" for name, value in fields.items())
    return f"backend: scaled\nrollout: {{precision: {{{block}}}}}\ntraining: {{precision: {trained}}}"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"weights": "fp8_block", "kv_cache": "fp8", "compute": "fp16"}, []),
        ({"weights": "fp8_block", "training": "bf16"}, ["training.precision"]),
        ({"weights": "fp8_block", "kernels": "rounded"}, ["precision.kernels"]),
        ({"weights": "fp8_block", "batch_invariant": "true"}, ["precision.batch_invariant"]),
    ],
)
def test_a_clusters_engine_tells_three_fields(
    folders: list[RunFolder], changes: dict[str, str], told: list[str]
) -> None:
    """Its words are of compute, weights and cache; another field is said, also where the words differ."""
    change(folders[0], "backend: sandbox", precision())
    change(folders[1], "backend: sandbox", precision(**changes))
    assert [found.name for found in differences(load_runs(folders[:2]))] == told


def test_a_field_is_told_by_its_own_words_alone(folders: list[RunFolder]) -> None:
    """Two defects of the same words are said though the engine's text differs in the precision of training."""
    change(folders[1], "scale: channel", "scale: channel, seed: 5")
    for folder, trained in zip(folders, ("fp32", "bf16"), strict=False):
        change(folder, "backend: sandbox", f"backend: sandbox\ntraining: {{precision: {trained}}}")
    runs = load_runs(folders[:2])
    assert [found.field for found in differences(runs)] == ["engine.defects"]
    assert [run.engine for run in runs] == [words := runs[0].engine, f"{words} (training in bf16)"]


def test_two_runs_show_both_values(folders: list[RunFolder]) -> None:
    """Of two runs neither has the usual value: a clip reads as one, not as one preset twice."""
    change(folders[0], "correction: null", "correction: null, eps_high: 0.27")
    change(folders[1], "correction: null", "correction: null, eps_high: null")
    (found,) = differences(load_runs(folders[:2]))
    assert found.values == ("0.27", PRESETS_OWN) and found.usual is None
    html = render(folders[:2])
    assert all(f"objective.eps_high <b>{escape(value)}</b>" in html for value in found.values)


def test_short_names_tell_fields_apart(folders: list[RunFolder]) -> None:
    """Two fields that end alike keep as much of their names as tells them apart."""
    change(folders[1], "backend: sandbox", "backend: sandbox\na: {x: {y: {z: 1}}}\nb: {x: {y: {z: 1}}}")
    change(folders[0], "backend: sandbox", "backend: sandbox\na: {x: {y: {z: 2}}}\nb: {x: {y: {z: 2}}}")
    names = [found.name for found in differences(load_runs(folders[:2]))]
    assert names == ["a.x.y.z", "b.x.y.z"]


def test_the_glossary_has_the_words_that_were_linked() -> None:
    """The first use of a word in a text is linked; parts of other words and markup are left alone."""
    glossary = Glossary()
    html = glossary.explained("mu/old <b> mu, cold, mu_t, k3_kl, F(2)")
    assert html.count("<a ") == 3 and "&lt;b&gt;" in html
    assert [word for _, word, _ in glossary.used] == ["mu", "old", "F(2)"]
    assert re.sub(r"<[^>]+>", "", html) == "mu/old &lt;b&gt; mu, cold, mu_t, k3_kl, F(2)"


def test_every_link_of_a_page_has_its_entry(tmp_path: Path) -> None:
    """A page's links inside itself lead somewhere, and mu, old, k3 and F(2) are among the words explained."""
    html = render(write_demo(tmp_path, DEMO[:2], num_steps=5))
    targets = re.findall(r'href="#([^"]+)"', html)
    assert targets and all(html.count(f'id="{target}"') == 1 for target in targets)
    assert all(f"<dd>{escape(TERMS[word])}</dd>" in html for word in ("mu", "old", "F(2)", "k3"))
    assert "Defined here" not in html


def test_a_watched_page_follows_its_run(tmp_path: Path) -> None:
    """It is written as records come, not otherwise, refreshes until the verdict, and is then the run's own page."""
    (run,) = write_demo(tmp_path, DEMO[:1], num_steps=25)
    verdict, out, pages = run.verdict(), tmp_path / "page.html", list[str]()
    (run.path / "verdict.json").unlink()

    def sleep(seconds: float) -> None:
        pages.append(out.read_text() if out.exists() else "")
        assert seconds == EVERY_S
        if len(pages) == 1:
            out.unlink()  # nothing has changed: nothing is written
        elif len(pages) == 2:
            run.append_metrics(26, {"reward/mean": 0.5})
        else:
            run.write_verdict(verdict or {})

    watch([run], out, sleep)
    reload = f"location.reload(), {1000 * EVERY_S})"
    assert [reload in page for page in pages] == [True, False, True] and pages[1] == ""
    assert "The run is unfinished after 26 steps." in pages[2]
    assert out.read_text() == render([run]) and reload not in out.read_text()
