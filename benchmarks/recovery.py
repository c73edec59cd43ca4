"""elasticd and torchrun side by side, in one run and with one script: how long a start, a crash and a step take.

`make bench` runs it whole (about a quarter of an hour on 2 cores), `--quick` in about two minutes. It prints a markdown
table and writes everything it saw as JSON. Every wait has a deadline; every process it started is ended at its exit.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import measurements, report
from benchmarks.launchers import ALL, ELASTICD, TORCHRUN
from benchmarks.processes import adopt_orphans, end_all

PARTS = ("recovery", "steady", "memory")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    adopt_orphans()
    # SIGTERM unwinds like Ctrl-C does, so that the jobs are ended by their own contexts.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rng = random.Random(args.seed)
    facts = report.machine()
    print(f"machine: {report.machine_line(facts)}; seed {args.seed}", file=sys.stderr, flush=True)
    found: dict[str, object] = {"machine": facts, "seed": args.seed, "wall": time.time(), "arguments": vars(args)}
    text = [f"Measured on {report.machine_line(facts)}."]
    ok = True
    try:
        with tempfile.TemporaryDirectory(prefix="elasticd-bench-") as scratch:
            ok = measure(args, rng, numbered(Path(scratch)), found, text)
    finally:
        end_all()
    print("\n\n".join(text))
    path: Path = args.json or Path("bench-results") / time.strftime("recovery-%Y%m%d-%H%M%S.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, default=as_plain) + "\n")
    print(f"\nAll figures: {path}", file=sys.stderr)
    return 0 if ok else 1


def measure(
    args: argparse.Namespace, rng: random.Random, scratch: Iterator[Path], found: dict[str, object], text: list[str]
) -> bool:
    """Fill in what was found, as data and as text; False if elasticd lost a job that it must not lose."""
    if args.kills:
        kills = measurements.many_kills(args.kills, args.workers[0], args.deadline, rng, scratch, say)
        found["kills"] = kills
        text.append(report.kills_line(kills))
        return not kills.lost
    ok = True
    for launcher in ALL:  # page caches and .pyc files, for everyone, before anything counts
        measurements.warm_up(launcher, scratch)
    if "recovery" in args.parts:
        results = [
            result
            for workers in args.workers
            for result in measurements.recoveries(ALL, workers, args.repetitions, args.deadline, rng, scratch, say)
        ]
        found["recoveries"] = results
        text.append(report.recovery_table(results))
        ok = all(r.all_recovered for r in results if r.launcher == ELASTICD.name)
    if "steady" in args.parts:
        steady = measurements.overhead(args.starts, args.turns, rng, scratch, say)
        found["steady"] = steady
        text.append(report.overhead_line(steady))
    if "memory" in args.parts:
        workers = max(args.workers)
        sizes = measurements.memory((ELASTICD, TORCHRUN), workers, scratch, say)
        found["memory"] = sizes
        text.append(report.memory_table(sizes, workers))
    return ok


def numbered(folder: Path) -> Iterator[Path]:
    """A fresh folder's name for every job."""
    return (folder / f"job{n}" for n in itertools.count())


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def as_plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 repetitions, 2 workers, 3 starts: a look, not a figure")
    parser.add_argument("--repetitions", type=int, help="of start and recovery, each launcher (default 5)")
    parser.add_argument("--workers", type=int, nargs="+", help="numbers of workers (default 2 4)")
    parser.add_argument("--starts", type=int, help="pairs of jobs in the steady state (default 12)")
    parser.add_argument("--turns", type=int, default=20, help="that each of such a pair takes, of half a second")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds after which a restart counts as stalled")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--kills", type=int, default=0, help="only this: kills in a row in one elasticd job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where the figures go (default bench-results/)")
    args = parser.parse_args(argv)
    repetitions, workers, starts = (2, [2], 3) if args.quick else (5, [2, 4], 12)
    args.repetitions = args.repetitions or repetitions
    args.workers = args.workers or workers
    args.starts = args.starts or starts
    if min(args.workers) < 2:
        parser.error("--workers: at least 2, or there is no rank other than 0 to kill")
    return args


if __name__ == "__main__":
    sys.exit(main())
