"""Laws of the audit: its rows are sums over all responses, distances those asked for, page and words the rows."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from lab.audit import AuditConfig, audit, load_config, medians
from lab.audit.cases import MAX_REWARDS, draw_reward, exact_cases
from lab.audit.config import AuditObjective, GroupBlock
from lab.audit.page import render
from lab.audit.records import read, to_json
from lab.audit.study import study
from lab.audit.table import interval, ratios
from lab.audit.words import sentences, turns
from lab.config.load import config_hash, to_yaml
from lab.config.strict import ConfigError
from lab.report.style import number
from tests.lab.test_report import FRAME, Page, attribute_in, browse, payload, with_script
from theory.exact.estimator import Problem
from theory.exact.tree import PrefixTree
from theory.objectives import Objective
from theory.streams import stream

CONFIG = """
name: tiny
backend: exact
policies:
  - {kind: tabular, num_tokens: 2, lengths: [2, 3], seeds: 2}
  - {kind: linear, features: bigram, num_tokens: 3, has_end: true, lengths: [2], seeds: 2, objectives: [none, token]}
discrepancy: {kind: logits, token_kl: [1e-3, 1e-2]}
staleness: {direction: random, token_kl: [0.0, 3e-3]}
rewards: [sparse, last]
groups: [{size: 2}, {size: infinite, baseline: mean}, {size: infinite, baseline: none}]
objectives:
  - {preset: reinforce, label: none}
  - {preset: reinforce, label: token, correction: {name: token_is, numerator: pi}}
  - {preset: reinforce, label: sequence, correction: {name: seq_tis, numerator: pi, cap: .inf}}
  - {preset: grpo}
num_responses: [64, 1024]
compare: {first: token, second: none}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> AuditConfig:
    """A small audit of both kinds of policies."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(CONFIG)
    return load_config(path)


@pytest.fixture(scope="module")
def frame(config: AuditConfig) -> pd.DataFrame:
    """Its rows."""
    return audit(config)


# ---- the rows, against enumeration by hand ---------------------------------------------------------------------------


def logits_of(problem: Problem, logp: list[Tensor]) -> list[Tensor]:
    """Free logits of a tabular policy, as leaves: log-probabilities are logits too."""
    return [x.clone().requires_grad_() for x in logp]


def string_logp(edges: list[Tensor], tokens: tuple[int, ...]) -> Tensor:
    """log-probabilities of a string's tokens, walking down the tree; no end token."""
    node, parts = 0, []
    for t, token in enumerate(tokens):
        parts.append(edges[t].log_softmax(1)[node, token])
        node = node * edges[t].shape[1] + token
    return torch.stack(parts)


def by_hand(
    problem: Problem, objective: Objective, size: int, advantage: Callable[[Tensor, float], Tensor]
) -> tuple[Tensor, float, Tensor]:
    """Mean, trace of the covariance times size, and truth: over every group of `size` strings, by autograd."""
    tree = problem.target.tree
    logits = logits_of(problem, problem.target.logp())
    strings = list(itertools.product(range(tree.num_tokens), repeat=tree.max_length))
    mu = torch.stack([string_logp(list(problem.logp_mu), s) for s in strings])
    old = torch.stack([string_logp(list(problem.logp_old), s) for s in strings])
    pi = torch.stack([string_logp(logits, s) for s in strings])
    R, p_mu = problem.reward_Y, mu.sum(1).exp()
    value = (pi.sum(1).exp() * R).sum()
    truth = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, logits, retain_graph=True)])
    mean, second, mean_reward = torch.zeros_like(truth), 0.0, float((p_mu * R).sum())
    for chosen in itertools.product(range(len(strings)), repeat=size):
        rows = list(chosen)
        probability = float(p_mu[rows].prod())
        advantages = advantage(R[rows], mean_reward)
        output = objective(pi[rows], old[rows], mu[rows], advantages, torch.ones_like(mu[rows], dtype=torch.bool))
        parts = torch.autograd.grad(output.objective, logits, retain_graph=True)
        gradient = torch.cat([g.reshape(-1) for g in parts])
        mean += probability * gradient
        second += probability * float(gradient.square().sum())
    return mean, size * (second - float(mean.square().sum())), truth


HANDS: list[tuple[str, str, str, Callable[[Tensor, float], Tensor]]] = [
    ("token", "infinite", "mean", lambda R, mean: R - mean),
    ("token", "infinite", "none", lambda R, mean: R),
    ("none", "2", "own", lambda R, mean: R - R.mean()),
    ("sequence", "2", "own", lambda R, mean: R - R.mean()),
]


