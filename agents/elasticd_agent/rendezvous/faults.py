"""Pure: the fault that ended the round that ran, in one word, and the node at fault: what the metrics count.

A fault is counted once it is settled, also where no Round can follow for a while, and once, by the leader.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import SHARED_ERROR_KINDS, Failure
from elasticd_agent.rendezvous.membership import losses
from elasticd_agent.rendezvous.plan import ROOT_CAUSE_WAIT_S
from elasticd_agent.rendezvous.view import View


@dataclass(frozen=True, slots=True)
class Fault:
    cause: str  #: the kind of the Failure, or node_lost
    culprit: str  #: the node at fault, "" where no single one is


def find_faults(view: View, policy: Policy, now: float) -> tuple[Fault, ...]:
    """The faults that have broken `view.current`, as far as they are settled. Nodes lost together are a fault each."""
    current = view.current
    if current is None or current.terminal or view.stop is not None:
        return ()
    failures = [f for f in view.failures if f.round == current.number and view.member(f.node) is not None]
    if not failures and all(member.node in view.done for member in current.members):
        return ()
    blamed = next((f for f in failures if f.culprits or f.kind == "start_failed"), None)
    if blamed is not None:
        return (Fault("crash" if blamed.kind in SHARED_ERROR_KINDS else blamed.kind, blamed.node),)
    lost = losses(view, current, policy, now)
    if lost.nodes:
        return tuple(Fault("node_lost", node) for node in sorted(lost.nodes))
    if failures and not lost.returning and _are_failures_settled(view, failures, len(current.members), now):
        return (Fault(failures[0].kind, ""),)
    return ()


def _are_failures_settled(view: View, failures: list[Failure], members: int, now: float) -> bool:
    """No node is still about to report the root cause of what were secondary failures."""
    secondary = all(f.kind == "crash" for f in failures)
    return not secondary or len(failures) >= members or now >= view.failure_seen_at + ROOT_CAUSE_WAIT_S


class FaultTracker:
    """The faults of the current round, each once."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._known: tuple[int, frozenset[Fault]] = (0, frozenset())

    def take_new(self, view: View, now: float) -> list[tuple[int, Fault]]:
        """The new ones, with their round.

        Failures after a round's first are its consequences; only a further lost node is a fault of its own.
        """
        number = view.current.number if view.current is not None else 0
        known = self._known[1] if self._known[0] == number else frozenset()
        culprits = {fault.culprit for fault in known}
        faults = [f for f in find_faults(view, self._policy, now) if not known or f.cause == "node_lost"]
        new = [f for f in faults if f.culprit not in culprits]
        self._known = number, known.union(new)
        return [(number, fault) for fault in new]
