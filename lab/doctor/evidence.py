"""The numeric evidence of a trace about a pair of engines: each clue is one function of the tokens, with its formula.

d = log old - log mu of a sampled token, rho = e^d, p its probability under old, token ~ mu. Without data, no clue.
Papers: R3 (arXiv 2510.11370) Eq. 2 and 3, sec. 3.2; MiniRL (arXiv 2512.01374) Eq. 5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lab.doctor import alignment, gap, routes, sampler
from lab.doctor.view import View
from lab.traces import Trace
from theory.routing.measures import router_disagreement


@dataclass(frozen=True)
class Clue:
    """One number of a trace: its title, its formula, and the function, which returns None without data."""

    title: str
    formula: str
    of: Callable[[View], float | None]


def gather(trace: Trace) -> dict[str, float]:
    """Every clue that the trace has data for, by name.

    If some log-probability is not finite, only the share of such tokens and their number. Raises ValueError where no
    token was sampled.
    """
    view = View.of(trace)
    is_finite_n = view.mu_n.isfinite() & view.old_n.isfinite()
    if not bool(is_finite_n.all()):
        return {"nonfinite_share": 1 - is_finite_n.double().mean().item(), "num_tokens": float(len(view))}
    values = {name: clue.of(view) for name, clue in CLUES.items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def disagreement(view: View) -> float | None:
    """Share, in [0, 1], of (row, layer) pairs whose sets of experts differ (R3 sec. 3.2), prompts included."""
    mu, old = view.trace.record_mu, view.trace.record_old
    # `router_disagreement` raises ValueError for two records without a (row, layer) in common.
    if mu is None or old is None or view.difference_RL is None or not bool((view.difference_RL >= 0).any()):
        return None
    return router_disagreement(mu, old)


def _part(pair: Callable[[View], tuple[float, float] | None], i: int) -> Callable[[View], float | None]:
    """One number of a clue that comes as two."""
    return lambda view: None if (found := pair(view)) is None else found[i]


CLUES: dict[str, Clue] = {
    "num_tokens": Clue("sampled tokens", "n", lambda view: float(len(view))),
    "temperature": Clue("sampling temperature", "T, if the trace has it", lambda view: view.trace.temperature),
    "exact_share": Clue("tokens with equal bits", "share of tokens with log mu == log old", gap.exact_share),
    "k3_kl": Clue("k3 KL(mu, old)", "mean of rho - 1 - log rho, rho = old/mu, nats per token", gap.k3_kl),
    "extreme_frac_tau2": Clue("F(2)", "share of tokens with max(rho, 1/rho) > 2", gap.extreme),
    "size": Clue("deviation of a logit", "median of |d| / (1 - p) where p < 0.99, d = log old - log mu", gap.size),
    "sure_ratio": Clue("its ratio on sure tokens", "median where 0.99 < p < 0.9995 / where p < 0.99", gap.sure_ratio),
    "rho_mean": Clue("mean ratio", "mean of rho; 1 for policies over the same tokens", gap.rho_mean),
    "rho_z": Clue("mean ratio - 1, in standard errors", "(mean rho - 1) / (std rho / sqrt n)", gap.rho_z),
    "one_sided": Clue("one-sidedness", "|sum d| / sum |d|", gap.one_sided),
    "logit_slope": Clue("slope of logits", "a in logit mu = a logit old, least squares", _part(gap.logit_line, 0)),
    "logit_fit": Clue("share explained by the slope", "of sum (logit mu - logit old)^2", _part(gap.logit_line, 1)),
    "correlation": Clue("correlation", "Pearson, of log mu and log old", gap.correlation),
    "shift": Clue(
        "better shift", "s of -1 and 1 with the least mean |log mu_t - log old_(t+s)|", _part(alignment.shift, 0)
    ),
    "shift_gain": Clue("gain from that shift", "mean |d| unshifted / shifted", _part(alignment.shift, 1)),
    "zero_share": Clue(
        "zeros", "log-probs exactly 0 on one side, p < 1/2 on the other, last tokens excluded", alignment.zero_share
    ),
    "zero_sure_share": Clue(
        "zeros, likely tokens included", "0 on one side, < -1e-4 on the other", alignment.zero_sure_share
    ),
    "zero_last_share": Clue("zeros at the end", "the same share among last tokens", alignment.zero_last_share),
    "end_share": Clue(
        "ending on an end token", "share of responses of neither the largest length nor total", alignment.end_share
    ),
    "noise_share": Clue("unrepeated part", "sum m s^2 / sum d^2 over equal (context, token)", gap.noise_share),
    "unrepeated_tail": Clue(
        "tail of the unrepeated part", "99 % quantile / median of |deviation - its mean|", gap.unrepeated_tail
    ),
    "jump": Clue(
        "fall along the response", "of mean log |d|/(1 - p), least of four parts of the prompts", _part(gap.fall, 0)
    ),
    "jump_at": Clue("position of that fall", "in the response", _part(gap.fall, 1)),
    "surprise_gap": Clue("surprise - entropy", "mean of -log old - H(old), nats per token", sampler.mean_surprise),
    "surprise_z": Clue("surprise - entropy, in standard errors", "its mean / its standard error", sampler.surprise_z),
    "collision_z": Clue(
        "repeats from one context", "sum of 1(y' = y) - mu(y), in standard errors", sampler.collision_z
    ),
    "tail_share": Clue("unlikely tokens / expected", "where entropy < 0.325 nats", sampler.tail_share),
    "router_disagreement": Clue("routers that differ", "share of (row, layer) with other experts", disagreement),
    "num_flips": Clue("number of differing routers", "number of (row, layer)", routes.num_flips),
    "flips_per_size": Clue(
        "differing routers per deviation", "router disagreement / deviation of a logit", routes.flips_per_size
    ),
    "kl_per_flip": Clue(
        "KL per differing router", "k3 KL without its largest 0.5 % / router disagreement", routes.kl_per_flip
    ),
    "flip_share_of_kl": Clue("KL on tokens whose experts differ", "share of the sum of k3", routes.flip_share_of_kl),
    "flip_token_share": Clue("tokens whose experts differ", "share of sampled tokens", routes.flip_token_share),
    "row_shift_gain": Clue(
        "gain from shifting a row", "agreement with old's neighbouring row / own row", routes.row_shift_gain
    ),
    "unrecorded_share": Clue(
        "rows without mu's experts", "share of the (row, layer) pairs that old has", routes.unrecorded_share
    ),
}
"""Every clue by name, in the order of a report."""
