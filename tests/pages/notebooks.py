"""Notebooks as they are stored: run, with static figures; `python -m tests.pages.notebooks [NAME ...]` stores them.

GitHub and other viewers run no scripts. A Plotly figure is therefore stored as a PNG drawn by headless Chromium, and
dials, which would not respond there, are left out. Running a notebook brings both back. The processor time that each
took is stored, too, and written into the table of docs/notebooks.md.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import plotly
from nbclient import NotebookClient
from PIL import Image, ImageChops, ImageColor

from lab.report.style import PALETTE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "notebooks.md"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
IMAGES = ("image/png", "image/svg+xml")
WIDTH, SCALE, COLOURS = 860, 1.5, (56, 64, 72, 80, 96, 256)
"""A stored figure: CSS pixels, device pixels for each, and colours that its palette may have."""
KEPT = tuple(dict.fromkeys(("#FFFFFF", *(ink.line for ink in PALETTE), *(ink.text for ink in PALETTE))))
"""Colours that a stored figure keeps: the page, lines, and labels, whose colour names their line."""
NEAR = 8
"""A colour as close to a kept one is left out of the palette."""
SEEN, FEW = 20, 1e-2
"""A change of a colour by more than SEEN of 255 is seen; a share of FEW of a picture may change so."""

# Chromium draws every figure; the dumped page then holds each as a PNG in base64.
DRAW = """<!doctype html><meta charset="utf-8"><script src="{script}"></script><body></body><script>
const figures = {figures};
(async () => {{
  for (const figure of figures) {{
    const size = {{width: {width}, height: figure.layout.height || 420}};
    const drawn = document.createElement("pre");
    drawn.textContent = await Plotly.toImage(figure, {{format: "png", scale: {scale}, ...size}});
    document.body.append(drawn);
  }}
}})();
</script>"""


def execute(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook itself, run from the repository's root with new outputs; a cell that raises raises here."""
    # A notebook may take three minutes on an idle laptop; a shared machine is slower.
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}, record_timing=False)
    client.execute()
    return notebook


def sources(notebook: nbformat.NotebookNode) -> str:
    """A digest of the notebook's code, stored with the outputs to tell which code made them."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:16]


def store(path: Path) -> None:
    """Runs the notebook and writes it back with its outputs, figures as PNG, and the processor time that it took."""
    with first_run():
        before = _children_cpu_s()
        notebook = execute(nbformat.read(path, as_version=4))
        cpu_s = _children_cpu_s() - before
    figures = [output["data"][PLOTLY] for output in _outputs(notebook) if PLOTLY in output.get("data", {})]
    images = iter(drawn(figures) if figures else [])
    notebook.metadata.pop("widgets", None)
    notebook.metadata["firstorder"] = {"sources": sources(notebook), "cpu_s": round(cpu_s)}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            kept = [output for output in _joined(cell.outputs) if WIDGET not in output.get("data", {})]
            cell.outputs = [_still(output, images) for output in kept]
            cell.metadata.clear()
    nbformat.write(notebook, path)


@contextlib.contextmanager
def first_run() -> Iterator[None]:
    """Inside, a notebook finds the runs of `make demo` and no others, so that its time includes all that it trains."""
    with tempfile.TemporaryDirectory() as folder:
        for run in (ROOT / "runs").glob("demo-*"):
            (Path(folder) / run.name).symlink_to(run)
        before = os.environ.get("FIRSTORDER_RUNS")
        os.environ["FIRSTORDER_RUNS"] = folder
        try:
            yield
        finally:
            os.environ.pop("FIRSTORDER_RUNS")
            if before is not None:
                os.environ["FIRSTORDER_RUNS"] = before


def _children_cpu_s() -> float:
    """Processor seconds, user and system, of the processes that this one has waited for: kernels and their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def with_times(page: str) -> str:
    """docs/notebooks.md with the stored processor time in the row of each notebook."""
    for path in NOTEBOOKS:
        cpu_s = nbformat.read(path, as_version=4).metadata["firstorder"].get("cpu_s", "")
        page = re.sub(rf"^(\| `{path.stem}` \|.*\|) *\d* \|$", rf"\g<1> {cpu_s} |", page, flags=re.MULTILINE)
    return page


