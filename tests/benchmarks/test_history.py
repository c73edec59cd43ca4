"""The history checker finds that a guard of the protocol is missing: docs/history.md has what it finds."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.guards import GUARDS, Guard
from benchmarks.history import AgentHistory, History, Training, View, breaches, from_logs
from tests.scenarios import nodes

FOUND = {
    "a Round is written by compare-and-swap of the version it follows and of the leader key": "one writer per round",
    "a Round is written by compare-and-swap of the version it follows": "one writer per round",
    "a Round without this node ends its group": "one round trains",
    "members write their Round again, and the spec with it, where the store has lost it": "spec is the jobs",
    "an older Round of a run never replaces a newer one": "views only grow",
    "the end of a run stays for agents that come late": "ends are final",
    "every agent reads its keys again every 10 s, whatever its watches say": "ends are final",
    "a node reads the Round before it registers": "one round trains",
    "a Round of an earlier run never replaces one of a later run": "earlier runs are over",
    "the wait for an earlier run's nodes has a deadline": "nobody waits in silence",
    "members write their job's spec again where the store has lost it": "spec is the jobs",
    "hosted: a Round keeps more than half of the last one's members": "one round trains",
}


@pytest.mark.parametrize("guard", [guard for guard in GUARDS if guard.scenario], ids=lambda guard: guard.rule)
def test_missing_guard_is_found(guard: Guard) -> None:
    assert guard.play() == []
    with guard.replaced():
        assert FOUND[guard.rule] in {breach.partition(":")[0] for breach in guard.play()}


def test_page_has_every_guard() -> None:
    """And what the checker finds without it."""
    page = (Path(__file__).parents[2] / "docs" / "history.md").read_text()
    rows = re.findall(r"^\| (.+) \| (?:etcd|c10d|hosted) \| \d+.* \| ([^:|]+).* \|$", page, re.M)
    assert rows == [(guard.rule.removeprefix("hosted: "), FOUND.get(guard.rule, "nothing")) for guard in GUARDS]


def test_second_writer_is_found() -> None:
    """A leader that overwrites the Round without comparing it."""
    members = ", ".join(f'{{"node": "{name[0]}", "incarnation": "{name}", "slots": [0]}}' for name in ("a1", "b2"))
    first, other = (
        f'> put round {{"version": "1.0", "number": 2, "members": [{members}], "reason": "{reason}"}}\n> wait 9\n'
        for reason in ("one", "another one")
    )
    _, history = nodes.play(
        f"> job nodes=1:3\n> twins allowed\n> start a b\n> wait 9\n{first}{other}> start c\n> wait 9\n"
    )
    assert "one writer per round" in {breach.partition(":")[0] for breach in breaches(history)}


# ---- forged histories


def view(agent: str, number: int, at: float, outcome: str = "", run: str = "") -> View:
    return View(at, (agent, "i"), run, number, (("a", "i"), ("b", "i")), "a", f"round {number}", outcome)


def healthy() -> History:
    """Two agents, two rounds, the end."""
    history = History(ended_at=40.0)
    for name in "ab":
        views = [view(name, 1, 1.0), view(name, 2, 11.0), view(name, 3, 20.0, "succeeded")]
        history.agents[name, "i"] = AgentHistory((name, "i"), "", 0.0, b"s", views, [(0.0, 20.5)], [], 20.5)
    for number, begin in ((1, 2.0), (2, 12.0)):
        for at in (begin, begin + 8.0):
            history.trained("", number, (("a", "i"), ("b", "i")), at)
    history.specs = [(0.0, b"s")]
    return history


def a_round_after_the_end(history: History) -> None:
    history.agents["a", "i"].views.append(view("a", 4, 25.0))


def an_agent_that_stays(history: History) -> None:
    agent = history.agents["b", "i"]
    agent.left_at, agent.hears = None, [(0.0, 40.0)]


def an_older_round_again(history: History) -> None:
    history.agents["b", "i"].views.insert(2, view("b", 1, 15.0))


def a_round_that_trains_on(history: History) -> None:
    history.trained("", 1, (("a", "i"), ("b", "i")), 19.0)


def a_round_that_trains_on_beside_a_cut_node(history: History) -> None:
    """The third member hears nothing, which is no excuse for the others."""
    members = (("a", "i"), ("b", "i"), ("c", "i"))
    history.agents["c", "i"] = AgentHistory(("c", "i"), "", 0.0, b"s", [view("c", 1, 1.0)], [(0.0, 8.0)], [], 19.0)
    history.trainings[0] = Training("", 1, members, 2.0, 19.0)


def another_spec(history: History) -> None:
    history.specs.append((12.0, b"another"))


def test_healthy_history_has_no_breach() -> None:
    assert breaches(healthy()) == []


@pytest.mark.parametrize(
    ("forge", "found"),
    [
        (a_round_after_the_end, "ends are final"),
        (an_agent_that_stays, "ends are final"),
        (an_older_round_again, "views only grow"),
        (a_round_that_trains_on, "one round trains"),
        (a_round_that_trains_on_beside_a_cut_node, "one round trains"),
        (another_spec, "spec is the jobs"),
    ],
)
def test_forgery_is_found(forge: Callable[[History], None], found: str) -> None:
    history = healthy()
    forge(history)
    assert found in {breach.partition(":")[0] for breach in breaches(history)}


def test_pair_of_rounds_may_train_while_one_of_them_cannot_hear() -> None:
    history = healthy()
    a_round_that_trains_on(history)
    for (name, _), agent in history.agents.items():
        agent.hears = [(0.0, 8.0), (18.9, 20.5)]
        agent.views[1] = view(name, 2, 18.9)
    assert breaches(history) == []


def test_history_is_made_of_event_logs() -> None:
    def published(number: int, at: float, leader: str) -> dict[str, object]:
        return {"kind": "round_published", "round": number, "mono": at, "nodes": ["a"], "reason": "r", "leader": leader}

    first = [published(1, 1.0, "a"), {"kind": "store_unavailable", "round": 1, "mono": 3.0, "reason": "away"}]
    second = [published(1, 2.0, "b")]
    record = [{"step": n, "round": 1, "rank": 0, "node": "a", "mono": 1.0 + n} for n in (1, 2)]
    history = from_logs([("agent-0-a", "a", first), ("agent-1-b", "b", second)], record)
    assert history.agents["a", "agent-0-a"].hears == [(1.0, 3.0)]
    assert [(t.number, t.begin, t.end) for t in history.trainings] == [(1, 2.0, 3.0)]
    assert [breach.partition(":")[0] for breach in breaches(history)] == ["one writer per round"]
