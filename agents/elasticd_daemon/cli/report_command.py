"""`elasticd report`: what the jobs of weeks cost, on one page or as JSON, from event logs. It only reads.

Logs are found by their usual names below the given directories, or are given themselves; the default is this node's
agent's. One log counts once, whatever leads to it. They are read in the order of their first lines, line by line, so
months of logs need no memory, and each within a time that its size allows: a log on a dead file system is named, and
the rest is reported.

Files below a job's directory belong to the job's user. So only plain files are opened, no link is followed, and lines
are decoded as foreign text: torn, of another version or no JSON at all.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from elasticd import bounded_json
from elasticd.errors import UsageError
from elasticd_agent.config.command_parser import CommandParser
from elasticd_agent.model.log_events import MAX_LINE_BYTES, LogLine, decode
from elasticd_agent.model.phrases import count, visible
from elasticd_agent.system.bounded_io import DeadlineExceeded, run_within
from elasticd_agent.system.durations import UNITS_S, in_words, parse_duration
from elasticd_agent.telemetry.report import Report
from elasticd_daemon.cli.tables import table
from elasticd_daemon.config.agent_settings import NodeSettings
from elasticd_daemon.config.load import DEFAULT_FILE, installed_config, load

READ_TIMEOUT_S, MIN_BYTES_PER_S = 30.0, 1_000_000
"""A mount that is slower than this is dead."""
MAX_DIRECTORY_DEPTH = 6
"""Directories below the one given in which logs are looked for."""
MAX_TABLE_ROWS = 10
_LOG_NAME = re.compile(r"(?:events|event-log)\.jsonl(?:[.-]\d+)*(?:\.gz)?")
"""The usual names, also of logs that were rotated."""
_READ_ERRORS = (OSError, EOFError, zlib.error, DeadlineExceeded)
_SCALARS_MARK = b'"kind": "scalars"'
"""Within a text the quotes would be escaped."""


def report(argv: Sequence[str]) -> int:
    """Print the report. Returns 0, or 1 if there was nothing to report. Raises UsageError."""
    options = build_parser().parse_args(argv)
    now = time.time()
    since = now - _parse_since_s(options.since) if options.since else 0.0
    paths = options.path or [_state_dir(options.config) / "jobs"]
    result = Report(since)
    unread: list[str] = []
    logs = _find_logs(paths, since, unread)
    for path in logs:
        try:
            run_within(
                READ_TIMEOUT_S + path.stat().st_size / MIN_BYTES_PER_S, partial(_feed_log, path, result.feed), str(path)
            )
        except _READ_ERRORS as error:
            unread.append(_describe_error(path, error))
    document = {**result.to_json(now), "logs": len(logs), "unread": unread}
    for why in unread:
        print(f"elasticd report: not read: {visible(why)}", file=sys.stderr)
    if not document["jobs"]:
        recent = f" with events of the last {in_words(now - since)}" if since else ""
        where = ", ".join(str(path) for path in paths)
        print(f"elasticd report: no event log of a job{recent} in {where}", file=sys.stderr)
        return 1
    print(json.dumps(document, indent=2, ensure_ascii=False) + "\n" if options.json else page(document), end="")
    return 0


def _parse_since_s(text: str) -> float:
    """Return the seconds of --since. Raises UsageError."""
    try:
        seconds = parse_duration(text)
        if not 0 < seconds < 1e9:
            raise ValueError
    except ValueError:
        units = ", ".join(UNITS_S)
        raise UsageError(f"--since {text}: give a time such as 30d or 12h; the units are {units}") from None
    return seconds


def _state_dir(config: Path | None) -> Path:
    """The directory of this node's agent."""
    config = config or installed_config()
    settings: NodeSettings = load(config, os.environ)
    return settings.state_dir


