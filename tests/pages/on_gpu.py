"""The tables and the picture of docs/on-gpu.md on whole runs, from the measurements in results/on_gpu.

`python -m tests.pages.on_gpu` writes them. The files are metrics.jsonl of the runs of configs/on_gpu; the rows of
`firstorder ladder` on the wide one's model, by draw; and nvidia-smi's memory during the wide run, every 0.25 s.
"""

from __future__ import annotations

import json
from statistics import median
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.border.pictures import svg
from tests.pages.study import ROOT, Part

RESULTS = ROOT / "results/on_gpu"
PAGE, PICTURE = ROOT / "docs/on-gpu.md", ROOT / "docs/images/on-gpu-memory.svg"
RUNS, LADDER = Part(PAGE, "runs"), Part(PAGE, "ladder")

DEMOS = {
    "BF16 engine, R3": "demo_r3",
    "BF16 engine with CUDA graphs, R3": "demo_graphs",
    "FP8 engine (native), Pr3": "demo_fp8_pr3",
}
STAGES = {
    "sampling": "timing_s/gen",
    "old pass": "timing_s/old_log_prob",
    "updates": "timing_s/update_actor",
    "push": "timing_s/push",
    "step": "timing_s/step",
}
KL, ROUTERS = "rollout_corr/k3_kl", "routing/router_disagreement"
ENGINE_GB, TRAINER_GB = 100.0, 15.0
"""Memory in use above which the engine is awake, and above which (below that) the trainer holds its states."""


def metrics(name: str) -> list[dict[str, Any]]:
    """The rows of a run, the evaluation before the first step among them."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def runs() -> str:
    """The runs of the demo's model: accuracy before and after, medians over steps of the mismatch and the times."""
    seconds = tuple(f"{stage}, s" for stage in STAGES)
    header = ("run", "steps", "held-out accuracy", "k3 KL(mu, old)", "routers that differ", *seconds)
    lines = []
    for words, name in DEMOS.items():
        first, *steps = metrics(name)
        accuracy = f"{first['eval/accuracy']:.2f} to {steps[-1]['eval/accuracy']:.2f}"
        mid = {key: median(row[key] for row in steps) for key in (*STAGES.values(), KL, ROUTERS)}
        times = (number(mid[key]) for key in STAGES.values())
        lines.append((words, str(len(steps)), accuracy, number(mid[KL]), f"{mid[ROUTERS]:.1%}", *times))
    return markdown_table(header, lines)


def ladder() -> str:
    """The wide model: rows without replay by engine, means over draws, and the run's first step under R3."""
    draws = pd.read_csv(RESULTS / "wide_ladder.csv")
    layers = [name for name in draws if name.startswith("layer_")]
    header = ("engine", "routes of the old pass", "tokens", "k3 KL(mu, old)", "routers that differ, by layer")
    lines = []
    for engine, rows in draws.groupby("engine", sort=False):
        shares = ", ".join(f"{rows[name].mean():.1%}" for name in layers)
        lines.append((str(engine), "its own", f"{rows.tokens.sum():,}", number(rows.k3.mean()), shares))
    step = metrics("wide_r3")[1]
    num = f"{step['progress/num_tokens']:,.0f}"
    lines.append(("bf16", "the engine's (R3)", num, number(step[KL]), f"{step[ROUTERS]:.1%} in all"))
    return markdown_table(header, lines)


def figure() -> Figure:
    """Memory in use on the GPU over the wide run's start, first step, and second rollout."""
    memory = pd.read_csv(RESULTS / "memory.csv")
    made = Figure(figsize=(7.2, 2.8), layout="constrained")
    axes = made.subplots()
    axes.fill_between(memory.seconds, memory.gb, step="post", color="#4c78a8", alpha=0.25, linewidth=0)
    axes.step(memory.seconds, memory.gb, where="post", color="#4c78a8", linewidth=1.2)
    for start, stop, words in spans(memory):
        axes.annotate(words, ((start + stop) / 2, 141), ha="center", va="bottom", fontsize=8)
        axes.plot([start, stop], [138, 138], color="#444444", linewidth=2, solid_capstyle="butt")
    axes.set(xlabel="seconds", ylabel="GPU memory in use, GB", ylim=(0, 155), xlim=(0, memory.seconds.max()))
    axes.spines[["top", "right"]].set_visible(False)
    return made


def spans(memory: pd.DataFrame) -> list[tuple[float, float, str]]:
    """Stretches of at least 4 s with the engine awake, or with the trainer's states on the GPU."""
    state = (memory.gb > ENGINE_GB) * 2 + ((memory.gb > TRAINER_GB) & (memory.gb <= ENGINE_GB))
    words = {1: "rank", 2: "engine"}
    found = []
    for _, part in memory.groupby((state != state.shift()).cumsum()):
        start, stop, kind = part.seconds.iloc[0], part.seconds.iloc[-1], int(state[part.index[0]])
        if kind in words and stop - start >= 4:
            found.append((float(start), float(stop), words[kind]))
    # Before the engine's first turn the rank only starts.
    return found[next(i for i, one in enumerate(found) if one[2] == words[2]) :]


def main() -> None:
    """Writes both tables and the picture."""
    RUNS.write(runs())
    LADDER.write(ladder())
    PICTURE.write_text(svg(figure()), encoding="utf-8")


if __name__ == "__main__":
    main()
