"""Did a job of many nodes keep its guarantees? Reads its logs and names every breach.

    python -m benchmarks.checker WORK SAMPLES        # a directory with agent-*/events.jsonl, record and faults.jsonl

It reads the agents' event logs, the record in which every rank of tests/multihost/lineage.py wrote its samples, and the
list of faults, if there is one. It reads no store, agent or checkpoint directory, because a defect in these must not
hide itself. All hosts of such a run share one monotonic clock, so times can be compared.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import history

Line = Mapping[str, Any]

STORE_FAULTS = ("store restart", "store freeze", "cut from store")
"""Faults that must not end any round."""


@dataclass(frozen=True, slots=True)
class Log:
    """The event log of one start of an agent, in the order in which it was written."""

    name: str
    node: str
    events: tuple[Line, ...]

    def of(self, *kinds: str) -> Iterator[Line]:
        return (event for event in self.events if event["kind"] in kinds)


@dataclass(frozen=True, slots=True)
class Begin:
    """Where a round's training began: after a step, from a checkpoint of `parent` (None: from nothing)."""

    parent: int | None
    step: int


@dataclass(frozen=True, slots=True)
class SoakLogs:
    """All that was logged of one job."""

    logs: tuple[Log, ...]
    record: tuple[Line, ...] = ()
    faults: tuple[Line, ...] = ()
    samples: int = 0
    _begins: dict[int, Begin] = field(default_factory=dict)

    def begins(self) -> dict[int, Begin]:
        """By round: where rank 0 began. Rounds that never came so far are not in it."""
        if not self._begins:
            for line in self.record:
                if "begins" in line and line["rank"] == 0:
                    parent, step = line["begins"] or (None, 0)
                    self._begins.setdefault(line["round"], Begin(parent, step))
        return self._begins

    def trained(self) -> dict[tuple[int, int], list[Line]]:
        """By round and step: what its ranks wrote of it."""
        found: dict[tuple[int, int], list[Line]] = defaultdict(list)
        for line in self.record:
            if "step" in line:
                found[line["round"], line["step"]].append(line)
        return found

    def rounds(self) -> dict[int, Line]:
        """By number: the first agent's word of each round, and its time."""
        found: dict[int, Line] = {}
        for log in self.logs:
            for event in log.of("round_published"):
                if event["round"] not in found or event["mono"] < found[event["round"]]["mono"]:
                    found[event["round"]] = event
        return found


def breaches(evidence: SoakLogs) -> list[str]:
    """Every promise that was not kept, each with the lines that show it; empty when all is well."""
    checks = (
        rounds_only_grow,
        rounds_are_agreed_on,
        restarts_have_reasons,
        one_group_at_a_time,
        resumes_come_from_the_chain,
        no_loser_is_resumed_from,
        ranks_have_one_state,
        no_sample_lost_or_repeated,
        the_end_is_agreed_on,
        the_store_restarts_nobody,
        the_protocol_is_kept,
    )
    return [f"{check.__name__.replace('_', ' ')}: {breach}" for check in checks for breach in check(evidence)]


def rounds_only_grow(evidence: SoakLogs) -> Iterator[str]:
    """Every agent sees higher and higher numbers; a node's next agent sees the last one or a higher one."""
    latest: dict[str, int] = {}
    for log in evidence.logs:
        known = latest.get(log.node, 0)
        last = 0
        for event in log.of("round_published"):
            if event["round"] <= last or event["round"] < known:
                yield f"{log.name} saw round {event['round']} after round {max(last, known)}"
            last = max(last, event["round"])
        latest[log.node] = max(known, last)


def rounds_are_agreed_on(evidence: SoakLogs) -> Iterator[str]:
    """There is one Round of a number: all agents tell the same of it."""
    published: dict[int, dict[tuple[Any, ...], str]] = defaultdict(dict)
    for log in evidence.logs:
        for event in log.of("round_published"):
            what = (tuple(event["nodes"]), event["world_size"], event["restarts"], event["reason"])
            published[event["round"]].setdefault(what, log.name)
    for number, versions in sorted(published.items()):
        if len(versions) > 1:
            yield f"round {number} is not the same to all: " + "; ".join(
                f"to {who}: {' '.join(nodes)}, {reason!r}" for (nodes, _, _, reason), who in versions.items()
            )


def restarts_have_reasons(evidence: SoakLogs) -> Iterator[str]:
    """Each Round after the first has a reason, and counts one restart more."""
    rounds = sorted(evidence.rounds().items())
    for number, event in rounds:
        why = event["reason"].partition("restart with ")[0] if event["restarts"] else event["reason"]
        if not why.strip("; "):
            yield f"round {number} is restart {event['restarts']} and has no reason: {event['reason']!r}"
    for (older, before), (newer, after) in itertools.pairwise(rounds):
        if after["restarts"] <= before["restarts"]:
            yield f"round {newer} counts {after['restarts']} restarts, round {older} {before['restarts']}"


