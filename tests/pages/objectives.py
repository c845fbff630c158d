"""Every preset and every correction with the formula that it prints: docs/objectives.md.

`python -m tests.pages.objectives` prints the page; test_objectives.py compares it with the file.
"""

from __future__ import annotations

from theory.advantages import FORMULAS
from theory.objectives import PRESETS
from theory.objectives.corrections import CORRECTIONS, Correction, correction

HEAD = """# Objectives

This page has the formula of every objective, correction and advantage that a config can name. An objective is a
composition of an advantage, a ratio, a trust region, a correction of the engine gap, an aggregation and a KL penalty. A
preset is a named composition; `algorithm.objective` in a config names a preset and may replace its parts:

```yaml
algorithm:
  objective: {preset: grpo, eps_high: 0.27, correction: {name: token_tis, cap: 2.0}}
```

pi, old and mu are the policy that learns, the training engine at the weights of the rollout, and the engine that
sampled ([notation](notation.md)); `sg[.]` is a stopped gradient, and a `_t` after a policy is its probability of token
t. [The league table](league.md) compares the objectives on one set of problems. The [paper index](paper-index.md) gives
the source, equation, test and differences of each. [Peers](peers.md) compares them with verl's and TRL's own functions.
Some were considered and [left out](#left-out-and-why).

The blocks below are the output of `theory.objectives.preset(name).describe()` and its parts;
`python -m tests.pages.objectives` prints the page.
"""

BESIDE = """
## A weight and a rejection

`objective.rejection` adds a correction that only rejects to `objective.correction`: verl's Geo-RS-Token-TIS is
`correction: {name: token_tis}` with `rejection: {name: geo_rs}`. `seq_mis`, which also weights, `geo_rs`, `k3_rs` and
`seq_max_*` remove a response from the mask and so from every denominator. `token_k1`, `token_k2` and `token_k3` give a
token the weight 0 and leave it in the mask, as `icepop` does. `objective.normalise_weights` divides the weights by
their mean over the mini-batch's kept responses.
"""

TOKENS = """
## An advantage per token

`objective.advantage: optimal_token` gives each token its own baseline, weighted by the squares of the scores up to it
(arXiv 2602.07078), with any preset. The old pass reports sum_v old(v)^2 of every token for it, in both worlds, without
another pass. It cannot be combined with centering. Exact audits and exact training support it in infinite groups, where
a token's baseline is E[W_t R] / E[W_t]. They refuse finite groups, since a baseline there depends on the prefixes of
the group's other responses.
"""

SHIFT = """
## Ratios scaled by the routers' shift (RSPO)

`objective.router_shift_floor` below 1 scales every token's pi/old by gamma_t = sg[max(exp(-Delta_t), floor)] before any
clip and any mean over the response; Delta_t is the mean of abs(log p_pi/p_old) over the MoE layers and the experts that
old's pass used, at the row that predicts the token (RSPO, arXiv 2510.23027). RSPO is

```yaml
objective: {preset: gmpo, router_shift_floor: 0.8}
```

and GRPO and GSPO accept it as well. Both worlds and every layout support it: the old pass keeps K log-scores per layer
and token (`firstorder plan` counts them). Before each mini-batch except the first, a scoring pass over it gives pi's,
so that gamma does not depend on micro-batches or on the split of layers over ranks. `timing_s/old_log_prob` includes
that pass. It is refused with a dense model, a correction on pi/mu, centering, an `m2_budget`, and ratios and trust
regions that are not a function of a token's pi/old or of its geometric mean. Exact audits and exact training support it
on the sandbox's MoE, under every replay mode; policies on trees have no routers and are refused.
"""

BUDGET = """
## Clip bounds from a budget (M2PO)

`objective.m2_budget` widens the clip of a token's ratio as far as the budget allows: the mean of (log pi/old)^2, over
the tokens that move away from old, stays within it (M2PO, arXiv 2510.01161). `eps_low` and `eps_high` are then the
minimum widths. With its authors' numbers it is

```yaml
objective: {preset: grpo_dapo, m2_budget: 0.04, eps_low: 0.3, eps_high: 0.5}
```

The bounds are those of a whole mini-batch under pi, independent of its micro-batches: a scoring pass before each update
except the first computes them, as for the routers' shift. Its authors' code uses each micro-batch's own. In exact
audits and exact training the mini-batch is infinitely large: each token counts by the probability that its response has
that sign of advantage, and the variance leaves out that a sampled mini-batch has its own bounds.
"""

VERL = """
## Bounds that verl inverts

Every bound of a rejection here is on old/mu, and so are weights, unless `numerator: pi` puts them on pi/mu. verl's
`rollout_is` has the same ratio, but the bounds of its k1 rejections are on mu/old: "a_b" there is lo = 1/b, hi = 1/a
here. `firstorder promote` records verl's numbers beside the run's own.

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

| paper | rule | reason |
|---|---|---|
"""

LEFT_OUT = (
    (
        "SAT (2607.18722)",
        "contracts a clip's bound for the tokens whose abs(log pi/mu) is above the batch's 0.9 quantile",
        "no available source has its kernel's formula",
    ),
    (
        "ESTR (2607.22186)",
        "stops tokens with (log pi/mu)^2 > tau (H + eps)",
        "H is the entropy of mu at the position, which no engine here records; only summaries were available",
    ),
    (
        "verl's `sequence` IcePop, TRL's `sequence_mask`",
        "the weight of a response outside its bounds is 0, and it stays in the denominator",
        "not added: `seq_mis` with the same bounds also drops such a response, and takes it out of the denominator",
    ),
)
"""Paper, rule, and the reason for leaving it out."""


def page() -> str:
    """The page: a block per preset, then a row per correction."""
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
