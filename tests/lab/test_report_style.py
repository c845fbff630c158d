"""Laws of the report's drawing: labels keep apart, values stay inside their axis, numbers and names are short."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lab.report.runs import load_runs, shared_prefix
from lab.report.scale import PLOT_HEIGHT, Scale
from lab.report.style import number, spread
from tests.lab.synthetic_runs import DEMO, write_demo


@given(st.lists(st.floats(-50, 300), min_size=1, max_size=12))
@example([100.0, 100.0, 105.0])
@example([60.0, 150.0, 152.0, 61.0, 200.0])
def test_labels_never_overlap(positions: list[float]) -> None:
    """Spread labels keep their order and their distance, stay inside, and move around their own mean, if at all."""
    gap, low, high = 14.0, 0.0, 230.0
    placed = spread(positions, gap, low, high)
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    steps = [placed[b] - placed[a] for a, b in itertools.pairwise(order)]
    # 1e-9: pixels after a few additions in float64.
    assert all(step >= gap - 1e-9 for step in steps)
    assert min(placed) >= low - 1e-9 and max(placed) <= high + 1e-9
    free = all(low <= p <= high for p in positions) and all(
        positions[b] - positions[a] >= gap for a, b in itertools.pairwise(order)
    )
    assert not free or placed == positions
    if low + 1e-9 < min(placed) and max(placed) < high - 1e-9:
        assert math.isclose(sum(placed), sum(positions), rel_tol=1e-9, abs_tol=1e-9)


@given(st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=20), st.sampled_from(["linear", "log"]))
def test_every_value_is_inside_its_axis(values: list[float], axis: str) -> None:
    """Whatever the values, each is drawn between the ends of the plot, and a larger one never lower."""
    values = [value if value > 1e-12 else 0.0 for value in values]
    scale = Scale.of(values, axis)
    pixels = [scale.pixels(value) for value in sorted(values)]
    assert pixels == sorted(pixels) and pixels[0] >= 0 and pixels[-1] <= PLOT_HEIGHT
    ticks = scale.axis().get("tickvals", [])
    assert all(scale.low <= math.log10(tick) <= scale.high for tick in ticks)


@given(st.floats(1e-6, 1e3), st.floats(1.3, 1e6))
def test_a_log_axis_can_be_read(low: float, factor: float) -> None:
    """An axis over any range from a factor of 1.3 on has at least three ticks, and at most one per 12 pixels."""
    assert 3 <= len(Scale.of([low, low * factor], "log").axis()["tickvals"]) <= PLOT_HEIGHT / 12


NUMBERS: list[tuple[float | int | None, str]] = [
    (None, "–"), (0.0, "0"), (3, "3"), (0.8314, "0.831"), (12.345, "12.3"), (3.4e-4, "3.4e-4"), (2e-3, "2e-3"),
    (-0.05, "-0.05"), (123456.7, "1.2e5"), (1234.5, "1234"), (0.99996, "1"),
    (999.4, "999"), (999.5, "1000"), (-999.6, "-1000"), (1000.0, "1000"),
    (0.01, "0.01"), (0.0099999, "0.01"), (-0.00996, "-0.01"), (0.0099, "9.9e-3"),
    (math.nan, "–"), (math.inf, "∞"), (-math.inf, "-∞"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "text"), NUMBERS)
def test_numbers_have_the_digits_they_deserve(value: float | int | None, text: str) -> None:
    """Three significant digits, two for powers of ten, a dash for no data and never for 0; infinity has its sign."""
    assert number(value) == text


PREFIXES: list[tuple[list[str], str]] = [
    (["demo-exact", "demo-none"], "demo-"), (["demo-r3", "demo-r3-tis"], "demo-"), (["a", "b"], ""), (["one"], ""),
    (["demo", "demo-x"], ""), (["r3-", "r3-x"], ""), (["a-b-", "a-b-c"], "a-"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "prefix"), PREFIXES)
def test_labels_leave_out_what_all_names_share(names: list[str], prefix: str) -> None:
    """The shared beginning ends at a hyphen, and something remains of every name."""
    assert shared_prefix(names) == prefix and all(len(name) > len(prefix) for name in names)


CLASHES: dict[str, Callable[[str], str]] = {
    "seeds": lambda config: config.replace("demo-none", "demo-exact"),
    "nothing but the time": lambda config: config.replace("demo-none", "demo-exact").replace("seed: 1", "seed: 0"),
}


@pytest.mark.parametrize("differ_by", CLASHES)
def test_runs_of_one_name_are_told_apart(tmp_path: Path, differ_by: str) -> None:
    """Two runs of one config name never share a label: the seed tells them apart, or else the folder."""
    runs = write_demo(tmp_path, DEMO[:2], num_steps=5)
    config = runs[1].path / "config.yaml"
    config.write_text(CLASHES[differ_by](config.read_text()))
    labels = [run.label for run in load_runs(runs)]
    assert len(set(labels)) == 2 and all(labels)


def test_a_config_is_utf_8_wherever_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's config is the file's text, whatever encoding the system has for files without one."""
    (run,) = write_demo(tmp_path, DEMO[:1], num_steps=5)
    text = "name: Schrödinger – 薛定谔\n"
    (run.path / "config.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(io, "text_encoding", lambda encoding, _=2: encoding or "cp1252")
    assert load_runs([run])[0].config_text == text
