"""Pages as a reader and a browser see them: their parts, their data, and what Chromium makes of them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """The parts of a page that tests read: balanced tags, ids, addresses, and how often plotly drew in each figure."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.plots: list[tuple[str, int]] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.drawings: dict[str, int] = {}
        self.root: dict[str, str | None] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "html":
            self.root = found
        classes = (found.get("class") or "").split()
        if "id" in found and "drawn" not in classes:
            self.ids.append(found["id"] or "")
        self.addresses += [found[name] or "" for name in ("src", "href", "data", "action") if name in found]
        if "plot" in classes:
            self.plots.append((found["id"] or "", len(self.open)))
            self.drawings[found["id"] or ""] = 0
        if "main-svg" in classes and self.plots:
            self.drawings[self.plots[-1][0]] += 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()


def whole(html: str) -> Page:
    """The page, whose tags balance, whose ids are unique, which holds plotly.js once and names no address."""
    page = Page(html)
    assert page.open == [] and len(page.ids) == len(set(page.ids)) and html.count("plotly.js v") == 1
    assert [a for a in page.addresses if not a.startswith(("data:", "#"))] == []
    return page


def payload(html: str) -> dict[str, Any]:
    """The data that the page's script draws."""
    found = re.search(r'<script type="application/json" id="payload">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def browse(page: Path, tmp_path: Path, *options: str) -> tuple[str, list[str]]:
    """The page's DOM after its scripts ran in Chromium, and every line that it wrote to the console."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium is not None, "this test draws the report in a real browser: apt-get install -y chromium"
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --virtual-time-budget=20000 --enable-logging=stderr --dump-dom"
    )
    command = [chromium, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def with_script(html: str, script: str) -> str:
    """The page with a script at its end."""
    return html.replace("</body>", f"<script>{script}</script></body>")


FRAME = """<!doctype html><html><body><iframe src="page.html" style="width:{width}px;height:900px"></iframe><script>
addEventListener("message", (e) => {{ document.body.dataset.found = JSON.stringify(e.data); }});
</script></body></html>"""


def probed(html: str, probe: str, tmp_path: Path, width: int, is_dark: bool) -> dict[str, Any]:
    """The post of the script, at the end of the page, to the frame of this width (pixels) around it.

    In either colour scheme the page writes nothing to the console.
    """
    (tmp_path / "page.html").write_text(with_script(html, probe))
    (tmp_path / "frame.html").write_text(FRAME.format(width=width))
    dark = ["--blink-settings=preferredColorScheme=0"] if is_dark else []
    dom, console = browse(tmp_path / "frame.html", tmp_path, "--window-size=1400,1000", *dark)
    assert console == []
    return json.loads(attribute_in(dom, "data-found"))


def attribute_in(dom: str, name: str) -> str:
    """The value of an attribute in a dumped page."""
    found = re.search(rf'{name}="([^"]*)"', dom)
    assert found is not None
    return found.group(1).replace("&quot;", '"')
