"""What the history checker finds when a guard of the protocol is taken out: docs/history.md has the table.

    python -m benchmarks.guards [--histories 200] [--without 60] [--only WORDS]

Random histories of a job on up to four nodes: the real members, planners and state machines over a store and a clock in
memory. Nodes are killed, frozen, cut off, held up within a request and started again, a later run begins; the store is
away, loses its data or its watches. benchmarks/history.py judges them, which knows nothing of the code. First the whole
protocol has to pass --histories of them on each kind of store. Then each guard is taken out, alone, and histories are
made until one is bad, or --without have passed. Exit code 1 if the whole protocol had a bad one.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.history import breaches
from elasticd_agent.job import state_machine
from elasticd_agent.model.job import Policy
from elasticd_agent.model.messages import Action, Event, Phase, RoundPublished, Running, StateMachineRules
from elasticd_agent.model.records import Round
from elasticd_agent.rendezvous import member as member_module
from elasticd_agent.rendezvous.member import RendezvousMember
from elasticd_agent.rendezvous.membership_client import NodeRegistration, RoundFollower
from elasticd_agent.rendezvous.planner import Planner
from elasticd_agent.rendezvous.spec_check import SpecAgreement
from elasticd_agent.rendezvous.succession import Succession
from elasticd_agent.rendezvous.view import Requirements
from tests.daemon.stores import InterruptedStore
from tests.rendezvous.test_cluster_histories import KINDS, NAMES, CheckedCluster, Step, all_is_well, happen
from tests.scenarios import nodes
from tests.scenarios.cluster import Cluster
from tests.scenarios.hosting import HostingCluster

STORES = "etcd", "c10d", "c10d, hosted"
"""Compares two keys at once; compares one; one that ends with its agent, and another agent hosts the next."""
WAITS_S = 0.0, 0.02, 0.2, 1.3, 3.7, 12.0, 25.0
MAX_FAULTS = 10
HELD_UP_S = 1.0, 6.0, 12.0
"""In the middle of a turn: longer than a retry, than a lease."""
JOIN_S = 60.0
"""`join_timeout`: an agent says what it waits for, or gives up."""
MAX_S = 10
"""Of processor time for one history, which takes half a second: some guards keep agents from asking without end."""

SCENARIOS = Path(nodes.__file__).parent / "nodes"
LEADER_IS_HELD_UP = """\
> job nodes=1:3{}
> twins allowed
> start a b c
> wait 9
> delay a 12
> kill c
> wait 30
"""
A_LONE_NODE_IS_CUT_OFF = """\
> job nodes=1:3 adopt_timeout_s=5
> start a
> wait 9
> cut a from store peers
> start b
> wait 30
> heal a
> wait 30
"""
AN_OLDER_COPY_OF_THE_STORE = """\
> job nodes=1:3
> twins allowed
> start a b
> wait 9
> exit a SIGKILL
> wait 9
> put round {"version": "1.0", "number": 1, "leader": "a", \
"reason": "first round: 2 workers on 2 nodes, no elasticd checkpoint yet", \
"members": [{"node": "a", "incarnation": "a1", "slots": [0]}, {"node": "b", "incarnation": "b2", "slots": [0]}]}
> wait 30
"""
A_JOB_ENDS = """\
> job nodes=2
> twins allowed
> start a b
> wait 9
> finish
> wait 30
"""
WATCHES_ARE_SILENT = """\
> job nodes=3
> start a b c
> wait 9
> hints dropped
> finish
> wait 30
"""
WAITS_FOR_AN_EARLIER_RUN = """\
> job nodes=1:2 run=17 last_call_timeout_s=0 join_timeout_s=20
> start a
> wait 3
> run 24
> start c
> wait 60
"""

Replace = Callable[[object, str, object], None]


class RecordedCluster(CheckedCluster):
    """The history alone judges: nothing is checked on the way."""

    feed, train, run_due = Cluster.feed, Cluster.train, Cluster.run_due

    def __init__(self, asked: Requirements, policy: Policy, holds: bool) -> None:
        super().__init__(asked, policy, holds)
        self.twins = True


class RecordedHosting(RecordedCluster, HostingCluster):
    feed, train, run_due = Cluster.feed, Cluster.train, Cluster.run_due


def history(store: str, seed: int) -> list[str]:
    """One random history; what is wrong with it."""
    rng = random.Random(seed)
    asked = Requirements(1, 1, rng.randint(1, 3), rng.choice((3, 4)), run="1", spares=rng.randint(0, 1))
    hosted = store == STORES[2]
    policy = Policy(max_restarts=50, join_timeout_s=JOIN_S, store_away_s=30.0)
    c = (RecordedHosting if hosted else RecordedCluster)(asked, policy, rng.random() < 0.5)
    c.start_s, c.compares_one_key = rng.choice((0.0, 0.5, 4.0)), store != STORES[0]
    for label in NAMES[: rng.randint(2 if hosted else 1, 4)]:
        c.start(label)
    c.wait(rng.choice((1.0, 8.0)))
    for _ in range(rng.randint(1, MAX_FAULTS)):
        _happen(c, rng, hosted)
    all_is_well(c)
    c.delays.clear()
    c.wait(40.0)
    if rng.random() < 0.5:
        c.start("late")
    c.wait(90.0)
    return breaches(c.history)


def _happen(c: RecordedCluster, rng: random.Random, hosted: bool) -> None:
    label = rng.choice(NAMES)
    match rng.choice((*KINDS, "held up", "later run", "split", "finish")):
        case "held up":
            c.delay(label, rng.choice(HELD_UP_S))
        case "later run" if not hosted and rng.random() < 0.3:
            c.asked = replace(c.asked, run=str(int(c.asked.run) + 1))
        case "split":
            side = rng.sample(sorted(c.nodes), len(c.nodes) // 2)
            for one in side:
                for other in set(c.nodes) - set(side):
                    c.cut(one, peer=other)
        case "finish" if not hosted and rng.random() < 0.3:
            c.finish()
        case kind if kind in KINDS:
            happen(c, Step(kind, NAMES.index(label), rng.randint(1, 12), 0.0))
    c.wait(rng.choice(WAITS_S))


# ---- the guards


@dataclass(frozen=True, slots=True)
class Guard:
    """A rule of the protocol. `take_out` replaces the code that keeps it. `scenario`: the history that is tried first,
    of tests/scenarios/nodes, or its text."""

    rule: str
    take_out: Callable[[Replace], None]
    scenario: str = ""
    store: str = STORES[0]

    def replaced(self) -> ExitStack:
        """Without this guard, until it is closed."""
        ending = ExitStack()

        def replace_(where: object, name: str, new: object) -> None:
            ending.enter_context(patch.object(where, name, new))

        self.take_out(replace_)
        return ending

    def play(self) -> list[str]:
        """What is wrong with the scenario's history."""
        text = self.scenario if "\n" in self.scenario else (SCENARIOS / f"{self.scenario}.txt").read_text()
        return breaches(nodes.play(text)[1])  # type: ignore[attr-defined]  # a directory has the same name


