"""Did agents under faults keep their guarantees? Reads their logs and those of their jobs, and names every breach.

    python -m benchmarks.daemon_checker WORK        # a directory that daemon_soak.py --keep has left

Each job is judged as checker.py judges one of `elasticd run`: by the event logs of its runners and by its ranks' record
of their samples; further by the answers to submissions and cancellations, by observed locks and results, and by what
was left at the end. Everything happened on one machine, so times can be compared.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import checker
from benchmarks.attacker import ATTACKS, FILLED_S
from benchmarks.checker import Line, Log
from elasticd_daemon.api.local import MAX_SHOWN_ROUNDS

SLOTS = 2
SAMPLES = 600
LEAVES_S = 40.0
"""A cancelled job's workers are gone by then: adopt_timeout where the agent is away, and what they have to leave."""
_OF_A_JOB = (
    checker.rounds_only_grow,
    checker.rounds_are_agreed_on,
    checker.restarts_have_reasons,
    checker.one_group_at_a_time,
    checker.resumes_come_from_the_chain,
    checker.no_loser_is_resumed_from,
    checker.ranks_have_one_state,
    checker.the_protocol_is_kept,
)
_OF_ITS_SUCCESS = (checker.no_sample_lost_or_repeated, checker.the_end_is_agreed_on)
_CUTS = ("link down", "cut peers", "cut from store")
_HARMS = ("kill agent long", "kill both", "kill node", "stop agent", "drain", "full disk", "damaged file", *_CUTS)
_LAST = ("full disk", *_CUTS)
_REASONS = (
    "has succeeded", "cancelled", "drain", "SIGTERM", "pending", "submitted again", "without it", "is gone",
    "slots on this node change",  # it was absent, and came back while the runner from before was still in its slot
)  # fmt: skip
_SHOWN_S = 10.0
"""A running job's round is shown by then."""
_EXCUSES_S = 60.0
"""A job whose agent is away leaves after 12 s, within 20 s; where no node of it is left, the next one reports it."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one job. `seq` is the submission's own number, `number` the daemons'."""

    job: str
    number: int
    seq: int
    steps: int
    evidence: checker.SoakLogs
    endings: tuple[Line, ...] = ()
    hostile: bool = False
    """Its user attacks: what it does to itself is no breach, as long as it ends and nothing of it stays."""
    lossy: bool = False
    """A runner of it lived while its disk was full: its last lines are lost if it ended then."""

    @property
    def name(self) -> str:
        return f"{self.job}.{self.number}"


@dataclass(frozen=True, slots=True)
class FleetLogs:
    runs: tuple[Run, ...]
    agents: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    """By node: the agents' own events."""
    notes: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    """By the name of the journal: requests, observed, faults, signals, left, history, end."""
    attacks: Mapping[int, tuple[Line, ...]] = field(default_factory=dict)
    """By the submission's number: what each hostile job tried."""
    running: frozenset[int] | None = None
    """Submissions that need not have ended yet; None: it is all over."""

    def of(self, journal: str, **having: object) -> list[Line]:
        return [line for line in self.notes.get(journal, ()) if having.items() <= line.items()]


def breaches(evidence: FleetLogs) -> list[str]:
    """Every guarantee that was not kept; empty when all is well."""
    found = []
    for run in evidence.runs:
        if not run.hostile:
            found += [f"{run.name}: {breach}" for breach in _of_a_job(run)]
    checks = (
        no_slot_has_two_runners,
        no_node_trains_more_workers_than_slots,
        no_submission_is_lost,
        no_submission_runs_twice,
        endings_stay,
        a_cancel_wins,
        jobs_succeed,
        nobody_trains_after_the_end,
        only_the_killed_are_lost,
        only_the_killed_die,
        only_the_stopped_hang,
        nobody_is_sent_away_for_nothing,
        histories_are_whole,
        agents_leave_well,
        agents_stay_small,
        *((nothing_is_left, attacks_fail) if evidence.running is None else ()),
    )
    return found + [f"{check.__name__.replace('_', ' ')}: {breach}" for check in checks for breach in check(evidence)]