def _find_logs(paths: Sequence[Path], since: float, unread: list[str]) -> list[Path]:
    """The logs in these files and directories that were written to since then, each once, by their first lines."""
    found: dict[tuple[int, int], tuple[float, Path]] = {}
    for given in paths:
        try:
            given.stat()
        except OSError as error:
            what = "give event logs (--event-log), or directories that have some"
            raise UsageError(f"{given} cannot be read: {error.strerror}; {what}") from None
        for path in _log_files_below(given, unread):
            try:
                status = path.stat()
                if status.st_mtime >= since:
                    found[status.st_dev, status.st_ino] = (
                        run_within(READ_TIMEOUT_S, partial(_first_line_time, path)),
                        path,
                    )
            except _READ_ERRORS as error:
                unread.append(_describe_error(path, error))
    return [path for _, path in sorted(found.values())]


def _describe_error(path: Path, error: Exception) -> str:
    if isinstance(error, DeadlineExceeded):
        return f"{path}: its file system does not answer"
    return f"{path}: {getattr(error, 'strerror', None) or error}"


def _log_files_below(given: Path, unread: list[str], depth: int = 0) -> Iterator[Path]:
    """Plain files only: a job's user could put a pipe or a link where its log was."""
    if not given.is_dir():
        yield given
        return
    try:
        with os.scandir(given) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        unread.append(f"{given}: {error.strerror}")
        return
    for entry in listed:
        if entry.is_dir(follow_symlinks=False) and depth < MAX_DIRECTORY_DEPTH:
            yield from _log_files_below(Path(entry.path), unread, depth + 1)
        elif _LOG_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


@contextlib.contextmanager
def _open_log(path: Path) -> Iterator[IO[bytes]]:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(None, "it is not a plain file")
        yield gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file  # type: ignore[misc]


def _decode_lines(file: IO[bytes]) -> Iterator[LogLine]:
    """Those that make sense: a line may be torn, of another version, or no JSON at all."""
    is_rest = False
    while data := file.readline(MAX_LINE_BYTES + 1):
        is_whole, was_rest = data.endswith(b"\n"), is_rest
        is_rest = not is_whole
        if was_rest or _SCALARS_MARK in data:
            continue
        try:
            values = bounded_json.loads(data)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict) and (line := decode(values)) is not None:
            yield line


def _first_line_time(path: Path) -> float:
    """Return the time of a log's first line, 0 if it has none."""
    with _open_log(path) as file:
        return next((line.wall for line in _decode_lines(file)), 0.0)


def _feed_log(path: Path, feed: Callable[[LogLine], None]) -> None:
    """Read a log to its end."""
    with _open_log(path) as file:
        for line in _decode_lines(file):
            feed(line)


def page(document: Mapping[str, Any]) -> str:
    """One page of text."""
    parts = [
        _goodput_part(document),
        _cause_table(document),
        _node_table(document),
        _rank_table(document),
        _job_table(document),
    ]
    return "\n".join(filter(None, parts))


def _goodput_part(document: Mapping[str, Any]) -> str:
    """The first part of the page: what was read, and the goodput."""
    jobs, nodes = len(document["jobs"]), len({node for job in document["jobs"] for node in job["nodes"]})
    spent = document["worker_seconds"]
    begin, end = _utc_minute(document["oldest"]), _utc_minute(document["newest"])
    what = f"UTC, {count(jobs, 'job')} on {count(nodes, 'node')}, {count(document['logs'], 'event log')}"
    lines = [f"elasticd report: {begin} to {end} {what}", ""]
    if not spent:
        return "\n".join([*lines, "no log has the time that workers spent", ""])
    lines.append(f"GOODPUT {_percent(document['goodput'])} of {_hours(spent)} worker hours\n")
    for name, meaning in (
        ("useful", "steps that count"),
        ("lost", "after faults, until a step beyond the last one before the fault"),
        ("idle", "before the first step, waits for nodes, pauses"),
    ):
        seconds = document[f"{name}_seconds"]
        lines.append(f"  {name:<7} {_hours(seconds):>10} h  {_percent(seconds / spent):>7}  {meaning}")
    if document["saves"]:
        paused = f"{_hours(document['save_seconds'])} worker hours"
        lines.append(f"  {count(document['saves'], 'checkpoint')} paused training for {paused}, which are in useful")
    return "\n".join(lines) + "\n"


