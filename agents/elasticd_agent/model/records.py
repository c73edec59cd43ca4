"""The records that agents share through the store: who takes part in which round, and why one ended.

A NodeRecord is written by its node, under a lease: what it offers and where it stands. A Round is written by the
leader, once for each number: what all agree on. A Failure is written by the node whose group ended, and read by the
leader, which answers with the next Round. Between them they hold all that is needed to continue after any agent has
died, the leader included.

A node has a name and an incarnation. The name is the machine's and comes back after a restart; the incarnation is of
one agent process. A Round names both, so an agent that was restarted under its old name is not in the Round of its
predecessor, and its workers are not either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from elasticd.errors import WireError
from elasticd_agent.model.codec import Document, Record, parse_json

Outcome = Literal["succeeded", "failed", "stopped"]
Identity = tuple[str, str]
"""(node, incarnation)."""
SHARED_ERROR_KINDS = ("user_error", "shared_error")
"""Kinds of failures before the first step: all ranks of the node raised the same error of the script. Every start
raises a user_error again."""
IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError")
MAX_SAME_ERROR_WAIT_S = 30.0
"""More than two ranks that import the same from a slow disk differ by."""
TERM_HASH_BITS = 32
MAX_NAME_BYTES = 128
"""The longest name of a job, a run or a node."""


def is_later_run(run: str, than: str) -> bool:
    """True if both runs are numbered, and `run` is the later one: then the other is over.

    The service and Slurm number runs so: they start a job again only after it has ended.
    """
    return all(name.isascii() and name.isdecimal() for name in (run, than)) and int(run) > int(than)


def check_slots(whose: str, slots: Sequence[int]) -> None:
    """Raise WireError for slots that are negative or come twice."""
    if min(slots, default=0) < 0 or len(set(slots)) != len(slots):
        raise WireError(f"{whose}: slots must be distinct and not negative, got {list(slots)}")


@dataclass(frozen=True, slots=True)
class Member(Record):
    """One node's part in a Round."""

    node: str
    incarnation: str
    slots: tuple[int, ...]  #: those in use; a slot's index is the worker's local rank
    role: str = ""  #: torchrun's --role; "" where the planner knew of none, and then all nodes have the same
    address: str = ""  #: where its agent answers a probe, "host:port"; "" in a Round of an older leader

    @property
    def identity(self) -> Identity:
        """The name and the incarnation: which agent process this is."""
        return self.node, self.incarnation

    def check(self) -> None:
        if not self.node or not self.slots:
            raise WireError(f"member {self.node!r} needs a name and at least one slot")
        check_slots(f"member {self.node!r}", self.slots)


@dataclass(frozen=True, slots=True)
class StoreLife(Record):
    """One life of a store that an agent hosts. Another agent may host the job's next one, with a later term."""

    term: int  #: above it, how many lives were before, then a part of the host's incarnation
    agent: str  #: where the host's agent answers a probe, "host:port"
    endpoint: str  #: where the store is, "host:port"

    @property
    def earlier_lives(self) -> int:
        """The number of lives of the job's store before this one."""
        return self.term >> TERM_HASH_BITS


def store_term(earlier_lives: int, incarnation: str) -> int:
    """The term of the store of this agent, after `earlier_lives` of the job's stores. Terms of two hosts differ."""
    number = int.from_bytes(hashlib.sha256(incarnation.encode()).digest()[:4], "big") | 1
    return earlier_lives << TERM_HASH_BITS | number


@dataclass(frozen=True, slots=True)
class QuarantinedSlot(Record):
    """The failures of a slot. It is quarantined while `left_s` is above 0."""

    node: str
    slot: int
    strikes: int  #: failures without progress between them
    times: int = 0  #: quarantines so far; each lasts twice as long as the one before
    left_s: float = 0.0  #: cool-off left when this Round was published
    hung: bool = False  #: the last strike was a hang, which progress does not clear

    def check(self) -> None:
        if min(self.slot, self.strikes, self.times, self.left_s) < 0:
            raise WireError(f"quarantine of slot {self.slot} on {self.node!r}: no number may be negative")


@dataclass(frozen=True, slots=True)
class Exclusion(Record):
    """A node that was left out of a Round although it may come back."""

    node: str
    times: int  #: in a row
    age_s: float = 0.0  #: from the last time to this Round's publication

    def check(self) -> None:
        if not self.node or self.times < 1 or self.age_s < 0:
            raise WireError(f"exclusion of {self.node!r}: {self.times} times, {self.age_s} s ago makes no sense")


@dataclass(frozen=True, slots=True)
class BudgetState(Record):
    """The restart budget's counters as of this Round's publication."""

    counted: int = 0  #: restarts that count against the budget
    streak: int = 0  #: of them, those since the last progress
    tokens: float | None = None  #: left of the hourly allowance; None: all of it
    high_water: int = 0  #: the highest step that any round has committed
    step: int | None = None  #: of the last failure that counted, as in Failure; None where progress followed it
    repeat_key: str = ""  #: the same

    def check(self) -> None:
        if min(self.counted, self.streak, self.high_water, self.tokens or 0) < 0:
            raise WireError("budget: no counter may be negative")


