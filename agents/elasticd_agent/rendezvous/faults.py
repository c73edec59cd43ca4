"""Pure: what has ended the round that ran, in one word, and whose fault it was: what the metrics count.

It exists so that a fault is counted when it is known, also where no Round can follow for a while, and once, by whoever
plans. It words nothing and decides nothing: what follows from a fault is `plan`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticd_agent.model.job import Policy
from elasticd_agent.rendezvous.membership import losses
from elasticd_agent.rendezvous.plan import ROOT_CAUSE_WAIT_S
from elasticd_agent.rendezvous.view import View


@dataclass(frozen=True, slots=True)
class Fault:
    """`cause` is the kind of the Failure, or node_lost; `culprit` the node at fault, "" where no single one is."""

    cause: str
    culprit: str


def find_faults(view: View, policy: Policy, now: float) -> tuple[Fault, ...]:
    """What has broken `view.current`, as far as that is settled. Nodes that are lost together are a fault each."""
    current = view.current
    if current is None or current.terminal or view.stop is not None:
        return ()
    failures = [f for f in view.failures if f.round == current.number and current.member(f.node) is not None]
    if not failures and all(member.node in view.done for member in current.members):
        return ()
    lost = losses(view, current, policy, now)
    to_blame = next((f for f in failures if f.culprits or f.kind in ("user_error", "start_failed")), None)
    if lost.nodes and to_blame is None:
        return tuple(Fault("node_lost", node) for node in sorted(lost.nodes))
    if to_blame is not None:
        return (Fault("crash" if to_blame.kind == "user_error" else to_blame.kind, to_blame.node),)
    victims = all(f.kind == "crash" for f in failures) and len(failures) < len(current.members)
    if not failures or lost.returning or (victims and now < view.failed_at + ROOT_CAUSE_WAIT_S):
        return ()
    return (Fault(failures[0].kind, ""),)


@dataclass(slots=True)
class FaultLog:
    """Which have been seen, each once: (round, Fault), in `new` until somebody takes them out."""

    policy: Policy
    new: list[tuple[int, Fault]] = field(default_factory=list)
    _seen: tuple[int, frozenset[Fault]] = (0, frozenset())

    def observe(self, view: View, now: float) -> None:
        """What is heard after a round's first is brought about by it, but for other nodes that are lost."""
        number = view.current.number if view.current is not None else 0
        seen = self._seen[1] if self._seen[0] == number else frozenset()
        blamed = {fault.culprit for fault in seen}
        found = [f for f in find_faults(view, self.policy, now) if not seen or f.cause == "node_lost"]
        new = [f for f in found if f.culprit not in blamed]
        self.new += [(number, fault) for fault in new]
        self._seen = number, seen.union(new)
