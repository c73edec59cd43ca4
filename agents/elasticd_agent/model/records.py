"""The records that cross a process or the network: who takes part in which round, and why one ended.

How they are written, read and kept compatible is `records`'. This module never imports torch, never reads a clock and
never touches a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from elasticd.errors import WireError
from elasticd_agent.model.codec import Document, Record

Outcome = Literal["succeeded", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class Member(Record):
    """One node's part in a Round. `slots` are those in use; a slot's index is the worker's local rank. `role`: its
    workers', as torchrun's --role; "" where the planner knew of none, and then all nodes have the same."""

    node: str
    incarnation: str
    slots: tuple[int, ...]
    role: str = ""

    def check(self) -> None:
        if not self.node or not self.slots:
            raise WireError(f"member {self.node!r} needs a name and at least one slot")
        if min(self.slots) < 0 or len(set(self.slots)) != len(self.slots):
            raise WireError(f"member {self.node!r}: slots must be distinct and not negative, got {list(self.slots)}")


@dataclass(frozen=True, slots=True)
class QuarantinedSlot(Record):
    """What is held against a slot: `strikes` failures without progress between them, `times` set aside so far,
    `left_s` seconds of cool-off left when this Round was published (0: it may be used). `hung`: the last one was a hang
    of its, which progress does not forgive."""

    node: str
    slot: int
    strikes: int
    times: int = 0
    left_s: float = 0.0
    hung: bool = False

    def check(self) -> None:
        if min(self.slot, self.strikes, self.times, self.left_s) < 0:
            raise WireError(f"bench of slot {self.slot} on {self.node!r}: no number may be negative")


@dataclass(frozen=True, slots=True)
class Exclusion(Record):
    """A node that was left out of a Round although it may come back: how many `times` in a row, the last one `age_s`
    seconds before this Round was published."""

    node: str
    times: int
    age_s: float = 0.0

    def check(self) -> None:
        if not self.node or self.times < 1 or self.age_s < 0:
            raise WireError(f"exclusion of {self.node!r}: {self.times} times, {self.age_s} s ago makes no sense")


@dataclass(frozen=True, slots=True)
class BudgetState(Record):
    """The restart budget's counters as of this Round's publication.

    `counted` restarts so far that count, `streak` of them since the last progress, `tokens` left of the hourly
    allowance (None: full), `high_water` the highest step any round has committed.
    """

    counted: int = 0
    streak: int = 0
    tokens: float | None = None
    high_water: int = 0

    def check(self) -> None:
        if min(self.counted, self.streak, self.high_water, self.tokens or 0) < 0:
            raise WireError("budget: no counter may be negative")


@dataclass(frozen=True, slots=True)
class Round(Document):
    """One agreed membership, or, with an `outcome`, the end of the job.

    `resume` proposes a checkpoint as (round, step). Ranks are numbered through the members in order, and through
    each member's slots in order. `restarts` counts the rounds started after the first one. `directory` names the
    checkpoint directory of rank 0's node, as its NodeRecord does; `run` tells two runs of one job apart. `cause` is the
    reason in one word: "start", "resize", or the kind of the Failure it answers.
    """

    number: int
    members: tuple[Member, ...]
    last_checkpoint: tuple[int, int] | None = None
    restarts: int = 0
    budget: BudgetState = BudgetState()
    quarantined_slots: tuple[QuarantinedSlot, ...] = ()
    excluded: tuple[Exclusion, ...] = ()
    directory: str = ""
    run: str = ""
    reason: str = ""
    cause: str = ""
    outcome: Outcome | None = None
    exit_code: int | None = None

    def check(self) -> None:
        if self.number < 1 or self.restarts < 0:
            raise WireError(f"round {self.number}: numbers start at 1, restarts ({self.restarts}) at 0")
        if (self.outcome is None) != (self.exit_code is None):
            raise WireError(f"round {self.number}: outcome and exit_code come together or not at all")
        if self.exit_code is not None and not 0 <= self.exit_code <= 255:
            raise WireError(f"round {self.number}: exit_code {self.exit_code} is not in 0..255")
        if self.outcome is None and not self.members:
            raise WireError(f"round {self.number}: a round that runs needs at least one member")
        if len({m.node for m in self.members}) != len(self.members):
            raise WireError(f"round {self.number}: a node is a member twice")

    @property
    def world_size(self) -> int:
        return sum(len(m.slots) for m in self.members)

    @property
    def terminal(self) -> bool:
        """True for the Round that ends the job."""
        return self.outcome is not None

    def member(self, node: str) -> Member | None:
        return next((m for m in self.members if m.node == node), None)

    def group_rank(self, node: str) -> int:
        """The node's place among the members (torchrun's GROUP_RANK). KeyError if it is none."""
        for i, m in enumerate(self.members):
            if m.node == node:
                return i
        raise KeyError(f"{node!r} is not a member of round {self.number}")

    def ranks(self, node: str) -> range:
        """The global ranks on `node`, in local-rank order; empty if it is not a member."""
        first = 0
        for m in self.members:
            if m.node == node:
                return range(first, first + len(m.slots))
            first += len(m.slots)
        return range(0)

    def assignments(self) -> Iterator[tuple[int, str, int, int]]:
        """(rank, node, local rank, slot) of every worker, by rank."""
        rank = 0
        for m in self.members:
            for local_rank, slot in enumerate(m.slots):
                yield rank, m.node, local_rank, slot
                rank += 1


@dataclass(frozen=True, slots=True)
class NodeRecord(Document):
    """An agent's announcement of its node, kept under its lease and up to date by itself.

    `incarnation` is new whenever the owner of its workers starts anew. `address` is where it answers a knock,
    "host:port", `leaving_code` the exit code that whoever asked it to stop expects, 0 if unknown.
    `unreached` are members of the round it has seen that do not answer it. `directory` names its checkpoint directory:
    two nodes that say the same share it; `highest` is the
    highest round number found there and among its logs. The rest is how far it is, each the number of a round, 0 if
    none: it has `seen` the round, its group was started (`ready`), has `stepped`, could be held at a checkpoint
    (`can_hold`), is `held` at one; it is `leaving` if somebody asked its agent to stop, and `warm` (1, else 0)
    once its workers would start at once. `role` is its workers'. `slots` are those that can be used, none where too few
    of them can; `unusable` says why some cannot. `pace` has of each of its ranks (rank, pulses, pulses in which
    it waited). `raised`: an exception of a rank of its `ready` round that has not ended yet, in words.
    """

    id: str
    incarnation: str
    address: str
    slots: tuple[int, ...]
    directory: str = ""
    highest_round: int = 0
    seen_round: int = 0
    ready_round: int = 0
    stepped_round: int = 0
    can_pause: int = 0
    paused: int = 0
    checkpoint: tuple[int, int] | None = None
    high_water: int = 0
    leaving: str = ""
    warm: int = 1
    wait_counts: tuple[tuple[int, int, int], ...] = ()
    role: str = ""
    unusable: str = ""
    leaving_code: int = 0
    unreachable: tuple[str, ...] = ()
    pending_exception: str = ""

    def check(self) -> None:
        if not self.id:
            raise WireError("a node needs an id")
        if not 0 <= self.leaving_code <= 255:
            raise WireError(f"node {self.id!r}: leaving_code {self.leaving_code} is not in 0..255")
        if min(self.slots, default=0) < 0 or len(set(self.slots)) != len(self.slots):
            raise WireError(f"node {self.id!r}: slots must be distinct and not negative, got {list(self.slots)}")


@dataclass(frozen=True, slots=True)
class Failure(Document):
    """Why a node's group of a round ended without success.

    `kind` is "crash", "user_error", "store_lost", "hung", "start_failed" or newer; `cause` is which kind of hang it is.
    `culprits` are (rank, slot); none when nobody on this node is to blame. `high_water` is the highest step seen,
    `checkpoint` the newest (round, step) saved, both by this round. `error` is the exception's type, `detail` its
    traceback.
    """

    round: int
    node: str
    kind: str
    culprits: tuple[tuple[int, int], ...]
    why: str
    high_water: int = 0
    checkpoint: tuple[int, int] | None = None
    error: str | None = None
    detail: str | None = None
    cause: str = ""
