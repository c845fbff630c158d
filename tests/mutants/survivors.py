"""`python -m tests.mutants.survivors`: what mutmut's last run left alive, against the reasons in survivors.md.

A survivor is named by its function and by what was changed in it, not by mutmut's running numbers: these move with
every edit of the file. Fails where less than nine of ten generated mutants were killed, and where a survivor has no
reason.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from scipy.stats import binomtest

REASONS = Path(__file__).with_name("survivors.md")
SHARE = 0.9
KILLED = ("killed", "timeout", "segfault", "caught by type check")
UNTOUCHED = ("not checked", "skipped")


def mutmut(*arguments: str) -> str:
    """The output of mutmut."""
    command = [str(Path(sys.executable).with_name("mutmut")), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def statuses(listing: str) -> dict[str, str]:
    """The status of every mutant in `mutmut results --all true`."""
    return dict(re.findall(r"^\s*(\S+__mutmut_\d+): (.+?)\s*$", listing, re.MULTILINE))


def change(name: str, diff: str) -> str:
    """A mutant as a line of survivors.md names it: function, and the changed lines as `before` -> `after`."""
    lines = [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    before, after = (" ".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+")
    module, _, function = name.rpartition("__mutmut_")[0].rpartition(".")
    function = re.sub(r"^x_?", "", function).replace("ǁ", ".").strip(".")
    return f"{module}.{function}: `{before}` -> `{after}`"


def reasons(text: str) -> dict[str, str]:
    """The lines `- change: reason` of survivors.md, the reason on the indented line below."""
    return dict(re.findall(r"^- (.+)\n  (\S.*)$", text, re.MULTILINE))


def main() -> int:
    """Prints the share killed, the survivors without a reason, and the reasons without a survivor."""
    parser = argparse.ArgumentParser(description="Holds mutmut's survivors against survivors.md.")
    parser.add_argument("--partial", action="store_true", help="the run was over some mutants: unused reasons are fine")
    options = parser.parse_args()
    found = statuses(mutmut("results", "--all", "true"))
    run = {name: status for name, status in found.items() if status not in UNTOUCHED}
    if not run:
        print("mutmut has run nothing here: `mutmut run` first")
        return 2
    killed = sum(status in KILLED for status in run.values())
    known = reasons(REASONS.read_text(encoding="utf-8"))
    alive = {change(n, mutmut("show", n)): n for n, status in run.items() if status not in KILLED}
    low, high = binomtest(killed, len(run)).proportion_ci(method="wilson")
    print(f"{killed} of {len(run)} generated mutants killed ({killed / len(run):.1%}); {dict(Counter(run.values()))}")
    if len(run) < len(found):
        print(f"of all {len(found)}, if these were drawn at random: {low:.1%} to {high:.1%} (Wilson, 95%)")
    unexplained = [line for line in alive if line not in known]
    for line in unexplained:
        print(f"- {line}\n  ({alive[line]}: no reason in {REASONS.name})")
    unused = [] if options.partial else [line for line in known if line not in alive]
    for line in unused:
        print(f"no longer a survivor, remove its reason: {line}")
    return 1 if unexplained or unused or killed < SHARE * len(run) else 0


if __name__ == "__main__":
    sys.exit(main())