@dataclass(frozen=True, slots=True)
class Round(Document):
    """One agreed membership, or, with an `outcome`, the end of the job.

    Invariant: at most one Round per number. A planner publishes it by compare-and-swap of the round key, guarded by the
    leader key; a published Round never changes.
    """

    MAX_BYTES: ClassVar[int] = 2 << 20
    COMPRESSED: ClassVar[bool] = True
    number: int  #: grows with every Round of the job, also across its runs
    members: tuple[Member, ...]  #: global ranks are numbered through the members in order, and through their slots
    last_checkpoint: tuple[int, int] | None = None  #: newest (round, step) saved before: where progress starts
    restarts: int = 0  #: rounds started after the first one
    budget: BudgetState = BudgetState()
    quarantined_slots: tuple[QuarantinedSlot, ...] = ()  #: every slot with a strike
    excluded: tuple[Exclusion, ...] = ()
    hang_places: tuple[tuple[str, int], ...] = ()  #: what killed groups waited in, and how often
    hang_steps: tuple[tuple[str, int], ...] = ()  #: the same, and the step of the last one
    directory: str = ""  #: the checkpoint directory of rank 0's node, named as in its NodeRecord
    run: str = ""  #: tells two runs of one job id apart
    stepped_size: int = 0  #: the smallest world size with which a round has stepped
    required_size: int = 0  #: the same, once the script has refused a smaller one
    reason: str = ""  #: why this Round follows the last one, in a sentence
    cause: str = ""  #: the same in a word: "start", "resize", or the kind of the Failure it answers
    outcome: Outcome | None = None
    exit_code: int | None = None
    leader: str = ""  #: the node that published it; "" in a Round of an older leader
    store: StoreLife | None = None  #: where it was published; None: no other agent may host that store
    electors: tuple[str, ...] = ()  #: incarnations: the last Round's members that could have continued without this one
    quorum: int = 0  #: so many electors must have read it before another Round follows it

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
        if len(self.run) > MAX_NAME_BYTES:  # a longer number cannot be read, either
            raise WireError(f"round {self.number}: run {self.run[:16]!r}… has more than {MAX_NAME_BYTES} characters")

    @property
    def world_size(self) -> int:
        return sum(len(m.slots) for m in self.members)

    @property
    def terminal(self) -> bool:
        """True for the Round that ends the job."""
        return self.outcome is not None

    @property
    def store_term(self) -> int:
        return 0 if self.store is None else self.store.term

    def precedes(self, other: Round) -> bool:
        """True if `other` replaces this Round: of a later run or, in no earlier one, of a later term or number."""
        if is_later_run(self.run, than=other.run):
            return False
        if is_later_run(other.run, than=self.run):
            return True
        return (self.store_term, self.number) < (other.store_term, other.number)

    def member(self, node: str) -> Member | None:
        return next((m for m in self.members if m.node == node), None)

    @property
    def recovery_reporter(self) -> str:
        """The member that reports the recovery from the fault before this Round."""
        return recovery_reporter(self.leader, [member.node for member in self.members])

    def group_rank(self, node: str) -> int:
        """The node's index among the members (torchrun's GROUP_RANK). KeyError if it is none."""
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


class MemberCache:
    """Parses one Round of a job after another: a member that has the same text in both is decoded once.

    A thousand agents read each Round at once, and most of its members were in the last one. The members' texts are
    what `},{` divides, if they have no other braces: one that is inside a name would leave fewer members than texts.
    Any other Round is parsed as a whole.
    """

    def __init__(self) -> None:
        self._by_text: dict[bytes, Member] = {}

    def parse_round(self, text: bytes | str, max_bytes: int) -> Any:
        """A `Parser` whose members are records already."""
        if isinstance(text, bytes) and text.count(b'"members":') == 1 and len(text) <= max_bytes:
            head, _, rest = text.partition(b'"members":[{')
            body, end, tail = rest.partition(b"}]")
            try:
                members = self._decode_members(body, max_bytes) if end else []
                raw = parse_json(head + b'"members":[]' + tail, max_bytes)
                if members and isinstance(raw, dict) and raw.get("members") == []:
                    return raw | {"members": members}
            except (ValueError, WireError):
                pass  # an error names its place in the whole text
        return parse_json(text, max_bytes)

    def _decode_members(self, body: bytes, max_bytes: int) -> list[Member]:
        """Raises ValueError, WireError; empty where the texts may not be those of members."""
        texts = body.split(b"},{")
        new = [text for text in texts if text not in self._by_text]
        raw = parse_json(b"[{" + b"},{".join(new) + b"}]", max_bytes) if new else []
        if not body.count(b"{") == body.count(b"}") == len(texts) - 1 or len(raw) != len(new):
            return []
        known = self._by_text | dict(zip(new, map(Member.from_dict, raw), strict=True))
        self._by_text = {text: known[text] for text in texts}
        return [*self._by_text.values()] if len(self._by_text) == len(texts) else []


