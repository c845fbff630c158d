"""docs/in-trl.md's table, picture and predictions, from results/in_trl.jsonl.

`python -m tests.pages.in_trl RUNS...` keeps the runs in these folders as rows and writes them; without folders it
writes them from the rows alone. The predictions were committed before the runs (LOG.md, 2026-12-01).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import yaml
from matplotlib.figure import Figure
from scipy.stats import fisher_exact, ttest_1samp

from lab.levels import trailing_mean
from lab.markdown import markdown_table
from lab.records import RunFolder
from lab.report.style import PALETTE
from sandbox.border.pictures import svg
from sandbox.border.study import paragraph
from sandbox.ledger.statistics import holm
from tests.pages.study import ROOT, Part

FILE = ROOT / "results/in_trl.jsonl"
PAGE, PICTURE = ROOT / "docs/in-trl.md", ROOT / "docs/images/in-trl.svg"
TABLE, OUTCOME, DIFFERENCE = (Part(PAGE, name) for name in ("runs", "predictions", "difference"))

ARMS = {
    "none": "no remedy",
    "exact": "an exact engine",
    "tis": "Token-TIS",
    "mask": "TRL's default weight",
}
"""The arms of the study by the end of their runs' names."""
TRAINERS = {"trl": "TRL", "sandbox": "sandbox"}


def summary(run: RunFolder) -> dict[str, Any]:
    """One run: arm, trainer and seed; its rewards; accuracies; the step at which it collapsed."""
    config = yaml.safe_load((run.path / "config.yaml").read_text(encoding="utf-8"))
    first, *rows = run.metrics()
    verdict = run.verdict()
    assert verdict is not None, f"{run.path}: expected a finished run, got one without a verdict"
    manifest = run.manifest()
    held_out = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    return {
        "arm": config["name"].removeprefix("demo-").removesuffix("-trl"),
        "trainer": "trl" if "trainer" in manifest else "sandbox",
        "seed": config["seed"],
        "verdict": verdict["verdict"],
        "collapsed_at": verdict["first_step"],
        "k3_kl": rows[0]["rollout_corr/k3_kl"],
        "accuracy_before": first["eval/accuracy"],
        "accuracy": fmean(held_out),
        "accuracy_after": held_out[-1],
        "rewards": [round(row["reward/mean"], 4) for row in rows],
        "commit": manifest.get("commit", ""),
    }


def kept() -> pd.DataFrame:
    """The rows, a line per run."""
    return pd.read_json(FILE, lines=True)


def of(runs: pd.DataFrame, arm: str, trainer: str) -> pd.DataFrame:
    """The runs of an arm, by seed."""
    return runs[(runs.arm == arm) & (runs.trainer == trainer)].sort_values("seed").set_index("seed")


def collapses(runs: pd.DataFrame) -> int:
    """The number of runs that collapsed."""
    return int((runs.verdict == "collapsed").sum())


def table() -> str:
    """A line per arm and trainer."""
    runs = kept()
    titles = ("", "trained by", "collapsed", "at step", "accuracy over the run", "lowest, highest", "at the end")
    lines = []
    for arm, words in ARMS.items():
        for trainer, name in TRAINERS.items():
            own = of(runs, arm, trainer)
            if own.empty:
                continue
            fell = own.collapsed_at[own.verdict == "collapsed"]
            at = f"{fell.min():.0f} to {fell.max():.0f}" if len(fell) else "–"
            lines.append((
                words, name, f"{collapses(own)} of {len(own)}", at, f"{own.accuracy.mean():.3f}",
                f"{own.accuracy.min():.3f}, {own.accuracy.max():.3f}", f"{own.accuracy_after.mean():.3f}",
            ))  # fmt: skip
    return markdown_table(titles, lines)