def _of_a_job(run: Run) -> Iterator[str]:
    checks: list[Any] = list(_OF_A_JOB)
    if any(ending["outcome"] == "succeeded" for ending in run.endings):
        checks += _OF_ITS_SUCCESS
        last = max((line["ends"] for line in run.evidence.record if "ends" in line), default=0)
        if last != run.steps:
            yield f"it should end after step {run.steps}, and ended after {last}"
    for check in checks:
        for breach in check(run.evidence):
            if "counts 0 restarts" in breach:  # it had left all of its nodes, and starts counting again
                continue
            if run.lossy and "no agent saw" in breach:
                continue
            yield f"{check.__name__.replace('_', ' ')}: {breach}"


def no_slot_has_two_runners(evidence: FleetLogs) -> Iterator[str]:
    for line in evidence.of("observed", what="slot"):
        yield f"slot {line['slot']} of {line['node']} is {' and '.join(line['by'])}'s at once"


def no_node_trains_more_workers_than_slots(evidence: FleetLogs) -> Iterator[str]:
    """By what the workers themselves wrote: how many were between their first and their last line at once."""
    moments: dict[str, list[tuple[float, int, str]]] = defaultdict(list)
    for run in evidence.runs:
        lives: dict[tuple[str, int], list[float]] = defaultdict(list)
        for line in run.evidence.record:
            lives[line["node"], line["pid"]].append(line["mono"])
        for (node, pid), times in lives.items():
            moments[node] += [(min(times), 1, f"{run.name} (pid {pid})"), (max(times), -1, f"{run.name} (pid {pid})")]
    for node, changes in moments.items():
        train: set[str] = set()
        for at, change, who in sorted(changes, key=lambda one: (one[0], -one[1])):  # a life may be a single line
            (train.add if change > 0 else train.discard)(who)
            if len(train) > SLOTS:
                yield f"{node} has {SLOTS} slots, at {at:.1f} there trained {', '.join(sorted(train))}"
                break


def no_submission_is_lost(evidence: FleetLogs) -> Iterator[str]:
    known = {(run.seq, run.number) for run in evidence.runs if run.endings}
    for line in evidence.of("requests", do="submit"):
        if line["seq"] in (evidence.running or ()):
            continue
        if line["code"] == 201 and (line["seq"], line["number"]) not in known:
            yield f"job {line['job']} was submitted as number {line['number']} and never ended"


def no_submission_runs_twice(evidence: FleetLogs) -> Iterator[str]:
    numbers: dict[int, set[int]] = defaultdict(set)
    for line in [*evidence.of("requests", do="submit"), *evidence.of("observed", what="submission")]:
        if line["number"]:
            numbers[line["seq"]].add(line["number"])
    for seq, several in numbers.items():
        if len(several) > 1:
            yield f"submission {seq} became numbers {sorted(several)}"


def endings_stay(evidence: FleetLogs) -> Iterator[str]:
    for run in evidence.runs:
        if len(run.endings) > 1:
            results = "; then ".join(f"{ending['outcome']}: {ending['reason']}" for ending in run.endings)
            yield f"{run.name} ended more than once: {results}"


def a_cancel_wins(evidence: FleetLogs) -> Iterator[str]:
    """A job that was answered to be cancelled is cancelled."""
    endings = {run.number: run.endings for run in evidence.runs}
    for line in evidence.of("requests", do="cancel"):
        if line["code"] == 200 and line["answer"].get("outcome") == "cancelled":
            for ending in endings.get(line["answer"]["number"], ()):
                if ending["outcome"] != "cancelled":
                    yield f"job {line['job']} was cancelled, and has {ending['outcome']}"


