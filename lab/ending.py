"""The end of a run, the same in both worlds: the verdict on its records, its page, and three lines that say both."""

from __future__ import annotations

from lab.config.run import RunConfig
from lab.records import RunFolder
from lab.report.run_page import write_report
from lab.report.runs import ACCURACY, ReportRun, load_runs
from lab.report.story import alone, listed, reasons
from lab.verdict import judge


def finish(config: RunConfig, folder: RunFolder) -> None:
    """Writes the hashes of the records, verdict.json, from which on no step is taken again, and report.html."""
    folder.seal()
    folder.write_verdict(judge(folder.metrics(), config.verdict).to_json())
    write_page(folder)


def write_page(folder: RunFolder) -> None:
    """Writes report.html: all that a run lacks which was killed after its verdict."""
    write_report([folder], folder.path / "report.html")


def last_words(folder: RunFolder) -> list[str]:
    """Three lines for the terminal: the verdict and why, held-out accuracy from first to last, the page's path."""
    (run,) = load_runs([folder])
    return [f"{run.name}: {alone(run)}: {_why(run)}.", _accuracy(run), str(folder.path / "report.html")]


def _why(run: ReportRun) -> str:
    """The rules that fired, what could not be judged, or that no rule fired, with the remarks on a stable run."""
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


__all__ = ["finish", "last_words", "write_page"]
