"""Laws of a run's last words: three lines, whose numbers are the records'."""

from __future__ import annotations

import json
from pathlib import Path

from lab.ending import last_words
from tests.lab.synthetic_runs import DEMO, write_demo


def test_the_last_words_are_the_records(tmp_path: Path) -> None:
    """Verdict and rules with their steps, accuracy from first to last with its highest, the page; a line each."""
    held, fell = write_demo(tmp_path, (DEMO[4], DEMO[1]))
    for folder, word in ((held, "Training held for 60 steps: no rule of the verdict fired."), (fell, "")):
        verdict = folder.verdict()
        assert verdict is not None
        values = [row["eval/accuracy"] for row in folder.metrics() if "eval/accuracy" in row]
        first, second, third = last_words(folder)
        assert first.endswith(word) and first.startswith(f"demo-{'r3' if folder is held else 'none'}: ")
        assert all(f"at step {reason['step']}" in first for reason in verdict["reasons"])
        assert second.startswith(f"held-out accuracy: {values[0]:.3f} -> {values[-1]:.3f} (highest {max(values):.3f}, ")
        assert Path(third) == folder.path / "report.html"
    assert first.startswith(f"demo-none: Training collapsed at step {(fell.verdict() or {})['first_step']} of 60: the ")


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    """A short run says that it is undecided and why; no accuracy, or one alone, is said as such; remarks are told."""
    (run,) = write_demo(tmp_path, DEMO[:1], num_steps=3)
    first, second, _ = last_words(run)
    assert "The run is undecided after 3 steps: 3 steps are recorded, and the rules need 20." in first
    rows = run.metrics()
    assert second == f"held-out accuracy: {rows[0]['eval/accuracy']:.3f} at step 1, its only measurement"
    path = run.path / "metrics.jsonl"
    path.write_text("".join(json.dumps({k: v for k, v in r.items() if k != "eval/accuracy"}) + "\n" for r in rows))
    verdict = run.verdict()
    run.write_verdict((verdict or {}) | {"verdict": "stable", "undecided": [], "remarks": ["The end is low."]})
    first, second, _ = last_words(run)
    assert first.endswith("Training held for 3 steps: The end is low.") and second.endswith("not measured")
