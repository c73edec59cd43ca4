"""Pure except one memory: which Round may follow, where an agent hosts the store and another may host the next one.

A c10d store lives in one of the job's agents and dies with it. What matters in it is the Round, which every member has
in memory, so another agent may host an empty store and the members restore it there (`takeover` decides who). Then two
stores may be in use at once, by two sides of a partition, each with a leader. **Invariant: at most one side
continues.** Each store has a term, and a later store a higher one. An agent uses stores in the order of their terms and
never goes back. Given that, two rules are enough:

1. A Round keeps a quorum of the electors of the Round before it: that one's members, without those that leave for good.
2. A Round is followed by another one only once a quorum of the same electors has read it.

A quorum is more than half, or half for the store in which the last Round was published: nobody else has more than half
then. A leader in a later store first publishes the Round that it found there once more, with the store's term; no
worker notices.

Why that is enough: suppose a Round R had two successors, published in stores S and the later T, and both trained. By 1
and 2 a quorum of R's electors has read each of them. Two quorums meet in a member. It was in T when T's leader counted
it, had not read S's successor by then, and cannot have read it afterwards, since it does not go back. So it is not in
the quorum that has read S's. No lease, no clock and no proof of a death is used, only what an agent has read and the
order of terms.

What rule 2 prevents: of {a, b, c, d, e}, d and e are cut off and a publishes {a, b, c}. Before c has read that, it is
cut off from a and joins d and e. If a may leave c out as well, {a, b} are a quorum of {a, b, c} and train, while {c,
d, e} are a quorum of the five and train, too. `tests/rendezvous/test_takeover_model.py` takes the rule out and finds
this.

What it does not cover, and what an operator sees, is in docs/adr/0011 and docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from elasticd_agent.model.phrases import count
from elasticd_agent.model.records import NodeRecord, Round, StoreLife
from elasticd_agent.rendezvous.view import Wait

LOOK_AGAIN_S = 1.0


@dataclass
class Succession:
    """One leader's. `look` first; the other methods are about what it has seen."""

    _node: str
    lacks_quorum: bool = False  #: too few are registered here to follow the Round, or ever to have read it
    blocked_why: str = ""  #: why no Round may follow, although one is due
    published_term: int = 0  #: the term of the last store in which a Round was or may have been published
    _life: StoreLife | None = None
    _base: Round | None = None
    _electors: tuple[str, ...] = ()
    _present_electors: frozenset[str] = frozenset()
    _quorum: int = 0
    _readers: set[str] = field(default_factory=set)  #: have ever read `_base`

    def look(self, base: Round | None, life: StoreLife | None, records: Iterable[NodeRecord]) -> None:
        """`base`: the Round in the store; `life`: the store's, None if no other agent may host the next one."""
        constrained = base is not None and life is not None and base.store is not None and not base.terminal
        if (
            self._base is None
            or base is None
            or (self._base.store_term, self._base.number) != (base.store_term, base.number)
        ):
            self._readers.clear()
        self._life, self._base, self.lacks_quorum, self.blocked_why = life, base if constrained else None, False, ""
        if base is None or not constrained:
            return
        registered = list(records)
        here = [r for r in registered if r.seen_round == base.number and self._has_read(r)]
        leaving = {r.incarnation for r in here if r.leaving}
        self._readers |= {r.incarnation for r in here}
        self._electors = tuple(m.incarnation for m in base.members if m.incarnation not in leaving)
        self._present_electors = frozenset(self._electors).intersection(r.incarnation for r in here)
        size = len(self._electors)
        self._quorum = (size + 1) // 2 if self._is_published_here else size // 2 + 1
        may_read = self._readers.union(r.incarnation for r in registered)
        self.lacks_quorum = (
            len(self._present_electors) < self._quorum or len(may_read.intersection(base.electors)) < base.quorum
        )

    def _has_read(self, record: NodeRecord) -> bool:
        """An older version's agent writes no term: it cannot leave the first store."""
        assert self._base is not None
        return record.seen_term == self._base.store_term or (record.seen_term == 0 and self._is_published_here)

    @property
    def _is_published_here(self) -> bool:
        """The Round was published in this store."""
        return self._base is not None and self._life is not None and self._base.store_term == self._life.term

    @property
    def _is_read_by_quorum(self) -> bool:
        base = self._base
        return base is None or len(self._readers.intersection(base.electors)) >= base.quorum

    def adoption(self, now: float) -> Round | Wait | None:
        """The Round that an earlier store has left, with this store's term; None: it has that already."""
        base, life = self._base, self._life
        if base is None or life is None or self._is_published_here:
            return None
        if base.store is not None and base.store.earlier_lives >= life.earlier_lives:
            return Wait(f"round {base.number} belongs to another agent's store", now + LOOK_AGAIN_S)
        if (missing := self._await_quorum(base, now)) is not None:
            return replace(missing, notable=False)  # they are on their way
        self.published_term = life.term
        return replace(base, store=life, electors=self._electors, quorum=self._quorum)

    def approve(self, verdict: Round, now: float) -> Round | Wait:
        """`verdict` as it may be published, or what it waits for."""
        base, life = self._base, self._life
        self.published_term = 0 if life is None else life.term
        if base is None:
            return replace(verdict, store=life, electors=(), quorum=0)
        if verdict.outcome != "succeeded" and (missing := self._await_quorum(verdict, now)):
            return missing
        # A leader that was left behind may have published a Round of the next number, which nobody may continue.
        skipped = life.earlier_lives if life is not None and base.leader != self._node else 0
        number = verdict.number + skipped
        return replace(verdict, number=number, store=life, electors=self._electors, quorum=self._quorum)

    def note_wait(self, verdict: Wait) -> None:
        """Nothing is to be published. Where too few nodes are left, the missing ones may go on elsewhere."""
        if verdict.too_few_nodes and self.lacks_quorum and self._base is not None:
            here = self._here_phrase(len(self._present_electors))
            self.blocked_why = f"{verdict.why}; {here if self._is_read_by_quorum else self._unread_reason}"

    @property
    def _unread_reason(self) -> str:
        assert self._base is not None
        return f"too few of the last round's nodes have read round {self._base.number}"

    def _here_phrase(self, number: int) -> str:
        assert self._base is not None
        return f"{number} of {count(len(self._electors), 'node')} of round {self._base.number} are here"

    def _await_quorum(self, following: Round, now: float) -> Wait | None:
        base = self._base
        assert base is not None
        if not self._is_read_by_quorum:
            self.blocked_why = self._unread_reason
            return Wait(self.blocked_why, now + LOOK_AGAIN_S)
        members = {m.incarnation for m in following.members}
        staying = self._present_electors if following.terminal else self._present_electors & members
        if len(staying) >= self._quorum:
            return None
        here = self._here_phrase(len(staying))
        self.blocked_why = f"{following.reason}; {here}, and without {self._quorum} of them others may go on elsewhere"
        return Wait(self.blocked_why, now + LOOK_AGAIN_S, notable=True)
