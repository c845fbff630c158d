"""Laws of the sections of docs/border.md, on rows made by hand: each sentence follows from the counts."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lab.report.style import number
from sandbox.border import branches, controls, coverage, dual_clip, objectives, one_number
from sandbox.border.curves import entropy_path, entropy_picture, fit_picture
from sandbox.border.page import markdown as page
from sandbox.border.pictures import FULL, svg
from sandbox.border.study import WIDTH, BorderStudy, paragraph
from sandbox.border.table import STORY
from sandbox.border.tables_page import markdown as tables_page
from sandbox.claims.border_arms import MAP, slower, with_dual_clip, with_free_norm
from sandbox.claims.c43_from_one_state import branch
from sandbox.ledger.cells import key
from tests.sandbox.border.made import BORDER, rows

INT4 = {"no": rows("int4", "none", 8, 4, 4), "R3": rows("int4", "R3", 8, 4, 3), "tis": rows("int4", "tis", 8, 4, 1)}


NO_PEAKS = pd.DataFrame(columns=["arm", "seed", "update", "norm"])


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_paragraph_is_wrapped_and_leaves_out_empty_sentences() -> None:
    found = paragraph("One two.", "", "word " * 40)
    assert max(len(line) for line in found.splitlines()) <= WIDTH and found.startswith("One two. word")
    assert found.endswith("word\n") and paragraph("", "") == ""


def test_controls_say_whether_it_is_routing_or_any_gap() -> None:
    """A control without router noise that ends most runs: not routing alone. One that ends few: not any gap."""
    study = BorderStudy(
        INT4["no"] | INT4["R3"] | INT4["tis"] | rows("logits1.6", "none", 8, 4, 1) | rows("r0.5", "none", 8, 4, 4),
        BORDER,
    )
    said = flat(controls.markdown(study.grpo))
    assert "| INT4 weights | 0.3 | 0.3 | 4 of 4, 0.000 | 3 of 4, 0.075 | 1 of 4, 0.225 |" in said
    assert "| router noise 0.5 | 0.3 | – | 4 of 4, 0.000 | – | – |" in said
    assert "Not routing alone: without its noise 4 of 4 with INT4 weights collapse." in said
    assert "Not any gap: only 1 of 4 with logit noise 1.6 do." in said
    assert "R3 does not prevent it there (3 of 4)" in said
    assert "The weight prevents it there (1 of 4)" in said


def test_controls_without_runs_say_nothing() -> None:
    only = controls.markdown(BorderStudy(rows("r0.5", "none", 8, 4, 4), BORDER).grpo)
    assert "routing alone" not in only and "any gap:" not in only
    assert controls.markdown(BorderStudy({}, BORDER).grpo) == ""


def test_the_cells_without_runs_are_counted_and_grouped() -> None:
    """One arm of noise 0.5 has runs: every other engine has none, and every other remedy none with it."""
    study = BorderStudy(rows("r0.5", "none", 8, 2), BORDER)
    said = flat(coverage.markdown(study.grpo))
    assert len(coverage.arms()) == len(MAP) == 173
    assert f"Of the map's {len(MAP)} arms, {len(MAP) - 1} have no run: exact; FP8 without router noise;" in said
    assert "token TIS, R2, R3, TIS and R3, Pr2 and Pr3 with router noise 0.5" in said
    # The four other N of no remedy there.
    assert "the other 4 lack some N." in said


def test_a_map_with_every_run_has_nothing_missing() -> None:
    made: dict[str, Any] = {}
    for gap, n, remedy in coverage.arms():
        made |= rows(gap, remedy, n, FULL)
    assert coverage.markdown(BorderStudy(made, BORDER).grpo) == ""


def test_arms_with_fewer_runs_than_the_design_are_counted() -> None:
    """Three of the map's arms have fewer than FULL, the least 2; an arm with FULL does not count, nor one without."""
    made = rows("r0.5", "none", 1, 3) | rows("r0.5", "none", 2, 2) | rows("r0.5", "none", 4, FULL - 1)
    said = flat(coverage.markdown(BorderStudy(made | rows("r0.5", "none", 8, FULL), BORDER).grpo))
    assert said.endswith("3 of the map's 173 arms have fewer runs than the 8 of the design, 2 or more.")


