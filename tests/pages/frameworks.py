"""docs/how-to/remedies-by-framework.md: each remedy as an option of a framework, and each metric as a figure of ours.

`python -m tests.pages.frameworks` writes the page from `framework_options.jsonl`, whose rows quote the lines of the
framework's source that name the option. `python -m tests.pages.frameworks CLONES` looks for these lines again, in the
clones `CLONES/{owner}+{name}` at the commits below.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from lab.doctor.standing import MEASURES, reported
from lab.markdown import markdown_table
from lab.report.style import number
from tests.pages.study import ROOT

FILE, PAGE = Path(__file__).with_name("framework_options.jsonl"), ROOT / "docs/how-to/remedies-by-framework.md"
SOURCES = {
    "verl": ("verl-project/verl", "1dda039"),
    "slime": ("THUDM/slime", "624b824"),
    "miles": ("radixark/miles", "31f1ca9"),
    "TRL": ("huggingface/trl", "f2cd577"),
    "NeMo-RL": ("NVIDIA-NeMo/RL", "7ea279a"),
    "prime-rl": ("PrimeIntellect-ai/prime-rl", "559b447"),
    "SkyRL": ("NovaSky-AI/SkyRL", "a956457"),
}
"""Each framework's repository, and the commit at which it was read."""
CORRECTION = "`--algorithm.objective.correction '{{{}}}'`"
REMEDIES = {
    "r3": ("Replay the engine's routes (R3)", "`--algorithm.replay.mode R3`"),
    "r2": ("Replay the old pass's routes (R2)", "`--algorithm.replay.mode R2`"),
    "router32": ("Compute the router in float32", "–"),
    "tis": ("Weight tokens by old/mu, capped (Token-TIS)", CORRECTION.format("name: token_tis, cap: 2.0")),
    "icepop": ("Drop tokens outside bounds (IcePop)", CORRECTION.format("name: icepop, lo: 0.5, hi: 5.0")),
    "dual_clip": (
        "Bound pi/old where the advantage is negative (dual clip)",
        "`--algorithm.objective.preset grpo_dual_clip`",
    ),
    "sequence": ("Weight or drop whole responses", CORRECTION.format("name: seq_tis, cap: 2.0")),
    "old_pass": ("Score with the trainer before the updates (the old pass)", "always on"),
    "precision": ("The same precision on both sides", "`--engine.defects '[]'`"),
    "invariant": ("Engine kernels that do not depend on the batch", "–"),
    "minibatches": ("Fewer updates per rollout", "`--algorithm.batch.num_minibatches 1`"),
    "sync": ("Compare weights after a transfer", "–"),
}
"""Each remedy, and how to try it in the sandbox."""
CAUSES = {
    "routing": ("r3", "r2", "router32", "tis", "icepop", "dual_clip"),
    "precision": ("precision", "tis", "icepop", "invariant", "sequence"),
    "stale": ("sync", "minibatches", "tis", "icepop", "sequence"),
    "behind": ("sync", "minibatches", "tis", "icepop", "sequence"),
    "stopped": ("sync",),
    "partly": ("sync",),
    "wrong_weights": ("sync",),
    "nothing": ("old_pass", "minibatches"),
}
"""The remedies of a cause of the doctor, the first one first."""

INTRO = """# Remedies by framework

[The doctor](../doctor.md) names a cause. This page says which option of verl, slime, miles, TRL, NeMo-RL, prime-rl or
SkyRL is the remedy, and which of the metrics that they log is which of our figures.

`firstorder translate` prints a whole recipe as options of verl, TRL or slime
([Translate a recipe](translate-a-recipe.md)).

The options were read in the source of each framework at the commit below, and the line of the source that names each
is kept (`tests/pages/framework_options.jsonl`). Nothing was run with these frameworks for this page, and other releases
may have other names. A remedy that is missing from a framework's table was not found in its source. Numbers are the
framework's defaults or its own examples, not recommendations; [the league table](../league.md) compares corrections.
The page is written by `python -m tests.pages.frameworks`.

## From the cause to the remedy
"""
OPTIONS = """
With R3 keep gradient clipping, or add the token weight or a dual clip. In the sandbox, at N = 8 and a large engine
gap, R3 alone collapses in most runs if gradients are never clipped, and in no run with the weight or with a dual clip
([claims 59, 60 and 62](../border-tables.md#clipping)). At N = 16, with gradients clipped, no run of R3 or of
Token-TIS with a dual clip collapses ([claims 64 and 66](../border.md#with-a-dual-clip)). If you sample one rollout
ahead, add the token weight to a dual clip: with weights one rollout old 1 of 36 runs collapses with both, and 16 of 36
with the dual clip alone (claim 67).

The comparison of slime and miles runs once, after the first transfer: it finds weights that are missing or misplaced.
Transfers that stop or lag later show in the dumps of [several steps](../doctor.md#over-the-steps-of-a-run).

Faults of the records (`shifted`, `zero_padded`, `last_token`, `mask`, `temperature` and others) have no such option:
the doctor's line *Do first* says where to look. With `nothing` both sides are equal; check that an old pass ran, since
a copy of the engine's values is equal by construction.

In the sandbox each remedy is an option of any config, as in `firstorder train configs/demo/none.yaml OPTION`:
"""
METRICS = """## The metrics that they log

Each is one of the figures of [What is normal](../reference-ranges.md), which `firstorder doctor` computes from a dump,
too. Beside it are the values reported for BF16 on both sides, and for FP8 or MXFP8 on one side or both.
"""