@pytest.mark.parametrize(("label", "group", "baseline", "advantage"), HANDS, ids=[" ".join(h[:3]) for h in HANDS])
def test_a_row_is_the_sum_over_all_groups(
    config: AuditConfig,
    frame: pd.DataFrame,
    label: str,
    group: str,
    baseline: str,
    advantage: Callable[[Tensor, float], Tensor],
) -> None:
    """Bias, cosine, variance and error of rows are those of summing autograd over every group of strings."""
    case = next(c for c in exact_cases(config, config.policies[0]).each if c.keys["length"] == 3)
    level = (1e-2, 3e-3)
    objective = next(one.build() for one in config.objectives if one.name == label)
    size = 1 if group == "infinite" else int(group)
    mean, variance, truth = by_hand(case.problem(*level), objective, size, advantage)
    found = frame.query(
        "kind == 'tabular' and length == 3 and seed == 0 and reward == @case.keys['reward'] and objective == @label "
        "and asked_discrepancy == 1e-2 and asked_staleness == 3e-3 and group == @group and baseline == @baseline"
    )
    assert len(found) == 1
    row, length = found.iloc[0], float(truth.norm())
    # Both sides are sums of some 100 float64 terms: measured agreement 1e-14, x 100.
    assert row["bias"] == pytest.approx(float((mean - truth).norm()) / length, abs=1e-12)
    assert row["cosine"] == pytest.approx(float(mean @ truth) / float(mean.norm()) / length, abs=1e-12)
    assert row["variance"] == pytest.approx(variance / length**2, rel=1e-10)
    error = math.sqrt(float((mean - truth).square().sum()) + variance / 64) / length
    assert row["error_64"] == pytest.approx(error, rel=1e-10)


def test_distances_are_those_asked_for(frame: pd.DataFrame) -> None:
    """KL(mu || old) and KL(old || pi) a token are the levels of the config, to the bisection's relative 1e-9."""
    for measured, asked in (("kl_mu_old", "asked_discrepancy"), ("kl_old_pi", "asked_staleness")):
        assert frame[measured].to_numpy() == pytest.approx(frame[asked].to_numpy(), rel=1e-6, abs=1e-12)
    same = frame[frame["asked_staleness"] == 0]
    assert same["kl_mu_pi"].to_numpy() == pytest.approx(same["kl_mu_old"].to_numpy(), rel=1e-12)


def test_the_full_weight_is_unbiased(frame: pd.DataFrame) -> None:
    """With the whole sequence's weight and an infinite group the expected gradient is the true one; token's is not."""
    infinite = frame[(frame["group"] == "infinite") & (frame["kind"] == "tabular")]
    bias = infinite.groupby("objective")["bias"].min()
    assert infinite[infinite["objective"] == "sequence"]["bias"].max() < 1e-12  # float64 rounding, measured 1e-15
    assert bias["token"] > 1e-4 and bias["none"] > 1e-4


def test_the_split_is_the_bias_with_one_gap_closed(config: AuditConfig, frame: pd.DataFrame) -> None:
    """bias_discrepancy is the bias of the same case at staleness 0; without any gap only the group's size biases."""
    keys = ["policy", "length", "seed", "reward", "objective", "group", "baseline", "asked_discrepancy"]
    alone = frame[frame["asked_staleness"] == 0].set_index(keys)["bias"]
    both = frame[frame["asked_staleness"] > 0].set_index(keys)["bias_discrepancy"]
    assert (alone == both.loc[alone.index]).all()
    reinforce = frame[frame["objective"] == "none"]
    # A group's own mean has 1/G of each response in it, which leaves (G - 1)/G of the gradient.
    expected = np.where(reinforce["group"] == "2", 0.5, 0.0)
    assert reinforce["bias_on_policy"].to_numpy() == pytest.approx(expected, abs=1e-12)
    staleness = frame[(frame["asked_staleness"] == 0)]
    assert staleness["bias_staleness"].to_numpy() == pytest.approx(staleness["bias_on_policy"].to_numpy(), abs=1e-14)


def test_policies_may_have_objectives_of_their_own(frame: pd.DataFrame) -> None:
    """A block's `objectives` leaves the others out; every pairing of the rest is there exactly once."""
    linear = frame[frame["kind"] == "bigram"]
    assert set(linear["objective"]) == {"none", "token"}
    assert len(linear) == 2 * 2 * 4 * 2 * 3  # seeds, rewards, levels, objectives, groups
    assert len(frame) == len(linear) + 2 * 2 * 2 * 4 * 4 * 3
    assert set(linear["policy"]) == {"bigram, 3 tokens with an end"}


