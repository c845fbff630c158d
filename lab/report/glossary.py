"""The terms of the field on the pages, each in a sentence: linked in the text, listed at the end of the page."""

from __future__ import annotations

import re

from markupsafe import Markup, escape

from theory.routing.passes import PASSES

TERMS: dict[str, str] = {
    "mu": "the policy of the inference engine: the distribution, with that engine's numerics, weights and routing, "
    "from which the tokens were sampled",
    "old": "the policy of the training engine at the weights with which the responses were sampled, before any update",
    "pi": "the policy of the training engine now, after the updates so far",
    "KL": "Kullback-Leibler divergence: the mean, over tokens from the first policy, of the logarithm of the ratio of "
    "the first policy's probability to the second's; 0 only where both are equal",
    "k3": "an estimate of KL(p || q) from tokens of p, the mean of r - 1 - log r with r = q/p; never negative "
    "(R3 Eq. 2)",
    "F(2)": "share of sampled tokens whose probabilities under mu and old differ by a factor of more than 2 (R3 Eq. 3)",
    "F(tau)": "share of sampled tokens whose probabilities under mu and old differ by a factor of more than tau",
    "nats": "the unit of entropy and KL by the natural logarithm; 1 nat is 1.44 bits",
    "N": "mini-batches of a global step, each an update on the same set of responses; 1 is on-policy",
    "staleness": "the distance of pi from old: the updates made since the responses were sampled",
    "discrepancy": "the distance of old from mu: two engines that compute the same weights differently",
    "entropy": "the mean of -log pi over the tokens that pi may choose; near 0 the policy no longer explores",
    **{mode: f"a mode that {plan.effect}" for mode, plan in PASSES.items() if plan.effect},
    "global step": "one round: sample responses, score them, make N updates, hand the weights to the inference engine",
    "regime": "in the claims ledger, the model, task, engine and optimizer that a set of runs shares",
}
"""Word to its meaning; a word is found in the spelling used here."""

# Longest first, because an alternation takes the first alternative that fits.
_PATTERN = re.compile(rf"(?<!\w)({'|'.join(re.escape(word) for word in sorted(TERMS, key=len, reverse=True))})(?!\w)")


class Glossary:
    """The words that one page has used, in the order of TERMS."""

    def __init__(self) -> None:
        self._used: set[str] = set()

    def explained(self, text: object) -> Markup:
        """The text as HTML in which the first use of each word links to its meaning, which hovering shows."""
        marked, seen = [Markup("")], set[str]()
        # re.split puts the captured words at the odd places.
        for place, part in enumerate(_PATTERN.split(str(text))):
            is_first = place % 2 == 1 and part not in seen
            marked.append(self._link(part) if is_first else escape(part))
            seen.add(part)
        return Markup("").join(marked)

    def _link(self, word: str) -> Markup:
        self._used.add(word)
        return Markup('<a class="term" href="#{}" title="{}: {}">{}</a>').format(anchor(word), word, TERMS[word], word)

    @property
    def used(self) -> list[tuple[str, str, str]]:
        """Anchor, word and meaning of each word that the page has linked so far."""
        return [(anchor(word), word, meaning) for word, meaning in TERMS.items() if word in self._used]


def anchor(word: str) -> str:
    """The id of the word's entry."""
    return f"word-{re.sub(r'[^A-Za-z0-9]+', '-', word).strip('-')}"
