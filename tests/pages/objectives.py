"""Every preset and every correction with the formula that it prints: docs/objectives.md.

`python -m tests.pages.objectives` prints the page; test_objectives.py compares it with the file.
"""

from __future__ import annotations

from theory.advantages import FORMULAS
from theory.objectives import PRESETS
from theory.objectives.corrections import CORRECTIONS, Correction, correction

HEAD = """# Objectives

An objective is a composition: advantage, ratio, trust region, correction of the engine gap, aggregation, KL penalty. A
preset is a named one. What stands here is what `describe` prints and what every run's report says;
`python -m tests.pages.objectives` prints the page. `sg[.]` is a stopped gradient; pi, old and mu are the policy that
learns, the one that was rolled out, and the engine that sampled.

Where each comes from, by which equation, which test holds it and what differs: the [paper index](paper-index.md).
Beside verl's and TRL's own functions: [peers](peers.md). Objectives that were considered and left out are
[below](#left-out-and-why).
"""

BESIDE = """
## A weight and a rejection

`objective.rejection` is one more correction beside `objective.correction`, which only rejects: verl's Geo-RS-Token-TIS
is `correction: {name: token_tis}` with `rejection: {name: geo_rs}`. `seq_*`, `geo_rs` and `k3_rs` take a response out
of the mask and so out of every denominator; `token_*` give a token the weight 0 and leave it there.
`objective.normalise_weights` divides the weights by their mean over the mini-batch.
"""

TOKENS = """
## An advantage per token

`objective.advantage: optimal_token` gives each token its own baseline, weighted by the squares of the scores up to it
(arXiv 2602.07078), with any preset. The old pass reports sum_v old(v)^2 of every token for it, in both worlds, at no
further pass. Centering is refused beside it. Exact audits and exact training have it in infinite groups, where a
token's baseline is E[W_t R] / E[W_t]; finite groups are refused, since a baseline depends on the others' prefixes.
"""

SHIFT = """
## The routers' shift

`objective.router_shift_floor` below 1 scales every token's pi/old by gamma_t = sg[max(exp(-Delta_t), floor)] before any
clip and any mean over the response; Delta_t is the mean of abs(log p_pi/p_old) over the MoE layers and the experts that
old's pass used, at the row that predicts the token (RSPO, arXiv 2510.23027). RSPO is

```yaml
objective: {preset: gmpo, router_shift_floor: 0.8}
```

and GRPO and GSPO take it as well. Both worlds and every layout have it: the old pass keeps K log-scores per layer and
token (`firstorder plan` counts them), and before each mini-batch but the first a scoring pass of it gives pi's, so that
gamma does not depend on micro-batches or on how ranks share the layers. `timing_s/old_log_prob` includes that pass.
A dense model, a correction on pi/mu, centering, and ratios and trust regions that are no function of a token's pi/old
or of its geometric mean are refused. Exact audits and exact training have it on the sandbox's MoE, under every replay
mode; policies on trees have no routers, and are refused.
"""

BUDGET = """
## Bounds from a budget

`objective.m2_budget` widens the clip of a token's ratio as far as keeps the mean of (log pi/old)^2, over the tokens
that move away from old, at the budget (M2PO, arXiv 2510.01161); `eps_low` and `eps_high` are then the least widths.
With its authors' numbers it is

```yaml
objective: {preset: grpo_dapo, m2_budget: 0.04, eps_low: 0.3, eps_high: 0.5}
```

The bounds are those of a whole mini-batch under pi, whatever its micro-batches: a scoring pass before each update but
the first gives them, as for the routers' shift. Its authors' code takes each micro-batch's. In exact audits and exact
training the mini-batch is infinitely large: each token counts by the probability that its response has that sign of
advantage, and the variance leaves out that a sampled mini-batch has bounds of its own.
"""

VERL = """
## Bounds that verl writes the other way

Every weight and bound here is on old/mu. verl's `rollout_is` has the same ratio, but the bounds of its k1 rejections
are on mu/old: "a_b" there is lo = 1/b, hi = 1/a here. `firstorder promote` records the numbers for the runs' bounds.

| correction | keeps | in verl |
|---|---|---|
"""


KL = """k1     log(pi_t/ref_t)
k2     (log(pi_t/ref_t))^2 / 2
k3     ref_t/pi_t - 1 - log(ref_t/pi_t)
k3+    k3 in value, with the gradient of k2
k3_is  (pi_t/mu_t) k3, with the gradient of both factors"""

WHY = """
## Left out, and why

| paper | rule | why it is not here |
|---|---|---|
"""

LEFT_OUT = (
    (
        "SAT (2607.18722)",
        "contracts a clip's bound for the tokens whose abs(log pi/mu) is above the batch's 0.9 quantile",
        "its kernel's formula is in no source that could be had",
    ),
    (
        "ESTR (2607.22186)",
        "stops tokens with (log pi/mu)^2 > tau (H + eps)",
        "H is the entropy of mu at the position, which no engine records here; known from summaries alone",
    ),
    (
        "verl's `sequence` IcePop, TRL's `sequence_mask`",
        "the weight of a response outside its bounds is 0, and it stays in the denominator",
        "`seq_mis` with the same bounds takes it out",
    ),
)
"""Paper, rule, and why it is not here."""


def page() -> str:
    """The page: a block a preset, then a row a correction."""
    presets = "\n\n".join(PRESETS[name].describe() for name in PRESETS)
    width = max(map(len, CORRECTIONS))
    rows = "\n".join(f"{name:<{width}}  {correction(name).formula}" for name in CORRECTIONS)
    wide = max(map(len, FORMULAS))
    advantages = "\n".join(f"{name:<{wide}}  {formula}" for name, formula in FORMULAS.items())
    blocks = {
        "Presets": presets,
        "Corrections, at their default numbers": rows,
        "Advantages": advantages,
        "Estimators of the penalty KL(pi || ref)": KL,
    }
    sections = "".join(f"\n## {title}\n\n```\n{text}\n```\n" for title, text in blocks.items())
    verl = "".join(map(_verl_row, (c() for c in CORRECTIONS.values() if c().verl)))
    left_out = "".join(f"| {' | '.join(row)} |\n" for row in LEFT_OUT)
    return HEAD + sections + BESIDE + TOKENS + SHIFT + BUDGET + VERL + verl + WHY + left_out


def _verl_row(fix: Correction) -> str:
    keeps = (fix.rejection or f"w_t = {fix.symbol}").replace("|", "\\|")
    return f"| `{fix.name}` | {keeps} | {fix.verl} |\n"


if __name__ == "__main__":
    print(page(), end="")