def outcome() -> str:
    """Every prediction, what was found, and whether it holds."""
    runs = kept()
    none, exact, tis, mask = (of(runs, arm, "trl") for arm in ARMS)
    sides = {"an exact engine": exact, "Token-TIS": tis}
    p_values = dict(zip(sides, holm([_more(none, other) for other in sides.values()]), strict=True))
    gaps = {
        arm: of(runs, arm, "trl").accuracy.mean() - of(runs, arm, "sandbox").accuracy.mean() for arm in list(ARMS)[:3]
    }
    rises, below = int((tis.accuracy > none.accuracy).sum()), int((mask.accuracy < tis.accuracy).sum())
    size = len(none)
    lines = [
        *(
            (f"*Decides*: in TRL more runs collapse without a remedy than with {words}",
             f"{collapses(none)} and {collapses(other)} of {size}, p = {p_values[words]:.2g}", p_values[words] < 0.05)
            for words, other in sides.items()
        ),
        ("7 or 8 of 8 runs without a remedy collapse", f"{collapses(none)}", collapses(none) >= 7),
        ("at most 1 of 8 with an exact engine", f"{collapses(exact)}", collapses(exact) <= 1),
        ("at most 1 of 8 with Token-TIS", f"{collapses(tis)}", collapses(tis) <= 1),
        ("Token-TIS has the higher accuracy over the run for all seeds", f"{rises} of {size}", rises == size),
        ("at most 2 of 8 runs with TRL's default weight collapse", f"{collapses(mask)}", collapses(mask) <= 2),
        ("its accuracy is below that of Token-TIS in at least 6 of 8", f"{below} of {size}", below >= 6),
        ("each arm's mean accuracy is within 0.05 of the sandbox's",
         ", ".join(f"{ARMS[arm]} {gap:+.3f}" for arm, gap in gaps.items()), max(map(abs, gaps.values())) < 0.05),
    ]  # fmt: skip
    return markdown_table(
        ("predicted", "found", "holds"), [(words, found, "yes" if holds else "no") for words, found, holds in lines]
    )


def difference() -> str:
    """TRL's accuracy over the run less the sandbox's with an exact engine, paired by seed, and whether it is chance."""
    runs = kept()
    theirs, ours = (of(runs, "exact", trainer).accuracy for trainer in TRAINERS)  # by seed
    gap = (theirs - ours).to_numpy()
    test = ttest_1samp(gap, 0.0)
    low, high = test.confidence_interval()
    words = "which chance alone would explain" if low < 0.0 < high else "which chance alone does not explain"
    return paragraph(
        f"With an exact engine TRL's accuracy over the run differs from the sandbox's by {gap.mean():.3f} (paired by",
        f"seed, 95% from {low:.3f} to {high:.3f}, p = {test.pvalue:.2f}), {words}.",
    )


def _more(left: pd.DataFrame, right: pd.DataFrame) -> float:
    """The one-sided p-value of Fisher's exact test: more runs collapse on the left."""
    counts = [[collapses(runs), len(runs) - collapses(runs)] for runs in (left, right)]
    return float(fisher_exact(counts, alternative="greater").pvalue)


def picture() -> Figure:
    """A panel per arm: the reward of every run by step, TRL's in colour over the sandbox's in grey."""
    runs = kept()
    figure = Figure(figsize=(9.6, 2.9), layout="constrained")
    for axis, (arm, words) in zip(figure.subplots(1, len(ARMS), sharey=True), ARMS.items(), strict=True):
        for trainer, colour in (("sandbox", PALETTE[-1].line_dark), ("trl", PALETTE[arm == "none"].line)):
            own = of(runs, arm, trainer)
            for line in own.rewards:
                axis.plot(range(1, len(line) + 1), _smooth(line), color=colour, lw=0.6, alpha=0.55)
            if len(own):
                mean = [fmean(column) for column in zip(*own.rewards, strict=True)]
                axis.plot(range(1, len(mean) + 1), _smooth(mean), color=colour, lw=2.2, label=TRAINERS[trainer])
        axis.set_title(words, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="upper left", fontsize=8)
    axis.set_ylim(0, max(max(_smooth(line)) for line in runs.rewards))
    figure.supxlabel("global step", fontsize=9)
    figure.supylabel("reward, mean of five steps", fontsize=9)
    return figure


def _smooth(values: Sequence[float]) -> list[float]:
    return [value for _, value in trailing_mean(list(enumerate(values)), window=5)]


def main(folders: list[str]) -> None:
    """Keeps the runs of the folders, if any, and writes page and picture."""
    if folders:
        rows = [summary(RunFolder.open(Path(folder))) for folder in folders]
        frame = pd.DataFrame(rows).sort_values(["arm", "trainer", "seed"])
        frame.to_json(FILE, orient="records", lines=True)
    TABLE.write(table())
    OUTCOME.write(outcome())
    DIFFERENCE.write(difference())
    PICTURE.write_text(svg(picture()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
