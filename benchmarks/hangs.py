"""Every way to hang, each in a job of its own: time to the verdict, cause, blamed rank, time to the next step.

Each row is a situation of tests/hangs/situations.py: a small DDP script on gloo with steps of 50 ms, with a session and
without one, under the default policy and under `--hang-floor 5s`. Several jobs run at a time, because they mostly wait.
`--slow-minutes 15` runs jobs that are only slow, at full length, and counts kills. It prints markdown, with the goals
of each class of evidence, and writes all results as JSON; `--from FILE…` prints one table of several such files, so
that an hour of runs may be cut into parts.
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
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import report
from benchmarks.hang_jobs import DEFAULT, FLOOR, TUNED, HangOutcome, observe, partition
from benchmarks.hang_soak import HangSoak, soak
from benchmarks.hang_torchrun import torchrun, torchrun_partition
from benchmarks.processes import adopt_orphans, end_all, end_at_once
from benchmarks.recovery import as_plain, numbered, say
from tests.hangs.situations import (
    BY_NAME,
    CEILING,
    GIL,
    OUTSIDE,
    PLAIN,
    PROVEN,
    SESSION,
    STOPPED,
    WEAK,
    ZOMBIE,
    Situation,
)
from tests.multihost.net import missing

POLICIES: Mapping[str, Sequence[str]] = {"default": DEFAULT, "floor": FLOOR, "tuned": TUNED}
GOALS_S: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "default": {
        STOPPED: (2.5, 3.5),
        ZOMBIE: (1, 3.5),
        PROVEN: (0, 7),
        GIL: (0, 20),
        WEAK: (0, 75),
        CEILING: (0, 75),
        OUTSIDE: (60, 75),
    },
    "floor": {
        STOPPED: (2.5, 3.5),
        ZOMBIE: (1, 3.5),
        PROVEN: (0, 8),
        GIL: (0, 8),
        WEAK: (0, 8),
        CEILING: (0, 8),
        OUTSIDE: (60, 75),
    },
}
"""Seconds to the verdict, at least and at most, by policy and class of evidence."""
RIGHT_CAUSE, RIGHT_RANK = 0.98, 0.97
_TORCHRUN = "torchrun"
_TORCHRUN_DEADLINE_S = 120.0

Outcomes = dict[str, dict[str, HangOutcome]]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.parts:
        outcomes = together(args.parts)
        print(f"{table(outcomes)}\n\n{summary(outcomes)}")
        return 0 if goals_met(outcomes) else 1
    adopt_orphans()
    signal.signal(signal.SIGTERM, end_at_once)
    facts = report.machine()
    found: dict[str, object] = {"machine": facts, "seed": args.seed, "wall": time.time(), "arguments": vars(args)}
    text = [f"Measured on {report.machine_line(facts)}."]
    ok = True
    try:
        with tempfile.TemporaryDirectory(prefix="elasticd-bench-") as scratch:
            folders = numbered(args.keep or Path(scratch))
            if args.repetitions or args.torchrun:
                outcomes = hung(args, folders)
                found["hung"] = outcomes
                text += [table(outcomes), summary(outcomes)]
                ok = goals_met(outcomes)
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
    """By policy, and then by situation and script."""
    chosen = [BY_NAME[name] for name in args.situations]
    policies = args.policies if args.repetitions else []
    outcomes: Outcomes = {policy: {} for policy in policies}
    for policy, situation, script in itertools.product(policies, chosen, args.scripts):
        if script in situation.scripts and (situation.name != "partition" or script == SESSION):
            outcome = HangOutcome(situation.name, policy, script)
            outcomes[policy][_key(outcome)] = outcome
    rows = [(BY_NAME[o.situation], o) for by_key in outcomes.values() for o in by_key.values()]
    tasks = [row for row in rows if row[0].name != "partition"] * args.repetitions
    again = {id(outcome): threading.Lock() for _, outcome in tasks}  # one run of a row at a time writes to it

    def one(task: tuple[Situation, HangOutcome, Path]) -> None:
        situation, outcome, folder = task
        with again[id(outcome)]:
            observe(situation, outcome.script, POLICIES[outcome.policy], folder, outcome)
            wrong = outcome.wrong[-1].splitlines()[0] if outcome.wrong else "right"
            say(f"{outcome.policy}: {_key(outcome)}: {_seconds(outcome.detected)}: {wrong} ({folder.name})")

    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(one, [(*task, next(folders)) for task in tasks]))
    if "partition" in args.situations and args.repetitions:
        _partitions(args, folders, outcomes)
    if args.torchrun:
        others = [each.name for each in chosen if each.what or (each.name == "partition" and not missing())]
        outcomes[_TORCHRUN] = {name: HangOutcome(name, _TORCHRUN) for name in others}
        _under_torchrun(args.torchrun, folders, outcomes[_TORCHRUN])
    return outcomes


def _key(outcome: HangOutcome) -> str:
    return outcome.situation if outcome.script == SESSION else f"{outcome.situation}, plain script"


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
    """What several runs have seen, in their order."""
    outcomes: Outcomes = {}
    for policy, by_key in (item for path in paths for item in json.loads(path.read_text())["hung"].items()):
        for key, found in by_key.items():
            empty = HangOutcome(found["situation"], policy, found["script"])
            into = outcomes.setdefault(policy, {}).setdefault(key, empty)
            for count in ("tried", "reported", "right_cause", "right_culprit", "evidence_first"):
                setattr(into, count, getattr(into, count) + found.get(count, 0))
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
    for name in dict.fromkeys(key for by_key in outcomes.values() for key in by_key):
        cells = []
        for policy in policies:
            one = outcomes[policy].get(name) or HangOutcome(name, policy)
            right = f"{min(one.right_cause, one.right_culprit)}/{one.tried}"
            again = "reported" if one.reported == one.tried else _seconds(one.recovered)
            if BY_NAME[one.situation].what == "exit":  # nothing is left to train
                again = "–"
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
    """The goals: verdicts, ranks, seconds by class of evidence; then every wrong one."""
    lines = []
    for policy, by_key in outcomes.items():
        if policy == _TORCHRUN:
            continue
        found = list(by_key.values())
        single = [o for o in found if len(BY_NAME[o.situation].blamed) == 1]
        lines.append(
            f"{policy}: {_share(sum(len(o.detected) for o in found), found)} found; the right cause in "
            f"{_share(sum(o.right_cause for o in found), found)}; the right rank in "
            f"{_share(sum(o.right_culprit for o in single), single)} of those with a single one; the evidence of all "
            f"ranks on disk before the kill in {_share(sum(o.evidence_first for o in found), found)}."
        )
        for evidence, (least, most) in GOALS_S.get(policy, {}).items():
            times = [time_s for o in found if BY_NAME[o.situation].evidence == evidence for time_s in o.detected]
            met = sum(least <= time_s <= most for time_s in times)
            lines.append(f"- {evidence}: {_seconds(times)} s, {met} of {len(times)} within {least:g} to {most:g} s")
        lines += [f"- {_key(o)}: {wrong.splitlines()[0]}" for o in found for wrong in o.wrong]
    return "\n".join(lines)


def _share(count: int, outcomes: Sequence[HangOutcome]) -> str:
    tried = sum(o.tried for o in outcomes)
    return f"{count} of {tried} ({count / max(1, tried):.1%})"


def slow_line(found: HangSoak) -> str:
    lines = [
        f"What is only slow, {found.minutes:g} minutes, {sum(found.runs.values())} jobs: {len(found.kills)} kills, "
        f"{found.suspected} suspicions that passed, {len(found.broken)} jobs that did not end well."
    ]
    return "\n".join([*lines, *(f"- {line}" for line in [*found.kills, *found.broken])])


def goals_met(outcomes: Outcomes) -> bool:
    """The right cause and rank often enough, each verdict in its time, and no hang missed."""
    for policy, by_key in outcomes.items():
        found = [outcome for outcome in by_key.values() if outcome.tried]
        if policy == _TORCHRUN or not found:
            continue
        tried, single = sum(o.tried for o in found), [o for o in found if len(BY_NAME[o.situation].blamed) == 1]
        goals = GOALS_S.get(policy, {})
        late = [o for o in found if (goal := goals.get(BY_NAME[o.situation].evidence)) and not _within(o, *goal)]
        ranks, of = sum(o.right_culprit for o in single), sum(o.tried for o in single)
        if late or sum(o.right_cause for o in found) < RIGHT_CAUSE * tried or ranks < RIGHT_RANK * of:
            return False
    return all(len(o.detected) == o.tried for name in outcomes if name != _TORCHRUN for o in outcomes[name].values())


def _within(outcome: HangOutcome, least: float, most: float) -> bool:
    return all(least <= time_s <= most for time_s in outcome.detected)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5, help="of every situation (default %(default)s)")
    parser.add_argument("--situations", nargs="+", choices=list(BY_NAME), default=list(BY_NAME), metavar="NAME")
    parser.add_argument("--scripts", nargs="+", choices=[SESSION, PLAIN], default=[SESSION])
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=["default", "floor"])
    parser.add_argument("--at-once", type=int, default=6, help="jobs (default %(default)s)")
    parser.add_argument("--torchrun", type=int, default=0, help="repetitions of torchrun beside it, up to 2 min each")
    parser.add_argument("--slow-minutes", type=float, default=0.0, help="of what is only slow; 15 are a fair try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--from", dest="parts", nargs="+", type=Path, metavar="FILE", help="of earlier runs; runs nothing"
    )
    parser.add_argument("--keep", type=Path, help="an empty directory for the jobs' files")
    parser.add_argument("--json", type=Path, help="where the figures go (default bench-results/)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
