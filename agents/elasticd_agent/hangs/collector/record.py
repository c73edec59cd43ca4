"""evidence-NODE.json: all that one node's collector learned of its ranks, as one record.

The helper reports a rank in parts, as it learns them. The agent's thread composes the record from what came in time,
and `explain` decodes it. Unknown numbers are -1, unknown texts "".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from elasticd_agent.hangs.stacks import ProcessStacks, ThreadStack
from elasticd_agent.model.codec import Document, Record
from elasticd_agent.model.reports import GroupTail, LaunchCount, StackPlace


@dataclass(frozen=True, slots=True)
class ProcessFacts(Record):
    """One process of a rank's tree, from /proc."""

    pid: int
    parent: int = -1
    comm: str = ""
    state: str = ""
    wchan: str = ""
    threads: int = 0
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RankEvidence(Record):
    """One rank."""

    rank: int
    pid: int = -1
    # from its heartbeat record
    phase: str = ""
    step: int = -1
    collectives: int = -1
    usual: int = -1  #: collectives of its last finished step
    barrier: str = ""
    # from /proc
    state: str = ""
    wchan: str = ""  #: the kernel function that its main thread sleeps in
    call: str = ""  #: the system call of its main thread, with its target
    kernel: tuple[str, ...] = ()  #: the kernel stack, innermost first
    tree: tuple[ProcessFacts, ...] = ()  #: its process and those below
    proc: Mapping[str, Any] = field(default_factory=dict, hash=False)  #: what only a person reads
    # from its stack; those from `where` to `loading` are as in RankReport
    where: StackPlace = ""
    function: str = ""
    place: str = ""
    stack: str = ""
    alone: bool = False
    loading: bool = False
    source: str = ""  #: "py-spy" or "faulthandler"; "": there is no stack, and `trouble` says why
    trouble: str = ""
    processes: tuple[ProcessStacks, ...] = ()
    """The stacks of the worker's process, then of processes below it (DataLoader workers)."""
    # from its flight recorder
    groups: tuple[GroupTail, ...] = ()  #: its end in each group, as in RankReport; the whole is in rank-R.flight.json
    deviation: str = ""
    launches: tuple[LaunchCount, ...] = ()  #: from NCCL's RAS, as in RankReport
    late: bool = False  #: the heartbeat thread runs, and had no time to write it
    # from its output
    log: tuple[str, ...] = ()  #: the last lines, where output goes to files

    @property
    def main_thread(self) -> ThreadStack | None:
        return next((thread for process in self.processes[:1] for thread in process.threads), None)

    @property
    def threads(self) -> list[ThreadStack]:
        return [thread for process in self.processes for thread in process.threads]


@dataclass(frozen=True, slots=True)
class NodeEvidence(Document):
    """One gathering on one node."""

    MAX_BYTES: ClassVar[int] = 8 << 20
    round: int
    node: str
    why: str
    at_wall: float  #: unix time
    ranks: tuple[RankEvidence, ...]
    gpus: tuple[Mapping[str, Any], ...] = ()  #: facts from NVML and the kernel's log, one object a GPU
    troubles: tuple[str, ...] = ()  #: the parts that are missing, and why

    def shortened(self) -> NodeEvidence:
        """Itself; without all threads but the main ones where it is too long to be read."""
        if len(self.to_json()) <= self.MAX_BYTES:
            return self
        ranks = []
        for rank in self.ranks:
            main = [replace(process, threads=process.threads[:1]) for process in rank.processes[:1]]
            ranks.append(replace(rank, processes=tuple(main), proc={}))
        return replace(
            self, ranks=tuple(ranks), troubles=(*self.troubles, "too many threads: only the main ones are here")
        )

    @property
    def file_name(self) -> str:
        return f"evidence-{self.node}.json"
