"""Every way to hang, repeatedly: time to the verdict, blamed rank, time to the next step; torchrun too.

Each row is a situation of tests/hangs/situations.py: a small DDP script on gloo with steps of 20 ms and an attached
checkpoint, under the default policy and under `--hang-floor 1s --stopped-after 1s`; `--policies floor` leaves the
second of them away. `--slow-minutes 15` runs jobs that are only slow, at full length, and counts kills. It prints
markdown and writes all results as JSON; `--from FILE…` prints one table of several such files, so that an hour of runs
may be cut into parts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.hang_jobs import DEFAULT, FLOOR, JOBS, TUNED, HangOutcome, Missed, partition, repetition
from benchmarks.hang_soak import HangSoak, soak
from benchmarks.hang_torchrun import torchrun, torchrun_partition
from benchmarks.processes import adopt_orphans, end_all
from benchmarks.recovery import as_plain, numbered, say
from tests.hangs.situations import BY_NAME
from tests.multihost.net import missing

POLICIES: Mapping[str, Sequence[str]] = {"default": DEFAULT, "floor": FLOOR, "tuned": TUNED}
_TORCHRUN = "torchrun"
_TORCHRUN_DEADLINE_S = 120.0

Outcomes = dict[str, dict[str, HangOutcome]]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.parts:
        outcomes = together(args.parts)
        print(f"{table(outcomes)}\n\n{summary(outcomes)}")
        return 0 if all_found(outcomes) else 1
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    facts = report.machine()
    found: dict[str, object] = {"machine": facts, "seed": args.seed, "wall": time.time(), "arguments": vars(args)}
    text = [f"Measured on {report.machine_line(facts)}."]
    ok = True
    try:
        with tempfile.TemporaryDirectory(prefix="elasticd-bench-") as scratch:
            folders = numbered(Path(scratch))
            if args.repetitions or args.torchrun:
                outcomes = hung(args, folders)
                found["hung"] = outcomes
                text += [table(outcomes), summary(outcomes)]
                ok = all_found(outcomes)
            if args.slow_minutes:
                quiet = soak(args.slow_minutes, next(folders), random.Random(args.seed), say)
                found["slow"] = quiet
                text.append(slow_line(quiet))
                ok = ok and not quiet.kills and not quiet.broken
    finally:
        end_all()
    print("\n\n".join(text))
    path: Path = args.json or Path("bench-results") / time.strftime("hangs-%Y%m%d-%H%M%S.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, default=as_plain) + "\n")
    print(f"\nAll figures: {path}", file=sys.stderr)
    return 0 if ok else 1


def hung(args: argparse.Namespace, folders: Iterator[Path]) -> Outcomes:
    """By policy and situation. A job that loses a situation is given up; the ones after it are not counted."""
    jobs = [job for job in JOBS if set(job) & set(args.situations)]
    names = [name for name in BY_NAME if name in {"partition"} & set(args.situations) or name in sum(jobs, ())]
    policies = args.policies if args.repetitions else []
    outcomes = {policy: {name: HangOutcome(name, policy) for name in names} for policy in policies}
    for number in range(args.repetitions):
        for policy, job in itertools.product(args.policies, jobs):
            start = time.monotonic()
            try:
                repetition(job, POLICIES[policy], next(folders), outcomes[policy])
            except Missed as missed:
                outcomes[policy][job[0]].wrong.append(str(missed))
                say(f"LOST: {policy}: {missed}")
            say(f"{policy} {number + 1}/{args.repetitions}: {', '.join(job)}: {time.monotonic() - start:.0f} s")
        say(table(outcomes))  # an interrupted run has printed this much
    if "partition" in args.situations and args.repetitions:
        _partitions(args, folders, outcomes)
    if args.torchrun:
        others = [name for name in names if BY_NAME[name].what or (name == "partition" and not missing())]
        outcomes[_TORCHRUN] = {name: HangOutcome(name, _TORCHRUN) for name in others}
        _under_torchrun(args.torchrun, folders, outcomes[_TORCHRUN])
    return outcomes


def _partitions(args: argparse.Namespace, folders: Iterator[Path], outcomes: Outcomes) -> None:
    if reason := missing():
        say(f"no partition: {reason}")
        return
    for policy in args.policies:
        outcome = outcomes[policy]["partition"]
        try:
            partition(POLICIES[policy], next(folders), args.repetitions, outcome)
        except AssertionError as error:
            outcome.wrong.append(str(error))
        say(f"{policy}: {args.repetitions} partitions")


def _under_torchrun(repetitions: int, folders: Iterator[Path], outcomes: dict[str, HangOutcome]) -> None:
    for number, outcome in itertools.product(range(repetitions), outcomes.values()):
        if outcome.situation == "partition":
            torchrun_partition(next(folders), _TORCHRUN_DEADLINE_S, outcome)
        else:
            torchrun(BY_NAME[outcome.situation], next(folders), _TORCHRUN_DEADLINE_S, outcome)
        say(f"torchrun {number + 1}/{repetitions}: {outcome.situation}: {_seconds(outcome.recovered)}")


def together(paths: Sequence[Path]) -> Outcomes:
    """What several runs have seen, in the order of the policies and situations."""
    parts = [json.loads(path.read_text())["hung"] for path in paths]
    outcomes: Outcomes = {}
    for policy in (one for one in (*POLICIES, _TORCHRUN) if any(one in each for each in parts)):
        outcomes[policy] = {name: HangOutcome(name, policy) for name in BY_NAME}
        for found in (one for each in parts for one in each.get(policy, {}).values()):
            into = outcomes[policy][found["situation"]]
            for count in ("tried", "right_cause", "right_culprit", "evidence_first"):
                setattr(into, count, getattr(into, count) + found[count])
            for many in ("detected", "recovered", "wrong"):
                getattr(into, many).extend(found[many])
    return outcomes


def table(outcomes: Outcomes) -> str:
    """Rows: situations. Of each policy: found after, training again after, right verdicts and culprits of the tries."""
    policies = [policy for policy in outcomes if policy != _TORCHRUN]
    heads = [f"{policy}: found | {policy}: training again | right" for policy in policies]
    heads += ["torchrun, group timeout 30 s"] if _TORCHRUN in outcomes else []
    columns = 3 * len(policies) + (_TORCHRUN in outcomes)
    lines = [
        "| seconds after the injection: median (max) | " + " | ".join(heads) + " |",
        "|---|" + "---|" * columns,
    ]
    for name in outcomes[policies[0]] if policies else outcomes[_TORCHRUN]:
        cells = []
        for policy in policies:
            one = outcomes[policy][name]
            right = f"{min(one.right_cause, one.right_culprit)}/{one.tried}"
            again = "–" if BY_NAME[name].what == "exit" else _seconds(one.recovered)  # nothing is left to train
            cells += [_seconds(one.detected), again, right] if one.tried else ["–"] * 3
        if _TORCHRUN in outcomes:
            other = outcomes[_TORCHRUN].get(name)
            of = f", {len(other.recovered)}/{other.tried}" if other is not None else ""
            cells.append(f"{_seconds(other.recovered)}{of}" if other is not None and other.tried else "–")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _seconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({max(values):.1f})" if values else "never"


def summary(outcomes: Outcomes) -> str:
    lines = []
    for policy, by_name in outcomes.items():
        if policy == _TORCHRUN:
            continue
        all_of_them = list(by_name.values())
        single = [o for o in all_of_them if len(BY_NAME[o.situation].blamed) == 1]
        lines.append(
            f"{policy}: {_share(sum(len(o.detected) for o in all_of_them), all_of_them)} found; the right culprit in "
            f"{_share(sum(o.right_culprit for o in single), single)} of those with a single one; the evidence of all "
            f"ranks on disk before the kill in {_share(sum(o.evidence_first for o in all_of_them), all_of_them)}."
        )
        lines += [f"- {o.situation}: {wrong.splitlines()[0]}" for o in all_of_them for wrong in o.wrong]
    return "\n".join(lines)


def _share(count: int, outcomes: Sequence[HangOutcome]) -> str:
    return f"{count} of {sum(o.tried for o in outcomes)}"


def slow_line(found: HangSoak) -> str:
    lines = [
        f"What is only slow, {found.minutes:g} minutes, {sum(found.runs.values())} jobs: {len(found.kills)} kills, "
        f"{found.suspected} suspicions that passed, {len(found.broken)} jobs that did not end well."
    ]
    return "\n".join([*lines, *(f"- {line}" for line in [*found.kills, *found.broken])])


def all_found(outcomes: Outcomes) -> bool:
    return all(
        len(outcome.detected) == outcome.tried
        for policy, by_name in outcomes.items()
        if policy != _TORCHRUN
        for outcome in by_name.values()
    )


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="of every situation (default %(default)s)")
    parser.add_argument(
        "--situations", nargs="+", choices=list(BY_NAME), default=list(BY_NAME), help="and those of their jobs"
    )
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=["default", "tuned"])
    parser.add_argument("--torchrun", type=int, default=0, help="repetitions of torchrun beside it, up to 2 min each")
    parser.add_argument("--slow-minutes", type=float, default=0.0, help="of what is only slow; 15 are a fair try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--from", dest="parts", nargs="+", type=Path, metavar="FILE", help="of earlier runs; runs nothing"
    )
    parser.add_argument("--json", type=Path, help="where the figures go (default bench-results/)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