def test_the_same_config_gives_the_same_numbers(config: AuditConfig, frame: pd.DataFrame) -> None:
    """Rows depend on the seed alone, bit for bit, and not on which other rewards or objectives are audited."""
    block = config.policies[0].model_copy(update={"lengths": (3,)})
    part = config.model_copy(update={"policies": (block,), "rewards": ("last",), "objectives": config.objectives[1:2]})
    again = audit(part).reset_index(drop=True)
    query = "kind == 'tabular' and length == 3 and reward == 'last' and objective == 'token'"
    pd.testing.assert_frame_equal(again, frame.query(query).reset_index(drop=True))
    assert audit(part.model_copy(update={"seed": 1}))["bias"].ne(again["bias"]).all()
    first, second = (again.loc[again["seed"] == seed, "variance"].to_numpy() for seed in (0, 1))
    assert (first != second).all()  # one seed, one policy


def test_a_reward_is_never_constant() -> None:
    """Draws that pay every response the same are drawn again: with 4 responses a third of sparse ones would be."""
    config = AuditConfig.model_construct(groups=(GroupBlock(),))
    tree = PrefixTree(2, 2)
    for seed in range(50):
        reward_Y = draw_reward(config, tree, "sparse", stream(seed, "test"))
        assert reward_Y.min() < reward_Y.max()


# ---- medians, ratios, turns ------------------------------------------------------------------------------------------


def test_medians_run_over_policies_alone(frame: pd.DataFrame) -> None:
    """Each median row is numpy's median and quartiles over the seeds of one case, level and objective."""
    found = medians(frame)
    assert (found["num_policies"] == 2).all() and len(found) == len(frame) / 2
    row = found.iloc[17]
    names = ["policy", "length", "reward", "objective", "group", "baseline", "asked_discrepancy", "asked_staleness"]
    part = frame[np.logical_and.reduce([frame[name] == row[name] for name in names])]
    assert len(part) == 2
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
    assert again.objectives[2].build().correction.formula == "w_t = min(prod_s pi_s/mu_s, inf)"
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
    """No perturbation makes two policies on 2 tokens differ by 1000 nats a token."""
    block = config.policies[0].model_copy(update={"lengths": (2,), "seeds": 1})
    discrepancy = config.discrepancy.model_copy(update={"token_kl": (1000.0,)})
    with pytest.raises(ValueError, match=r"^discrepancy\.token_kl: expected a scale up to .* to reach 1000"):
        audit(config.model_copy(update={"policies": (block,), "discrepancy": discrepancy}))


