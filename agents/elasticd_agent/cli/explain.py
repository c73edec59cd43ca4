"""`elasticd explain`: the evidence of a hang on one page. It only reads, and ends in time on a dead file system."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from elasticd.errors import UsageError
from elasticd_agent.config.command_parser import CommandParser
from elasticd_agent.hangs.explain import load as reading
from elasticd_agent.hangs.explain import locate as finding
from elasticd_agent.hangs.explain.json_report import document
from elasticd_agent.hangs.explain.model import Explanation
from elasticd_agent.hangs.explain.text import DEFAULT_WIDTH, page
from elasticd_agent.system import bounded_io as files

READ_TIMEOUT_S = 30.0
"""Reading a few megabytes takes well below a second; a mount this slow is dead."""
EVENT_LOG_NAMES = ("events.jsonl", "event-log.jsonl")
_WIDEST, _NARROWEST = 140, 60


def explain(argv: Sequence[str]) -> int:
    """Returns 0 if there was evidence, 1 if not; raises UsageError."""
    args = build_parser().parse_args(argv)
    directory = Path(args.logdir)
    try:
        return files.run_within(READ_TIMEOUT_S, lambda: _explain_or_list(args, directory))
    except files.DeadlineExceeded:
        print(f"elasticd explain: {directory} does not answer: is its file system dead?", file=sys.stderr)
        return 1


def _explain_or_list(args: argparse.Namespace, directory: Path) -> int:
    folders = finding.find_folders(directory)
    if not folders and not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise UsageError(
            f"{directory} {what}; give the job's --log-dir, a round's folder in it, or a folder of evidence"
        )
    if args.list:
        return _print_folders(folders, directory)
    place = finding.choose_default_folder(folders)
    if args.round is not None:
        place = finding.choose_default_folder([folder for folder in folders if folder.round == args.round])
        if place is None and folders:
            rounds = ", ".join(str(number) for number in sorted({folder.round for folder in folders}))
            return _print_nothing_found(f"no evidence of round {args.round} in {directory}; there is some of: {rounds}")
    if place is None:
        ended = reading.describe_job_end(args.event_log or _find_event_log(None, directory))
        return _print_nothing_found(f"no evidence in {directory}: no hang was suspected here{ended}")
    print_explanation(
        reading.explain(place, args.event_log or _find_event_log(place, directory), folders), as_json=args.json
    )
    return 0


def print_explanation(explained: Explanation, *, as_json: bool) -> None:
    """Print an explanation: the page, as wide as the terminal allows, or one JSON object."""
    if as_json:
        text = json.dumps(document(explained), indent=2, ensure_ascii=False) + "\n"
    else:
        columns = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns if sys.stdout.isatty() else DEFAULT_WIDTH
        text = page(explained, max(_NARROWEST, min(columns, _WIDEST)))
    print(text, end="", flush=True)


def _print_folders(found: Sequence[finding.EvidenceFolder], directory: Path) -> int:
    """Print one line for each folder of evidence."""
    if not found:
        return _print_nothing_found(f"no evidence in {directory}")
    for place in found:
        verdict = reading.read_verdict(place)
        cause = f" ({verdict.cause[:40]})" if verdict is not None else ""
        print(f"round {place.round or '?'}  {place.reason_in_words}{cause}  {place.path}")
    return 0


def _print_nothing_found(why: str) -> int:
    print(f"elasticd explain: {why}", file=sys.stderr)
    return 1


def _find_event_log(place: finding.EvidenceFolder | None, directory: Path) -> Path | None:
    """The event log, if it has one of its usual names in the log directory."""
    above = place.log_dir if place is not None else None
    for folder in dict.fromkeys([above or directory, directory]):
        for name in EVENT_LOG_NAMES:
            if (folder / name).is_file():
                return folder / name
    return None


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "explain",
        "Explains on one page which rank made a group hang and why, from the evidence on disk. A name "
        "without a slash that does not exist here is the id of a daemon's job, if `elasticd agent` runs on this node: "
        "elasticd explain JOB [--round N] [--node NODE] [--json] [--agent URL].",
        "Exit codes: 0 explained, 1 nothing found, 2 usage. The page and its parts: elasticd docs hangs",
    )
    parser.add_argument("logdir", metavar="LOGDIR", help="the job's --log-dir, or a folder of evidence")
    parser.add_argument("--round", type=int, metavar="N", help="explain this round; default: the newest that hung")
    parser.add_argument("--list", action="store_true", help="only list the rounds that have evidence")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the page")
    parser.add_argument(
        "--event-log",
        type=Path,
        metavar="FILE",
        help=f"the job's --event-log; otherwise {' or '.join(EVENT_LOG_NAMES)} in LOGDIR, if one is there",
    )
    return parser