def _overwrites(replace_: Replace) -> None:
    swap = InterruptedStore.compare_and_swap

    def write(store: InterruptedStore, key: str, expected: int | None, value: bytes, guard: Any = None) -> bool:
        if key.endswith("/round"):
            found = store.memory.read(key)
            expected, guard = None if found is None else found.version, None
        return swap(store, key, expected, value, guard)

    replace_(InterruptedStore, "compare_and_swap", write)


def _follows_an_older_round(replace_: Replace) -> None:
    restore = RoundFollower._restore

    def follow(follower: RoundFollower, round: Round, version: int | None) -> None:
        if version is None:
            return restore(follower, round, version)
        follower.round = None  # what the store has is read as by an agent that has just started
        follower.invalidate_leader()
        return None

    replace_(RoundFollower, "_restore", follow)


def _registers_first(replace_: Replace) -> None:
    follow_round = RendezvousMember._follow_round

    def register_first(member: RendezvousMember) -> None:
        member._registration.turn(member._follower.running, member._last_turn)
        follow_round(member)

    replace_(RendezvousMember, "_follow_round", register_first)


def _trains_on_without_a_place(replace_: Replace) -> None:
    step = state_machine.step

    def ignore(phase: Phase, event: Event, rules: StateMachineRules) -> tuple[Phase, list[Action]]:
        round = event.round if isinstance(event, RoundPublished) and isinstance(phase, Running) else None
        if round is not None and not round.terminal and round.member(rules.node) is None:
            return phase, []
        return step(phase, event, rules)

    replace_(state_machine, "step", ignore)


def _any_reading_will_do(replace_: Replace) -> None:
    look = Succession.look

    def one_is_enough(succession: Succession, *seen: Any) -> None:
        look(succession, *seen)
        succession._quorum, succession.lacks_quorum = 0, False

    replace_(Succession, "look", one_is_enough)


def _ends_without_a_trace(replace_: Replace) -> None:
    delete = Planner.delete_job_records

    def delete_all(planner: Planner, round: Round) -> None:
        delete(planner, round)
        planner._store.delete(planner._keys.round)

    replace_(Planner, "delete_job_records", delete_all)


