"""The one writer of Markdown tables, for pages, reports on a terminal and the docs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: bool = False) -> str:
    """The rows under these titles, as a Markdown table that ends with a line break.

    `numbers` aligns every column but the first to the right. A `|` inside a cell is the caller's to escape.
    """
    rule = "---:|" if numbers else "---|"
    lines = [f"| {' | '.join(titles)} |", "|---|" + rule * (len(titles) - 1)]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines) + "\n"
