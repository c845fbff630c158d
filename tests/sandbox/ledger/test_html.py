"""Laws of the ledger's HTML: a real browser draws all of it, cuts no name, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.report.sections import metric_title
from sandbox.claims import CLAIMS, REGIMES, RESULTS
from sandbox.ledger import html
from sandbox.ledger.early_warning import SIGNALS
from sandbox.ledger.figures import OTHER_TITLES, title_of
from sandbox.ledger.verdicts import findings
from tests.lab.browser import Page, browse, payload, probed
from tests.pages.study import ROOT
from tests.sandbox.ledger.chosen import CHOSEN, SEEDS, made_rows


@pytest.fixture(scope="module")
def text() -> str:
    rows = made_rows()
    return html.render(CHOSEN, REGIMES, findings(CHOSEN, REGIMES, rows, len(SEEDS)), rows, len(SEEDS))


def test_a_browser_draws_the_ledger_without_a_word(text: str, tmp_path: Path) -> None:
    """Chromium shows the regime with the most claims that have runs, draws each of its figures, and logs nothing."""
    (tmp_path / "ledger.html").write_text(text)
    dom, console = browse(tmp_path / "ledger.html", tmp_path)
    drawn = [figure["id"] for figure in payload(text)["figures"] if figure.get("slice") in (None, "0")]
    seen = Page(dom)
    assert console == []
    assert seen.root.get("data-drawn") == str(len(drawn))
    assert {id_ for id_ in seen.drawings if seen.drawings[id_]} == set(drawn)
    assert {"map-MiniRL", "claim-3-actor-entropy"} <= set(drawn)


CUT = """
setTimeout(() => {
  const wide = document.documentElement;
  parent.postMessage({
    cut: [...document.querySelectorAll('#verdicts .halves tbody :is(th, td)')]
      .filter((cell) => cell.scrollWidth > cell.clientWidth + 1).map((cell) => cell.textContent),
    names: document.querySelectorAll('#verdicts .halves tbody th').length,
    overflow: wide.scrollWidth - wide.clientWidth,
  }, '*');
}, 2000);
"""


@pytest.mark.parametrize(("width", "is_dark"), [(400, True), (1280, False)])
def test_no_name_is_cut(text: str, tmp_path: Path, width: int, is_dark: bool) -> None:
    """Names longer than their column wrap, and the page, which a phone shows without a pointer, names none."""
    long = "a name of as many words as the longest of the claims has, and more"
    found = probed(
        text.replace("length normalisation", long).replace("no weight collapses", long), CUT, tmp_path, width, is_dark
    )
    assert found["cut"] == [] and found["overflow"] == 0 and found["names"] > 4
    assert "pointer" not in text.partition("<h2>Verdicts</h2>")[2].partition("<style>")[0]


def test_the_page_is_whole_and_loads_nothing(text: str) -> None:
    """Tags balance, ids are unique, no address is loaded, and links lead somewhere: into the page, or to the map of the
    border, whose place in the checkout is told in words, too."""
    seen = Page(text)
    assert seen.open == [] and len(seen.ids) == len(set(seen.ids))
    inner = [address for address in seen.addresses if address.startswith("#")]
    assert len(inner) >= len(CHOSEN) and {address[1:] for address in inner} <= set(seen.ids)
    (outward,) = (address for address in seen.addresses if not address.startswith(("data:", "#")))
    assert (RESULTS / outward).resolve() == ROOT / "docs/border-map.html"
    assert f'<a href="{outward}">docs/border-map.html</a>' in text and (RESULTS / outward).exists()


def test_figures_are_titled_by_the_reports_words(text: str) -> None:
    """No heading is a metric's raw name: those of the claims' figures are the report's titles, for every claim."""
    headings = re.findall(r"<h3>(.*?)</h3>", text)
    assert {"Reward in training", "KL between rollout and training engine", "Entropy of the policy"} <= {*headings}
    assert not [one for one in headings if "/" in one or "_" in one]
    names = {*SIGNALS, *(name for claim in CLAIMS for name in claim.shown)}
    assert all("/" not in title_of(name) and "_" not in title_of(name) for name in names)
    assert {title_of(name) for name in OTHER_TITLES}.isdisjoint(metric_title(name) for name in names - {*OTHER_TITLES})


def test_the_diagrams_say_how_many_cells_are_whole(text: str) -> None:
    """The number of drawn cells without a break is that of the cells of 1.00, and the sentence names the other map."""
    cells = [text for one in payload(text)["figures"] if one["id"].startswith("map-")
             for line in one["data"][0]["z"] for text in line if text is not None]  # fmt: skip
    assert 0 < cells.count(1.0) < len(cells)
    above = text.partition('<section id="maps">')[2].partition("<figure")[0]
    assert f"In {cells.count(1.0)} of {len(cells)} cells no run breaks." in above and "docs/border.md" in above