def test_the_weight_s_gain_needs_the_runs_of_the_design() -> None:
    """At N = 2 either arm has 7 runs, at N = 4 both have 8: the page gives the gain at N = 4 alone."""
    made: dict[str, Any] = {}
    for remedy in ("none", "tis"):
        made |= rows("r0.5", remedy, 2, FULL - 1) | rows("r0.5", remedy, 4, FULL)
    said = flat(page(BorderStudy(made, BORDER), [], NO_PEAKS))
    assert " at N = 4. " in said.split("It changes the accuracy by")[1][:60]


def test_a_remedy_that_turns_at_one_update_is_not_counted_as_one() -> None:
    """The weight ends runs at N = 1 and saves them at N = 8; their sum would say that it saves. The fit's own runs at
    N = 8 stand half above the border and half below."""
    made = rows("r0.2", "none", 1, 20, 1, kl=0.07) | rows("r0.5", "none", 8, 20, 19) | rows("r0.3", "none", 4, 20, 10)
    made |= rows("r0.5", "tis", 1, 8, 8, kl=0.08) | rows("r0.5", "tis", 8, 40, 0)
    study = BorderStudy(made, BORDER)
    said, found = flat(one_number.moved_said(study)), one_number.tallies(study)
    at_later, at_one = (
        r"fewer collapse with token TIS, 0 of 40 \(3\d\)",
        r"more collapse with token TIS, 8 of 8 \([01]\)",
    )
    assert re.search(rf"From N = 2 on {at_later}\. At N = 1 {at_one}\.$", said)
    # The fit has an error of its own: beside runs without a remedy at the same place both counts are told.
    beside = BorderStudy(made | rows("r0.5", "none", 1, 10, 3), BORDER)
    assert flat(one_number.moved_said(beside)).endswith("At router noise 0.5: token TIS 8 of 8, no remedy 3 of 10.")
    # A logistic fit expects as many collapses as its own runs have.
    own = found["no remedy"].values()
    assert sum(one.expected for one in own) == pytest.approx(sum(one.num_collapsed for one in own), rel=0.01)
    more = flat(tables_page(study, [], ""))
    assert "| runs with | N = 1 | N = 4 | N = 8 |" in more and "| token TIS | 8 of 8 (" in more


def test_an_alarm_is_tried_in_the_setting_in_which_it_was_chosen() -> None:
    """Not on runs at half the rate, with a dual clip or never clipped; other remedies and controls count."""
    made = rows("r0.5", "tis", 8, 3) | rows("int4", "none", 8, 3, 3)
    others: dict[str, Any] = {}
    for change in (slower, with_dual_clip, with_free_norm):
        others |= rows("r0.5", "none", 8, 3, 2, changed=change)
    study = BorderStudy(made | others, BORDER)
    assert {row["cell"] for row in study.fresh} == set(made) and len(others) == 9