def recovery_reporter(leader: str, members: Sequence[str]) -> str:
    """One node reports a recovery, by its own clock: the leader, or the first member where the leader is none."""
    return leader if leader in members else next(iter(members), "")


NO_NODE_RANK = 1 << 30
"""Nodes without a given place come after those that have one, by arrival."""


@dataclass(frozen=True, slots=True)
class NodeRecord(Document):
    """A node's record, kept up to date by its agent under its lease: it is gone once the lease has expired.

    A field that holds the number of a round holds 0 for none.
    """

    FIELD_IN_KEY: ClassVar[str] = "id"
    id: str
    incarnation: str  #: new whenever the owner of its workers starts anew: a member is a pair (id, incarnation)
    address: str  #: where the agent answers a probe, "host:port"
    slots: tuple[int, ...]  #: the usable ones; none where too few of them are
    directory: str = ""  #: names its checkpoint directory: nodes with the same value share it
    highest_round: int = 0  #: in its checkpoint directory and logs: the job's next Round is numbered above it
    seen_round: int = 0  #: the newest Round its agent has read
    seen_term: int = 0  #: the term of the store that it was published in
    ready_round: int = 0  #: the newest round whose group was started here, after every earlier group was gone
    stepped_round: int = 0  #: the newest round with a finished step here
    can_pause: int = 0  #: the round whose workers can pause at a checkpoint
    paused: int = 0  #: the round whose workers are paused at a checkpoint
    checkpoint: tuple[int, int] | None = None  #: newest (round, step) saved here
    high_water: int = 0  #: the highest step seen here
    leaving: str = ""  #: why the agent was asked to stop; a leaving node is in no further Round
    warm: int = 1  #: 1 once its workers would start at once, else 0
    wait_counts: tuple[tuple[int, int, int], ...] = ()  #: (rank, heartbeats, those in which it waited for other ranks)
    role: str = ""
    unusable: str = ""  #: why some slots are not usable
    leaving_code: int = 0  #: the exit code that the sender of the stop request expects, 0 if unknown
    leaving_soon: bool = False  #: its time is nearly over, so that its state is saved even where too few nodes remain
    unreachable: tuple[str, ...] = ()  #: members of `seen_round` that do not answer its probes
    starting: tuple[int, ...] = ()  #: those of `slots` whose new process is not ready, while other ranks keep theirs
    entered: int = 0  #: the round whose workers here can leave it in their process
    ahead: int = 0  #: the round for which this node, in none yet, was asked to start its workers ahead
    pending_exception: str = ""  #: of a rank of `ready_round` that has raised and not exited yet, in words
    node_rank: int = NO_NODE_RANK  #: its place among nodes that have not been in a Round before, as its user gave it
    min_workers: int = 0  #: the fewest workers here, as its user gave it; 0: as the leader's

    @property
    def identity(self) -> Identity:
        return self.id, self.incarnation

    def check(self) -> None:
        if not self.id:
            raise WireError("a node needs an id")
        if not 0 <= self.leaving_code <= 255:
            raise WireError(f"node {self.id!r}: leaving_code {self.leaving_code} is not in 0..255")
        if not 0 <= self.node_rank <= NO_NODE_RANK:
            raise WireError(f"node {self.id!r}: node_rank {self.node_rank} is no rank")
        check_slots(f"node {self.id!r}", self.slots)


@dataclass(frozen=True, slots=True)
class LeaderRecord(NodeRecord):
    """The same under the leader key."""

    FIELD_IN_KEY: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class Failure(Document):
    """Why a node's group of a round ended without success."""

    round: int
    node: str
    kind: str  #: "crash", "store_lost", "hung", "start_failed", one of SHARED_ERROR_KINDS, or newer
    culprits: tuple[tuple[int, int], ...]  #: (rank, slot); none where no rank of this node is to blame
    why: str
    high_water: int = 0  #: the highest step seen by this round
    checkpoint: tuple[int, int] | None = None  #: newest (round, step) saved by this round
    error: str | None = None  #: the exception's type
    detail: str | None = None  #: its traceback
    cause: str = ""  #: the kind of hang
    step: int | None = None  #: the last one that the culprits finished, as the script counts; None: unknown
    repeat_key: str = ""  #: equal where two rounds end by the same error; "" where it came from outside
    places: tuple[str, ...] = ()  #: of a hang: what the ranks waited in
    hang_step: int = 0  #: of a hang: the highest step of a rank


def same_error_wait_s(least_s: float, ran_s: float, error: str | None, *, is_user_error: bool) -> float:
    """The wait for the same error of others that the first one raised after `ran_s`.

    As long again where no restart mends it: imports from a slow disk do not end together.
    """
    lasts = is_user_error or error in IMPORT_ERRORS
    return max(least_s, min(ran_s, MAX_SAME_ERROR_WAIT_S)) if lasts else least_s
