"""docs/league.md says what its kept rows say; these are what an audit gives, and every objective is in them."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.audit.cases import exact_cases
from lab.audit.config import LinearPolicies, load_config
from lab.audit.every import every_objective
from lab.audit.table import records
from tests.pages.league import PICTURE, beside, figure, standing
from tests.pages.league_rows import CONFIGS, SIZES, best_step_error, kept, sandbox_schema
from theory.exact.estimator import Estimate, estimate
from theory.exact.groups import Group
from theory.objectives import CORRECTIONS, PRESETS

pytestmark = pytest.mark.unchecked


def test_the_picture_has_every_number_of_the_rows() -> None:
    texts = re.findall(r">([^<>]*\S[^<>]*)</text>", PICTURE.read_text(encoding="utf-8"))
    drawn = [text.get_text() for text in figure(kept("league")).axes[0].texts]
    assert sorted(t for t in texts if re.fullmatch(r"\d+\.\d\d", t)) == sorted(drawn)


def test_every_preset_and_correction_has_a_row_or_says_why() -> None:
    """`all` has the presets and corrections of the tables; what it leaves out cannot be called on log-probs alone."""
    blocks = every_objective()
    presets = {block["preset"] for block in blocks if "label" not in block}
    weighed = {block["correction"]["name"] for block in blocks if "correction" in block}
    assert {"minirl", "grpo", "gspo", "minpro", "dppo_tv", "ppo_dual_clip"} <= presets <= set(PRESETS)
    assert {"token_is", "seq_tis", "prefix_tis", "icepop", "k3_rs"} <= weighed <= set(CORRECTIONS)
    rows = {str(name) for name in kept("league")["objective"]}
    assert rows <= {one.name for one in load_config(CONFIGS["league"]).objectives}
    assert {"minirl", "reinforce + token_is", "reinforce + centred", "m2po"} <= rows
    tokens = {one.name for one in load_config(CONFIGS["league_tokens"]).objectives}
    assert set(kept("league_tokens")["objective"]) == tokens >= {"minirl", "minirl, per token"}
    moe = {one.name for one in load_config(CONFIGS["league_moe"], sandbox=sandbox_schema).objectives}
    assert set(kept("league_moe")["objective"]) == moe >= {"gmpo", "rspo"}


@given(
    scale=st.floats(1e-3, 2), sign=st.sampled_from([1, -1]), cosine=st.floats(0.05, 1), variance=st.floats(0, 100),
    n=st.sampled_from(SIZES),
)  # fmt: skip
def test_no_step_length_errs_less(scale: float, sign: int, cosine: float, variance: float, n: int) -> None:
    """The error at the best step length is the least of sqrt(|s m - t|^2 + s^2 v / n) over lengths s >= 0, |t| = 1."""
    scale = sign * scale
    row = pd.DataFrame([{"scale": scale, "cosine": sign * cosine, "variance": variance}])
    squared = (scale / cosine) ** 2 + variance / n
    lengths = np.linspace(0, 3 * abs(scale) / squared, 3001)
    errors = np.sqrt(np.maximum(1 - 2 * lengths * scale + lengths**2 * squared, 0))
    assert best_step_error(row, n)[0] == pytest.approx(errors.min(), abs=2e-6)


def test_a_kept_row_is_an_enumeration() -> None:
    """The first policies' cell at the largest gap, enumerated again for three objectives, is their row."""
    config = load_config(CONFIGS["league"])
    block = config.policies[0]
    level = (config.discrepancy.token_kl[-1], config.staleness.token_kl[-1])
    wanted = ("reinforce", "gspo", "reinforce + centred")
    found: dict[str, list[Estimate]] = {name: [] for name in wanted}
    assert isinstance(block, LinearPolicies)
    for case in exact_cases(config, block).each:
        if case.keys["reward"] != config.rewards[0]:
            continue
        for one in config.objectives:
            if one.name in wanted:
                found[one.name].append(estimate(case.problem(*level), one.build(), Group(8)))
    frame = kept("league")
    cell = frame[(frame["policy"] == block.label) & (frame["reward"] == config.rewards[0])]
    cell = cell[(cell["asked_discrepancy"] == level[0]) & (cell["asked_staleness"] == level[1])]
    for row in records(pd.DataFrame(cell)):
        if row["objective"] in wanted:
            each = found[row["objective"]]
            assert row["bias"] == pytest.approx(np.median([one.bias for one in each]), rel=1e-5)
            assert row["error_64"] == pytest.approx(np.median([one.error(64) for one in each]), rel=1e-5)


def test_baselines_are_compared_in_the_same_cells() -> None:
    """Rows with a baseline per token stand beside rows of the mean in the same cells, where grad J is one and the same;
    under a weight of the whole gap a baseline of the infinite group moves no bias."""
    frame, pairs = kept("league_tokens"), list(beside(kept("league_tokens")))
    assert 2 * sum(len(mine) for _, mine, _ in pairs) == len(frame) and len(pairs) == 4
    for name, mine, theirs in pairs:
        assert mine["kl_mu_old"].tolist() == theirs["kl_mu_old"].tolist()
        assert mine["variance"].tolist() != theirs["variance"].tolist()
        if name == "reinforce + token_is":
            assert mine["bias"].tolist() == pytest.approx(theirs["bias"].tolist(), rel=1e-5, abs=1e-9)


def test_the_least_of_a_cell_is_one() -> None:
    """In every cell some objective makes the least error, and the table is sorted by the median of that ratio."""
    frame = kept("league")
    for n in SIZES:
        cells = frame.groupby(["policy", "reward", "asked_discrepancy", "asked_staleness"])[f"times_{n}"]
        assert (cells.min() == 1.0).all()
    times = [row["times_1024"] for row in records(standing(frame))]
    assert times == sorted(times)