def one_group_at_a_time(evidence: SoakLogs) -> Iterator[str]:
    """A node starts a group after its last one is gone, and only in a round that it is in; no rank trains on after."""
    rounds = evidence.rounds()
    for log in evidence.logs:
        running: int | None = None
        for event in log.of("group_started", "group_ended"):
            number = event["round"]
            if event["kind"] == "group_ended":
                running = None if number == running else running
                continue
            if running is not None:
                yield f"{log.name} started its group of round {number} while that of round {running} was not gone"
            if number not in rounds or log.node not in rounds[number]["nodes"]:
                yield f"{log.name} started a group of round {number}, in which it is not"
            running = number
    by_node: dict[str, list[Line]] = defaultdict(list)
    for line in evidence.record:
        by_node[line["node"]].append(line)
    for node, lines in by_node.items():
        for before, after in itertools.pairwise(sorted(lines, key=lambda line: float(line["mono"]))):
            if after["round"] < before["round"]:
                yield (
                    f"a worker (pid {after['pid']}) of round {after['round']} on {node} still trained when one "
                    f"(pid {before['pid']}) of round {before['round']} did"
                )
                break


def resumes_come_from_the_chain(evidence: SoakLogs) -> Iterator[str]:
    """What a round resumes from was written by an older round, and is the newest that this one's chain has written."""
    begins = evidence.begins()
    saved: dict[int, dict[int, float]] = defaultdict(dict)
    resumed: dict[int, Line] = {}
    for log in evidence.logs:
        for event in log.of("checkpoint_saved"):
            saved[event["round"]].setdefault(event["step"], event["mono"])
        for event in log.of("resumed"):
            if resumed.setdefault(event["round"], event) is not event:
                yield f"round {event['round']} resumed twice: {resumed[event['round']]['reason']}; {event['reason']}"
    trained = evidence.trained()
    for number, begin in sorted(begins.items()):
        logged = resumed.get(number)
        if logged is not None and (logged["from_round"], logged["step"]) != (begin.parent, begin.step):
            yield f"round {number} logs {logged['reason']!r}, its rank 0 began after step {begin.step}"
        if begin.parent is None:
            continue
        if begin.parent >= number:
            yield f"round {number} resumed from round {begin.parent}, which is not older"
            continue
        older = begins.get(begin.parent)
        relinked = older is not None and older.step == begin.step
        # An agent that was killed may have taken the word of the checkpoint with it; never that of the training.
        made = begin.step in saved[begin.parent] or len(trained.get((begin.parent, begin.step), ())) > 0
        if not (relinked or made):
            yield f"round {number} resumed from step {begin.step} of round {begin.parent}, which never wrote that"
        at = evidence.rounds()[number]["mono"] if number in evidence.rounds() else 0.0
        newest = max((step for step, when in saved[begin.parent].items() if when < at), default=begin.step)
        if newest > begin.step:
            yield (
                f"round {number} resumed from step {begin.step} of round {begin.parent}, "
                f"which had saved step {newest} before"
            )


def no_loser_is_resumed_from(evidence: SoakLogs) -> Iterator[str]:
    """Once a round has a checkpoint of its own, every later one descends from it: what others write counts no more.

    It has one when it begins, unless its processes held the state: then its first save makes one.
    """
    begins, rounds = evidence.begins(), evidence.rounds()
    resumes = (event for log in evidence.logs for event in log.of("resumed"))
    from_files = {event["round"] for event in resumes if not event.get("in_processes")}
    owned: dict[int, float] = {}
    for line in evidence.record:
        if line.get("begins") and line["rank"] == 0 and line["round"] in from_files:
            owned[line["round"]] = line["mono"]
    for log in evidence.logs:
        for event in log.of("checkpoint_saved"):
            owned[event["round"]] = min(event["mono"], owned.get(event["round"], event["mono"]))
    for number in sorted(begins.keys() & rounds.keys()):
        before = [other for other, at in owned.items() if other < number and at < rounds[number]["mono"]]
        chain = _chain(begins, number)
        if before and max(before) not in chain:
            yield f"round {number} goes back to {chain[1:2] or 'nothing'}, past round {max(before)}"


def ranks_have_one_state(evidence: SoakLogs) -> Iterator[str]:
    """After a step all ranks have the same parameters, bit for bit."""
    for (number, step), lines in evidence.trained().items():
        if len({line.get("state") for line in lines}) > 1:
            yield f"after step {step} of round {number} ranks differ"


def steps_lost(evidence: SoakLogs) -> int:
    """How many steps were trained again, which all ranks had finished: not the one that the fault interrupted."""
    last: dict[int, int] = defaultdict(int)
    for number, step in evidence.trained():
        last[number] = max(last[number], step)
    lost = 0
    for number, begin in evidence.begins().items():
        parent = max((older for older in last if older < number), default=0) if begin.parent is None else begin.parent
        lost += max(0, last.get(parent, 0) - 1 - begin.step)
    return lost