def branched(remedy: str, n: int, values: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """Rows of two branches with these probes."""
    arm, found = branch(remedy, n), {}
    for i, seed in enumerate((104, 105)):
        probes = {name: pair[i] for name, pair in values.items()}
        found[key(BORDER, arm, seed)] = {"arm": arm.name, "regime": "border", "seed": seed, "probes": probes}
    return found


def test_branches_have_the_means_of_their_probes() -> None:
    """Bias, cosine and variance by remedy, the ratio of the variances, and the gains in accuracy within a state."""
    made = branched(
        "none", 8, {"bias": (0.7, 0.9), "cosine": (0.7, 0.8), "variance": (30.0, 50.0), "accuracy_after": (0.1, 0.2)}
    )
    made |= branched(
        "R3", 8, {"bias": (0.6, 0.8), "cosine": (0.8, 0.8), "variance": (60.0, 60.0), "accuracy_after": (0.3, 0.3)}
    )
    made |= branched(
        "tis", 8, {"bias": (0.2, 0.4), "cosine": (0.9, 1.0), "variance": (100.0, 140.0), "accuracy_after": (0.3, 0.4)}
    )
    said = flat(branches.markdown(made, BORDER))
    assert "bias is 0.80 without a remedy, 0.70 under R3 and 0.30 with the weight (cosine 0.75, 0.80 and 0.95)" in said
    assert "whose variance is 3 times that without a remedy" in said
    assert "| R3 | 0.70 (-0.57 to 1.97) | 0.80 (0.80 to 0.80) | 60 (60 to 60) | – | 0.300 (0.300 to 0.300) |" in said
    assert re.search(r"\| no remedy \|.*? \| – \| 0\.150 \([^|]*\) \| – \|", said)
    # Gains of 0.2 and 0.1 within a state under R3, and of 0.2 twice with the weight; none has none over itself.
    assert "| 0.300 (0.300 to 0.300) | 0.150 (-0.485 to 0.785) |" in said
    assert said.count(" | 0.200 (0.200 to 0.200) |") == 1
    assert "| R2 |" not in said
    made |= branched("R2", 8, {"bias": (1.0, 1.2), "accuracy_after": (0.1, 0.1)})
    assert "| R2 | 1.10 (-0.17 to 2.37) | – | – | – | 0.100 (0.100 to 0.100) | -0.050" in flat(
        branches.markdown(made, BORDER)
    )
    # A row of another config is left out, and without all remedies there is no section.
    assert branches.markdown({"0123456789ab": next(iter(made.values()))}, BORDER) == ""


def test_objectives_stand_side_by_side() -> None:
    """Collapsed runs and accuracy by N."""
    made = rows("r0.5", "none", 1, 4, 1) | rows("r0.5", "none", 8, 4, 3)
    made |= rows("r0.5", "none", 1, 4, 4, preset="minirl") | rows("r0.5", "none", 8, 4, 0, preset="minirl")
    said = flat(objectives.sides(BorderStudy(made, BORDER).table))
    assert "| GRPO | 1 of 4, 0.225 | – | – | 3 of 4, 0.075 |" in said
    assert "| MiniRL | 4 of 4, 0.000 | – | – | 0 of 4, 0.300 |" in said
    assert objectives.sides(BorderStudy({}, BORDER).table) == ""


@pytest.mark.parametrize(
    ("weighted", "words"), [(0.2, "is not equal in all arms"), (2.0, "is about equal in all arms")]
)
def test_clipping_is_equal_only_where_the_shares_are(weighted: float, words: str) -> None:
    """Norms of 2 are above GRPO's threshold of 1, norms of 0.2 are not."""
    made: dict[str, Any] = {}
    for gap, remedy, norm in (("exact", "none", 0.2), ("r0.5", "none", 2.0), ("r0.5", "tis", weighted)):
        made |= rows(gap, remedy, 8, 2, series={"actor/grad_norm": [norm] * 20})
    study = BorderStudy(made, BORDER)
    said = flat(objectives.clipping_said(study))
    assert f"**Clipping** {words}." in said and "where 0% of the windows" in said
    assert f"GRPO with no remedy 100%; GRPO with token TIS {100 * (weighted > 1)}%" in said
    assert "also one of clipped and unclipped updates" in said
    assert objectives.clipping(study).endswith(
        f"| GRPO with no remedy | 1.0 | 100% |\n| GRPO with token TIS | 1.0 | {100 * (weighted > 1)}% |\n"
    )


def test_runs_without_clipping_stand_beside_the_others() -> None:
    """Outcomes of both, by remedy; the map, and so the fit, has only the clipped ones."""
    clipped = rows("exact", "none", 8, 2, series={"actor/grad_norm": [0.2] * 20})
    made = dict(clipped)
    for remedy, num in (("none", 3), ("R2", 4), ("R3", 1), ("tis", 0), ("tis-R3", 2)):
        made |= rows("r0.5", remedy, 8, 4, 2, series={"actor/grad_norm": [2.0] * 20})
        made |= rows("r0.5", remedy, 8, 4, num, changed=with_free_norm)
    study = BorderStudy(made, BORDER)
    assert len(study.table) == 2 + 20 and len(study.unclipped) == 20
    said = flat(objectives.clipping_said(study))
    assert (
        "Never clipped, GRPO collapses in 3 of 4 with no remedy, 4 of 4 with R2, 1 of 4 with R3, 0 of 4 with token "
        "TIS, 2 of 4 with TIS and R3 (claims 58 to 60;" in said
    )
    assert "| R3 | 2 of 4 | 0.150 | 1 of 4 | 0.225 |" in objectives.clipping(study)


def test_runs_with_a_second_clip_have_their_own_lines() -> None:
    """They are neither in the map nor among those without clipping; where one kind has no run the line has a dash."""
    made = rows("exact", "none", 8, 2, series={"actor/grad_norm": [0.2] * 20})
    made |= rows("r0.5", "none", 8, 4, 4) | rows("r0.5", "none", 8, 4, 1, changed=with_dual_clip)
    study = BorderStudy(made, BORDER)
    assert len(study.table) == 6 and len(study.dual_clipped) == 4
    assert "| dual clip | 1 of 4 | 0.225 | – | – |" in objectives.clipping(study)
    assert "dual clip" not in objectives.clipping_said(study)
    assert "GRPO has no *dual clip* here. With one, and no other remedy, 1 of 4 runs collapse" in flat(
        page(study, [], NO_PEAKS)
    )
    both = made | rows("r0.5", "R3", 8, 5, 2, changed=lambda arm: with_dual_clip(with_free_norm(arm)))
    study = BorderStudy(both, BORDER)
    assert study.unclipped.empty and len(study.dual_unclipped) == 5
    assert "| R3 and dual clip | – | – | 2 of 5 | 0.180 |" in objectives.clipping(study)
    said = flat(dual_clip.markdown(study, NO_PEAKS))
    assert "| router noise 0.5 | 8 | no remedy | 4 of 4 | 0.000 | 1 of 4 | 0.225 |" in said
    assert "no gradient clipping 2 of 5 runs collapse under R3" in said and "half of the runs" not in said


def test_a_second_clip_on_other_engines_is_told_by_the_engine() -> None:
    """A control and a smaller noise have their own words, and the border is fitted without the control."""
    made = rows("stale", "tis", 8, 4, 1) | rows("stale", "tis", 8, 4, changed=with_dual_clip)
    made |= rows("stale", "none", 8, 4, 3, changed=with_dual_clip) | rows(
        "r0.2", "none", 16, 4, 2, changed=with_dual_clip
    )
    study = BorderStudy(made, BORDER)
    said = flat(dual_clip.markdown(study, NO_PEAKS))
    assert "| weights one rollout old | 8 | token TIS | 1 of 4 | 0.225 | 0 of 4 | 0.300 |" in said
    assert "| router noise 0.2 | 16 | no remedy | – | – | 2 of 4 | 0.150 |" in said
    assert len(study.dual_clipped) == 12 and len(dual_clip.unaided(study)) == 4 and dual_clip.beside(study) == ""


def test_runs_with_a_second_clip_have_their_own_border() -> None:
    """Where half of them collapse, from three places on; the border without a second clip does not move with them."""
    made: dict[str, Any] = {}
    for gap, kl, n, num, dual in (("r0.2", 0.1, 4, 0, 0), ("r0.3", 0.2, 8, 8, 0), ("r0.5", 0.4, 16, 8, 8)):
        made |= rows(gap, "none", n, 8, num, kl=kl) | rows(gap, "none", n, 8, dual, kl=kl, changed=with_dual_clip)
    study = BorderStudy(made, BORDER)
    plain, own = study.borders["KL x N"], dual_clip.border(dual_clip.fits(dual_clip.unaided(study)))
    assert plain.num_runs == 24 and own is not None and own.num_runs == 24
    assert 0.4 < plain.border < 1.6 < own.border < 6.4
    said = flat(dual_clip.markdown(study, NO_PEAKS))
    assert f"collapse at {number(own.border)} (" in said and f"at {number(plain.border)} without one (24 and 24" in said
    assert "extrapolation" not in said
    drawn = svg(fit_picture(study.unaided, study.slowed, dual_clip.unaided(study)))
    assert "dual clip" in drawn and "its fit" in drawn
    made |= rows("r0.5", "none", 16, 8, 3, kl=0.4, changed=with_dual_clip)
    study = BorderStudy(made, BORDER)
    own = dual_clip.border(dual_clip.fits(dual_clip.unaided(study)))
    assert own is not None and own.border > 6.4
    said = flat(dual_clip.markdown(study, NO_PEAKS))
    assert f"The largest that was tried is 6.4, so {number(own.border)} is an extrapolation." in said
    two = {cell: row for cell, row in made.items() if "dual_clip" not in row["arm"] or row["num_steps"] < 100}
    fewer = BorderStudy(two, BORDER)
    assert dual_clip.fits(dual_clip.unaided(fewer)) == [] and dual_clip.border([]) is None
    drawn = svg(fit_picture(fewer.unaided, fewer.slowed, dual_clip.unaided(fewer)))
    assert "dual clip" in drawn and "its fit" not in drawn


def test_there_is_no_border_where_another_number_predicts_better() -> None:
    """With a second clip runs collapse by the gap alone here, whatever N: KL x N is no border, and the page says so."""
    made = rows("r0.2", "none", 4, 8, 0, kl=0.1) | rows("r0.5", "none", 16, 8, 8, kl=0.4)
    for gap, kl, n, dual in (("r0.2", 0.1, 16, 0), ("r0.3", 0.2, 16, 1), ("r0.5", 0.4, 4, 7), ("r0.5", 0.4, 8, 7)):
        made |= rows(gap, "none", n, 8, dual, kl=kl, changed=with_dual_clip)
    study = BorderStudy(made, BORDER)
    found = dual_clip.fits(dual_clip.unaided(study))
    assert found[0].name == "KL" and dual_clip.border(found) is None
    said = flat(dual_clip.markdown(study, NO_PEAKS))
    assert "`KL x N` orders the collapses less well: of 8 numbers tried `KL` predicts them best" in said
    assert "half of the runs" not in said and said.count("no x*") == 1
    drawn = svg(fit_picture(study.unaided, study.slowed, dual_clip.unaided(study)))
    assert "dual clip" in drawn and "its fit" not in drawn


def test_an_entropy_path_is_the_median_over_runs() -> None:
    """At the last update of each window; a run without a value in a window does not count there."""
    series = ([0.4] * 20, [0.2] * 20, [0.1] * 19 + [None])
    own = [{"series": {"actor/entropy": list(one)}, "num_steps": 50} for one in series]
    x, median = entropy_path(own, 8)
    assert (x[0], x[-1]) == (3 * 8, 400) and np.all(median[:19] == 0.2) and median[19] == pytest.approx(0.3)


def _story() -> dict[str, Any]:
    """The demo's six runs on two exploratory and three fresh seeds; on the last one R2 holds."""
    made: dict[str, Any] = {}
    for preset, gap, remedy in STORY:
        falls = STORY[preset, gap, remedy]
        kl = 0.0 if gap == "exact" else 0.3
        for first, num, num_collapsed in ((102, 2, 2), (104, 3, 2 if remedy == "R2" else 3)):
            made |= rows(gap, remedy, 8, num, num_collapsed * falls, preset=preset, kl=kl, first_seed=first,
                         series={"actor/entropy": [0.3] * 20, "actor/grad_norm": [0.5] * 20})  # fmt: skip
    return made


def test_the_story_is_counted_on_fresh_seeds_apart() -> None:
    said = flat(page(BorderStudy(_story(), BORDER), [], NO_PEAKS))
    assert "came out in full on 2 of 3 fresh seeds" in said
    assert "(an exact engine 3, no remedy 3, R2 2, token TIS 3, R3 3, MiniRL 3)" in said


def test_a_page_has_its_rate_and_its_pictures() -> None:
    """From rows on both sides of the border, and at half the rate, both pages and all their pictures are made."""
    made = _story() | rows("r0.2", "none", 4, 12, 1, kl=0.07) | rows("r0.3", "none", 4, 12, 6, kl=0.12)
    made |= rows("r0.5", "none", 8, 12, 11, first_seed=110) | rows("r0.5", "none", 8, 12, 0, changed=slower)
    study = BorderStudy(made, BORDER)
    said, more = flat(page(study, [], NO_PEAKS)), flat(tables_page(study, [], ""))
    (border,) = re.findall(r"Where `KL x N` passes x\* = (\S+) \(\S+ to \S+\) at a learning rate of 2e-3, half", said)
    assert study.borders["KL x N"].border == pytest.approx(float(border), rel=1e-2)
    assert "At 1e-3 (router noise 0.5, N = 8) 0 of 12 runs collapse, where `KL x N` alone expects" in said
    assert "one learning rate (2e-3)" in said and "passes `x*` = " + border in more
    texts = svg(fit_picture(study.unaided, study.slowed, dual_clip.unaided(study)))
    assert f"x* = {border}" in texts and "half the rate" in texts
    assert "entropy, nats per token" in svg(entropy_picture(study.table, study.rows))
