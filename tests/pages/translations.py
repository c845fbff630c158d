"""The tables of docs/how-to/translate-a-recipe.md; `python -m tests.pages.translations` writes them."""

from __future__ import annotations

import re
from pathlib import Path

from lab.markdown import markdown_table
from lab.translate import FRAMEWORKS
from theory.algorithm import Algorithm
from theory.objectives import PRESETS, Objective, correction, preset
from theory.objectives.corrections import CORRECTIONS

TITLES = ("verl", "TRL", "slime")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "translate-a-recipe.md"


def _cell(framework: str, objective: Objective) -> str:
    unsaid = FRAMEWORKS[framework](Algorithm(objective=objective)).unsaid
    return "yes" if not unsaid else f"no ({', '.join(one.part for one in unsaid)})"


def presets() -> str:
    """Every preset: whether all of it has options, and else the parts that have none."""
    rows = [(f"`{name}`", *(_cell(f, objective) for f in FRAMEWORKS)) for name, objective in PRESETS.items()]
    return markdown_table(("preset", *TITLES), rows)


def corrections() -> str:
    """The same for every correction of the engine gap, beside DAPO's GRPO."""
    fixes = {name: preset("grpo_dapo", correction=correction(name)) for name in CORRECTIONS}
    return markdown_table(
        ("correction", *TITLES), [(f"`{name}`", *(_cell(f, o) for f in FRAMEWORKS)) for name, o in fixes.items()]
    )


def page(text: str) -> str:
    """The page with both tables made anew."""
    for name, table in (("presets", presets()), ("corrections", corrections())):
        text, num = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", lambda m, t=table: m[1] + t + m[2], text, flags=re.DOTALL
        )
        assert num == 1, name
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
