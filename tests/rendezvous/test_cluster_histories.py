"""Random histories of a job on several nodes against real members, planners and state machines: invariants 1, 2, 4, 5.

Nodes are killed, frozen, cut off, stopped and restarted, also in the middle of a turn; the store goes down,
loses its data or answers; watches are late, repeated or silent. Afterwards every fault is healed: then the job must
train, or have ended with a reason that every agent gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.history import breaches
from elasticd_agent.model.job import Policy
from elasticd_agent.model.messages import Event, ExitStatus, RoundPublished, StoreAbandoned
from elasticd_agent.model.records import Round
from elasticd_agent.rendezvous.view import Requirements
from tests.scenarios.cluster import Cluster
from tests.scenarios.node import Node

NAMES = "abcd"
HEARD_S = 3.0
"""A node that reaches the store has read a Round and killed its old group within this: retries, a lost lease."""
MISSED_S = 12.0
"""The same where its watches stay silent: it reads its keys every 10 s."""

Kind = Literal[
    "start", "kill", "vanish", "freeze", "thaw", "crash", "stop",
    "cut store", "cut peers", "cut", "cut from one", "heal",
    "store down", "store up", "store empty", "hints", "deaf", "dies before", "dies after", "answer lost", "clock",
]  # fmt: skip
KINDS: tuple[Kind, ...] = Kind.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Step:
    kind: Kind
    who: int
    n: int
    wait_s: float


acts = st.builds(
    Step,
    kind=st.sampled_from(KINDS),
    who=st.integers(0, len(NAMES) - 1),
    n=st.integers(1, 12),
    wait_s=st.sampled_from((0.0, 0.02, 0.2, 1.3, 3.7, 12.0, 25.0)),
)


class CheckedCluster(Cluster):
    """A Cluster that checks every transition."""

    def __init__(self, asked: Requirements, policy: Policy, holds: bool) -> None:
        super().__init__(asked, policy, 1, holds)
        self.published_at: dict[int, float] = {}
        self.listens_since: dict[str, float] = {}
        self.deaf_until = 0.0
        self.deliveries: tuple[float, ...] = (0.0,)
        self.hints = self._hint
        self.history.window_s = HEARD_S + MISSED_S

    def _hint(self, deliver: Callable[[], None]) -> None:
        for delay_s in self.deliveries:
            if delay_s:
                self._at(delay_s, deliver)
            else:
                deliver()

    def feed(self, node: Node, event: Event) -> None:
        group = node.group
        super().feed(node, event)
        if not self.store_up and isinstance(event, RoundPublished | StoreAbandoned):
            assert node.group == group and node.left is None, "invariant 5: the store is down"

    def published(self, round: Round) -> None:
        super().published(round)
        self.published_at.setdefault(round.number, self.now)

    def train(self, round: Round) -> None:
        trains = self._trains(round)
        super().train(round)
        newest = max(self.rounds)
        if trains and newest > round.number:
            for node in self._members(round):
                if node.label in self.listens_since:
                    since = max(self.listens_since[node.label], self.published_at[newest], self.deaf_until)
                    assert self.now <= since + HEARD_S, f"invariant 2: {node.label} trains {round.number}, not {newest}"

    def run_due(self) -> None:
        for node in self.nodes.values():
            if node in self.alive() and self.is_store_up and not node.partition.store:
                self.listens_since.setdefault(node.label, self.now)
            else:
                self.listens_since.pop(node.label, None)
        super().run_due()


def happen(c: CheckedCluster, act: Step) -> None:
    label = NAMES[act.who]
    node = c.nodes.get(label)
    lives = node is not None and not (node.dead or node.left)
    match act.kind:
        case "start" if not lives:
            c.start(label)
        case "kill" | "vanish" | "freeze" | "thaw" | "heal" if lives:
            getattr(c, act.kind)(label)
        case "cut store" | "cut peers" | "cut" if lives:
            c.cut(label, store=act.kind != "cut peers", peers=act.kind != "cut store")
        case "cut from one" if lives and (other := NAMES[act.n % len(NAMES)]) != label and other in c.nodes:
            c.cut(label, peer=other)
        case "crash" if node is not None and lives and not node.frozen and node.group is not None:
            c.exit(label, 0, ExitStatus(None, 9))
        case "stop" if node is not None and lives and not node.frozen:
            c.stop(label)
        case "store down" | "store up":
            c.store_up = act.kind == "store up"
        case "store empty" if c.store_up and any(_remembers(c, n) for n in c.nodes.values()):
            c.empty_store()
            c.wait(1.0)  # a member of the newest Round restores it before a joiner leads
        case "hints" | "deaf":
            c.deliveries = () if act.kind == "deaf" else ((0.0,), (0.5,), (2.0, 0.0, 0.3))[act.n % 3]
            c.deaf_until = c.now + MISSED_S if c.deliveries else float("inf")
        case "clock" if lives:
            c.jump(label, (1.0, 7.0, 90.0, 4000.0)[act.n % 4])
        case "dies before" | "dies after" | "answer lost" if node is not None and lives:
            node.store.fates[act.n] = act.kind
    c.wait(act.wait_s)


def _remembers(c: CheckedCluster, node: Node) -> bool:
    """True if the newest Round that runs has a member here that can restore it."""
    newest = c.rounds.get(max(c.rounds, default=0))
    running = newest is not None and not newest.terminal and node.group == newest
    return running and node in c.alive() and not node.partition.store and not node.store.fates


def all_is_well(c: CheckedCluster) -> None:
    c.store_up, c.deliveries = True, (0.0,)
    for node in list(c.nodes.values()):
        node.store.fates.clear()
        if not (node.dead or node.left):
            c.heal(node.label)
            c.thaw(node.label)
    c.deaf_until = c.now + MISSED_S


def living(c: CheckedCluster) -> list[Node]:
    return [n for n in c.nodes.values() if not (n.dead or n.left)]


def check_rounds(c: CheckedCluster) -> None:
    rounds = [c.rounds[number] for number in sorted(c.rounds)]
    resumes = [r.last_checkpoint or (0, 0) for r in rounds if not r.terminal]
    assert resumes == sorted(resumes), "a checkpoint of a lineage that was left is resumed from"
    assert all(r.last_checkpoint is None or r.last_checkpoint[0] < r.number for r in rounds)


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    fewest=st.integers(1, 3),
    holds=st.booleans(),
    began=st.integers(1, 3),
    acts=st.lists(acts, max_size=10),
    store=st.sampled_from(("etcd", "c10d", "c10d on a")),
    start_s=st.sampled_from((0.0, 0.5, 4.0)),
    spares=st.integers(0, 1),
)
def test_random_histories_keep_the_invariants(
    fewest: int, holds: bool, began: int, acts: list[Step], store: str, start_s: float, spares: int
) -> None:
    live(fewest, holds, began, acts, store, start_s, spares)


def live(
    fewest: int, holds: bool, began: int, acts: list[Step], store: str, start_s: float = 0.0, spares: int = 0
) -> CheckedCluster:
    """`store`: c10d compares one key at a time; "c10d on a" ends with a's agent, and is empty when it starts again.
    `start_s`: workers keep their processes, and a new one needs so long to its entry."""
    c = CheckedCluster(Requirements(1, 1, fewest, 3, spares=spares), Policy(max_restarts=50), holds)
    c.start_s = start_s
    c.compares_one_key, c.host = store != "etcd", "a" if store.endswith(" a") else ""
    for label in NAMES[:began]:
        c.start(label)
    c.wait(1.0)
    for act in acts:
        happen(c, act)
    all_is_well(c)
    c.wait(40)  # who was asked to leave has left
    for label in NAMES:
        if label not in c.nodes or c.nodes[label].dead or (c.nodes[label].left and not ended(c)):
            c.start(label)
    c.wait(90)
    check_rounds(c)
    assert breaches(c.history) == []
    newest = c.rounds[max(c.rounds)]
    if not newest.terminal:
        assert c.trained.get(newest.number, 0) > c.now - 1, f"round {newest.number} does not train: {newest.reason}"
        c.finish()
        c.wait(15)
        newest = c.rounds[max(c.rounds)]
        assert newest.outcome == "succeeded", newest
    assert newest.reason
    assert not living(c), f"{[n.label for n in living(c)]} have not heard that {newest.reason}"
    last = {n.left.exit_code for n in c.nodes.values() if n.left is not None and n.phase.round == newest.number}
    assert last == {newest.exit_code}
    return c


def ended(c: CheckedCluster) -> bool:
    newest = c.rounds.get(max(c.rounds, default=0))
    return newest is not None and newest.outcome in ("succeeded", "failed")
