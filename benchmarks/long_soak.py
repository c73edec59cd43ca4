"""`make soak HOURS=N`: agents under random faults for hours, which may be stopped and continued.

    python -m benchmarks.long_soak --hours 6 [--directory .soak] [--seed N]

Four nodes, each with a network of its own, and one etcd. One job of three nodes and a spare trains for hours, its ranks
stay in their processes; short jobs come and go beside it. Faults are those of daemon_faults.py. After every 25 of them
all is mended, every short job must have ended, and daemon_checker.py judges all logs so far.

Each minute one line goes into DIRECTORY/minutes.jsonl: faults, jobs, steps, breaches, and what every process has. A run
that was stopped, by Ctrl-C, SIGTERM or its machine, is continued by the same command: hours add up until there are N.
A table and a plot of all lines come at each end; --table prints them of what there is. The first node is spared all
faults that end its processes, so that their growth can be seen. Exit code 1 if there was a breach. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import checker, daemon_checker, report
from benchmarks.daemon_faults import FleetFaults, FleetStuck
from benchmarks.daemon_fleet import Fleet, small_disk
from benchmarks.daemon_soak import FleetSoak
from tests.etcd import EtcdServers, etcd_servers
from tests.multihost.net import Network, missing

NODES = 4
SPARED = "n1"
BETWEEN_S = (2.0, 22.0)
LASTS_S = (1.0, 8.0)
LONG_STEPS = 40_000
"""Three hours."""
SHORT_STEPS = (60, 300)
SETTLES_MINUTES = 60
"""What grows in a process' first hour is no growth."""
FEWEST = 15
"""Lines of a process whose growth says anything."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
ETCD_FLAGS = ("--auto-compaction-mode=periodic", "--auto-compaction-retention=5m")

Minute = Mapping[str, Any]


@dataclass(slots=True)
class Segment:
    """One invocation. `minutes.jsonl` has all that is known of the earlier ones."""

    directory: Path
    number: int
    work: Path
    run: FleetSoak
    judged: set[int] = field(default_factory=set)
    breaches: list[str] = field(default_factory=list)
    _steps: dict[int, int] = field(default_factory=dict)
    _lost: dict[int, int] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _minute: int = 0
    _at: float = field(default_factory=time.monotonic)
    _told: Minute = field(default_factory=dict)

    def judge(self, *, over: bool = False) -> None:
        """By all logs so far. A job that had ended at the time before is not looked at again, and its files go."""
        fleet = self.run.fleet
        running = None if over else {one.seq for one in fleet.unfinished()}
        evidence = daemon_checker.read(self.work, judged=self.judged, running=running)
        for breach in daemon_checker.breaches(evidence):
            if breach not in self.breaches:
                self.breaches.append(breach)
                self.run.say(f"BREACH {breach}")
        for run in evidence.runs:
            self._steps[run.seq] = len(run.evidence.trained())
            self._lost[run.seq] = checker.steps_lost(run.evidence)
        for seq in self._ended - self.judged:
            self.judged.add(seq)  # its agents remove their logs, without which a later look finds breaches
            if not self.breaches:
                shutil.rmtree(self.work / "jobs" / str(seq), ignore_errors=True)
        self._ended |= {run.seq for run in evidence.runs if run.endings}

    def minutes(self, etcd: EtcdServers, over: threading.Event) -> None:
        while not over.wait(60.0):
            self.write(etcd)

    def write(self, etcd: EtcdServers) -> None:
        """One line, with what is new since the last one."""
        self._minute += 1
        fleet = self.run.fleet
        now: dict[str, Any] = {
            "faults": dict(self.run.struck),
            "jobs": sum(one.over for one in fleet.submissions.values()),
            "steps": sum(self._steps.values()),
            "lost": sum(self._lost.values()),
            "breaches": len(self.breaches),
        }
        told, self._told = self._told, now
        line: dict[str, Any] = {"segment": self.number, "minute": self._minute, "seconds": time.monotonic() - self._at}
        self._at = time.monotonic()
        for name, count in now.items():
            before = told.get(name, {} if name == "faults" else 0)
            line[name] = dict(Counter(count) - Counter(before)) if name == "faults" else count - before
        line["found"] = self.breaches[-line["breaches"] :] if line["breaches"] else []
        line["processes"] = {}
        for name, node in fleet.nodes.items():
            for pid, comm in node.processes().items():
                if used := _used(pid):
                    line["processes"][pid] = [name, _kind(pid, comm), *used]
        with contextlib.suppress(AssertionError):  # it is away
            line["processes"][etcd.pid()] = ["store", "etcd", *(_used(etcd.pid()) or ())]
        line["disk"] = {name: _bytes(node.state) for name, node in fleet.nodes.items()} | {"etcd": _bytes(etcd.data())}
        line["shm"] = {name: _bytes(host.shared_memory) for name, host in zip(fleet.nodes, fleet.hosts, strict=False)}
        with (self.directory / "minutes.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _used(pid: int) -> tuple[int, int] | None:
    """Resident bytes and descriptors."""
    try:
        resident = int(Path("/proc", str(pid), "statm").read_text().split()[1]) * _PAGE
        return resident, len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None


def _kind(pid: int, comm: str) -> str:
    if comm.startswith("elasticd"):
        return comm
    try:
        return "agent" if b"elasticd_agent\0agent" in Path("/proc", str(pid), "cmdline").read_bytes() else "worker"
    except OSError:
        return "worker"


def _bytes(folder: Path) -> int:
    total = 0
    for at, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += Path(at, name).lstat().st_blocks * 512
    return total


def soak(directory: Path, number: int, seed: int, limit_s: float, say: Any, stop: threading.Event) -> list[str]:
    """One segment; returns its breaches."""
    work = Path(tempfile.mkdtemp(prefix=f"segment-{number}-", dir=directory))
    disk = small_disk(work, f"n{NODES}")
    with contextlib.ExitStack() as ending:
        net = ending.enter_context(Network(NODES, others=("store",)))
        store = net["store"]
        ending.enter_context(store.entered())
        etcd = ending.enter_context(etcd_servers(flags=ETCD_FLAGS, address=store.address))
        fleet = Fleet(work, etcd, NODES, seed, SHORT_STEPS, disk=disk, hosts=[*net.hosts, store])
        faults = FleetFaults(fleet, random.Random(seed), LASTS_S, spared=SPARED)
        run = FleetSoak(fleet, faults, say, BETWEEN_S, 1, LONG_STEPS, stop=stop)
        segment = Segment(directory, number, work, run)
        run.at_calm = segment.judge
        over = threading.Event()
        recorder = threading.Thread(target=segment.minutes, args=(etcd, over), name="minutes", daemon=True)
        try:
            fleet.start()
            recorder.start()
            run.run(float("inf"), limit_s)
            fleet.leave()
        except (FleetStuck, AssertionError) as error:
            segment.breaches.append(f"stuck after fault {run.count}: {str(error)[:6000]}")
            say(f"BREACH {segment.breaches[-1]}")
        finally:
            over.set()
            with contextlib.suppress(RuntimeError):  # never started
                recorder.join(30)
            fleet.close()
            segment.judge(over=True)
            segment.write(etcd)
    if segment.breaches:
        work.rename(directory / f"breaches-{number}")
    clear(directory)
    return segment.breaches


def clear(directory: Path) -> None:
    """Remove what a part without a breach has left, or one whose machine was gone."""
    for work in directory.glob("segment-*"):
        for state in work.glob("nodes/*/state"):
            subprocess.run(["umount", "--lazy", state], capture_output=True)
        shutil.rmtree(work, ignore_errors=True)


# ---- what all segments have shown


def read(directory: Path) -> list[Minute]:
    return list(checker.lines(directory / "minutes.jsonl"))


def drop_torn_line(directory: Path) -> None:
    """The last one, which a machine that went down has left without its end."""
    path = directory / "minutes.jsonl"
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def hours(minutes: Sequence[Minute]) -> float:
    return float(sum(line["seconds"] for line in minutes)) / 3600


def growth(minutes: Sequence[Minute]) -> dict[str, tuple[float, float, float]]:
    """By kind of process or place: the median, and its growth, a fraction of it an hour, of memory and descriptors.

    Of processes of the spared node and the store that have lived for more than an hour; while there is none, of the one
    that lived longest, from the middle of its life on.
    """
    lives: dict[tuple[str, int, Any], list[tuple[float, float, float]]] = defaultdict(list)
    for line in minutes:
        for pid, (node, kind, *used) in line["processes"].items():
            if node in (SPARED, "store") and used:
                lives[kind, line["segment"], pid].append((line["minute"], used[0], used[1]))
        for place, size in line["disk"].items():
            if place in (SPARED, "etcd"):
                lives[f"disk of {place}", line["segment"], 0].append((line["minute"], size, 0))
    found = {}
    for kind in sorted({kind for kind, _, _ in lives}):
        own = [life for (of, _, _), life in lives.items() if of == kind]
        longest = max(own, key=len)
        after = SETTLES_MINUTES if len(longest) >= SETTLES_MINUTES + FEWEST else len(longest) // 2
        if len(longest) < FEWEST:
            continue
        settled = [part for life in own if len(part := life[after:]) >= FEWEST] or [longest[after:]]
        slopes = [_hourly(part, 1) for part in settled], [_hourly(part, 2) for part in settled]
        middle = statistics.median(value for part in settled for _, value, _ in part)
        found[kind] = (middle, statistics.median(slopes[0]), statistics.median(slopes[1]))
    return found


def _hourly(part: Sequence[tuple[float, ...]], column: int) -> float:
    """The slope of the line through them, as a fraction of the mean an hour."""
    minutes, values = [row[0] for row in part], [row[column] for row in part]
    mean = statistics.mean(values)
    return 60 * statistics.linear_regression(minutes, values).slope / mean if len(part) > 1 and mean else 0.0


def table(minutes: Sequence[Minute]) -> str:
    struck = sum((Counter(line["faults"]) for line in minutes), Counter[str]())
    total = {name: sum(line[name] for line in minutes) for name in ("jobs", "steps", "lost", "breaches")}
    rows = [
        ("hours", f"{hours(minutes):.1f}, in {len({line['segment'] for line in minutes})} parts"),
        (
            "faults",
            f"{sum(struck.values())}: " + ", ".join(f"{count} × {what}" for what, count in struck.most_common()),
        ),
        ("jobs that ended", f"{total['jobs']}"),
        ("steps", f"{total['steps']}, of which {total['lost']} were trained again after a fault"),
        ("breaches", f"{total['breaches']}"),
    ]
    for kind, (middle, memory, descriptors) in growth(minutes).items():
        rows.append((f"{kind}: median, growth an hour", f"{middle / 1e6:.1f} MB, {memory:+.1%}"))
        if not kind.startswith("disk"):
            rows[-1] = (rows[-1][0], f"{rows[-1][1]}; descriptors {descriptors:+.1%}")
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def draw(minutes: Sequence[Minute], path: Path) -> None:
    """Memory of the spared node's processes, by hours of the whole run, and faults."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    figure, (above, below) = plt.subplots(2, 1, figsize=(10, 6), layout="constrained", sharex=True)
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for index, line in enumerate(minutes):
        used: dict[str, int] = defaultdict(int)
        for node, kind, *values in line["processes"].values():
            if node in (SPARED, "store") and values:
                used[kind] = max(used[kind], values[0])
        for kind, most in used.items():
            series[kind].append((index / 60, most / 1e6))
    for kind, points in sorted(series.items()):
        above.plot(*zip(*points, strict=True), label=kind, linewidth=0.9)
    above.set(ylabel="MB, the largest process", ylim=0)
    above.legend(fontsize=7, ncols=4)
    for what, many in (("faults", _sums(minutes, "faults")), ("breaches", _sums(minutes, "breaches"))):
        below.plot([index / 60 for index in range(len(many))], many, label=what)
    below.set(xlabel="hours", ylabel="so far")
    below.legend()
    figure.savefig(path, dpi=110)


