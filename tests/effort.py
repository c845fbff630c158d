"""The number of examples that a law draws where the profile's number would be too many for what one example costs.

The profiles are in conftest.py. An example costs 1 to 20 ms for most laws; the two kinds below cost more.
"""

from __future__ import annotations

from hypothesis import settings

_EXAMPLES = settings().max_examples

few = settings(max_examples=max(4, _EXAMPLES // 6))
"""For laws over all objectives, which have the most rows: fewer batches each than the other laws draw."""

heavy = settings(max_examples=min(_EXAMPLES, max(50, _EXAMPLES // 10)))
"""For laws that sum whole trees many times an example (80 to 430 ms): a tenth, yet 50 where that is less."""

__all__ = ["few", "heavy"]
