"""Is it routing, or any gap? Engines whose errors are of other kinds, without a remedy, with R3 and with token TIS."""

from __future__ import annotations

import pandas as pd

from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.border.study import paragraph
from sandbox.border.table import ended, summary

N = 8

ENGINES = {
    "r0.5": "router noise 0.5",
    "logits1.6": "logit noise 1.6",
    "r0.3": "router noise 0.3",
    "logits1.1": "logit noise 1.1",
    "int4": "INT4 weights",
    "stale": "weights one rollout old",
}
"""The map's two larger gaps, and the controls: those of one KL stand together."""

REMEDIES = ("none", "R3", "tis")

WORDS = """## Is it routing, or any gap?

Not all gaps come from routers. Noise on the next-token logits and INT4 weights (an error that is never redrawn) have
controls of nearly one KL with router noise; an exact engine with the previous rollout's weights makes no error at all,
and has a KL from the second rollout on (claims 49 and 69). Collapsed runs at N = 8, and the mean accuracy over the run:
"""


def words_of(gap: str) -> str:
    """The engine of a gap in words: a control, or its router noise."""
    return ENGINES.get(gap) or f"router noise {gap.removeprefix('r')}"


def markdown(grpo: pd.DataFrame) -> str:
    """The section: a line per engine that has runs, and the answer in a sentence; empty without runs."""
    lines = []
    for gap, words in ENGINES.items():
        found = [summary(grpo, N=N, gap=gap, remedy=remedy) for remedy in REMEDIES]
        if found[0] is not None:
            kls = ("–" if one is None else number(one["kl"]) for one in found[:2])
            shown = ("–" if one is None else f"{ended(one)}, {one['area']:.3f}" for one in found)
            lines.append((words, *kls, *shown))
    if not lines:
        return ""
    titles = ("engine", "KL before", "KL under R3", "no remedy", "R3", "token TIS")
    return f"{WORDS}\n{markdown_table(titles, lines)}\n{_answer(grpo)}"


def _answer(grpo: pd.DataFrame) -> str:
    """The controls that end training without a remedy in more than half of the runs; whether R3 and the weight hold."""
    controls = {gap: words for gap, words in ENGINES.items() if not gap.startswith("r")}
    bare = {gap: summary(grpo, N=N, gap=gap, remedy="none") for gap in controls}
    ending = [gap for gap, one in bare.items() if one is not None and one["collapsed"] > 0.5]
    sparing = [gap for gap, one in bare.items() if one is not None and gap not in ending]

    def told(gaps: list[str], remedy: str, *, is_named: bool = True) -> str:
        found = {gap: summary(grpo, N=N, gap=gap, remedy=remedy) for gap in gaps}
        names = {gap: f" with {controls[gap]}" if is_named else "" for gap in gaps}
        return " and ".join(f"{ended(one)}{names[gap]}" for gap, one in found.items() if one is not None)

    parts = [f"Not routing alone: without its noise {told(ending, 'none')} collapse."] if ending else []
    parts += [f"Not any gap: only {told(sparing, 'none')} do."] if sparing else []
    for remedy, words in (("R3", "R3"), ("tis", "The weight")):
        found = [summary(grpo, N=N, gap=gap, remedy=remedy) for gap in ending]
        shares = [one["collapsed"] for one in found if one is not None]
        if shares:
            verb = "prevents it" if max(shares) < 0.5 else "does not prevent it"
            parts.append(f"{words} {verb} there ({told(ending, remedy, is_named=len(found) != len(shares))}).")
    return paragraph(*parts)


__all__ = ["ENGINES", "markdown", "words_of"]
