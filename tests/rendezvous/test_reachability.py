"""When a node probes the other members, and which silence counts."""

from __future__ import annotations

from collections.abc import Mapping

from elasticd_agent.model.job import Policy
from elasticd_agent.model.records import Exclusion, Member, Round
from elasticd_agent.rendezvous.peers import (
    FIRST_PROBE_SPREAD_S,
    MAX_PROBE_INTERVAL_S,
    NON_MEMBER_PROBE_INTERVAL_S,
    PeerNetwork,
    PeerObservations,
    ReachabilityMonitor,
)
from elasticd_agent.rendezvous.probe import Address, ProbeAlive, ProbeAnswer, ProbeNoAnswer, ProbeRefused

POLICY = Policy()


class Network(PeerNetwork):
    """Node b among a, b, c, d; `answers`: the behaviour of each other node; `asked`: (time, probed nodes)."""

    def __init__(self, **answers: str) -> None:
        self.now = 1000.0
        self.answers = {"a": "answers", "c": "answers", "d": "answers", **answers}
        self.asked: list[tuple[float, str]] = []
        self.reach = ReachabilityMonitor(POLICY, ("b", "i"), PeerObservations("b", self))
        self.round = Round(1, tuple(Member(name, "i", (0,), "", f"{name}:1") for name in "abcd"))
        self.stepped = 0
        self.advances_by: float | None = self.now

    def probe(self, nodes: Mapping[str, Address]) -> Mapping[str, ProbeAnswer]:
        self.asked.append((self.now, "".join(sorted(nodes))))
        kinds = {"silent": ProbeNoAnswer("no answer"), "refuses": ProbeRefused()}
        return {name: kinds.get(self.answers[name], ProbeAlive(name, "i")) for name in nodes}

    def wait(self, seconds: float) -> tuple[str, ...]:
        """As a member does: turns when they are due, and ten times a second."""
        until = self.now + seconds
        while self.now < until:
            due = self.reach.turn(self.round, self.stepped, self.advances_by, self.now)
            self.now = min(until, self.now + 0.1, max(due or until, self.now + 1e-3))
        return self.reach.unreachable

    def train(self, seconds: float) -> tuple[str, ...]:
        self.stepped = self.round.number
        for _ in range(int(seconds)):
            self.advances_by = self.now + 1.5
            self.wait(1)
        return self.reach.unreachable


def test_members_are_probed_once_while_all_is_well() -> None:
    net = Network()
    net.train(60)
    (at, whom), *more = net.asked
    assert (whom, more) == ("acd", [])
    assert at <= 1000.5, "before a fault that comes soon"


def test_members_of_a_large_round_probe_each_other_for_the_first_time_within_seconds() -> None:
    net = Network()
    net.round = Round(1, tuple(Member(f"n{i}", "i", (0,), "", f"n{i}:1") for i in range(999)) + net.round.members[1:2])
    net.answers = dict.fromkeys((m.node for m in net.round.members), "answers")
    net.train(10)
    assert [round(at - 1000) for at, _ in net.asked] == [FIRST_PROBE_SPREAD_S]


def test_stalled_member_probes_less_often_while_all_answer() -> None:
    net = Network()
    net.train(10)
    net.asked.clear()
    assert net.wait(200) == ()
    pauses = [b - a for (a, _), (b, _) in zip(net.asked, net.asked[1:], strict=False)]
    assert net.asked[0][0] >= 1010 + POLICY.lease_s
    assert [round(pause) for pause in pauses[:6]] == [1, 2, 4, 8, 16, MAX_PROBE_INTERVAL_S]


def test_silence_of_a_lease_is_unreachable_until_an_answer_or_step() -> None:
    """An unreachable member is reachable again with its answer, or with a step of the local workers."""
    net = Network()
    net.train(10)
    net.answers["c"] = "silent"
    assert net.wait(1.5 + POLICY.lease_s) == ()
    assert net.wait(POLICY.lease_s + 2) == ("c",)
    net.answers["c"] = "answers"
    assert net.wait(2) == ()
    net.answers["c"] = "silent"
    assert net.wait(2 * MAX_PROBE_INTERVAL_S) == ("c",)
    assert net.train(1) == (), "they train: so it is there"


def test_firewall_separates_no_members_that_trained() -> None:
    """Agents that never answered each other, while their workers trained, are not partitioned by silence."""
    net = Network(c="silent")
    net.train(100)
    assert net.wait(300) == ()
    assert len([whom for _, whom in net.asked if whom == "c"]) <= 3


def test_silence_before_the_first_step_counts_if_others_answer() -> None:
    """Where no member answers, the fault is on this side, or a firewall."""
    assert Network(c="silent").wait(20) == ("c",)
    assert Network(c="silent", d="refuses").wait(20) == ("c",), "who refuses is the planner's to judge"
    assert Network(a="silent", c="silent", d="silent").wait(60) == (), "then it is we, or a firewall"


def test_excluded_node_continues_to_probe() -> None:
    """It publishes the members that it does not reach, so that it is not taken again too early."""
    net = Network(c="silent")
    assert net.wait(20) == ("c",)
    members = tuple(Member(name, "i", (0,), "", f"{name}:1") for name in "acd")
    net.round = Round(2, members, excluded=(Exclusion("b", 1),))
    net.advances_by = None
    net.asked.clear()
    assert net.wait(20) == ("c",)
    assert len(net.asked) == 20 / NON_MEMBER_PROBE_INTERVAL_S
    net.answers["c"] = "answers"
    assert net.wait(NON_MEMBER_PROBE_INTERVAL_S) == ()
    net.answers["c"] = "silent"
    net.round = Round(3, tuple(Member(name, "i", (0,), "", f"{name}:1") for name in "abcd"))
    net.advances_by = net.now
    assert net.wait(1) == (), "back in: all begins anew"


def test_non_member_probes_no_node() -> None:
    net = Network()
    net.round = Round(2, tuple(Member(name, "i", (0,), "", f"{name}:1") for name in "acd"))
    net.wait(60)
    assert net.asked == []


def test_result_stays_while_the_failed_group_ends() -> None:
    net = Network(c="silent")
    assert net.wait(20) == ("c",)
    net.advances_by = None
    net.answers["c"] = "answers"
    assert net.wait(5) == ("c",)
    net.round = Round(2, (), outcome="failed", exit_code=1)
    assert net.wait(1) == ()
