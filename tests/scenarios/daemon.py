"""Runs a transcript of jobs that are submitted, placed and wait, and writes down what `placing` says of each.

> node n1 slots=8             a node is there (again), ready, with nothing running
> shrink n1 slots=2           it says that it has fewer, whatever runs on it
> submit llm nodes=2:4 slots=4 by=ann priority=low     as in a job file; nodes=1 slots=1 if not given
> end llm | cancel llm        its ending is written; its runners go at once, unless `> slow n1`
> cordon n1 REASON | drain n1 REASON | uncordon n1
> state n1 quarantined REASON      what the node says of itself
> away n1 | back n1 | gone n1      its card goes, comes back; it was away for too long
> without llm n1              the job's own Round does not have that node any more
> refuse llm n1 REASON        its runner there will not run it; `> accept llm n1`: it would by now
> retry n1                    it tries again what it has refused
> slow n1 | quick n1          runners on it stay until `quick`, though they were told to leave
> again                       nothing has happened
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elasticd_daemon.records import ClusterView, Cordon, JobResult, NodeStatus, Placement, RunnerStatus, Submission
from elasticd_daemon.scheduler.policy import describe_reason, head_of_queue, schedule


@dataclass
class Fleet:
    cards: dict[str, NodeStatus] = field(default_factory=dict)
    away: dict[str, NodeStatus] = field(default_factory=dict)
    cordons: dict[str, Cordon] = field(default_factory=dict)
    submissions: dict[str, Submission] = field(default_factory=dict)
    placements: dict[str, Placement] = field(default_factory=dict)
    endings: dict[str, JobResult] = field(default_factory=dict)
    lost: set[tuple[str, str]] = field(default_factory=set)
    refusals: dict[tuple[str, str], str] = field(default_factory=dict)
    slow: set[str] = field(default_factory=set)

    def view(self) -> ClusterView:
        return ClusterView(
            tuple(self.cards.values()),
            tuple(self.cordons.values()),
            tuple(self.submissions.values()),
            tuple(self.placements.values()),
            tuple(self.endings.values()),
            tuple(self.away.values()),
            frozenset(self.lost),
        )

    def run(self, what: str, name: str, words: list[str]) -> None:
        options = dict(word.split("=") for word in words if "=" in word)
        said = " ".join(words)
        match what:
            case "node":
                self.cards[name] = NodeStatus(name, "i", int(options["slots"]))
                self.away.pop(name, None)
            case "shrink":
                self.cards[name] = replace(self.cards[name], slots=int(options["slots"]))
            case "submit":
                nodes, slots = (_span(options.get(option, "1")) for option in ("nodes", "slots"))
                number = 1 + max((s.number for s in self.submissions.values()), default=0)
                by, priority = options.get("by", ""), options.get("priority", "normal")
                self.submissions[name] = Submission(
                    name, number, "{}", *nodes, *slots, submitted_by=by, priority=priority
                )
            case "end" | "cancel":
                outcome = "succeeded" if what == "end" else "cancelled"
                self.endings[name] = JobResult(name, self.submissions[name].number, outcome, 0, "")  # type: ignore[arg-type]
            case "cordon" | "drain":
                self.cordons[name] = Cordon(name, what == "drain", said)
            case "uncordon":
                del self.cordons[name]
            case "state":
                self.cards[name] = replace(self.cards[name], state=words[0], why=" ".join(words[1:]))
            case "away":
                self.away[name] = self.cards.pop(name)
            case "back":
                self.cards[name] = self.away.pop(name)
                self.lost = {(job, node) for job, node in self.lost if node != name}
            case "gone":
                del self.away[name]
            case "without":
                self.lost.add((name, words[0]))
            case "refuse":
                self.refusals[name, words[0]] = " ".join(words[1:])
            case "accept":
                del self.refusals[name, words[0]]
            case "retry":
                self.cards[name] = replace(self.cards[name], runners=())
            case "slow":
                self.slow.add(name)
            case "quick":
                self.slow.discard(name)
            case "again":
                pass
            case _:
                raise ValueError(f"nobody knows what {what!r} means")

    def settle(self) -> list[str]:
        """Let the placer and the nodes answer each other until nothing changes; the sentences."""
        said = []
        for _ in range(20):
            written = schedule(self.view())
            for placement in written:
                self.placements[placement.job] = placement
                reason = describe_reason(placement.reason, head_of_queue(self.view()))
                said.append(f"{placement.job} ({placement.number}) {reason}")
            before = dict(self.cards)
            self.cards = {name: self._runners(card) for name, card in self.cards.items()}
            if not written and self.cards == before:
                return said
        raise AssertionError(f"it does not settle: {said[-6:]}")

    def _runners(self, card: NodeStatus) -> NodeStatus:
        running = []
        for placement in self.placements.values():
            ending = self.endings.get(placement.job)
            seat = placement.assignment(card.node)
            if seat is None or (ending is not None and ending.number >= placement.number):
                continue
            why = self.refusals.get((placement.job, card.node))
            state = "running" if why is None else "refused"
            slots = seat.slots if why is None else ()
            running.append(RunnerStatus(placement.job, placement.number, slots, state, why or ""))  # type: ignore[arg-type]
        here = {(r.job, r.number) for r in running}
        if card.node not in self.cordons:
            running += [r for r in card.runners if r.state == "refused" and (r.job, r.number) not in here]
        if card.node in self.slow:
            left = [r for r in card.runners if (r.job, r.number) not in here and r.state != "refused"]
            running += [replace(r, state="leaving") for r in left]
        return replace(card, runners=tuple(running))

    def slots(self) -> list[str]:
        """Who has which slot: `n1: llm llm - -`."""
        lines = []
        for name, card in sorted({**self.away, **self.cards}.items()):
            used = {s: r.job + ("…" if r.state == "leaving" else "") for r in card.runners for s in r.slots}
            words = [used.get(slot, "-") for slot in range(card.slots)]
            lines.append(f"  {name}: {' '.join(words)}" + (" (away)" if name in self.away else ""))
        return lines


def rerun(text: str) -> str:
    """The transcript as it comes out now: comments and commands are kept, everything else is written anew."""
    fleet, lines, before = Fleet(), [], [""]
    for line in text.splitlines():
        if line.startswith("#"):
            lines.append(line)
        elif line.startswith("> "):
            what, _, rest = line.removeprefix("> ").partition(" ")
            name, *words = rest.split() or [""]
            lines.append(line)
            fleet.run(what, name, words)
            lines += fleet.settle()
            if (now := fleet.slots()) != before:
                lines += now
                before = now
    return "\n".join(lines) + "\n"


def _span(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return int(low), int(high or low)