def jobs_succeed(evidence: FleetLogs) -> Iterator[str]:
    """No fault is the job's own."""
    cancelled = {line["job"] for line in evidence.of("requests", do="cancel")}  # the answer may have been lost
    for run in evidence.runs:
        for ending in run.endings:
            if run.hostile:
                continue
            if ending["outcome"] != "succeeded" and not (ending["outcome"] == "cancelled" and run.job in cancelled):
                yield f"{run.name} has {ending['outcome']}: {ending['reason']}"
            if "exit_code" in ending and (ending["exit_code"] == 0) != (ending["outcome"] == "succeeded"):
                yield f"{run.name} has {ending['outcome']} with exit code {ending['exit_code']}"


def nobody_trains_after_the_end(evidence: FleetLogs) -> Iterator[str]:
    for run in evidence.runs:
        for ending in run.endings[:1]:
            until = ending["mono"] + (LEAVES_S if ending["outcome"] == "cancelled" else 0.0)
            late = [line for line in run.evidence.record if line["mono"] > until]
            if late:
                yield (
                    f"{run.name} has {ending['outcome']}, and pid {late[-1]['pid']} on {late[-1]['node']} "
                    f"trained in round {late[-1]['round']} {late[-1]['mono'] - ending['mono']:.1f} s later"
                )


def only_the_killed_are_lost(evidence: FleetLogs) -> Iterator[str]:
    """A runner that ends without a word, and a node that its job loses, were hurt themselves: not their agent only."""
    hostile = {(run.job, run.number) for run in evidence.runs if run.hostile}
    for node, events in evidence.agents.items():
        started: dict[tuple[Any, Any], Line] = {}
        for event in events:
            key = (event.get("name"), event.get("number"))
            if event["kind"] == "runner_started":
                started[key] = event
            elif event["kind"] == "runner_stop_requested":  # perhaps before it could receive it
                started.pop(key, None)
            elif event["kind"] == "runner_ended" and (begun := started.pop(key, None)) is not None:
                lost = event["outcome"] == "lost" and key not in hostile
                if lost and not _hurt(evidence, node, begun["mono"], event["mono"]):
                    yield f"{node}: {event['reason']}, without a fault there"
    for run in evidence.runs:
        for number, event in sorted(run.evidence.rounds().items()):
            for node in event.get("lost", ()):
                asked = [
                    one
                    for one in evidence.agents.get(node, ())
                    if one["kind"] == "runner_stop_requested" and (one["name"], one["number"]) == (run.job, run.number)
                ]
                if not asked and not _hurt(
                    evidence, node, _last_seen(run, node, event["mono"]) - _EXCUSES_S, event["mono"]
                ):
                    yield f"{run.name} lost {node} in round {number}, without a fault there: {event['reason']}"


def only_the_killed_die(evidence: FleetLogs) -> Iterator[str]:
    """A worker that ends by a signal got it here, or from its agent."""
    killed = {line["pid"] for line in evidence.of("signals")}
    for run in evidence.runs:
        for log in run.evidence.logs:
            for event in log.of("worker_exited"):
                if event.get("signal") and not event["requested"] and event["pid"] not in killed and not run.hostile:
                    yield f"{run.name}: {event['reason']} (pid {event['pid']} on {log.node}), without a fault"


def only_the_stopped_hang(evidence: FleetLogs) -> Iterator[str]:
    """A job is only found to hang while one of its processes is stopped, or a node cut off."""
    for run in evidence.runs:
        for log in run.evidence.logs:
            for event in log.of("hang_detected"):
                done = [line for line in evidence.of("signals") if line["signal"] == signal.SIGSTOP]
                done += [line for line in evidence.of("faults") if line["what"] in _CUTS]
                if not run.hostile and not any(
                    event["mono"] - _EXCUSES_S < one["mono"] < event["mono"] for one in done
                ):
                    yield f"{run.name}: {event['reason']}, without a fault"


def _last_seen(run: Run, node: str, until: float) -> float:
    """When the job's runner there last wrote an event: a job that waits for nodes notices its loss much later."""
    times = [event["mono"] for log in run.evidence.logs if log.node == node for event in log.events]
    return max((at for at in times if at < until), default=until)


