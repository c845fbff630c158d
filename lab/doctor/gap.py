"""Clues from the log-probabilities of both sides: the size, the shape and the place of their gap.

d = log old - log mu of a sampled token, rho = e^d, p its probability under old, token ~ mu. Functions of type
`float | None` return None below MIN_TOKENS usable tokens, unless they say otherwise.
Papers: R3 (arXiv 2510.11370) Eq. 2 and 3; MiniRL (arXiv 2512.01374) Eq. 5.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lab.doctor.view import MIN_TOKENS, View
from theory.divergences import extreme_fraction

FEWEST_REPEATED = 100
"""Fewest repeated draws of `unrepeated_tail`, whose 99 % quantile needs some above it."""
NUM_PARTS = 4
"""Parts into which `fall` splits the prompts; all of them must show a fall."""


def exact_share(view: View) -> float:
    """Share of tokens with log mu == log old to the bit, in [0, 1]."""
    return (view.d_n == 0).double().mean().item()


def k3_kl(view: View) -> float:
    """k3 estimate of KL(mu || old), nats per token, at least 0: mean of rho - 1 - log rho (R3 Eq. 2)."""
    return view.k3_n.mean().item()


def extreme(view: View) -> float:
    """F(2), the share of tokens with max(rho, 1/rho) > 2, in [0, 1] (R3 Eq. 3)."""
    return extreme_fraction(view.old_n, view.mu_n, torch.ones(len(view), dtype=torch.bool), tau=2.0).item()


def size(view: View) -> float | None:
    """Typical deviation of a logit, in logit units, at least 0: the median of |d| / (1 - p) over tokens with p < 0.99.

    To first order d = (1 - p) delta if only the token's own logit moves, by delta.
    """
    return view.size_n[view.is_open_n].median().item() if int(view.is_open_n.sum()) >= MIN_TOKENS else None


def sure_ratio(view: View) -> float | None:
    """Median of |d| / (1 - p) where 0.99 < p < 0.9995 over the median where p < 0.99, at least 0.

    Near 1 for rounding, which moves all logits alike; below 1 for training, whose gradient is small where the policy is
    sure.
    """
    sure = view.size_n[(view.doubt_n < 0.01) & (view.doubt_n > 5e-4)]
    usual = size(view)
    return sure.median().item() / usual if usual and len(sure) >= MIN_TOKENS else None


def rho_mean(view: View) -> float:
    """Mean of rho, at least 0: in expectation 1 for two policies over the same tokens.

    If mu is old cut to its likeliest tokens and rescaled, it is old's probability of those tokens.
    """
    return view.d_n.exp().mean().item()


def rho_z(view: View) -> float:
    """(mean rho - 1) / (std rho / sqrt n), in standard errors; 0 for equal bits and for a single token."""
    rho_n = view.d_n.exp()
    # The clamp: equal bits have a standard deviation of 0, and 0 / 1e-300 is the z of 0 that they should have.
    return ((rho_n.mean() - 1) / (rho_n.std() / len(view) ** 0.5).clamp(min=1e-300)).item() if len(view) > 1 else 0.0


def one_sided(view: View) -> float | None:
    """|sum d| / sum |d|, in [0, 1]: 1 if one side's log-probabilities are never below the other's. None if d = 0."""
    total = view.d_n.abs().sum()
    return (view.d_n.sum().abs() / total).item() if total > 0 else None


def logit_line(view: View) -> tuple[float, float] | None:
    """Slope a of logit(mu) = a logit(old), least squares through 0, and the share of the difference that it explains.

    The share, in [0, 1], is of sum (logit mu - logit old)^2. If only the temperatures differ, the slope is old's over
    mu's: exactly so in a vocabulary of two tokens.
    """
    # logit(p) = log p - log(1 - p) magnifies an error of log p by 1 / (1 - p), so tokens with p near 1 are left out.
    is_seen_n = (view.mu_n < -1e-3) & (view.old_n < -1e-3)
    if int(is_seen_n.sum()) < MIN_TOKENS or not bool((view.d_n[is_seen_n] != 0).any()):
        return None
    # -expm1(log p) is 1 - p with all its digits; 1 - exp(log p) would lose them where p is near 1.
    mu, old = (x[is_seen_n] - torch.log(-torch.expm1(x[is_seen_n])) for x in (view.mu_n, view.old_n))
    slope = (mu * old).sum() / (old * old).sum().clamp(min=1e-300)
    # Slope 1 leaves the whole denominator, and least squares never leaves more: the last clamp is for rounding alone.
    left = (mu - slope * old).square().sum() / (mu - old).square().sum().clamp(min=1e-300)
    return slope.item(), (1 - left).clamp(min=0).item()


def correlation(view: View) -> float | None:
    """Pearson correlation of log mu and log old, in [-1, 1]: near 1 for the same model and tokens."""
    if len(view) < MIN_TOKENS or view.mu_n.std() == 0 or view.old_n.std() == 0:
        return None
    return torch.corrcoef(torch.stack([view.mu_n, view.old_n]))[0, 1].item()


def noise_share(view: View) -> float | None:
    """Share of d^2 that does not repeat when a token follows the same context again, in [0, 1] up to sampling error.

    The sum of m s^2 over groups of m equal draws / the sum of d^2, with s^2 the unbiased variance of d within a group:
    1 for independent noise of mean 0, 0 for engines that are functions of the context.
    """
    # Equal draws have the same token, too: an engine that is a function of the context has a d for each token.
    _, group_n, sizes = view.draw_n.unique(return_inverse=True, return_counts=True)
    is_many_n = sizes[group_n] > 1
    total = view.d_n[is_many_n].square().sum()
    if int(is_many_n.sum()) < MIN_TOKENS or total == 0:
        return None
    mean = torch.zeros(len(sizes), dtype=torch.float64).index_add(0, group_n, view.d_n) / sizes
    # A group's squares sum to (m - 1) s^2; m / (m - 1) makes it m s^2. The clamp is for groups of one, left out below.
    squares = (view.d_n - mean[group_n]).square() * (sizes / (sizes - 1).clamp(min=1))[group_n]
    return (squares[is_many_n].sum() / total).item()


def unrepeated_tail(view: View) -> float | None:
    """Tail of the part of a logit's deviation that does not repeat: 99 % quantile / median of its absolute value.

    That part is d / (1 - p) less its mean over the m equal draws, times sqrt(m / (m - 1)), on tokens with p < 0.99. The
    ratio is 3.8 for normal noise. Noise that is added to numbers changes all draws alike; a router that errs by chance
    changes few draws by much, which makes the ratio large. None below FEWEST_REPEATED repeated draws, and where
    everything repeats.
    """
    _, group_n, sizes = view.draw_n[view.is_open_n].unique(return_inverse=True, return_counts=True)
    is_many_n = sizes[group_n] > 1
    if int(is_many_n.sum()) < FEWEST_REPEATED:
        return None
    size_n = (view.d_n / view.doubt_n)[view.is_open_n]
    mean = torch.zeros(len(sizes), dtype=torch.float64).index_add(0, group_n, size_n) / sizes
    rest_n = (size_n - mean[group_n]).abs() * (sizes / (sizes - 1).clamp(min=1)).sqrt()[group_n]
    rest_n = rest_n[is_many_n].sort().values
    # Deviations below 1e-6 of a logit are float32 rounding and count as 1e-6.
    tail, middle = (rest_n[int(share * (len(rest_n) - 1))].item() for share in (0.99, 0.5))
    return tail / max(middle, 1e-6) if tail > 1e-6 else None


def fall(view: View) -> tuple[float, int] | None:
    """Largest fall of mean log |d|/(1 - p), in nats, from before a position to the rest from it on, and that position.

    Prompts are dealt into four parts by their number modulo 4, and a fall is the least of the parts' falls: the size of
    the gap differs from text to text, but a change of weights in mid-response shows on all prompts. Only tokens with
    p < 0.997 count. Positions in a response count from 0.
    """
    is_open_n = view.doubt_n > 0.003
    # Deviations below 1e-6 of a logit are float32 rounding and count as 1e-6.
    log_n = view.size_n[is_open_n].clamp(min=1e-6).log()
    at_n, part_n = view.position_n[is_open_n], _prompt_numbers(view)[view.response_n][is_open_n] % NUM_PARTS
    num_places = int(view.position_n.max()) + 1
    # One histogram over (part, position), then cumulative sums along the positions.
    place_n, shape = part_n * num_places + at_n, (NUM_PARTS, num_places)
    counts = torch.bincount(place_n, minlength=NUM_PARTS * num_places).view(shape).cumsum(1)
    sums = torch.bincount(place_n, log_n, minlength=NUM_PARTS * num_places).view(shape).cumsum(1)
    # Column t - 1 sums the positions before t, so that `falls` at t - 1 is the fall at position t.
    before, after = counts[:, :-1], counts[:, -1:] - counts[:, :-1]
    # An empty side is 0 / 0 = nan and counts as no fall.
    falls = (sums[:, :-1] / before - (sums[:, -1:] - sums[:, :-1]) / after).nan_to_num(-math.inf).amin(0)
    # Each side needs an eighth of each part's tokens, so that a handful of tokens makes no fall.
    is_seen = (torch.minimum(before, after) >= (counts[:, -1:] / 8).clamp(min=MIN_TOKENS)).all(0)
    is_seen[-1:] = False  # at the last position only end tokens are left
    if not bool(is_seen.any()):
        return None
    t = int(falls.masked_fill(~is_seen, -math.inf).argmax())
    return falls[t].item(), t + 1


def _prompt_numbers(view: View) -> Tensor:
    """The prompt's number for each response, in order of appearance."""
    trace, seen = view.trace, {}
    starts = zip(trace.offsets[:-1].tolist(), trace.num_prompt.tolist(), strict=True)
    prompts = [tuple(trace.tokens[start : start + length].tolist()) for start, length in starts]
    return torch.tensor([seen.setdefault(prompt, len(seen)) for prompt in prompts])
