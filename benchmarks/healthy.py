"""Jobs that wait and are healthy, each with a session, in session.run() and without: counts kills by default policy.

The jobs are those of tests/hangs/healthy.py, at full length. Those that mostly sleep run several at a time. It prints a
table in markdown, writes all results as JSON, and ends with 1 if a job was killed more often than its row allows, or
was lost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import report
from benchmarks.processes import adopt_orphans, end_all, end_at_once
from benchmarks.recovery import as_plain, numbered, say
from tests.hangs import harms
from tests.hangs.healthy import HEALTHY, QUICK, SCRIPT_KINDS, HealthyOutcome, HealthyWait, observe

Run = tuple[HealthyWait, str]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    adopt_orphans()
    signal.signal(signal.SIGTERM, end_at_once)
    waits = [
        wait
        for wait in (QUICK if args.quick else HEALTHY)
        if not args.only or any(part in wait.name for part in args.only)
    ]
    skipped = {wait.name: why for wait in waits if (why := wait.missing())}
    runs: list[Run] = [
        (wait, script)
        for wait, script, _ in itertools.product(waits, args.scripts, range(args.repetitions))
        if wait.name not in skipped
    ]
    try:
        with harms.busy(2 * len(os.sched_getaffinity(0)) if args.busy else 0):
            outcomes = run_all(runs, args.at_once, args.keep, args.flags)
    finally:
        end_all()
    facts = report.machine()
    text = [f"Measured on {report.machine_line(facts)}.", table(outcomes), summary(outcomes)]
    print("\n\n".join([*text, *(f"Skipped: {name}: {why}." for name, why in skipped.items())]))
    path: Path = args.json or Path("bench-results") / time.strftime("healthy-%Y%m%d-%H%M%S.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": facts, "wall": time.time(), "arguments": vars(args), "skipped": skipped, "outcomes": outcomes}
    path.write_text(json.dumps(found, indent=1, default=as_plain) + "\n")
    print(f"\nAll figures: {path}", file=sys.stderr)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def run_all(runs: Sequence[Run], at_once: int, keep: Path | None, flags: Sequence[str]) -> list[HealthyOutcome]:
    """Those that sleep `at_once` at a time, then the others, as many as there are cores."""
    with tempfile.TemporaryDirectory(prefix="elasticd-bench-") as scratch:
        folders = numbered(keep or Path(scratch))

        def one(task: tuple[int, Run, Path]) -> HealthyOutcome:
            number, (wait, script), folder = task
            outcome = observe(wait, script, folder, flags)
            say(f"{number}/{len(runs)}: {_line(outcome)} {folder if keep else ''}")
            return outcome

        ordered = sorted(runs, key=lambda run: run[0].busy)
        tasks = [(number, run, next(folders)) for number, run in enumerate(ordered, start=1)]
        outcomes: list[HealthyOutcome] = []
        for busy, threads in ((False, at_once), (True, len(os.sched_getaffinity(0)))):
            with ThreadPoolExecutor(threads) as pool:
                outcomes += pool.map(one, [task for task in tasks if task[1][0].busy == busy])
    return outcomes


def _line(outcome: HealthyOutcome) -> str:
    what = f"{len(outcome.killed)} kills" if outcome.killed else "no kill"
    what += f", {outcome.reported} reports, {outcome.restarts} restarts"
    lines = [
        f"{'ok' if outcome.ok else 'WRONG'}: {outcome.name} ({outcome.script}): {what}, "
        f"exit code {outcome.code}, {outcome.wall_s:.0f} s, {outcome.cpu_s:.0f} s of CPU {outcome.wrong}"
    ]
    return "\n    ".join([*lines, *outcome.killed])


def table(outcomes: Sequence[HealthyOutcome]) -> str:
    """Rows: jobs; of all their runs."""
    head = "| | script | runs | kills (allowed) | reported | lost | exit codes | wall, s | CPU, s |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    rows: dict[tuple[str, str], list[HealthyOutcome]] = {}
    for outcome in outcomes:
        rows.setdefault((outcome.name, outcome.script), []).append(outcome)
    for (name, script), found in rows.items():
        kills, allowed = sum(len(one.killed) for one in found), sum(one.allowed for one in found)
        codes = ", ".join(sorted({str(one.code) for one in found}))
        reported, lost = sum(one.reported for one in found), sum(one.lost for one in found)
        wall, cpu = max(one.wall_s for one in found), max(one.cpu_s for one in found)
        lines.append(
            f"| {name} | {script} | {len(found)} | {kills} ({allowed}) "
            f"| {reported} | {lost} | {codes} | {wall:.0f} | {cpu:.0f} |"
        )
    return "\n".join(lines)


def summary(outcomes: Sequence[HealthyOutcome]) -> str:
    wrong = [outcome for outcome in outcomes if not outcome.ok]
    kills, allowed = sum(len(one.killed) for one in outcomes), sum(len(one.killed) for one in outcomes if one.ok)
    lines = [
        f"{len(outcomes)} healthy jobs: {kills} kills, {kills - allowed} of them wrong; "
        f"{sum(one.lost for one in outcomes)} lost; {sum(one.suspected for one in outcomes)} suspicions."
    ]
    return "\n".join([*lines, *(f"- {_line(outcome)}" for outcome in wrong)])


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=1, help="of every job (default %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="jobs with one of these in their names")
    parser.add_argument("--quick", action="store_true", help="only jobs that wait for less than 20 s")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPT_KINDS, default=["session", "plain"])
    parser.add_argument("--busy", action="store_true", help="beside two busy loops a core")
    parser.add_argument("--at-once", type=int, default=12, help="jobs that mostly sleep (default %(default)s)")
    parser.add_argument("--keep", type=Path, help="an empty directory for the jobs' files")
    parser.add_argument("--json", type=Path, help="where the figures go (default bench-results/)")
    parser.add_argument("flags", nargs="*", help="more options of elasticd run, after --")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
