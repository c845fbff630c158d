"""Traces from other systems' dumps: a file per format, and the choice of format by content.

rows.py has the schema that all formats are converted to, row by row; format.py describes a format; FORMATS is the list
that `firstorder doctor --list-formats` prints and docs/doctor.md shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from lab.doctor.importers import columns as mapped
from lab.doctor.importers import miles, nemo_rl, open_instruct, prime_rl, refused, rows, skyrl, slime, trl, verl, vllm
from lab.doctor.importers.bad_rows import Bad, BadRowCollector, BadRows, Read, each
from lab.doctor.importers.format import Dump, DumpDescription, NoOldError, Row
from lab.doctor.importers.reading import read_jsonl, read_parquet, without_collector
from lab.doctor.importers.torch_files import content_of
from lab.files import RecordError
from lab.traces import Trace

BY_ROWS = (
    nemo_rl.FORMAT, prime_rl.FORMAT, verl.FORMAT, trl.FORMAT, open_instruct.FORMAT, vllm.FORMAT, miles.DASHBOARD,
    rows.FORMAT,
)  # fmt: skip
"""Formats of rows, tried in this order: the last one accepts any row."""
BY_TORCH = (miles.FORMAT, slime.FORMAT, skyrl.FORMAT)
"""Formats of torch files, tried in this order."""
OURS = DumpDescription(
    "trace", ".safetensors, as in a run's rollouts/", "tokens, mu, old, entropies, pi, rewards, experts of both",
    "Nothing.", "lab/traces.py", steps=(r"step-(?P<step>\d+)\.safetensors",),
)  # fmt: skip
MAPPED = DumpDescription(
    "columns", ".jsonl, .parquet or .safetensors with --columns ours=theirs,...", "the named columns",
    "All others.", "lab/doctor/importers/columns.py",
    steps=(r"([^/]*\D)?(?P<step>\d+)\.(jsonl|parquet|safetensors)",),
)  # fmt: skip
FORMATS: tuple[DumpDescription, ...] = (OURS, *BY_ROWS[::-1], *BY_TORCH, MAPPED)
"""All formats, in display order."""
OLD = ("logp_old", "entropy_old", "experts_old", "logp_pi")
"""Columns that `--old` may bring."""
REPLAYED = (
    "the trainer scored on mu's experts (R3), so both sides ran the same routes and the gap is what replay leaves. Its "
    "own choice of experts is not looked at."
)


def load_dump(path: Path, columns: Mapping[str, str] | None = None, old: Path | None = None) -> Dump:
    """The trace in a file of any known format, with the format's caveats.

    `columns` names the file's own columns (columns.py); `old` is a file of rows in the same order with the trainer's
    side. Raises BadRows, a line per row that does not fit, and ValueError of one line if the file holds no trace.
    """
    path = Path(path)
    try:
        with without_collector():
            return _load(path, columns, old)
    # A RecordError is a ValueError, too, and already names its file, which may be the one of --old.
    except RecordError:
        raise
    except BadRows as error:
        raise error.of_file(str(path)) from error
    except ValueError as error:
        text, kind = str(error), NoOldError if isinstance(error, NoOldError) else ValueError
        raise kind(text if text.startswith(f"{path}: ") else f"{path}: {text}") from error


def load_trace(path: Path) -> Trace:
    """The trace of `load_dump`."""
    return load_dump(path).trace


def _load(path: Path, columns: Mapping[str, str] | None, old: Path | None) -> Dump:
    refused.refuse_pickle(path)
    suffix = path.suffix
    if suffix == ".safetensors" and columns is None:
        if old is not None:
            raise ValueError(f"--old: expected none with a trace of ours, which has both sides, got {old}")
        trace = Trace.load(path)
        return Dump(trace.as_scored, OURS.name, REPLAYED if trace.old_pass == "replay_rollout" else "")
    if suffix == ".pt":
        if columns is not None:
            raise ValueError("--columns: expected .jsonl, .parquet or .safetensors, got .pt")
        return _of_torch(path, old)
    readers = {".jsonl": read_jsonl, ".parquet": read_parquet, ".safetensors": mapped.read_safetensors}
    if suffix not in readers:
        # Said first, as a misspelt name may have any suffix.
        if not path.exists():
            raise RecordError(f"cannot read {path}: No such file or directory")
        wanted = ".safetensors, .jsonl, .parquet or .pt"
        raise ValueError(f"expected a trace as {wanted}, got {suffix or 'no suffix'}")
    first, placed = _first(readers[suffix](path))
    refused.refuse_texts(first)
    if columns is not None:
        read = each(placed, lambda raw, place: [mapped.read(raw, place, columns)])
        unused = tuple(name for name in first if name not in columns.values())
        return Dump(rows.packed(_with_old(read, old)), MAPPED.name, unused=unused)
    # Always found: the last format takes any row.
    form = next(form for form in BY_ROWS if form.is_mine(first))
    if not form.has_old and old is None:
        raise ValueError(f"{form.name}'s dump has no log-probabilities of old. {HOW_OLD}")
    trace = rows.packed(_with_old(each(placed, form.read), old))
    return Dump(trace, form.name, form.caveat(trace), form.unused(first), form.is_pi(trace))


def _first(placed: Iterable[Read]) -> tuple[Row, Iterator[Read]]:
    """The first readable row, which decides the format, and an iterator over all rows; BadRows if none is readable."""
    seen, rest, found = [], iter(placed), BadRowCollector()
    for row, place in rest:
        seen.append((row, place))
        if not isinstance(row, Bad):
            return row, itertools.chain(seen, rest)  # `rest` is a stream: the rows already read go back in front
        found.add(row.reason)
    found.refuse()
    raise ValueError("expected at least 1 row, got none")


HOW_OLD = (
    "Pass them with --old FILE: a .jsonl or .parquet with a row per response in the same order, with logp_old and, if "
    "available, entropy_old, experts_old, logp_pi"
)


def _with_old(placed: Iterator[Read], old: Path | None) -> Iterator[Read]:
    """The rows, each with the trainer's side from the other file; ValueError if the files differ in length."""
    if old is None:
        yield from placed
        return
    others = (read_parquet if old.suffix == ".parquet" else read_jsonl)(old)
    for mine, other in itertools.zip_longest(placed, others):
        if mine is None or other is None:
            # Bad rows are reported even past the end of the other file.
            if mine is not None and isinstance(mine[0], Bad):
                yield mine
                continue
            raise ValueError(
                f"--old {old}: expected as many rows as responses; the {'dump' if mine is None else 'file'} ends first"
            )
        (row, place), (theirs, where) = mine, other
        if isinstance(row, Bad):
            yield row, place
        elif isinstance(theirs, Bad):
            yield Bad(f"--old {old}: {theirs.reason}"), where
        else:
            yield {**row, **{name: theirs[name] for name in OLD if name in theirs}}, place


def _of_torch(path: Path, old: Path | None) -> Dump:
    """A torch file: slime's, miles's or SkyRL's, with the trainer's side from `old` if it is named."""
    content = content_of(path)
    form = next((form for form in BY_TORCH if form.is_mine(content)), None)
    if form is None:
        raise ValueError(f"expected slime's samples or rollout_data, got {', '.join(map(str, content))}")
    placed = ((row, f"response {b}") for b, row in enumerate(form.read(content, "")))
    trace = rows.packed(_with_old(placed, old))
    return Dump(trace, form.name, form.caveat(trace), form.unused(content), form.is_pi(trace), form.has_tokens)


__all__ = ["FORMATS", "Dump", "load_dump", "load_trace"]
