"""Laws of the notebooks as they are stored: run once, with pictures that a viewer without scripts shows."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import numpy as np
import pytest
from PIL import Image

from lab.report.style import PALETTE
from sandbox.ledger.claim import FRESH
from tests.pages.notebooks import (
    COLOURS,
    FEW,
    IMAGES,
    NOTEBOOKS,
    PAGE,
    ROOT,
    WIDTH,
    changed,
    small,
    sources,
    with_times,
)

MOST_BYTES, MOST_IN_ALL = 150_000, 1_500_000
"""Limits on the outputs of one notebook, and of all."""
BORDER = (ROOT / "docs" / "border.md").read_text(encoding="utf-8")
LONG = 30
"""Lines of a cell beyond which a reader skips it."""
OF_A_MACHINE = re.compile(rf"{re.escape(str(ROOT))}|/home/|/root/|/tmp/|/work/|/Users/")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code(path: Path) -> list[nbformat.NotebookNode]:
    """The cells of code, in order."""
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def outputs(path: Path) -> Iterator[nbformat.NotebookNode]:
    """Outputs of the stored cells, in order."""
    return (output for cell in code(path) for output in cell.outputs)


def size(path: Path) -> int:
    """Bytes of the stored outputs, as JSON."""
    return sum(len(json.dumps(output).encode()) for output in outputs(path))


@each_notebook
def test_stored_outputs_are_those_of_the_code(path: Path) -> None:
    """Every cell ran once, from top to bottom, as it stands: `python -m tests.pages.notebooks` after a change."""
    assert [cell.execution_count for cell in code(path)] == list(range(1, len(code(path)) + 1))
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata["firstorder"]["sources"] == sources(notebook)


@each_notebook
def test_what_is_stored_needs_no_script(path: Path) -> None:
    """Pictures and words alone: no widget, no figure of Plotly, no error, no warning, no path of a machine."""
    assert "widgets" not in nbformat.read(path, as_version=4).metadata
    shown = {"text/plain", "text/html", *IMAGES}
    num_pictures = 0
    for output in outputs(path):
        assert output.output_type in ("stream", "display_data", "execute_result")
        assert output.get("name", "stdout") == "stdout" and set(output.get("data", {})) <= shown
        words = [output.get("text", ""), *(v for kind, v in output.get("data", {}).items() if kind != "image/png")]
        assert not any(OF_A_MACHINE.search(text) or "<script" in text for text in words)
        num_pictures += any(kind in output.get("data", {}) for kind in IMAGES)
    assert num_pictures >= 1


@each_notebook
def test_stored_figures_are_drawn(path: Path) -> None:
    """A picture is as wide as asked, on a white page, and has ink of several colours: none is blank."""
    for output in outputs(path):
        if "image/png" in output.get("data", {}):
            image = Image.open(io.BytesIO(base64.b64decode(output["data"]["image/png"]))).convert("RGB")
            assert image.width >= WIDTH
            colours = image.getcolors(image.width * image.height)
            assert colours is not None and len(colours) > 8
            count, page = max(colours)
            assert page == (255, 255, 255) and count < 0.99 * image.width * image.height


def test_a_small_picture_keeps_the_inks() -> None:
    """Among a thousand shades that are everywhere, the few pixels of page, line and label keep their colours."""
    image = Image.new("RGB", (100, 100))
    image.putdata([(n % 250, n // 250 * 6, 128) for n in range(100 * 100)])
    inks = ["#FFFFFF", *(ink.line for ink in PALETTE), *(ink.text for ink in PALETTE)]
    for n, ink in enumerate(inks):
        image.putpixel((n, n), tuple(bytes.fromhex(ink[1:])))
    image.save(png := io.BytesIO(), "PNG")
    found = Image.open(io.BytesIO(small(png.getvalue()))).convert("RGB")
    colours = found.getcolors(100 * 100)
    assert colours is not None and len(colours) <= max(COLOURS)
    assert [found.getpixel((n, n)) for n in range(len(inks))] == [image.getpixel((n, n)) for n in range(len(inks))]


def test_a_small_picture_keeps_the_shades_of_a_map() -> None:
    """Shades of two kinds at once, too many for the smallest palette, stay what they are but for few pixels."""
    shade = np.linspace(0, 255, 48).astype(np.uint8).repeat(4)
    pixels = np.stack([*np.meshgrid(shade, shade), np.full((len(shade), len(shade)), 128, np.uint8)], axis=-1)
    Image.fromarray(pixels).save(png := io.BytesIO(), "PNG")
    assert changed(Image.fromarray(pixels), Image.open(io.BytesIO(small(png.getvalue())))) <= FEW


@each_notebook
def test_a_notebook_is_for_a_reader(path: Path) -> None:
    """Nothing is defined; a third of the cells at most is silent or long; a dial turns; it ends in a question."""
    cells = nbformat.read(path, as_version=4).cells
    skipped = [cell for cell in code(path) if not cell.outputs or len(cell.source.splitlines()) > LONG]
    assert 3 * len(skipped) <= len(cells)
    lines = [line.lstrip() for cell in code(path) for line in cell.source.splitlines()]
    assert not any(line.startswith(("def ", "class ")) for line in lines)
    assert any(line.startswith("dials(") for line in lines)
    assert cells[-1].id == "yours" and "?" in cells[-1].source


def test_the_stored_outputs_are_small() -> None:
    """A clone stays small: the stored outputs of each notebook, and of all, are within their limits."""
    sizes = {path.stem: size(path) for path in NOTEBOOKS}
    assert max(sizes.values()) <= MOST_BYTES and sum(sizes.values()) <= MOST_IN_ALL, sizes


@pytest.mark.parametrize(
    ("name", "seen", "expected"),
    [
        ("06_claims_ledger", r"seeds from (\d+) on decide", str(FRESH)),
        ("07_the_border", r" KL x N: .*x\* = ([\d.]+)", re.findall(r"`KL x N` passes x\* = ([\d.]+)", BORDER)[0]),
    ],
)
def test_a_number_is_that_of_the_page(name: str, seen: str, expected: str) -> None:
    """A stored output and the page that tells the same have the same number."""
    (path,) = (path for path in NOTEBOOKS if path.stem == name)
    printed = "".join(output.get("text", "") for output in outputs(path))
    assert re.findall(seen, printed) == [expected]


def test_every_notebook_is_listed() -> None:
    """docs/notebooks.md has a row for each."""
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == [path.stem for path in NOTEBOOKS]


def test_a_notebook_takes_less_than_two_minutes() -> None:
    """By its processor time on one thread, which is the time on an idle core; the page has what is stored."""
    stored = [nbformat.read(path, as_version=4).metadata["firstorder"]["cpu_s"] for path in NOTEBOOKS]
    assert all(0 < cpu_s < 120 for cpu_s in stored), stored
    page = PAGE.read_text(encoding="utf-8")
    assert with_times(page) == page and all(f" | {cpu_s} |\n" in page for cpu_s in stored)


def test_the_first_notebook_shows_the_demos_runs() -> None:
    """A reader sees how the six runs of `make demo` ended, not the tiny runs that stand in where there are none."""
    (path,) = (path for path in NOTEBOOKS if path.stem == "00_first_run")
    printed = "".join(output.get("text", "") for output in outputs(path))
    assert "smoke-" not in printed and len(set(re.findall(r"demo-\w+/", printed))) == 6
    assert "collapsed" in printed and "undecided" not in printed
