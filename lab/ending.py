"""The end of a run, the same in both worlds: the verdict on its records, its page, and a summary in three lines."""

from __future__ import annotations

from lab.config.run import RunConfig
from lab.records import RunFolder
from lab.report.run_page import write_report
from lab.report.runs import ACCURACY, ReportRun, load_runs
from lab.report.story import alone, reasons
from lab.report.style import listed
from lab.verdict import judge


def finish(config: RunConfig, folder: RunFolder) -> None:
    """Writes the records' hashes, verdict.json, after which no step is taken again, and report.html."""
    # In this order: the verdict marks the run as finished, so the hashes must be on the disk before it.
    folder.seal()
    folder.write_verdict(judge(folder.metrics(), config.verdict).to_json())
    write_page(folder)


def write_page(folder: RunFolder) -> None:
    """Writes report.html, the only file that a run killed after its verdict still lacks."""
    write_report([folder], folder.path / "report.html")


def last_words(folder: RunFolder) -> list[str]:
    """Three lines for the terminal: the verdict and its reasons, first and last held-out accuracy, the page's path."""
    (run,) = load_runs([folder])
    return [f"{run.name}: {alone(run)}: {_why(run)}.", _accuracy(run), str(folder.path / "report.html")]


def _why(run: ReportRun) -> str:
    """The rules that fired; without any, the undecided points and remarks, or that no rule fired."""
    verdict = run.verdict or {}
    if verdict.get("reasons"):
        return listed(reasons(run))
    remarks = [str(remark).rstrip(".") for remark in verdict.get("remarks", ())]
    return "; ".join([*map(str, verdict.get("undecided", ())), *remarks]) or "no rule of the verdict fired"


def _accuracy(run: ReportRun) -> str:
    values = run.series(ACCURACY)
    if not values:
        return "held-out accuracy: not measured"
    (first, start), (last, end) = values[0], values[-1]
    if first == last:
        return f"held-out accuracy: {start:.3f} at step {first}, its only measurement"
    step, highest = max(values, key=lambda pair: pair[1])
    return f"held-out accuracy: {start:.3f} -> {end:.3f} (highest {highest:.3f}, at step {step})"
