"""The arrival of the trainer's weights, from draws (one token after one context) that several steps share.

log mu of such a draw is a function of the engine's weights alone, log old of the trainer's. If the engine has the
weights of step v at step t, log mu_t and log old_v agree up to the engine's own gap on every draw that t and v share.
With D(t, v) = sum over shared draws of |log mu_t - log old_v|, the two faults are two families of hypotheses:

    stopped(v): Q = sum over t > v of D(t, v) / sum over t > v of D(t, t)      the weights of step v, ever since
    behind(k):  Q = sum over t of D(t, t - k) / sum over t of D(t, t)          k recorded steps behind, k at most half

both sums over the same draws. Q is 0 for an otherwise exact engine, and above 1 if its own step fits better. It needs
no noise level and no model of the trainer's movement, as versions are compared on the same tokens.
Weights delivered in part fit no version: there the slope of log mu's movement on log old's is below 1, and the gap on
the same draws grows from one meeting to the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median_low

import numpy as np

from lab.doctor.view import View

MOST_DRAWS = 2**15
"""Most draws kept in memory, for any number of steps; draws shared by two steps are kept first."""
MOST_STEPS = 64
"""Most steps kept in memory: beyond, every second step is kept, then every fourth, and so on."""
FEWEST_DRAWS = 50
"""Fewest shared draws for any statement."""
FEWEST_STEPS = 3
"""Fewest steps after v for `stopped(v)`."""
EXPLAINED = 0.5
"""Bound on Q, with any one part of the prompts left out, below which an earlier version explains the gap."""
FEWEST_PARTS = 4
"""Fewest parts of the prompts with movement for a slope."""
NUM_PARTS = 32
"""Parts of the prompts, by their hash, that the jackknife leaves out one at a time."""


@dataclass(frozen=True)
class Version:
    """The engine's weights: those of step `since` ever since, or those of `behind` recorded steps ago; `left` is Q."""

    since: int | None
    behind: int | None
    left: float
    most_left: float
    """The largest Q when one part of the prompts is left out."""
    left_a_draw: float
    """Mean of |log mu - log old of this version| plus two standard errors, nats."""
    num_draws: int
    lag: int | None = None
    """`behind` in global steps, of which not all are recorded; the median over the steps where the spacing varies."""


@dataclass(frozen=True)
class Slope:
    """Movement of log mu per unit of log old's since a draw's first step, by least squares through 0.

    value: 1 if all weights arrive, 0 if none do. error: its jackknife standard error over parts of the prompts.
    """

    value: float
    error: float
    num_draws: int
    grown: float
    """Mean |log mu - log old| at last meetings over that at first ones, on the draws that were first met in the first
    third of the steps; the least with any one part left out."""