def _cause_table(document: Mapping[str, Any]) -> str:
    """The table of faults by cause."""
    lost_s = document["lost_seconds"] or 1.0
    rows = [
        (
            visible(one["cause"]), f"{one['faults']:,}", _hours(one["lost_seconds"]),
            _percent(one["lost_seconds"] / lost_s),
            "-" if one["recovery_seconds"] is None else in_words(one["recovery_seconds"]),
        )
        for one in document["causes"]
    ]  # fmt: skip
    return _limited_table(("CAUSE", "FAULTS", "LOST h", "SHARE", "MEDIAN RECOVERY"), rows) or "no fault\n"


def _node_table(document: Mapping[str, Any]) -> str:
    """The table of nodes, with the faults that each of them caused."""
    rows = [
        (
            visible(one["node"]), _hours(one["worker_seconds"]), _percent(one["goodput"]),
            f"{one['faults_of_it']:,}", _hours(one["cost_seconds"]), _cause_counts(one["causes"]),
        )
        for one in document["nodes"]
    ]  # fmt: skip
    return _limited_table(("NODE", "WORKER h", "GOODPUT", "FAULTS", "COST h", "CAUSES"), rows)


def _rank_table(document: Mapping[str, Any]) -> str:
    """The table of ranks that were at fault."""
    rows = [
        (
            str(one["rank"]), visible(one["job"]), visible(one["node"]), f"{one['faults_of_it']:,}",
            _hours(one["cost_seconds"]), _cause_counts(one["causes"]),
        )
        for one in document["ranks"]
    ]  # fmt: skip
    return _limited_table(("RANK", "JOB", "NODE", "FAULTS", "COST h", "CAUSES"), rows)


def _job_table(document: Mapping[str, Any]) -> str:
    """The table of jobs."""
    rows = [
        (
            visible(one["job"]), str(len(one["nodes"])), _hours(one["worker_seconds"]), _percent(one["goodput"]),
            f"{one['faults']:,}", _hours(one["lost_seconds"]),
            visible(one["outcome"] or f"no end logged, last event {_age(document['until'] - one['newest'])} ago"),
        )
        for one in document["jobs"]
    ]  # fmt: skip
    return _limited_table(("JOB", "NODES", "WORKER h", "GOODPUT", "FAULTS", "LOST h", "END"), rows)


def _limited_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of at most MAX_TABLE_ROWS rows, and how many are left out; "" without rows."""
    if not rows:
        return ""
    more = len(rows) - MAX_TABLE_ROWS
    return table(heads, rows[:MAX_TABLE_ROWS]) + (f"and {more:,} more: elasticd report --json\n" if more > 0 else "")


def _cause_counts(causes: Mapping[str, int]) -> str:
    return ", ".join(f"{visible(cause)} {number}" for cause, number in sorted(causes.items())) or "-"


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _age(seconds: float) -> str:
    return in_words(max(0.0, seconds))


def _utc_minute(wall: float | None) -> str:
    return "-" if wall is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(wall))


def build_parser() -> CommandParser:
    parser = CommandParser(
        "report",
        "Reports what the jobs of a time cost: goodput, and faults by cause, by node and by rank, from event logs. "
        "Hours count once for each worker, so jobs of any size add up.",
        "Exit codes: 0 reported, 1 no event log, 2 usage. More: elasticd docs report",
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="*",
        type=Path,
        help="event logs (--event-log), or directories with logs that are named events.jsonl or event-log.jsonl, also "
        "rotated; of all nodes, for all nodes. Default: the jobs of this node's agent",
    )
    parser.add_argument("--since", metavar="TIME", help="only what happened since then, as in 30d or 12h; default: all")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the page")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"the agent's configuration; default: {DEFAULT_FILE} if it exists"
    )
    return parser
