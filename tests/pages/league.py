"""The league table of objectives and corrections: its kept rows, docs/league.md and its picture.

`python -m tests.pages.league` enumerates configs/audit/league.yaml (every preset and correction), league_tokens.yaml
and league_moe.yaml, keeps the medians over policies in results/audit/, and writes page and picture; with `--page` it
writes these from the kept rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from scipy import stats

from lab.audit.config import load_config
from lab.audit.table import distinct, numbers, parts, records, where
from lab.markdown import markdown_table
from lab.report.style import number
from sandbox.border.pictures import svg
from tests.pages.league_rows import CONFIGS, ROOT, SIZES, enumerated, keep, kept

PAGE, PICTURE = ROOT / "docs/league.md", ROOT / "docs/images/league.svg"
PLAIN = "reinforce"
"""The objective without any weight or bound."""

GAP = ("asked_discrepancy",)
NEAR = 1.05
LARGE = 5.0
"""An error this many times the least of its cell is far off."""


# ---- the table -------------------------------------------------------------------------------------------------------


def standing(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per objective: medians over all cells, the worst cell, and the number of cells within 2% of the best;
    sorted by `times_1024`."""
    rows = []
    for key, part in parts(frame, ["objective"]):
        row = dict(key)
        for name in ("bias", "direction_bias", "variance", "error_64", "error_1024", "best_64", "best_1024", "drift"):
            row[name] = float(np.nanmedian(numbers(part, name))) if not np.isnan(numbers(part, name)).all() else np.nan
        for n in SIZES:
            row[f"times_{n}"] = float(np.median(numbers(part, f"times_{n}")))
            row[f"worst_{n}"] = float(numbers(part, f"times_{n}").max())
            row[f"wins_{n}"] = int((numbers(part, f"times_{n}") <= 1.02).sum())
        rows.append(row | {"cells": len(part)})
    return pd.DataFrame(rows).sort_values(["times_1024", "times_64"], kind="stable")


HEADS = {
    "bias": "bias", "direction_bias": "direction bias", "variance": "variance", "error_64": "error, 64",
    "error_1024": "error, 1,024", "times_64": "x best, 64", "times_1024": "x best, 1,024",
    "worst_1024": "worst x, 1,024", "drift": "drift",
}  # fmt: skip


def shown(value: float, name: str = "") -> str:
    """A number in the table; the enumeration's rounding shows as 0, a missing value as a dash."""
    if np.isnan(value):
        return "–"
    return f"{value:.2f}" if name.startswith(("times", "worst")) else number(0.0 if abs(value) < 1e-7 else value)


def league(frame: pd.DataFrame) -> str:
    """The table of all objectives."""
    rows = [[row["objective"], *(shown(row[name], name) for name in HEADS)] for row in records(standing(frame))]
    return markdown_table(["objective", *HEADS.values()], rows, numbers=True)


def _tied(part: pd.DataFrame, n: int, num: int = 3) -> list[tuple[str, float]]:
    """The best objectives of some cells by median, with their error over the least error."""
    each = {key["objective"]: float(np.median(numbers(of, f"times_{n}"))) for key, of in parts(part, ["objective"])}
    return sorted(each.items(), key=lambda pair: pair[1])[:num]


