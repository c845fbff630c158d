"""Laws of the audit's medians and ratios, of its config and of its records."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lab.audit import AuditConfig, audit, load_config, medians
from lab.audit.cases import MAX_REWARDS, draw_reward
from lab.audit.records import read, write
from lab.audit.table import interval, numbers, ratios, where
from lab.audit.words import turns
from lab.config.load import config_hash, to_yaml
from lab.records import RunFolder
from lab.strict import ConfigError
from tests.lab.audit.conftest import CONFIG
from theory.exact.tree import PrefixTree
from theory.streams import stream

pytestmark = pytest.mark.unchecked

# ---- medians, ratios, turns ------------------------------------------------------------------------------------------


def test_medians_run_over_policies_alone(frame: pd.DataFrame) -> None:
    """Each median row is numpy's median and quartiles over the seeds of one case, level and objective."""
    found = medians(frame)
    wanted = frame["policy"].map(lambda policy: 6 if policy.startswith("tabular") else 2)
    assert list(found.groupby("num_policies").size()) == [sum(wanted == n) / n for n in (2, 6)]
    row = found.iloc[17]
    names = ["policy", "length", "reward", "objective", "group", "baseline", "asked_discrepancy", "asked_staleness"]
    part = frame[np.logical_and.reduce([frame[name] == row[name] for name in names])]
    assert len(part) == row["num_policies"]
    assert [row["bias_q1"], row["bias"], row["bias_q3"]] == list(np.quantile(part["bias"], [0.25, 0.5, 0.75]))


def test_ratios_are_taken_policy_by_policy(frame: pd.DataFrame) -> None:
    """The log-ratio is the median over seeds of one policy's two biases; swapping the objectives inverts it."""
    table, swapped = ratios(frame, "token", "none"), ratios(frame, "none", "token")
    assert table["ratio"].to_numpy() == pytest.approx(1 / swapped["ratio"].to_numpy(), rel=1e-12)
    assert (table["low"] <= table["ratio"]).all() and (table["ratio"] <= table["high"]).all()
    row = table.iloc[0]
    part = frame[
        np.logical_and.reduce(
            [frame[n] == row[n] for n in ("policy", "length", "reward", "group", "baseline")]
            + [frame[n] == row[n] for n in ("asked_discrepancy", "asked_staleness")]
        )
    ].pivot(index="seed", columns="objective", values="bias")
    assert row["ratio"] == pytest.approx(math.exp(np.log(part["token"] / part["none"]).median()), rel=1e-12)
    assert (ratios(frame, "token", "token")["ratio"] == 1).all()


def test_rounding_is_no_bias(frame: pd.DataFrame) -> None:
    """The ratio to an exact objective is infinite, that of it 0, that of two such objectives 1."""
    # Without a cap, the weight of the whole sequence is exact where no baseline depends on the group.
    part = where(frame, (frame["group"] == "infinite") & (frame["kind"] == "tabular"))
    assert 0 < numbers(where(part, part["objective"] == "sequence"), "bias").max() < 1e-12
    pairs = {("none", "sequence"): math.inf, ("sequence", "none"): 0.0, ("sequence", "sequence"): 1.0}
    for (first, second), ratio in pairs.items():
        table = ratios(part, first, second)
        assert len(table) and (np.asarray(table[["ratio", "low", "high"]]) == ratio).all()


def test_one_exact_policy_is_beyond_all_others() -> None:
    """Of the ratios 2 to 4 and infinity, each twice, the median is 4, and the interval reaches to infinity."""
    case = {"policy": "p", "engine": "e", "mode": "none", "reward": "r", "group": "infinite", "baseline": "mean"}
    level = {"length": 2, "asked_discrepancy": 1e-3, "asked_staleness": 0.0, "kl_mu_pi": 1e-3, "kl_sequence": 2e-3}
    biases = {"first": (0.02, 0.02, 0.04, 0.04, 0.08, 0.08), "second": (0.01, 0.01, 0.01, 0.01, 1e-16, 1e-16)}
    rows = [
        case | level | {"objective": name, "seed": seed, "bias": bias}
        for name, values in biases.items()
        for seed, bias in enumerate(values)
    ]
    (row,) = ratios(pd.DataFrame(rows), "first", "second").to_dict("records")
    assert [row["low"], row["ratio"], row["high"]] == pytest.approx([2.0, 4.0, math.inf])


def test_without_a_gap_there_is_no_ratio(frame: pd.DataFrame) -> None:
    """Rows at distance 0 alone, or of one objective alone, give a table without rows that has the columns of any."""
    columns = list(ratios(frame, "token", "none"))
    for part in (where(frame, numbers(frame, "kl_mu_pi") <= 0), where(frame, frame["objective"] == "grpo")):
        assert ratios(part, "token", "none").empty and list(ratios(part, "token", "none")) == columns


def test_an_interval_covers_the_median_of_its_law() -> None:
    """95% intervals from 12 draws hold the true median in most of 200 repetitions (percentile bootstrap: about 93%)."""
    rng = np.random.default_rng(0)
    hits = [(i := interval(rng.normal(size=12), k)).low <= 0 <= i.high for k in range(200)]
    # Binomial(200, 0.93) is above 172 with probability 0.9998.
    assert 172 <= sum(hits) < 200
    assert interval(np.array([2.0])) == interval(np.array([2.0]), "other")
    with pytest.raises(ValueError, match="expected finite values"):
        interval(np.array([1.0, math.nan]))