def drawn(figures: Sequence[dict[str, Any]]) -> list[bytes]:
    """Each figure as a PNG with a palette. RuntimeError without Chromium, or if it draws too few figures."""
    browser = next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )
    if browser is None:
        raise RuntimeError("expected Chromium or Chrome on the PATH to draw the figures, got neither")
    script = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "figures.html"
        # "</" would end the script element.
        data = json.dumps(figures).replace("</", "<\\/")
        page.write_text(DRAW.format(script=script.as_uri(), figures=data, width=WIDTH, scale=SCALE), encoding="utf-8")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000", "--dump-dom"]
        command += [f"--user-data-dir={folder}/profile", page.as_uri()]
        dumped = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    found = re.findall(r"<pre>data:image/png;base64,([^<]+)</pre>", dumped)
    if len(found) != len(figures):
        raise RuntimeError(f"expected {len(figures)} figures of Chromium, got {len(found)}")
    return [small(base64.b64decode(html.unescape(text))) for text in found]


def small(png: bytes) -> bytes:
    """The PNG with a palette, in which page, lines and labels keep their exact colours, however thin they are.

    It has the fewest colours of COLOURS by which few pixels change: a heat map or a cloud of points needs more of them
    than lines do.
    """
    image = Image.open(io.BytesIO(png)).convert("RGB")
    for colours in COLOURS:
        found = _with_palette(image, colours)
        if changed(image, found) <= FEW:
            break
    found.save(out := io.BytesIO(), "PNG", optimize=True)
    return out.getvalue()


def changed(before: Image.Image, after: Image.Image) -> float:
    """The share of pixels with a colour that differs by more than SEEN."""
    off = np.asarray(ImageChops.difference(before.convert("RGB"), after.convert("RGB")))
    return float((off.max(-1) > SEEN).mean())


def _with_palette(image: Image.Image, colours: int) -> Image.Image:
    kept = [ImageColor.getrgb(colour) for colour in KEPT]
    found = image.quantize(colours - len(kept)).getpalette() or []
    # Pillow takes a near colour for the nearest: one beside a kept colour would draw its pixels, too.
    each = (found[i : i + 3] for i in range(0, len(found), 3))
    others = [one for one in each if all(_distance(one, colour) > NEAR for colour in kept)]
    palette = Image.new("P", (1, 1))
    palette.putpalette([*chain.from_iterable([*kept, *others])])
    return image.quantize(palette=palette, dither=Image.Dither.NONE)


def _distance(one: Sequence[int], other: Sequence[int]) -> int:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def _still(output: nbformat.NotebookNode, images: Iterator[bytes]) -> nbformat.NotebookNode:
    """The output, with a picture instead of a figure that needs a script."""
    if PLOTLY in output.get("data", {}):
        title = output["data"][PLOTLY]["layout"].get("title", {}).get("text", "untitled")
        png = base64.b64encode(next(images)).decode()
        output["data"] = {"image/png": png, "text/plain": f"Figure: {title}"}
    elif "text/plain" in output.get("data", {}):
        # Addresses of objects differ between runs.
        output["data"]["text/plain"] = re.sub(r" at 0x[0-9a-f]+", "", output["data"]["text/plain"])
    output.get("metadata", {}).clear()
    return output


def _joined(outputs: Sequence[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """The outputs, with consecutive pieces of a stream joined."""
    out: list[nbformat.NotebookNode] = []
    for output in outputs:
        if out and output.output_type == "stream" and out[-1].get("name") == output.name:
            out[-1].text += output.text
        else:
            out.append(output)
    return out


def _outputs(notebook: nbformat.NotebookNode) -> Iterator[nbformat.NotebookNode]:
    return (output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)


if __name__ == "__main__":
    asked = sys.argv[1:]
    for one in NOTEBOOKS:
        if not asked or any(one.stem.startswith(name) for name in asked):
            print(one.stem, flush=True)
            store(one)
    PAGE.write_text(with_times(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