def regimes(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The pairs of gap and staleness, in words."""
    for key, part in parts(frame, ["asked_staleness", "asked_discrepancy"]):
        stale = "on policy" if key["asked_staleness"] == 0 else f"KL(old, pi) {number(key['asked_staleness'])}"
        yield f"KL(mu, old) {number(key['asked_discrepancy'])}, {stale}", part


def when(frame: pd.DataFrame) -> str:
    """For each regime and sample size, the three objectives with the least error, and the plain gradient."""
    rows = []
    for words, part in regimes(frame):
        cells = [words]
        for n in SIZES:
            cells.append(", ".join(f"{name} {times:.2f}" for name, times in _tied(part, n)))
            cells.append(f"{np.median(numbers(where(part, part['objective'] == PLAIN), f'times_{n}')):.2f}")
        rows.append(cells)
    heads = ["regime", "least error, 64 responses", f"{PLAIN}", "least error, 1,024 responses", f"{PLAIN}"]
    return markdown_table(heads, rows)


def by_level(frame: pd.DataFrame, names: Sequence[str]) -> str:
    """Median `times_1024` of the objectives of `names` by temperature, reward and staleness."""
    columns: list[tuple[str, pd.DataFrame]] = []
    for policy in frame["policy"].unique():
        columns.append((f"T {heat_of(policy)}", where(frame, frame["policy"] == policy)))
    columns += [(f"{reward} reward", where(frame, frame["reward"] == reward)) for reward in frame["reward"].unique()]
    for level in distinct(frame, "asked_staleness"):
        words = "on policy" if level == 0 else f"stale, KL {number(level)}"
        columns.append((words, where(frame, frame["asked_staleness"] == level)))
    rows = []
    for name in names:
        medians_ = [np.median(numbers(where(part, part["objective"] == name), "times_1024")) for _, part in columns]
        rows.append([name, *(f"{value:.2f}" for value in medians_)])
    return markdown_table(["objective", *(head for head, _ in columns)], rows, numbers=True)


SUFFIX = ", per token"


def beside(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """Each objective with a baseline per token: its name, its rows, and those of the same cells under the mean."""
    names = frame["objective"].astype(str)
    for name in names[names.str.endswith(SUFFIX)].unique():
        plain = name.removesuffix(SUFFIX)
        yield plain, where(frame, names == name), where(frame, names == plain)


PER_TOKEN_HEADS = {
    "variance": "variance", "direction_bias": "direction bias", "best_64": "error, 64", "best_1024": "error, 1,024",
}  # fmt: skip


def per_token(frame: pd.DataFrame) -> str:
    """For each objective and gap, the ratios of the numbers under a baseline per token to those under the mean."""
    rows = []
    for plain, mine, theirs in beside(frame):
        for level in distinct(frame, "asked_discrepancy"):
            at = [where(part, part["asked_discrepancy"] == level) for part in (mine, theirs)]
            cells = [plain, number(level)]
            for name in PER_TOKEN_HEADS:
                ratio = numbers(at[0], name) / numbers(at[1], name)
                cells.append(f"{np.median(ratio):.2f} [{ratio.min():.2f}, {ratio.max():.2f}]")
            rows.append(cells)
    return markdown_table(["objective", "KL(mu, old)", *PER_TOKEN_HEADS.values()], rows, numbers=True)


def _least_gain(frame: pd.DataFrame) -> str:
    """The cells in which a baseline per token lowers variance and error."""
    less, better, total = 0, 0, 0
    for _, mine, theirs in beside(frame):
        less += int((numbers(mine, "variance") < numbers(theirs, "variance")).sum())
        better += int((numbers(mine, "best_1024") < numbers(theirs, "best_1024")).sum())
        total += len(mine)
    return f"It lowers the variance in {less} of {total} cells, and the error with 1,024 responses in {better}."


def _shifted(moe: pd.DataFrame) -> str:
    """RSPO beside GMPO, off policy: the ratio of their numbers in the cells of the MoE."""
    stale = where(moe, moe["asked_staleness"] > 0)
    rspo, gmpo = (where(stale, stale["objective"] == name) for name in ("rspo", "gmpo"))
    said = []
    for name, words in (("direction_bias", "direction bias"), ("variance", "variance"), ("best_1024", "error")):
        ratio = numbers(rspo, name) / numbers(gmpo, name)
        said.append(f"{words} {ratio.min():.3g} to {ratio.max():.3g}")
    return f"RSPO over GMPO off policy, with 1,024 responses: {', '.join(said)}; on policy the two are equal."


# ---- words -----------------------------------------------------------------------------------------------------------


def findings(frame: pd.DataFrame) -> list[str]:
    """The findings of the rows, in sentences."""
    table = records(standing(frame))
    num_cells = table[0]["cells"]
    said = []
    for n in SIZES:
        least = min(table, key=lambda row: row[f"times_{n}"])
        most = max(table, key=lambda row: row[f"wins_{n}"])
        said.append(
            f"With {n:,} responses {least['objective']} has the least median error at the best step length: "
            f"{least[f'times_{n}']:.2f} times the best of its cell, and {least[f'worst_{n}']:.2f} times in its worst "
            f"cell. {most['objective']} is most often within 2% of the best ({most[f'wins_{n}']} of {num_cells} cells)."
        )
    said += [_plain_is_enough(frame), _plain_against_weights(frame)]
    said.append(_variance(frame))
    said.append(_centring(frame))
    far = [row["objective"] for row in table if row["worst_1024"] > LARGE]
    if far:
        said.append(f"With 1,024 responses, more than {LARGE:g} times the least error in some cell: {', '.join(far)}.")
    return said


def _median(frame: pd.DataFrame, objective: str, name: str, level: float) -> float:
    part = where(frame, (frame["objective"] == objective) & (frame["asked_discrepancy"] == level))
    return float(np.median(numbers(part, name)))


def _plain_is_enough(frame: pd.DataFrame) -> str:
    """The gaps at which, on policy, the gradient without a weight has hardly more error than the best."""
    part = where(frame, (frame["objective"] == PLAIN) & (frame["asked_staleness"] == 0))
    said = []
    for n in SIZES:
        each = {key["asked_discrepancy"]: np.median(numbers(of, f"times_{n}")) for key, of in parts(part, GAP)}
        near = [number(level) for level, times in each.items() if times <= NEAR]
        said.append(f"with {n:,} responses at KL(mu, old) {', '.join(near) or 'none of the gaps'}")
    return f"On policy, the plain gradient's error is at most {NEAR - 1:.0%} above the best {', and '.join(said)}."


def _plain_against_weights(frame: pd.DataFrame) -> str:
    """The errors of the gradient without a weight and with the token weight, at each gap."""
    said = []
    for level in distinct(frame, "asked_discrepancy"):
        each = [_median(frame, name, "best_1024", level) for name in (PLAIN, f"{PLAIN} + token_is")]
        said.append(f"{number(each[0])} and {number(each[1])} at KL(mu, old) {number(level)}")
    return f"The error with 1,024 responses, without a weight and with the token weight: {', '.join(said)}."


def _variance(frame: pd.DataFrame) -> str:
    """The cost in variance of a whole response's weight where the gap is large."""
    level = distinct(frame, "asked_discrepancy")[-1]
    token, whole = (_median(frame, f"{PLAIN} + {name}", "variance", level) for name in ("token_is", "seq_tis"))
    return (
        f"At KL(mu, old) {number(level)} the capped weight of a whole response has {whole / token:.2f} times the "
        f"variance of the token weight."
    )


def _centring(frame: pd.DataFrame) -> str:
    """The effect of centering on bias, variance and drift of the plain gradient, at each gap."""
    said = []
    for level in distinct(frame, "asked_discrepancy"):
        bias, variance = (
            _median(frame, f"{PLAIN} + centred", name, level) / _median(frame, PLAIN, name, level)
            for name in ("bias", "variance")
        )
        drift = _median(frame, PLAIN, "drift", level)
        said.append(
            f"the bias by {bias:.2f} and the variance by {variance:.2f} at KL {number(level)} (drift {number(drift)})"
        )
    return f"Centering the plain gradient multiplies {'; '.join(said)}. It leaves no drift."


def proxy(frame: pd.DataFrame) -> str:
    """The rank correlation of `rollout_corr/drift` with the drift that it estimates."""
    part = frame.dropna(subset=["drift", "drift_tokens"])
    part = where(part, (part["drift"] > 1e-7) & ~part["objective"].str.contains("centred"))
    said = []
    for name, sub in [("all cells", part), *((f"{o} alone", of) for o, of in _by_objective(part, (PLAIN, "ppo")))]:
        found = stats.spearmanr(numbers(sub, "drift_tokens"), numbers(sub, "drift"))
        said.append(f"{float(found.statistic):.2f} over {name} ({len(sub)})")  # pyright: ignore[reportAttributeAccessIssue]
    return (
        f"Spearman's correlation of the exact expectation of the metric `rollout_corr/drift` with the norm of the "
        f"drift in parameter space: {', '.join(said)}. The metric bounds the drift in the logits of a context; it "
        "ignores the prefix's mean advantage and the cancellation between contexts."
    )


def _by_objective(frame: pd.DataFrame, names: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    for name in names:
        yield name, where(frame, frame["objective"] == name)


# ---- picture and page ------------------------------------------------------------------------------------------------


def figure(frame: pd.DataFrame) -> Figure:
    """Every objective by regime: its error with 1,024 responses over the least error of the cell."""
    names = [row["objective"] for row in records(standing(frame))]
    columns = list(regimes(frame))
    grid = np.array([
        [np.median(numbers(where(part, part["objective"] == name), "times_1024")) for _, part in columns]
        for name in names
    ])  # fmt: skip
    drawn = Figure(figsize=(8.6, 1.4 + 0.22 * len(names)), layout="constrained")
    axis = drawn.subplots()
    axis.imshow(grid, aspect="auto", cmap="YlOrBr", norm=LogNorm(1.0, LARGE))
    for (y, x), value in np.ndenumerate(grid):
        axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color="white" if value > 3 else "black")
    heads = [words.replace(", ", "\n", 2).replace("\nold", ", old", 1) for words, _ in columns]
    axis.set_xticks(
        range(len(columns)),
        [head.replace("KL(mu, old) ", "gap ").replace("KL(old, pi) ", "stale ") for head in heads],
        fontsize=8,
    )
    axis.xaxis.tick_top()
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    return drawn


HEAD = """# League table of objectives and corrections

Which objective, under which correction of the engine gap, gives the gradient with the least error? This page ranks
{num} of them on the same small problems, by exact enumeration: no gradient is sampled. The error of a gradient from n
responses combines bias and variance. A *cell* is one choice of engine gap KL(mu, old), staleness KL(old, pi),
temperature and reward. `reinforce + x` is the plain policy gradient under the correction x
([formulas](objectives.md))."""

SETTING = """## The problems

The problems are small (three tokens, four positions, parameters shared by the last token; groups of {group}), so the
table compares the objectives with each other in an exact setting and says nothing about gains on a large model. The
responses are short, which favours the weight of a whole response: its variance grows with the length
([the token weight](token-weight.md)).

The table has every preset and correction of the project that needs only log-probabilities and rewards, and M2PO, whose
bounds are those of an infinitely large mini-batch. A baseline per token has its own section, and RSPO is in the one on
the MoE. `python -m tests.pages.league` computes the rows, the page and the picture again, in two and a half minutes.

Cells: KL(mu, old) = {gaps} nats per token; pi equal to old, or {stale} nats per token from it along the true gradient
(as after several updates per rollout); temperature {heats}; rewards {rewards}. Medians over {seeds} policies.
The weight of `reinforce + x` is on pi/mu, the whole gap. `centred`: each token's expected gradient under mu is
subtracted (score centering, arXiv 2609.20807); `centred by 1` computes it from mu's likeliest token alone."""

WHEN = """## Which one, when

The error is that of the gradient from n responses at its best step length, so that an objective's scale does not
matter. Numbers: error over the least error of the cell, median over temperatures and rewards."""

TABLE = """## The table

Medians over all cells, sorted by `x best, 1,024`. Bias, direction bias, variance and error are those of
[audits](audit.md), in units of the true gradient's norm and at the objective's own scale. `x best`: the error at the
best step length over the least of the cell; `worst x`: the largest of these ratios over the cells. Drift: the norm of
the part of the expected gradient that no choice of token earned."""

PER_TOKEN = """`advantage: optimal_token` (arXiv 2602.07078) compared with the mean reward, in infinite groups, where
either baseline is an expectation; cells as above, plus responses with an end token. Numbers are ratios of the
baseline per token to the mean: medians over cells, with the range in brackets."""

PICTURED = (
    "[![Error with 1,024 responses, by objective, gap and staleness](images/league.svg)](images/league.svg)\n\n"
    "*The error at the best step length over the least of the cell: medians over temperatures and rewards. Gap:\n"
    "KL(mu, old); stale: KL(old, pi); both in nats per token.*"
)


def page() -> str:
    """docs/league.md, from the kept rows."""
    frame, moe, tokens = kept("league"), kept("league_moe"), kept("league_tokens")
    config = load_config(CONFIGS["league"])
    first = [row["objective"] for row in records(standing(frame))]
    heats = dict.fromkeys(heat_of(policy) for policy in frame["policy"])
    text = [
        HEAD.format(num=len(first)),
        "\n".join(f"- {one}" for one in findings(frame)),
        PICTURED,
        SETTING.format(
            group=config.groups[0].size, gaps=", ".join(map(number, config.discrepancy.token_kl)),
            stale=number(config.staleness.token_kl[-1]), heats=" and ".join(heats),
            rewards=" and ".join(config.rewards), seeds=config.policies[0].seeds,
        ),
        WHEN,
        when(frame),
        TABLE,
        league(frame),
        "## By temperature, reward and staleness",
        "Median of `x best` with 1,024 responses: the first twelve, and the plain gradient.",
        by_level(frame, [*dict.fromkeys([*first[:12], PLAIN])]),
        "## A baseline per token",
        PER_TOKEN,
        _least_gain(tokens),
        per_token(tokens),
        "## A mixture of experts with its engines",
        f"The sandbox's MoE with its own engines, {len(moe['objective'].unique())} objectives, on policy and "
        f"{number(distinct(moe, 'asked_staleness')[-1])} nats per token from old in a random direction. The gap is "
        f"the engine's own. Least error with 1,024 responses: {'; '.join(_moe_gaps(moe))}. {_shifted(moe)} Columns as "
        f"above.",
        league(moe),
        "## Does the drift metric follow the drift?",
        proxy(frame),
    ]  # fmt: skip
    return "\n\n".join(part.rstrip("\n") for part in text) + "\n"


def heat_of(policy: str) -> str:
    """The temperature in the name of policies."""
    return policy.partition(", T ")[2] or "1"


def _moe_gaps(moe: pd.DataFrame) -> Iterator[str]:
    for key, part in parts(moe, ["engine", "mode"]):
        mode = "" if key["mode"] == "none" else f" under {key['mode']}"
        best = _tied(part, 1024, 1)[0][0]
        gap = number(float(np.median(numbers(part, "kl_mu_old"))))
        yield f"{best} ({key['engine']}{mode}, KL(mu, old) {gap})"


def main() -> None:
    """Enumerates the rows unless `--page` is given, then writes page and picture."""
    if "--page" not in sys.argv:
        for name in CONFIGS:
            keep(name, enumerated(name))
    PAGE.write_text(page(), encoding="utf-8")
    PICTURE.write_text(svg(figure(kept("league"))), encoding="utf-8")


if __name__ == "__main__":
    main()