GUARDS = (
    Guard(
        "a Round is written by compare-and-swap of the version it follows and of the leader key",
        _overwrites,
        LEADER_IS_HELD_UP.format(""),
    ),
    Guard(
        "a Round is written by compare-and-swap of the version it follows",
        _overwrites,
        LEADER_IS_HELD_UP.format(" c10d"),
        STORES[1],
    ),
    Guard(
        "a new leader first gives the Round another version",
        lambda replace_: replace_(RoundFollower, "fence_former_leader", lambda follower: None),
        store=STORES[1],
    ),
    Guard("a node reads the Round before it registers", _registers_first, "name_taken_over_while_cut_off"),
    Guard("a Round without this node ends its group", _trains_on_without_a_place, A_LONE_NODE_IS_CUT_OFF),
    Guard(
        "another agent's name is taken only after its port has refused a probe",
        lambda replace_: replace_(NodeRegistration, "_may_replace", lambda registration, value: True),
    ),
    Guard(
        "members write their Round again, and the spec with it, where the store has lost it",
        lambda replace_: replace_(RoundFollower, "_restore", lambda follower, round, version: None),
        "store_emptied_under_us",
    ),
    Guard(
        "a Round of an earlier run never replaces one of a later run",
        lambda replace_: replace_(Round, "precedes", lambda round, other: round.number < other.number),
        "earlier_run_in_an_empty_store",
    ),
    Guard("an older Round of a run never replaces a newer one", _follows_an_older_round, AN_OLDER_COPY_OF_THE_STORE),
    Guard(
        "the wait for an earlier run's nodes has a deadline",
        lambda replace_: replace_(
            SpecAgreement, "try_to_agree", lambda agreement, now: not agreement._write_or_compare()
        ),
        WAITS_FOR_AN_EARLIER_RUN,
    ),
    Guard(
        "members write their job's spec again where the store has lost it",
        lambda replace_: replace_(SpecAgreement, "restore_spec", lambda agreement: None),
        "another_job_in_an_empty_store",
    ),
    Guard("the end of a run stays for agents that come late", _ends_without_a_trace, A_JOB_ENDS),
    Guard(
        "every agent reads its keys again every 10 s, whatever its watches say",
        lambda replace_: replace_(member_module, "REREAD_S", float("inf")),
        WATCHES_ARE_SILENT,
    ),
    Guard("hosted: a Round keeps more than half of the last one's members", _any_reading_will_do, store=STORES[2]),
)


@dataclass(frozen=True, slots=True)
class Search:
    histories: int
    seconds: float
    found: str = ""


def search(store: str, most: int, guard: Guard | None = None, first: int = 0) -> Search:
    """Histories until one is bad. A simulation that cannot go on without the guard tells nothing."""
    began = time.monotonic()
    with guard.replaced() if guard is not None else ExitStack():
        if guard is not None and guard.scenario and (found := guard.play()):
            return Search(1, time.monotonic() - began, f"{found[0]} (a scenario)")
        for number in range(first, first + most):
            signal.setitimer(signal.ITIMER_PROF, MAX_S)
            try:
                found = history(store, number)
            except AssertionError as error:
                found = [] if guard else [f"the simulation stopped: {error}"]
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            if found:
                return Search(number - first + 1, time.monotonic() - began, f"{found[0]} (history {number})")
    return Search(most, time.monotonic() - began)


def _too_long(*_: object) -> None:
    raise AssertionError(f"no end after {MAX_S} s")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=200, help="of the whole protocol, for each store")
    parser.add_argument("--without", type=int, default=60, help="histories without a guard, at most")
    parser.add_argument("--only", default="", help="guards whose rule has these words")
    parser.add_argument("--seed", type=int, default=0, help="of the first history; the next one has the next number")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGPROF, _too_long)
    print("| taken out | store | histories | what the checker finds |\n|---|---|---|---|")
    bad = False
    for store in STORES if args.histories else ():
        done = search(store, args.histories, first=args.seed)
        bad |= bool(done.found)
        told = done.found or "nothing"
        print(f"| nothing | {store} | {done.histories} ({done.seconds:.0f} s) | {told} |", flush=True)
    for guard in GUARDS:
        if args.only in guard.rule:
            done = search(guard.store, args.without, guard, args.seed)
            told = done.found or "nothing"
            print(f"| {guard.rule} | {guard.store} | {done.histories} ({done.seconds:.0f} s) | {told} |", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