def _chain(begins: Mapping[int, Begin], number: int) -> list[int]:
    """The rounds that a round's state came through, newest first."""
    chain = [number]
    while (begin := begins.get(chain[-1])) is not None and begin.parent is not None and begin.parent < chain[-1]:
        chain.append(begin.parent)
    return chain


def no_sample_lost_or_repeated(evidence: SoakLogs) -> Iterator[str]:
    """Along the chain of the last round: every step once, by all ranks, and every epoch's samples exactly once."""
    ends = [line for line in evidence.record if "ends" in line]
    if not ends:
        yield "no rank came to the end of its training"
        return
    last = max(ends, key=lambda line: (line["round"], line["ends"]))
    begins, trained = evidence.begins(), evidence.trained()
    upto = last["ends"]
    lineage: list[tuple[int, int]] = []
    for number in _chain(begins, last["round"]):
        if number not in begins:
            yield f"the chain of round {last['round']} goes back to round {number}, of which there is no record"
            return
        lineage += [(number, step) for step in range(upto, begins[number].step, -1)]
        upto = begins[number].step
    if upto:
        yield f"the chain of round {last['round']} ends at step {upto}, not at the beginning"
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    ledger = 0
    for number, step in reversed(lineage):
        lines = trained.get((number, step), [])
        ledger = (ledger * 1_000_003 + sum((s + 1) ** 2 for line in lines for s in line["samples"])) % (2**61 - 1)
        ranks = sorted(line["rank"] for line in lines)
        world = lines[0]["world"] if lines else 0
        if ranks != list(range(world)) or not lines:
            yield f"step {step} of round {number} was made by ranks {ranks} of {world}"
        for line in lines:
            seen[line["epoch"]].update(line["samples"])
    if ledger != last["ledger"]:
        yield f"the last state has {last['ledger']} of the samples it was made of, the chain's add up to {ledger}"
    yield from _epochs(seen, evidence.samples)


def _epochs(seen: Mapping[int, Counter[int]], samples: int) -> Iterator[str]:
    for epoch in range(max(seen, default=-1) + 1):
        counts = seen.get(epoch, Counter())
        repeated = sorted(sample for sample, count in counts.items() if count > 1)
        if repeated:
            yield f"epoch {epoch}: {len(repeated)} samples were trained on more than once, as {repeated[:5]}"
        lost = sorted(set(range(samples)) - counts.keys())
        if lost and epoch < max(seen):  # the last one is not over
            yield f"epoch {epoch}: {len(lost)} samples were never trained on, as {lost[:5]}"


def the_end_is_agreed_on(evidence: SoakLogs) -> Iterator[str]:
    """All agents that saw the end tell the same of it."""
    words: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    highest = max(evidence.rounds(), default=0)
    for log in evidence.logs:
        for event in log.of("job_ended"):
            if event["round"] > highest:  # else it left before
                words[event["round"], event["outcome"], event["exit_code"], event["reason"]].append(log.name)
    if not words:
        yield "no agent saw the job's end"
    if len(words) > 1:
        yield "the job ended in different ways: " + "; ".join(f"{' '.join(who)}: {how}" for how, who in words.items())


def the_store_restarts_nobody(evidence: SoakLogs) -> Iterator[str]:
    """No round is published while nothing but the store, or the way to it, is hurt."""
    for fault in evidence.faults:
        if fault["what"] not in STORE_FAULTS:
            continue
        for number, event in sorted(evidence.rounds().items()):
            if fault["from"] < event["mono"] < fault["to"]:
                yield f"{fault['what']} ({fault['number']}) led to round {number}: {event['reason']}"


def the_protocol_is_kept(evidence: SoakLogs) -> Iterator[str]:
    """Every agent's view of the rounds, checked as the histories of the simulated cluster are."""
    logs = ((log.name, log.node, log.events) for log in evidence.logs)
    yield from history.breaches(history.from_logs(logs, evidence.record))


# ---- reading


def read(work: Path, samples: int) -> SoakLogs:
    """What a run left in its directory. Agents come in the order of their starts, which their directories number."""
    directories = sorted(work.glob("agent-*"), key=lambda path: int(path.name.split("-")[1]))
    logs = [Log(path.name, path.name.split("-", 2)[2], tuple(lines(path / "events.jsonl"))) for path in directories]
    return SoakLogs(tuple(logs), tuple(lines(work / "record")), tuple(lines(work / "faults.jsonl")), samples)


def lines(path: Path) -> Iterable[Line]:
    """The last one may have been cut short by the fault."""
    whole, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
    return [json.loads(line) for line in whole.splitlines()]


def main(argv: Sequence[str]) -> int:
    found = breaches(read(Path(argv[0]), int(argv[1])))
    print("\n".join(found) or "every promise was kept")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