class Entry(BaseModel):
    """An option or a metric of a framework: the remedy or figure that it is, and the lines of the source with it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    framework: str
    of: str
    name: str
    note: str
    seen: tuple[tuple[str, str], ...]

    @property
    def words(self) -> set[str]:
        """The words and numbers of the option and of the code in its note, except true, false and 1."""
        code = [self.name.removeprefix("without "), *re.findall(r"`(.*?)`", self.note)]
        return {word.lower() for word in WORD.findall(" ".join(code))} - {"true", "false", "1"}

    @property
    def quoted(self) -> set[str]:
        """The words and numbers of the lines that name it, and of their files."""
        return {word.lower() for pair in self.seen for text in pair for word in WORD.findall(text)}


WORD = re.compile(r"[A-Za-z]\w*(?:-\w+)*|\d[\d._]*\d|\d")
"""A name, its hyphens included, or a number."""


def entries() -> list[Entry]:
    """Every row of the file."""
    return [Entry.model_validate_json(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def page() -> str:
    """The whole page."""
    kept = entries()
    parts = [f"{INTRO}\n{_causes()}{OPTIONS}\n{markdown_table(('remedy', 'in the sandbox'), list(REMEDIES.values()))}"]
    for framework, (repository, commit) in SOURCES.items():
        own = [one for one in kept if one.framework == framework and one.of in REMEDIES]
        link = f"[{repository}](https://github.com/{repository}/tree/{commit})"
        parts.append(f"## {framework}\n\n{link} at {commit}.\n\n{_options(own)}")
    return "\n".join([*parts, f"{METRICS}\n{_metrics([one for one in kept if one.of in MEASURES])}"])


def _causes() -> str:
    causes = [(f"`{name}`", "; ".join(f"{i}. {REMEDIES[one][0]}" for i, one in enumerate(ones, 1)))
              for name, ones in CAUSES.items()]  # fmt: skip
    return markdown_table(("the doctor names", "remedies, the first one first"), causes)


def _options(own: Sequence[Entry]) -> str:
    rows = [
        (REMEDIES[one.of][0] if i == 0 or own[i - 1].of != one.of else "", _code(one.name), one.note)
        for i, one in enumerate(own)
    ]
    return markdown_table(("remedy", "option", "note"), rows)


def _metrics(own: Sequence[Entry]) -> str:
    rows = []
    for one in own:
        ranges = [_range(one.of, group) for group in ("bf16 against bf16", "FP8 or MXFP8")]
        rows.append((one.framework, _code(one.name), MEASURES[one.of].title, *ranges, one.note))
    return markdown_table(("framework", "metric", "figure", "BF16", "FP8", "note"), rows)


def _code(name: str) -> str:
    return " ".join(["without", f"`{name.removeprefix('without ')}`"]) if name.startswith("without ") else f"`{name}`"


def _range(name: str, group: str) -> str:
    known = reported(name, group)
    return " to ".join(number(one) for one in sorted({*known[:1], *known[-1:]})) or "–"


def lost(clones: Path) -> list[str]:
    """The rows whose lines are not in the framework's source at its commit."""
    found = []
    for one in entries():
        repository, commit = SOURCES[one.framework]
        folder = clones / repository.replace("/", "+")
        for file, line in one.seen:
            git = ["git", "-C", str(folder), "show", f"{commit}:{file}"]
            text = subprocess.run(git, capture_output=True, text=True, check=True).stdout
            if line not in (own.strip() for own in text.splitlines()):
                found.append(f"{one.framework}, {one.name}: {file} has no line {line!r}")
    return found


if __name__ == "__main__":
    if sys.argv[1:]:
        print("\n".join(lost(Path(sys.argv[1]))) or f"every line of {len(entries())} rows is there")
    else:
        PAGE.write_text(page(), encoding="utf-8")
