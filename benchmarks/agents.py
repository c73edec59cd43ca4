"""Many agents as threads of one process: real members, stores and probe ports, but no workers.

Started by rendezvous.py as `python -m benchmarks.agents STORE HOST PORT JOB MIN MAX LEASE NAME…`. It reads one command
a line ("go", "kill NAME…", "fail NUMBER NAME", "start NAME…", "planners", "end") and answers with JSON lines: the
notices of each agent, with time.monotonic(), which is one clock for the whole machine.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from elasticd_agent.model.job import Policy
from elasticd_agent.model.keys import Keys
from elasticd_agent.model.messages import Notice, PauseRequested, RoundPublished
from elasticd_agent.model.records import Failure, NodeRecord
from elasticd_agent.rendezvous.member import MemberThread, MemberThreadFailed, RendezvousMember
from elasticd_agent.rendezvous.membership_client import JobTerms
from elasticd_agent.rendezvous.peers import TcpPeerNetwork
from elasticd_agent.rendezvous.probe import ProbeServer
from elasticd_agent.rendezvous.view import LocalFacts, Requirements
from elasticd_agent.store import JobStore
from elasticd_agent.store.c10d.store import C10dStore
from elasticd_agent.store.etcd.store import EtcdStore

KNOCK_S = 0.2
LAST_CALL_S = 600.0
"""All of them join, however long the last one's helper process takes to import torch."""
SWITCH_S = 0.1
"""A thread that waits for the interpreter looks every 5 ms whether it may have it. Real agents have one each; here
hundreds wait for four, and would do little else. Each gives it up by itself within a millisecond or so."""
FULL_COLLECTIONS = 1_000_000
"""A full garbage collection here visits the objects of hundreds of agents, so there are none. A real agent has its own
few, and young objects are collected as everywhere."""
_printing = threading.Lock()


def report(**fields: object) -> None:
    with _printing:
        print(json.dumps({"at": time.monotonic(), **fields}), flush=True)


class SimulatedAgent:
    """Follows rounds and reports that it has started them."""

    def __init__(self, name: str, store: JobStore, job: str, requirements: Requirements, policy: Policy) -> None:
        self.name, self.store = name, store
        incarnation = f"{name}-{time.monotonic_ns()}"
        self.knock = ProbeServer("127.0.0.1", name, incarnation)
        record = NodeRecord(name, incarnation, f"127.0.0.1:{self.knock.port}", (0,))
        knock_s = KNOCK_S * policy.lease_s / Policy().lease_s
        self.lines = TcpPeerNetwork(self.knock, knock_s)
        terms = JobTerms(Keys(job), policy, requirements, b"{}")
        self._member = RendezvousMember(store, terms, record, LocalFacts(), self.lines, self.log)
        self._thread = MemberThread(self._member, self.on_notice)
        self._thread.start()

    @property
    def plans(self) -> bool:
        return self._member.leads

    def log(self, sentence: str) -> None:
        report(kind="log", node=self.name, sentence=sentence)

    def on_notice(self, notice: Notice | MemberThreadFailed) -> None:
        match notice:
            case RoundPublished(round):
                if round.member(self.name) is not None:
                    self._member.update_node_record(
                        ready_round=round.number, stepped_round=round.number, can_pause=round.number
                    )
                report(
                    kind="round", node=self.name, number=round.number, size=len(round.members), why=round.reason[:1000]
                )
            case PauseRequested(number, on=True):
                self._member.update_node_record(paused=number)
            case MemberThreadFailed(error):
                report(kind="broken", node=self.name, error=repr(error))

    def die(self) -> None:
        """As a killed process: its port refuses and its lines break. `bury` takes what the kernel would."""
        self.knock.close()

    def release(self) -> None:
        """Its lease is not renewed, and it takes nothing back."""
        self.lines.close()
        self.store.close()
        self._thread.abandon()

    def fail(self, number: int) -> None:
        """The report of every survivor when gloo's connections are reset."""
        self._member.report_failure(Failure(number, self.name, "crash", (), "lost its peers"), time.monotonic())

    def end(self) -> None:
        self.knock.close()
        self.lines.close()
        self._thread.close()
        self.store.close()


def policy_of(lease_s: float) -> Policy:
    """The default times, all in proportion to the lease."""
    usual = Policy()
    of = lease_s / usual.lease_s
    return replace(
        usual,
        lease_s=lease_s,
        renewal_s=usual.renewal_s * of,
        store_timeout_s=usual.store_timeout_s * of,
        seen_timeout_s=usual.seen_timeout_s * of,
        hold_timeout_s=usual.hold_timeout_s * of,
        adopt_timeout_s=usual.adopt_timeout_s * of,
    )


def main() -> None:
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTIONS)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # some six an agent
    kind, host, port, job, fewest, most, lease, *names = sys.argv[1:]
    policy = policy_of(float(lease))
    requirements = Requirements(1, 1, int(fewest), int(most), last_call_timeout_s=LAST_CALL_S)
    first = True

    def start(name: str) -> SimulatedAgent:
        nonlocal first
        hosts = kind == "c10d" and name == "n0" and first
        first = False
        store: JobStore = (
            EtcdStore([(host, int(port))], timeout_s=policy.store_timeout_s)
            if kind == "etcd"
            else C10dStore(host, int(port), serve=hosts, timeout_s=policy.store_timeout_s)
        )
        return SimulatedAgent(name, store, job, requirements, policy)

    report(kind="ready")
    agents: dict[str, SimulatedAgent] = {}
    for line in sys.stdin:
        verb, *words = line.split()
        match verb:
            case "go":
                for name in names:
                    agents[name] = start(name)
            case "start":
                for name in words:
                    agents[name] = start(name)
            case "kill":
                gone = [agents.pop(name) for name in words]
                with ThreadPoolExecutor(len(gone)) as at_once:  # as when a rack loses power
                    list(at_once.map(SimulatedAgent.die, gone))
                report(kind="killed")
                for agent in gone:
                    agent.release()
            case "fail":
                agents[words[1]].fail(int(words[0]))
            case "planners":
                report(kind="planners", nodes=[name for name, agent in agents.items() if agent.plans])
            case "end":
                break
    for agent in agents.values():
        agent.end()


if __name__ == "__main__":
    main()