def _hurt(evidence: FleetLogs, node: str, since: float, until: float) -> bool:
    """True if something was done to the node's processes, beside its agent, or they were requested to leave it."""
    done = evidence.of("signals", node=node)
    done += [line for line in evidence.of("faults") if line["what"] in _HARMS and node in line["detail"].split()]

    def over(line: Line) -> float:
        lasts = re.search(r" for ([\d.]+) s", line["detail"]) if line.get("what") in _LAST else None
        return float(line["mono"]) + (float(lasts[1]) if lasts else 0.0)

    return any(line["mono"] <= until and over(line) >= since for line in done)


def nobody_is_sent_away_for_nothing(evidence: FleetLogs) -> Iterator[str]:
    """A runner is requested to leave because its job is over, its node drained, or too few nodes are left."""
    for node, events in evidence.agents.items():
        for event in events:
            if event["kind"] == "runner_stop_requested" and not any(word in event["reason"] for word in _REASONS):
                yield f"{node}: {event['reason']}"


def histories_are_whole(evidence: FleetLogs) -> Iterator[str]:
    """What is shown of a job has its newest rounds, each with a reason, but those that only silent nodes know."""
    for line in evidence.of("history"):
        run = next((run for run in evidence.runs if (run.job, run.number) == (line["job"], line["number"])), None)
        if run is None or run.hostile:
            continue
        has_ended = any(ending["mono"] < line["mono"] for ending in run.endings)
        until = float("inf") if has_ended else line["mono"] - _SHOWN_S
        told = [log for log in run.evidence.logs if log.node not in line.get("unreachable", ())]
        there = {event["round"] for log in told for event in log.of("round_published") if event["mono"] < until}
        shown = {one["round"]: one["reason"] for one in line["rounds"]}
        first = min(shown) if len(shown) >= MAX_SHOWN_ROUNDS else 0
        if missing := sorted(number for number in there - shown.keys() if number > first):
            yield f"{run.name} had rounds {missing}, which its history does not show"
        for number, reason in shown.items():
            if not reason and not run.lossy:
                yield f"{run.name}: its history has no reason for round {number}"


def agents_leave_well(evidence: FleetLogs) -> Iterator[str]:
    for line in evidence.of("left"):
        if line["code"] != 0:
            yield f"the agent of {line['node']} was stopped and ended with {line['code']}"


def nothing_is_left(evidence: FleetLogs) -> Iterator[str]:
    ends = evidence.of("end")
    if not ends:
        yield "the end was not recorded"
    for line in ends:
        for what in line["left"]:
            yield str(what)


def attacks_fail(evidence: FleetLogs) -> Iterator[str]:
    """None worked, and there was one of each kind."""
    for seq, attacks in evidence.attacks.items():
        for line in attacks:
            if line["worked"]:
                yield f"hostile job {seq} did what it must not: {line['what']}, {line['on']}"
    if evidence.attacks and (rest := untried(evidence)):
        yield f"no hostile job tried: {', '.join(rest)}"


def untried(evidence: FleetLogs) -> list[str]:
    """The kinds of attack that no hostile job has come to yet."""
    tried = {line["what"] for attacks in evidence.attacks.values() for line in attacks}
    return [what for what in ATTACKS if what not in tried]


def agents_stay_small(evidence: FleetLogs) -> Iterator[str]:
    """Whatever strangers send: the memory is for training."""
    for line in evidence.of("observed", what="memory"):
        yield f"the agent of {line['node']} had {line['bytes'] / 1e6:.0f} MB"


# ---- reading


