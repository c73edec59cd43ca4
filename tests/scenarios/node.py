"""One agent of a Cluster, with its group and what it cannot reach."""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticd_agent.hangs.detector import HangDetector
from elasticd_agent.job.slots import Slots
from elasticd_agent.model.messages import Joining, Leave, Phase, StateMachineRules
from elasticd_agent.model.records import Round, StoreLife
from elasticd_agent.rendezvous.member import RendezvousMember
from tests.scenarios.waystore import NodeStore


@dataclass(slots=True)
class Partition:
    """What a node cannot reach now: the store, and which of its peers, by label."""

    store: bool = False
    peers: set[str] = field(default_factory=set)
    network: bool = False


@dataclass(eq=False, slots=True)
class Node:
    """One agent and its group. `group`: the round whose workers live here; `joined`: they have their store's address.

    `done`: the round whose workers here have all ended with code 0. `stuck`: what they do instead of training:
    "sleeps", "burns" (processor time), "stopped", "collective" (inside one, like those that wait for it). `unkillable`:
    slots whose workers do not die of SIGKILL; `blocked`: the round that waits for such a slot. `ahead_s`: its clock's
    lead over the cluster's: no two nodes' clocks agree. `hears`: it reaches the store, as last noted. `says`: what it
    answers a probe about its store; `hosted_round`: the Round in a store that it has taken over. `at_entry`: slots
    with a new process at its entry.
    """

    label: str
    name: str
    incarnation: str
    rules: StateMachineRules
    member: RendezvousMember
    store: NodeStore
    partition: Partition
    slots: Slots
    phase: Phase = field(default_factory=Joining)
    group: Round | None = None
    joined: bool = False
    done: int = 0
    stepping: int = 0
    master: int = 0
    pause_round: int = 0
    due: float | None = 0.0
    wakes: list[float] = field(default_factory=list)
    frozen: bool = False
    dead: bool = False
    left: Leave | None = None
    stuck: str = ""
    unkillable: set[int] = field(default_factory=set)
    blocked: int = 0
    hears: bool = False
    ahead_s: float = 0.0
    suspicion: HangDetector | None = None
    look_at: float = 0.0
    hosted_round: Round | None = None
    at_entry: set[int] = field(default_factory=set)
    says: tuple[StoreLife | None, bool, bool] = None, False, False
