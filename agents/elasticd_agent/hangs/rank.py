"""Pure: one rank under suspicion, as yes-or-no questions about its facts and as words for a person.

It exists so that the rules in `blame` and `hang` read like rules. Where a fact is missing the answer is the one that
kills nobody. It compares no two ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elasticd.heartbeat.record import INIT_PROCESS_GROUP
from elasticd_agent.model.reports import RankReport

BUSY_CORES = 0.1
"""A process tree that uses more of a core than this works. What only waits, its pulse included, uses under 0.02."""
BUSY_BYTES_PER_S = 64 * 1024
"""Or that reads or writes more than this: log lines and progress bars are a tenth of it, the slowest disk is more."""
FLOW_BYTES_PER_S = 1024 * 1024
"""A collective that sends more than this goes on; of gloo's traffic /proc counts what is sent, of NCCL's nothing."""
GIL_S = 1.0
"""The pulse comes ten times a second; on a crowded machine it was never seen to be this late."""


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where a rank runs."""

    node: str
    rank: int
    slot: int


@dataclass(frozen=True, slots=True)
class RankState:
    """What `node`'s agent sees of one of its ranks."""

    node: str
    report: RankReport

    @property
    def location(self) -> RankLocation:
        return RankLocation(self.node, self.report.rank, self.report.slot)

    @property
    def waits(self) -> bool:
        """True if its main thread waits for other ranks, or for its device."""
        return self.report.where in ("collective", "device") or self.at_barrier or self.is_joining

    @property
    def is_joining(self) -> bool:
        """True if it makes a process group, which it says itself where no stack could be taken."""
        seen = self.report
        return seen.where == "init" or (
            not seen.where and seen.phase == "starting" and seen.barrier == INIT_PROCESS_GROUP
        )

    @property
    def at_barrier(self) -> bool:
        """True if it waits for others out of band: at a barrier of its session, for a decision, for the next round."""
        return self.report.where == "barrier" or self.report.phase == "barrier"

    @property
    def is_paused(self) -> bool:
        """True if it was asked to wait for the next round."""
        return self.report.phase == "barrier" and self.report.barrier == "hold"

    @property
    def holds_gil(self) -> bool:
        """True if its background thread has not run for about as long as it was quiet, though it could."""
        seen = self.report
        return seen.state not in ("t", "X") and seen.alive_s >= max(GIL_S, seen.idle_s / 2)

    @property
    def is_moving(self) -> bool:
        """True if its Python was seen to move for half the time at least that it has made no progress.

        It evaluates on its device, or in collectives of a group that nobody counts. Barriers of ours are left out: they
        look again and again.
        """
        seen = self.report
        return seen.where in ("collective", "device") and not self.at_barrier and 0 <= seen.moved_s < seen.idle_s / 2

    @property
    def cores(self) -> float:
        return self.report.cpu_s / self.report.window_s if self.report.window_s > 0 else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.report.io_bytes / self.report.window_s if self.report.window_s > 0 else 0.0

    @property
    def is_busy(self) -> bool:
        """True if it works outside of any wait: then it is slow, not hung, for as long as a rank may be slow.

        One that could run but got no CPU, one that a debugger holds, and one that is ending count as busy. So does one
        that is seen in a wait, but not in the same one all the time.
        """
        if self.report.state in ("t", "X"):
            return True
        if self.waits and not self.holds_gil:
            return self.is_moving
        return self.report.state == "R" or self.cores > BUSY_CORES or self.bytes_per_s > BUSY_BYTES_PER_S

    @property
    def likely_cause(self) -> str:
        """What this rank by itself looks like, as a cause."""
        if self.report.state in ("T", "Z"):
            return "stopped" if self.report.state == "T" else "zombie"
        if self.holds_gil:
            return "gil"
        return "spinning" if self.is_busy else "blocked"

    def label(self, *, step: bool = True) -> str:
        at = f" (step {self.report.step})" if step and self.report.step else ""
        return f"rank {self.report.rank} on {self.node}{at}"

    def activity(self) -> str:
        """ "waits in x.py:88 next_batch, without using CPU, for 5.2 s" """
        seen = self.report
        where = f" in {seen.function}" if seen.function else ""
        phase = f", in phase {seen.phase}" if seen.phase in ("eval", "checkpoint", "exit") else ""
        idle = f"for {seen.idle_s:.1f} s"
        if seen.exited:
            return "has ended with code 0"
        if seen.state == "T":
            return f"is stopped (state T) for {seen.stopped_s:.1f} s"
        if seen.state == "Z":
            return f"is a zombie {idle}"
        if seen.state == "X":
            return f"is ending {idle}"
        if seen.state == "t":
            return f"is held by a debugger{where}{phase}, {idle}"
        if self.holds_gil:
            return f"holds the GIL{where}{phase}, using {self.cores:.0%} of a core, for {seen.alive_s:.1f} s"
        if self.is_moving:
            return f"goes on without a step, at the moment in {_wait(seen)}{phase}, {idle}"
        if self.waits:
            return f"waits in {_wait(seen)}{phase} {idle}"
        if self.is_busy:
            disk = f" and {self.bytes_per_s / 1e6:.1f} MB/s" if self.bytes_per_s > BUSY_BYTES_PER_S else ""
            return f"works{where}{phase}, using {self.cores:.0%} of a core{disk}, {idle}"
        if seen.state == "D":
            return f"is blocked in the kernel (state D){where}{phase}, {idle}"
        if seen.window_s <= 0:
            return f"has made no progress{where}{phase} {idle}"
        return f"waits{where}{phase}, without using CPU, {idle}"


def labels(ranks: Sequence[RankState], *, step: bool = True) -> str:
    """ "rank 1 on a (step 5)", "rank 1 on a (step 5) and 3 more": one sentence stays one line."""
    shown = [rank.label(step=step) for rank in ranks[:3]]
    if len(ranks) > len(shown):
        shown.append(f"{len(ranks) - len(shown)} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def describe_waits(ranks: Iterable[RankState]) -> str:
    """ "3 ranks wait in all_reduce, 1 in barrier 'epoch'": what those do who are not to blame; "" if nobody does."""
    places: dict[str, int] = {}
    for rank in ranks:
        if rank.waits:
            places[_wait(rank.report)] = places.get(_wait(rank.report), 0) + 1
    (first, n), *others = sorted(places.items(), key=lambda item: (-item[1], item[0])) or [("", 0)]
    if not n:
        return ""
    return ", ".join([f"{n} rank{'s wait' if n > 1 else ' waits'} in {first}", *(f"{m} in {w}" for w, m in others)])


def _wait(seen: RankReport) -> str:
    if seen.barrier and seen.phase == "barrier":
        return f"barrier {seen.barrier!r}"
    named = {"collective": "a collective", "device": "a device synchronisation"}
    return seen.function or named.get(seen.where) or (INIT_PROCESS_GROUP if seen.phase == "starting" else "a barrier")
