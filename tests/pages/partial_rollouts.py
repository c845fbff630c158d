"""The table of docs/how-to/study-partial-rollouts.md, from results/partial_rollouts.csv.

`python -m tests.pages.partial_rollouts RUNS...` adds the runs in these folders to the file and writes the table;
without folders it writes the table alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import yaml

from lab.markdown import markdown_table
from lab.records import RunFolder
from tests.pages.study import ROOT, Part

FILE = ROOT / "results/partial_rollouts.csv"
TABLE = Part(ROOT / "docs/how-to/study-partial-rollouts.md", "partial rollouts")
CORRECTIONS = {"": "none", "token_tis": "Token-TIS"}


def summary(run: RunFolder) -> dict[str, Any]:
    """One run: its dials, mean token lag, share of responses of several versions and of tokens dropped, accuracies, and
    the step at which it collapsed."""
    config = yaml.safe_load((run.path / "config.yaml").read_text(encoding="utf-8"))
    first, *rows = run.metrics()
    over = config["algorithm"]["oversampling"] or {"extra_prompts": 0, "unfinished": "", "max_staleness": 0}
    dropped = sum(row.get("sampling/dropped_tokens", 0.0) for row in rows)
    verdict = run.verdict()
    assert verdict is not None, f"{run.path}: expected a finished run, got one without a verdict"
    steps = [reason["step"] for reason in verdict["reasons"]] if verdict["verdict"] == "collapsed" else []
    return {
        "correction": (config["algorithm"]["objective"].get("correction") or {}).get("name", ""),
        "seed": config["seed"],
        **over,
        "token_lag": fmean(row.get("staleness/token_lag_mean", 0.0) for row in rows),
        "mixed": fmean(row.get("staleness/mixed_response_fraction", 0.0) for row in rows),
        "dropped": dropped / (dropped + sum(row["progress/num_tokens"] for row in rows)),
        "accuracy_before": first["eval/accuracy"],
        "accuracy_after": rows[-1]["eval/accuracy"],
        "collapsed_at": min(steps, default=None),
        "commit": run.manifest().get("commit", ""),
    }


def table() -> str:
    """A line per setting: number of seeds, collapses and their steps, token lag, mixed responses, accuracy."""
    runs = pd.read_csv(FILE, keep_default_na=False, na_values={"collapsed_at": [""]})
    titles = (
        "extra prompts", "unfinished", "correction", "token lag", "of several versions",
        "tokens dropped", "collapsed", "held-out accuracy",
    )  # fmt: skip
    lines = []
    for _, own in runs.groupby(["correction", "extra_prompts", "unfinished"]):
        first = own.iloc[0]
        fell = sorted(int(step) for step in own.collapsed_at.dropna())
        at = f" (step {', '.join(map(str, fell))})" if fell else ""
        lines.append((
            str(first.extra_prompts), str(first.unfinished) or "–", CORRECTIONS[str(first.correction)],
            f"{own.token_lag.mean():.2f}", f"{own.mixed.mean():.0%}", f"{own.dropped.mean():.0%}",
            f"{len(fell)} of {len(own)}{at}",
            f"{own.accuracy_before.mean():.2f} to {own.accuracy_after.mean():.2f}",
        ))  # fmt: skip
    return markdown_table(titles, lines)


def main(folders: list[str]) -> None:
    """Adds the runs of the folders, if any, and writes the table."""
    if folders:
        rows = [summary(RunFolder.open(Path(folder))) for folder in folders]
        pd.DataFrame(rows).sort_values(["correction", "extra_prompts", "unfinished", "seed"]).to_csv(FILE, index=False)
    TABLE.write(table())


if __name__ == "__main__":
    main(sys.argv[1:])