def _sums(minutes: Sequence[Minute], name: str) -> list[int]:
    total, found = 0, []
    for line in minutes:
        total += sum(line[name].values()) if name == "faults" else line[name]
        found.append(total)
    return found


@contextlib.contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """The first one ends the run in order, the second one at once."""

    def on_signal(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {signum: signal.signal(signum, on_signal) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0, help="of all parts together (default %(default)g)")
    parser.add_argument("--directory", type=Path, default=Path(".soak"), help="what is continued (default %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    parser.add_argument("--table", action="store_true", help="only the table and the plot of what there is")
    args = parser.parse_args(argv)
    directory = args.directory.resolve()
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} {line}", file=sys.stderr, flush=True)

    before = read(directory)
    if args.table and not before:
        print(f"no soak has been recorded in {directory}", file=sys.stderr)
        return 1
    left_s = 3600 * (args.hours - hours(before))
    if not args.table and left_s > 0:
        if reason := missing():
            print(f"no soak: {reason}", file=sys.stderr)
            return 1
        directory.mkdir(parents=True, exist_ok=True)
        stop = threading.Event()
        number = 1 + max((line["segment"] for line in before), default=0)
        say(f"seed {args.seed}: part {number}, {left_s / 3600:.1f} hours are left")
        clear(directory)
        drop_torn_line(directory)
        with stopped_by_signals(stop):
            soak(directory, number, args.seed, left_s, say, stop)
    minutes = read(directory)
    draw(minutes, directory / "soak.png")
    print(f"Measured on {report.machine_line(report.machine())}.\n\n{table(minutes)}")
    return 1 if any(line["breaches"] for line in minutes) else 0


if __name__ == "__main__":
    sys.exit(main())
