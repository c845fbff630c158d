"""docs/engine-defects.md from the measured rungs: each defect's docstring and its numbers."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from itertools import groupby

import torch

from lab.manifest import manifest
from lab.markdown import markdown_table
from sandbox.engines.defect import Defect
from sandbox.measure.defect_table import METRICS, DefectRow

INTRO = """# Engine defects

How far is an engine that rounds, has noise, or holds old or wrong weights from its trainer? The sandbox simulates such
defects. This page has the effect of each on one trained model. In a config a defect is an entry of `engine.defects`,
such as `{{kind: router_noise, std: 0.1}}`; each heading below is a `kind`. The page is written by

```
{command}
```

The exact engine keeps four equalities to the bit; a defect breaks those that it declares, and no others
(`tests/sandbox/engines/test_defect_chain.py` checks every defect):

- **alone == in a batch**: a response has the same tokens, log-probabilities and routes alone and in any batch.
- **prefill == decode**: a decoded token has the log-probability and routes that one prefill of the sequence gives it.
- **trainer == engine**: the training engine's pass at its own weights gives the same log-probabilities.
- **sampler == scorer**: tokens are drawn from the distribution whose log-probabilities are reported.

{setting}

Cells are mean ± half the width of the 95% interval over the draws (Student's t): over problems and tokens, for one set
of weights, whose particular rounding is part of each number.
KL is the k3 estimate of KL(mu, old) in nats per token, F(2) the share of tokens whose probabilities differ by a factor
of more than 2 (R3, arXiv 2510.11370, Eq. 2 and 3), and routers that differ are (token, layer) pairs with another set of
experts, prompts included. "Surprise - entropy" is the mean of -log old(y) minus old's entropy, in nats per token: 0 up
to noise if tokens were drawn from old. It is the only column that shows a sampler that differs from the scorer.
"""

REPEATED = """## Training numerics: repeated forward passes

The same responses of an exact engine, scored twice by the training engine, in micro-batches of 64 and of 24 responses
(`training:` in a config). With a fixed order both passes have the same bits. Otherwise the order of sums depends on the
rows of the micro-batch, and a global step whose mini-batches differ from the old pass's micro-batches starts with
ratios that are not 1. R3 sec. 3.3 reports a KL of 8.4e-4 between two passes of one MoE model in Megatron.
"""


def page(rungs: Sequence[DefectRow], repeated: Sequence[DefectRow], command: str, setting: str) -> str:
    """The whole page. `setting` names the model and the number of tokens, in one sentence."""
    where = f"torch {torch.__version__}, one thread, {manifest(0)['cpu']}."
    parts = [INTRO.format(command=command, setting=textwrap.fill(f"{setting} {where}", 120))]
    titles = ("dial", "breaks", *METRICS.values())
    # `groupby` joins neighbours only; RUNGS lists the rungs of a kind one after the other.
    for _, group in groupby(rungs, key=lambda rung: type(rung.defect)):
        members = list(group)
        defect = members[0].defect
        heading = "exact" if defect is None else str(defect.model_dump()["kind"])
        words = "No defect: the training engine's own maths." if defect is None else _words(type(defect))
        rows = [(r.name, r.breaks, *(r.metrics.get(m, "–") for m in METRICS)) for r in members]
        parts.append(f"## {heading}\n\n{words}\n\n{markdown_table(titles, rows)}")
    if repeated:
        names = [name for name in METRICS if name in repeated[0].metrics]
        rows = [(r.name, *(r.metrics[m] for m in names)) for r in repeated]
        titles = ("training numerics", *(METRICS[m].replace("mu, old", "first, second") for m in names))
        parts.append(f"{REPEATED}\n{markdown_table(titles, rows)}")
    return "\n".join(parts)


def _words(kind: type[Defect]) -> str:
    """The defect's docstring; ValueError if it has none."""
    words = inspect.getdoc(kind)
    if not words:
        raise ValueError(f"{kind.__name__}: expected a docstring for the page, got none")
    return words
