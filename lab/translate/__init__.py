"""A recipe in the words of another framework: the options that give its loss the same gradient, and what has none.

translation.py has what a translation consists of, and each other file a framework. A new framework is a new file with a
row in FRAMEWORKS. tests/peers compares the gradients with those of the frameworks' own losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lab.translate.slime import to_slime
from lab.translate.translation import Option, Translation, Unsaid
from lab.translate.trl import to_trl
from lab.translate.verl import to_verl
from theory.algorithm import Algorithm

FRAMEWORKS: Mapping[str, Callable[[Algorithm], Translation]] = {
    "verl": to_verl,
    "trl": to_trl,
    "slime": to_slime,
}
"""By name, the function that translates an algorithm."""

__all__ = ["FRAMEWORKS", "Option", "Translation", "Unsaid"]