def read(
    work: Path, samples: int = SAMPLES, judged: Collection[int] = (), running: Collection[int] | None = None
) -> FleetLogs:
    """`judged`: submissions that are left out; `running`: those that need not have ended."""
    notes = {path.stem: tuple(checker.lines(path)) for path in work.glob("*.jsonl")}
    notes["requests"] = tuple(line for line in notes.get("requests", ()) if line["seq"] not in judged)
    requests = [line for line in notes.get("requests", ()) if line["do"] == "submit"]
    hostile = {line["seq"] for line in requests if line.get("hostile")}
    attacks = {seq: tuple(_whole(work / "jobs" / str(seq) / "attacks.jsonl")) for seq in hostile}
    notes["faults"] = notes.get("faults", ()) + tuple(
        {"what": "full disk", "mono": line["mono"], "detail": f"{line['on'].split()[0]} for {2 * FILLED_S} s"}
        for lines in attacks.values()
        for line in lines
        if line["what"] == "disk"
    )
    full = [
        (node, line["mono"], line["mono"] + float(seconds))
        for line in notes["faults"]
        if line["what"] == "full disk"
        for node, _, seconds, _ in [line["detail"].split()]
    ]
    lossy = {node for node, _, _ in full}
    agents = {}
    for node in sorted((work / "nodes").iterdir()):
        agents[node.name] = tuple(_whole(node / "state" / "logs" / "events.jsonl"))
    numbers = {line["seq"]: line["number"] for line in requests}
    numbers |= {line["seq"]: line["number"] for line in notes.get("observed", ()) if line["what"] == "submission"}
    runs = []
    for line in requests:
        number = numbers[line["seq"]]
        if not number:
            continue
        job = line["job"]
        spoilt = line["seq"] in hostile  # so may its logs be
        logs = tuple(
            log
            for node in agents
            if not spoilt
            for log in _logs(work / "nodes", node, job, number, agents[node], lossy)
        )
        record = tuple(checker.lines(work / "jobs" / str(line["seq"]) / "record"))
        endings = tuple(e for e in notes.get("observed", ()) if e["what"] == "ending" and e["number"] == number)
        evidence = checker.SoakLogs(logs, record, (), samples)
        ended = min((e["mono"] for e in endings), default=float("inf"))
        was_full = any(_may_lack_lines([log for log in logs if log.node == node], ended, *span) for node, *span in full)
        runs.append(Run(job, number, line["seq"], line["steps"], evidence, endings, spoilt, was_full))
    return FleetLogs(tuple(runs), agents, notes, attacks, None if running is None else frozenset(running))


def _logs(nodes: Path, node: str, job: str, number: int, agent: Iterable[Line], lossy: Iterable[str]) -> Iterator[Log]:
    """Of each runner in turn: the agent's events of their starts split the job's one file on this node."""
    events = list(_whole(nodes / node / "state" / "jobs" / f"{job}.{number}" / "events.jsonl"))
    if node in lossy:  # a missing line is no breach
        events = [event for event in events if not event["kind"].startswith("group_")]
    starts = [
        event["mono"]
        for event in agent
        if event["kind"] == "runner_started" and (event["name"], event["number"]) == (job, number)
    ]
    for index, (begin, end) in enumerate(zip([0.0, *starts], [*starts, float("inf")], strict=True)):
        if part := tuple(event for event in events if begin <= event["mono"] < end):
            yield Log(f"{node}/{index}", node, part)


def _may_lack_lines(logs: list[Log], ended: float, full_from: float, full_to: float) -> bool:
    """Whether a runner of a node may have ended while the disk was full. One that continued wrote its lines later."""
    for index, log in enumerate(logs):
        first, last = log.events[0], log.events[-1]
        over = logs[index + 1].events[0]["mono"] if index + 1 < len(logs) else ended
        lived = first["mono"] < full_to and full_from < over
        if lived and last["mono"] < full_to and last["kind"] != "job_ended":
            return True
    return False


def _whole(path: Path) -> Iterator[Line]:
    """A full disk cuts lines short."""
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def main(argv: list[str]) -> int:
    found = breaches(read(Path(argv[0])))
    print("\n".join(found) or "every guarantee was kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
