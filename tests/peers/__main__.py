"""`python -m tests.peers`: docs/peers.md, the largest differences from verl and TRL, which must be installed."""

from __future__ import annotations

import torch

from tests.peers import trl_code, verl_code
from tests.peers.cases import Case, differences
from tests.peers.test_peers import PAGE
from tests.peers.trl_cases import TRL
from tests.peers.verl_cases import VERL

HEAD = """# Beside verl and TRL

Are the objectives here those that verl and TRL compute? This page compares our objectives, weights, masks and
advantages with the peers' own functions, in float64, on five batches of six ragged responses; tokens inside the
responses are masked, too. A number is the largest absolute difference. Only rounding differs, with one exception: verl
adds 1e-8 to what it divides by (the length of a response, a sum of weights) and to a variance, hence the differences of
1e-9. `make test-peers` installs verl 0.9.1 and TRL 1.16 and repeats the comparison; `python -m tests.peers` writes this
page. [`firstorder translate`](how-to/translate-a-recipe.md) writes a recipe in their options.

Four of verl's rules differ from ours, and are compared where both agree:

- verl limits log-ratios to 20 nats and its k3 to 10.
- Its trainer, not the functions compared here, leaves rejected responses in the denominators; ours leaves them out.
- Its token rejections take the token out of the mask, and so out of denominators; ours leave it in, with weight 0.
- The bounds of its k1 rejections are on mu/old, ours on old/mu: `token_k1`, `-log_ratio` in `rollout_corr_helper.py`,
  is log(mu/old), between the logarithms of the two bounds.
"""


def table(title: str, cases: list[Case], code: object) -> str:
    """A peer's section."""
    rows = []
    for case in cases:
        found = differences(case, code, range(5))
        rows.append(f"| {case.name} | {', '.join(f'{what} {x:.1e}' for what, x in found.items())} |\n")
    return f"\n## {title}\n\n| compared | largest difference |\n|---|---|\n" + "".join(rows)


def main() -> None:
    """Writes the page."""
    assert verl_code.IS_INSTALLED and trl_code.IS_INSTALLED, "expected verl and TRL to be installed (make test-peers)"
    torch.set_default_dtype(torch.float64)
    with verl_code.verl_code() as code:
        sections = table("verl 0.9.1", VERL, code)
    PAGE.write_text(HEAD + sections + table("TRL 1.16", TRL, None), encoding="utf-8")


if __name__ == "__main__":
    main()
