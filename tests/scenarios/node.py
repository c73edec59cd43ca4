"""One agent of a Cluster, with its group and what it cannot reach."""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticd.wire import Round
from elasticd_agent.coordinator import Coordinator
from elasticd_agent.messages import Joining, Leave, Phase, Rules
from elasticd_agent.planner import Facts
from tests.scenarios.waystore import WayStore


@dataclass(slots=True)
class Away:
    """What a node cannot reach now: the store, and which of its peers, by label."""

    store: bool = False
    peers: set[str] = field(default_factory=set)
    network: bool = False


@dataclass(eq=False, slots=True)
class Node:
    """One agent and its group. `group`: the round whose workers live here; `joined`: they know where their store is.

    `done`: the round whose workers here have all ended with code 0.
    """

    label: str
    name: str
    incarnation: str
    rules: Rules
    facts: Facts
    coordinator: Coordinator
    way: WayStore
    away: Away
    phase: Phase = field(default_factory=Joining)
    group: Round | None = None
    joined: bool = False
    done: int = 0
    stepping: int = 0
    master: int = 0
    hold: int = 0
    due: float | None = 0.0
    wakes: list[float] = field(default_factory=list)
    frozen: bool = False
    dead: bool = False
    left: Leave | None = None