class Arrivals:
    """A summary of the draws of all steps, in memory bounded by MOST_DRAWS times MOST_STEPS."""

    def __init__(self, most_draws: int = MOST_DRAWS, most_steps: int = MOST_STEPS) -> None:
        self.most_draws, self.most_steps = most_draws, most_steps
        self.steps: list[int] = []
        self._rows: dict[int, int] = {}
        self._part: list[int] = []
        self._stride, self._seen = 1, 0
        self._mu_ks = np.zeros((0, 0), dtype=np.float64)
        self._old_ks = np.zeros((0, 0), dtype=np.float64)

    def add(self, step: int, view: View) -> None:
        """Adds the step's draws with p < 0.99; repeated draws of one step count once, by their mean.

        Does nothing for the steps that MOST_STEPS omits.
        """
        self._seen += 1
        if (self._seen - 1) % self._stride:
            return
        # Full: double the stride and drop every second step, so that the kept ones stay evenly spaced.
        if len(self.steps) == self.most_steps:
            self._stride *= 2
            self.steps = self.steps[::2]
            self._mu_ks, self._old_ks = self._mu_ks[:, ::2], self._old_ks[:, ::2]
            if (self._seen - 1) % self._stride:
                return
        keys, parts = _keys(view)
        is_used = (view.is_open_n & view.mu_n.isfinite() & view.old_n.isfinite()).numpy()
        mu_n, old_n = view.mu_n.numpy(), view.old_n.numpy()
        sums: dict[int, list[float]] = {}
        for i in np.flatnonzero(is_used).tolist():
            # A key keeps the part of its first draw: in another response the same tokens may have a longer prompt.
            total = sums.setdefault(keys[i], [0.0, 0.0, 0.0, float(parts[i])])
            total[0] += 1
            total[1] += float(mu_n[i])
            total[2] += float(old_n[i])
        self._append(step, sums)
        self._forget()

    def _append(self, step: int, sums: dict[int, list[float]]) -> None:
        for key, total in sums.items():
            if key not in self._rows:
                self._rows[key] = len(self._rows)
                self._part.append(int(total[3]))
        num, grown = len(self._rows), len(self.steps) + 1
        for name in ("_mu_ks", "_old_ks"):
            # NaN where a step has not met a draw: differences with it stay NaN and are left out.
            table = np.full((num, grown), np.nan)
            table[: len(getattr(self, name)), :-1] = getattr(self, name)
            setattr(self, name, table)
        for key, (count, mu, old, _) in sums.items():
            self._mu_ks[self._rows[key], -1] = mu / count
            self._old_ks[self._rows[key], -1] = old / count
        self.steps.append(step)

    def _forget(self) -> None:
        """Keeps shared draws first, then the smallest keys: being hashes, they are the same ones at every step."""
        if len(self._rows) <= self.most_draws:
            return
        # The dict was filled in the order of the table's rows.
        keys = np.fromiter(self._rows, dtype=np.uint64)
        is_shared = np.isfinite(self._mu_ks).sum(1) > 1
        kept = np.sort(np.lexsort((keys, ~is_shared))[: self.most_draws])
        self._rows = {int(keys[i]): at for at, i in enumerate(kept.tolist())}
        self._part = [self._part[i] for i in kept.tolist()]
        self._mu_ks, self._old_ks = self._mu_ks[kept], self._old_ks[kept]

    @property
    def num_shared(self) -> int:
        """Draws that at least two of the kept steps share."""
        return int((np.isfinite(self._mu_ks).sum(1) > 1).sum()) if self.steps else 0

    def version(self) -> Version | None:
        """The earlier weights that explain the gap; None if none do, or if too few draws are shared."""
        n = len(self.steps)
        own_kt = np.abs(self._mu_ks - self._old_ks)
        stopped = [
            self._explained(own_kt, lambda t, v=v: v, range(v + 1, n), since=self.steps[v])
            for v in range(n - FEWEST_STEPS)
        ]
        behind = [
            self._explained(own_kt, lambda t, k=k: t - k, range(k, n), behind=k)
            for k in range(1, n // 2 + 1)
            if self._stride == 1  # with steps dropped, columns are not consecutive steps
        ]
        found = [version for version in (*stopped, *behind) if version is not None and version.most_left < EXPLAINED]
        # Not by the least Q: it shrinks as the gap grows, so it favours late steps. The remaining gap per draw is the
        # engine's own for the right version and larger for any other; two standard errors keep a few draws from winning
        # by chance.
        return min(found, key=lambda version: version.left_a_draw, default=None)

    def _explained(
        self,
        own_kt: np.ndarray,
        of: Callable[[int], int],
        times: range,
        since: int | None = None,
        behind: int | None = None,
    ) -> Version | None:
        left_g, own_g, num_g = np.zeros((3, NUM_PARTS))
        part_k = np.array(self._part)
        for t in times:
            other_k = np.abs(self._mu_ks[:, t] - self._old_ks[:, of(t)])
            is_shared = np.isfinite(other_k)  # NaN unless both steps have the draw
            left_g += np.bincount(part_k[is_shared], other_k[is_shared], NUM_PARTS)
            own_g += np.bincount(part_k[is_shared], own_kt[is_shared, t], NUM_PARTS)
            num_g += np.bincount(part_k[is_shared], minlength=NUM_PARTS)
        # Jackknife: each entry of `..without_g` is the sum over all parts but one.
        num, without_g = int(num_g.sum()), own_g.sum() - own_g
        # An engine without a gap leaves nothing to explain. The test also refuses draws of one part alone, for which
        # mean_g below would divide by 0.
        if num < FEWEST_DRAWS or not bool((without_g > 0).all()):
            return None
        left_without_g = left_g.sum() - left_g
        mean_g = left_without_g / (num - num_g)
        # (n - 1) / n times the sum of squares, written with the mean.
        error = float(np.sqrt((NUM_PARTS - 1) * np.square(mean_g - mean_g.mean()).mean()))
        left = float(left_g.sum())
        most_left = float((left_without_g / without_g).max())
        lag = None if behind is None else median_low(self.steps[t] - self.steps[of(t)] for t in times)
        return Version(since, behind, left / float(own_g.sum()), most_left, left / num + 2 * error, num, lag)

    def slope(self, first: int) -> Slope | None:
        """The slope over draws met at two or more steps from `first` on, from the first meeting; None for too few."""
        columns = [i for i, step in enumerate(self.steps) if step >= first]
        is_met = np.isfinite(self._mu_ks[:, columns])
        rows = np.flatnonzero(is_met.sum(1) > 1)
        if len(rows) < FEWEST_DRAWS:
            return None
        is_met, part_k, each = is_met[rows], np.array(self._part)[rows], np.arange(len(rows))
        mu_ks, old_ks = (table[rows][:, columns] for table in (self._mu_ks, self._old_ks))
        # First and last meeting of each draw: argmax of booleans is the first True.
        begin, end = is_met.argmax(1), is_met.shape[1] - 1 - is_met[:, ::-1].argmax(1)
        dmu, dold = (table - table[each, begin][:, None] for table in (mu_ks, old_ks))
        # nansum: a step that has not met a draw adds nothing, and the first meeting adds 0.
        cross_g, square_g = (np.bincount(part_k, np.nansum(x, 1), NUM_PARTS) for x in (dmu * dold, dold * dold))
        total = square_g.sum()
        # A part that has all the movement cannot be left out: the slope would be 0 / 0.
        used = np.flatnonzero((square_g > 0) & (total - square_g > 0))
        if len(used) < FEWEST_PARTS:
            return None
        without_g = (cross_g.sum() - cross_g[used]) / (total - square_g[used])
        error = np.sqrt((len(used) - 1) / len(used) * np.square(without_g - without_g.mean()).sum())
        # A gap that grows and then stays constant shows only on draws that were first met early.
        early = np.flatnonzero(begin <= is_met.shape[1] // 3)
        gap_ks = np.abs(mu_ks - old_ks)
        first_g, last_g = (np.bincount(part_k[early], gap_ks[early, at[early]], NUM_PARTS) for at in (begin, end))
        grown = (last_g.sum() - last_g) / np.maximum(first_g.sum() - first_g, 1e-12)
        return Slope(float(cross_g.sum() / total), float(error), len(rows), float(grown.min()))


def _keys(view: View) -> tuple[list[int], list[int]]:
    """For each sampled token a hash of its prefix, itself included, equal in every trace; and its prompt's part."""
    trace, keys, parts = view.trace, [], []
    # blake2b and a fixed byte order: keys are equal in every process and on every machine.
    tokens = trace.tokens.numpy().astype("<i4")
    is_response, at = trace.is_response.tolist(), 0
    for b, (start, stop) in enumerate(zip(trace.offsets[:-1].tolist(), trace.offsets[1:].tolist(), strict=True)):
        first = start + int(trace.num_prompt[b])
        running = hashlib.blake2b(tokens[start:first].tobytes(), digest_size=8)
        part = int.from_bytes(running.digest(), "little") % NUM_PARTS
        for place in range(first, stop):
            running.update(tokens[place].tobytes())
            if is_response[at]:
                keys.append(int.from_bytes(running.copy().digest(), "little"))
                parts.append(part)
            at += 1
    return keys, parts