@pytest.mark.parametrize(
    ("by_length", "expected"),
    [({2: 1.2, 4: 0.9, 6: 1.0, 8: 1.3}, 6), ({2: 1.2, 4: 0.9}, None), ({2: 1.0, 4: 2.0}, 2)],
)
def test_the_turn_is_where_the_ratio_stays_above_one(by_length: dict[int, float], expected: int | None) -> None:
    """It is the start of the last run of lengths at 1 or more that reaches the longest; without one there is none."""
    case = {"policy": "p", "engine": "e", "mode": "none", "reward": "r", "group": "infinite", "baseline": "mean"}
    level = {"asked_discrepancy": 1e-3, "asked_staleness": 0.0}
    rows = [case | level | {"length": n, "ratio": r, "kl_sequence": n * 1e-3} for n, r in by_length.items()]
    (found,) = turns(pd.DataFrame(rows)).to_dict("records")
    assert (None if math.isnan(found["length"]) else found["length"]) == expected
    assert math.isnan(found["kl_sequence"]) if expected is None else found["kl_sequence"] == expected * 1e-3


# ---- config and records ----------------------------------------------------------------------------------------------

MISTAKES = [
    ("num_tokens: 2", "num_tokens: 1", "policies.0.tabular.num_tokens"),
    ("lengths: [2, 3]", "lengths: [40]", "expected at most 4,000,000 responses to enumerate, got 1,099,511,627,776"),
    ("lengths: [2, 3]", "length: [2]", "unknown key; did you mean 'lengths'?"),
    ("kind: tabular", "kind: tabula", "policies.0.kind: expected one of 'tabular', 'linear', got tabula"),
    ("kind: logits", "kind: logit", "discrepancy.kind: expected 'logits' or 'weights'"),
    ("[1e-3, 1e-2]", "[-1.0]", "discrepancy.token_kl.0: expected a value greater than or equal to 0, got -1.0"),
    ("rewards: [sparse, last]", "rewards: [spars]", "rewards: expected one of sparse,"),
    ("{size: 2}", "{size: 1}", "groups.0.size"),
    ("{size: 2}", "{size: 2, baseline: mean}", "groups.0.baseline: expected own with size 2, got mean"),
    ("baseline: none}]", "baseline: own}]", "groups.2.baseline: expected mean or none with size infinite, got own"),
    ("{preset: grpo}", "{preset: grpoo}", "objectives.3: unknown preset 'grpoo'"),
    ("{preset: grpo}", "{preset: grpo, kl_coefficient: 0.1}", "objectives.3.kl_coefficient: expected 0"),
    ("{preset: grpo}", "{preset: reinforce, label: none}", "objectives: expected distinct names, got 'none' 2 times"),
    ("objectives: [none, token]", "objectives: [non]", "policies.1.objectives: expected one of none, token"),
    ("second: none}", "second: nothing}", "compare.second: expected one of none, token, sequence, grpo, got 'nothing'"),
    ("backend: exact", "backend: exactly", "backend: unknown backend 'exactly'; did you mean 'exact'?"),
]


@pytest.mark.parametrize(("right", "wrong", "wanted"), MISTAKES, ids=[wrong for _, wrong, _ in MISTAKES])
def test_a_mistake_in_a_config_is_one_line(right: str, wrong: str, wanted: str, tmp_path: Path) -> None:
    """Every wrong field is named with its dotted name, what came and what was expected."""
    assert right in CONFIG
    (tmp_path / "c.yaml").write_text(CONFIG.replace(right, wrong))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "c.yaml")
    assert wanted.replace(".tabular", "") in str(caught.value) and "\n" not in str(caught.value)


def test_a_config_comes_back_from_its_own_text(config: AuditConfig, tmp_path: Path) -> None:
    """The resolved YAML, infinite caps included, loads to the same config and hash; overrides change both."""
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    again = load_config(tmp_path / "c.yaml")
    assert again == config and config_hash(again) == config_hash(config)
    assert again.objectives[2].build().correction.formula == "w_t = prod_s pi_s/mu_s"
    other = load_config(tmp_path / "c.yaml", ["--seed", "1"])
    assert other.seed == 1 and config_hash(other) != config_hash(config)


def test_too_many_rewards_are_refused_for_groups_alone(config: AuditConfig) -> None:
    """A reward of many values is refused with the count where groups are finite, and enumerated where they are not."""
    tree = PrefixTree(3, 6)
    with pytest.raises(ValueError, match=rf"at most {MAX_REWARDS} distinct rewards, got 7\d\d of 'dense'"):
        draw_reward(config, tree, "dense", stream(0, "test"))
    infinite = config.model_copy(update={"groups": config.groups[1:]})
    assert len(draw_reward(infinite, tree, "dense", stream(0, "test")).unique()) > MAX_REWARDS


def test_a_distance_out_of_reach_names_its_field(config: AuditConfig) -> None:
    """No perturbation makes two policies on 2 tokens differ by 1000 nats per token."""
    block = config.policies[0].model_copy(update={"lengths": (2,), "seeds": 1})
    discrepancy = config.discrepancy.model_copy(update={"token_kl": (1000.0,)})
    with pytest.raises(ValueError, match=r"^discrepancy\.token_kl: expected a scale up to .* to reach 1000"):
        audit(config.model_copy(update={"policies": (block,), "discrepancy": discrepancy}))


def test_records_come_back(frame: pd.DataFrame, tmp_path: Path) -> None:
    """audit.json gives the same dataframe, bit for bit, says what each column means, and is strict JSON."""
    path = write(RunFolder(tmp_path), frame)
    again = read(path)
    pd.testing.assert_frame_equal(again, frame.reset_index(drop=True), check_exact=True)
    assert again.attrs == frame.attrs
    raw = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert set(raw["columns"]) - set(raw["meaning"]) == {"error_64", "error_1024"}
    path.write_text(path.read_text()[:-100])
    with pytest.raises(ValueError, match=r"audit\.json: expected the records of an audit, got damaged ones"):
        read(path)
