"""Every preset and every correction with the formula that it prints: docs/objectives.md.

`python -m tests.pages.objectives` prints the page; test_objectives.py compares it with the file.
"""

from __future__ import annotations

from theory.objectives import PRESETS
from theory.objectives.corrections import CORRECTIONS, Correction, correction

HEAD = """# Objectives

An objective is a composition: advantage, ratio, trust region, correction of the engine gap, aggregation, KL penalty. A
preset is a named one. What stands here is what `describe` prints and what every run's report says;
`python -m tests.pages.objectives` prints the page. `sg[.]` is a stopped gradient; pi, old and mu are the policy that
learns, the one that was rolled out, and the engine that sampled.
"""

VERL = """
## Bounds that verl writes the other way

Every weight and bound here is on old/mu. verl's `rollout_is` has the same ratio, but the bounds of its k1 rejections
are on mu/old: "a_b" there is lo = 1/b, hi = 1/a here. `firstorder promote` records the numbers for the runs' bounds.

| correction | keeps | in verl |
|---|---|---|
"""


def page() -> str:
    """The page: a block a preset, then a row a correction."""
    presets = "\n\n".join(PRESETS[name].describe() for name in PRESETS)
    width = max(map(len, CORRECTIONS))
    rows = "\n".join(f"{name:<{width}}  {correction(name).formula}" for name in CORRECTIONS)
    blocks = {"Presets": presets, "Corrections, at their default numbers": rows}
    sections = "".join(f"\n## {title}\n\n```\n{text}\n```\n" for title, text in blocks.items())
    return HEAD + sections + VERL + "".join(map(_verl_row, (c() for c in CORRECTIONS.values() if c().verl)))


def _verl_row(fix: Correction) -> str:
    keeps = fix.rejection.replace("|", "\\|")
    return f"| `{fix.name}` | {keeps} | {fix.verl} |\n"


if __name__ == "__main__":
    print(page(), end="")