def test_records_come_back(frame: pd.DataFrame, tmp_path: Path) -> None:
    """audit.json gives the same dataframe, bit for bit, says what each column means, and is strict JSON."""
    (tmp_path / "audit.json").write_text(to_json(frame))
    again = read(tmp_path / "audit.json")
    pd.testing.assert_frame_equal(again, frame.reset_index(drop=True), check_exact=True)
    assert again.attrs == frame.attrs
    raw = json.loads((tmp_path / "audit.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert set(raw["columns"]) - set(raw["meaning"]) == {"error_64", "error_1024"}
    (tmp_path / "audit.json").write_text(to_json(frame)[:-100])
    with pytest.raises(ValueError, match=r"audit\.json: expected the records of an audit, got damaged ones"):
        read(tmp_path / "audit.json")


# ---- words and page --------------------------------------------------------------------------------------------------


def test_the_summary_is_computed(config: AuditConfig, frame: pd.DataFrame) -> None:
    """Its numbers follow the rows: with the biases of two objectives exchanged, their names change places."""
    said = " ".join(sentences(config, frame))
    assert "every expectation is an exact sum" in said and "least with sequence" in said and "token has less" in said
    swap = {"sequence": "grpo", "grpo": "sequence"}
    other = frame.assign(objective=frame["objective"].map(lambda name: swap.get(name, name)))
    assert "least with grpo" in " ".join(sentences(config, other))
    assert f"{len(frame):,} rows" in said


def test_every_number_of_the_study_is_in_the_tables(config: AuditConfig, frame: pd.DataFrame) -> None:
    """Its ratio cells are those of `ratios` at the middle staleness, bold exactly where the interval leaves out 1."""
    text = study(config, frame)
    table = ratios(frame, "token", "none")
    cells = re.findall(r"(\*\*)?([\d.e-]+)(?:\*\*)? \[([\d.e-]+), ([\d.e-]+)\]", text)
    part = table[table["asked_staleness"] == 3e-3]
    wanted = sorted((number(r["ratio"]), number(r["low"]), number(r["high"])) for r in part.to_dict("records"))
    assert sorted(tuple(c[1:]) for c in cells) == wanted
    assert sum(bool(c[0]) for c in cells) == ((part["high"] < 1) | (part["low"] > 1)).sum()
    with pytest.raises(ValueError, match="compare: expected two objectives"):
        study(config.model_copy(update={"compare": None}), frame)


@pytest.fixture(scope="module")
def html(config: AuditConfig, frame: pd.DataFrame) -> str:
    """The page."""
    return render(config, frame, {"seed": 0, "versions": {"torch": "2"}}, to_yaml(config))


FIGURES = {"bias-kl", "direction-kl", "bias-length", "error-n", "split", "trade-off"}


def test_the_page_is_whole_and_loads_nothing(html: str) -> None:
    """Tags balance, ids are unique, plotly.js is inside once, and no element names an address."""
    page = Page(html)
    assert page.open == [] and len(page.ids) == len(set(page.ids)) and html.count("plotly.js v") == 1
    assert [a for a in page.addresses if not a.startswith(("data:", "#"))] == []
    maps = {figure for figure, _ in page.plots} - FIGURES
    assert {figure for figure, _ in page.plots} >= FIGURES and len(maps) == 12  # 2 policies x 2 rewards x 3 groups


def test_the_curves_are_the_medians(html: str, frame: pd.DataFrame) -> None:
    """The line of an objective on the bias figure has the medians at the middle staleness of the longest responses."""
    figure = next(f for f in payload(html)["figures"] if f["id"] == "bias-kl" and f["slice"] == "0/0/1")
    line = next(t for t in figure["data"] if t["name"] == "token" and t["meta"]["role"] == "line")
    found = medians(frame).query(
        "policy == 'tabular, 2 tokens' and length == 3 and reward == 'sparse' and group == 'infinite' "
        "and baseline == 'mean' and objective == 'token' and asked_staleness == 3e-3"
    )
    assert line["x"] == sorted(found["kl_mu_pi"]) and sorted(line["y"]) == sorted(found["bias"])


PROBE = """
const pick = [...document.querySelectorAll('select.slice')];
pick[0].value = "1"; pick[0].dispatchEvent(new Event("change"));
setTimeout(() => {
  const wide = document.documentElement;
  const plots = [...document.querySelectorAll('.plot')].filter((p) => !p.closest('figure').hidden);
  parent.postMessage({
    drawn: wide.dataset.drawn, shown: plots.filter((p) => p.querySelector('.main-svg')).length,
    rows: document.querySelectorAll('tbody tr:not([hidden])').length,
    names: [...document.querySelectorAll('.run')].filter((b) => !b.hidden).map((b) => b.textContent.trim()),
    overflow: wide.scrollWidth - wide.clientWidth,
    outside: plots.filter((p) => p.querySelector('.main-svg').getBoundingClientRect().width > p.clientWidth + 1).length,
  }, '*');
}, 2000);
"""


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1280, "light")])
def test_a_browser_shows_one_slice_at_a_time(html: str, tmp_path: Path, width: int, scheme: str) -> None:
    """Choosing other policies redraws figures, table and legend without a word on the console; nothing overflows."""
    (tmp_path / "report.html").write_text(with_script(html, PROBE))
    (tmp_path / "frame.html").write_text(FRAME.format(width=width))
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    dom, console = browse(tmp_path / "frame.html", tmp_path, "--window-size=1400,1000", *dark)
    found = json.loads(attribute_in(dom, "data-found"))
    assert console == []
    # The bigram policies have one length, so no figure over lengths, and two objectives at four pairs of distances.
    assert int(found["drawn"]) == found["shown"] == len(FIGURES) - 1 + 12
    assert found["names"] == ["none", "token"] and found["rows"] == 8
    assert found["overflow"] == 0 and found["outside"] == 0


def test_an_objective_has_its_label_or_its_preset() -> None:
    """Tables call an objective by its label, and by its preset where it has none."""
    assert AuditObjective(preset="minirl").name == "minirl"
    assert AuditObjective(preset="minirl", label="mine").name == "mine"
