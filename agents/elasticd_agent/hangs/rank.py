"""Pure: one rank under suspicion, as yes-or-no questions about its report and as words for a person.

Where a fact is missing the answer is the one that ends no job.

Each question combines what the heartbeat, the stack, /proc and the recorders say, and says which of them it trusts for
it. A heartbeat proves that Python runs; its absence proves nothing unless the process could have run. Processor time
proves work outside of a wait, and nothing inside of one: threads of NCCL and OpenMP spin while they wait. Bytes prove
work where no wait explains them. A stack is believed for where a rank waits and never for how long.

The answer that ends no job is not always "no": `is_busy` is true where it is unknown, `waits_for_unknown` is true
where the wait may be for another program, `is_at_unknown_place` keeps a rank from being blamed. Read each property with
that in mind before changing it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from elasticd.heartbeat.record import INIT_PROCESS_GROUP_BARRIER, PAUSE_BARRIER
from elasticd_agent.model.reports import RankLocation, RankReport

BUSY_CORES = 0.1
"""A process tree that uses more of a core works. A tree that only waits, its heartbeat thread included, uses < 0.02."""
BUSY_BYTES_PER_S = 64 * 1024
"""A process tree that reads or writes more works, too. Log lines and progress bars are a tenth of it, the slowest disk
is more."""
BUSY_GIL_HOLDER_CORES = 0.5
"""The same for a rank that holds the GIL: a C call that computes uses or waits for a whole one."""
JOIN_WAIT_S = 1.0
"""A rank without progress in init_process_group for so long waits for another one."""
RECENT_PROGRESS_S = 1.0
"""A rank that made progress within this time makes more."""
_LINE_NUMBER = re.compile(r":\d+ ")
_POINT_TO_POINT = re.compile(r"i?send|i?recv|batch_isend|send_object|recv_object")
_UNKNOWN_WAIT_SUFFIX = ".wait"
"""The end of the function's name where a line of source calls `wait` of an unknown object, perhaps of a store."""
RENDEZVOUS_FUNCTION = "rendezvous"
"""The collector's name for the first part of init_process_group, in which a rank connects to the store."""
_EXTRA_GROUP_FUNCTIONS = (RENDEZVOUS_FUNCTION, "_new_process_group_helper")
"""The functions that scripts call to make a group beside the job's own, as for the weights of an inference engine."""
GIL_HELD_AFTER_S = 1.0
"""The heartbeat comes ten times a second; on a crowded machine it was never seen to be this late."""


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank as the agent of `node` reports it."""

    node: str
    report: RankReport

    @property
    def location(self) -> RankLocation:
        return RankLocation(self.node, self.report.rank, self.report.slot)

    @property
    def waits(self) -> bool:
        """It waits for other ranks, or for its device."""
        return (
            self.report.where in ("collective", "device")
            or self.waits_out_of_band
            or self.is_joining
            or self.has_pending_collective
        )

    @property
    def is_in_point_to_point(self) -> bool:
        """It sends to or receives from one rank. That is not recorded as a collective, and the other rank unknown."""
        return self.report.where == "collective" and _POINT_TO_POINT.match(self.report.function) is not None

    @property
    def wait_is_recorded(self) -> bool:
        """The rank's recorder has the collective that its main thread waits in: gloo's are never a device's."""
        report = self.report
        if self.has_unrecorded_group:
            return False
        if report.where == "device":
            return any(tail.pending and tail.backend != "gloo" for tail in report.groups)
        unrecorded = (
            self.is_in_point_to_point
            or report.function == "monitored_barrier"
            or report.function.endswith(_UNKNOWN_WAIT_SUFFIX)
        )
        unrecorded = unrecorded or any(tail.unrecorded for tail in report.groups)  # by gloo: it may be one of those
        return report.where == "collective" and not unrecorded

    @property
    def waits_for_unknown(self) -> bool:
        """It is in such a line, and its recorder has no unfinished collective; or it meets processes in a store of the
        script's own, perhaps those of another program."""
        report = self.report
        if report.where == "init" and report.collectives >= 0 and report.function in _EXTRA_GROUP_FUNCTIONS:
            return True
        return self.wait_is_guessed and bool(report.groups)

    @property
    def wait_is_guessed(self) -> bool:
        """A line of source with some `wait` is all that says that it waits for other ranks: it may be a library's."""
        report = self.report
        guessed = report.where == "collective" and report.function.endswith(_UNKNOWN_WAIT_SUFFIX)
        return guessed and not any(tail.pending for tail in report.groups)

    @property
    def torch_ends_wait(self) -> bool:
        """It waits for other ranks, for as long as its process group's timeout lets it. The wait for a key of a store,
        for a library or for another program has a time of its own."""
        return self.report.where in ("collective", "init") and not (self.wait_is_guessed or self.waits_for_unknown)

    @property
    def has_only_job_groups(self) -> bool:
        """It has no group with members of another program, as far as it is known."""
        return all(tail.in_job for tail in self.report.groups)

    @property
    def may_wait_for_other_program(self) -> bool:
        """It waits, perhaps in a group with members of another program, which may take its time."""
        foreign = [tail for tail in self.report.groups if not tail.in_job]
        return self.waits and bool(foreign) and (not self.wait_is_recorded or any(tail.pending for tail in foreign))

    @property
    def has_no_data_in_flight(self) -> bool:
        """No data of it reaches another one without its main thread. Only of gloo is that known: it sends by TCP."""
        report = self.report
        gloo = bool(report.groups) and all(tail.backend == "gloo" for tail in report.groups)
        quiet = report.unsent == 0 and report.window_s > 0 and self.bytes_per_s <= BUSY_BYTES_PER_S
        return gloo and self.has_only_job_groups and not self.has_unrecorded_group and quiet

    @property
    def last_completed_if_pending(self) -> Mapping[int, int]:
        """The last completed collective of each NCCL group that has some its device has not completed."""
        return {group: completed for group, enqueued, completed in self.report.nccl_groups if enqueued > completed}

    @property
    def has_unrecorded_group(self) -> bool:
        """It has a group whose collectives, or their end, no recorder has: it may wait there, and may resume.

        One of gloo does not count: no device waits in it, and bytes tell whether its collectives move.
        """
        unknown = any(tail.unrecorded and tail.backend != "gloo" for tail in self.report.groups)
        return unknown or any(enqueued < 0 for _, enqueued, _ in self.report.nccl_groups)

    @property
    def has_pending_collective(self) -> bool:
        """NCCL's recorder: collectives are enqueued and none has completed for half of the time without progress.

        What its processor does says nothing then: it runs ahead of the device until the launch queue is full, and
        launches and NCCL's threads spin.
        """
        return bool(self.last_completed_if_pending) and self.report.device_s >= self.report.idle_s / 2

    def collective_missing_for(self, other: RankState) -> tuple[int, int] | None:
        """The (group, number) of a collective that `other` waits in and this rank has not enqueued yet."""
        for group, completed in other.last_completed_if_pending.items():
            if any(mine == group and 0 <= enqueued <= completed for mine, enqueued, _ in self.report.nccl_groups):
                return group, completed + 1
        return None

    @property
    def is_behind_in_ras(self) -> bool:
        """NCCL's RAS: it has launched fewer collectives of a communicator than another rank."""
        return any(count.launched < count.most for count in self.report.launches)

    @property
    def is_joining(self) -> bool:
        """It makes a process group; where no stack could be taken, its heartbeat says so."""
        report = self.report
        if report.where:
            return report.where == "init"
        return report.phase == "starting" and report.barrier == INIT_PROCESS_GROUP_BARRIER

    @property
    def waits_out_of_band(self) -> bool:
        """It waits out of band: in a call of its session, for a decision, for the next round."""
        return self.report.where == "barrier" or self.report.phase == "barrier" or bool(self.report.wait_call)

    def waits_for(self, ranks: Collection[int]) -> bool:
        """It runs, and has waited a second for one of these: in a call of its session, or to make the process group.

        A barrier with a timeout ends by itself, and the script may go on.
        """
        report = self.report
        if not 0.0 <= report.alive_s < RECENT_PROGRESS_S or report.barrier_s:
            return False
        if report.wait_call:
            return report.wait_rank in ranks
        return self.is_joining and report.collectives < 0 and report.idle_s >= JOIN_WAIT_S

    @property
    def is_paused(self) -> bool:
        """It was requested to pause until the next round."""
        return self.report.phase == "barrier" and self.report.barrier == PAUSE_BARRIER

    @property
    def holds_gil(self) -> bool:
        """The rank's heartbeat thread, though able to run, has not run for about as long as the rank has been idle."""
        report = self.report
        return report.state not in ("t", "X") and report.alive_s >= max(GIL_HELD_AFTER_S, report.idle_s / 2)

    @property
    def is_moving(self) -> bool:
        """It was seen to move within the last half of the time without progress.

        Inside of a wait only its Python and its NCCL collectives count: it evaluates on its device, or in collectives
        of a group that is not counted. Elsewhere its processor time and its bytes count as well. elasticd's own
        barriers poll, so movement inside of them means nothing.
        """
        report = self.report
        if self.waits_out_of_band:
            return False
        ages = [report.moved_s, report.device_s]
        ages += [] if self.waits else [report.quiet_s]
        return any(0 <= age_s < report.idle_s / 2 for age_s in ages)

    @property
    def waits_outside_job(self) -> bool:
        """Nothing inside of the job lets it continue, only a person at a debugger, or the reader of its output."""
        return self.report.state == "t" or self.report.where in ("debugger", "output")

    @property
    def is_at_unknown_place(self) -> bool:
        """Nothing says where it is. No evidence against it follows from that."""
        return (
            not self.report.where and not self.waits and not self.holds_gil and self.report.state not in ("T", "Z", "D")
        )

    @property
    def waiting_s(self) -> float:
        """The time for which it has waited for other ranks in torch.distributed, without a break, progress or
        movement."""
        report = self.report
        return min(report.waiting_s, report.idle_s, report.moved_s if report.moved_s >= 0 else report.idle_s)

    @property
    def wait_place(self) -> str:
        """A name of what it waits in, to be recognised again: kind of wait and the script's function; "" if unknown."""
        report = self.report
        where = report.place or _LINE_NUMBER.sub(" ", report.function)
        kind = "device" if report.where == "elsewhere" and self.waits else report.where
        kind = kind or ("barrier" if self.waits_out_of_band else "init" if self.is_joining else "")
        return f"{kind} in {where}".removesuffix(" in ") if kind else ""

    @property
    def cores(self) -> float:
        return self.report.cpu_s / self.report.window_s if self.report.window_s > 0 else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.report.io_bytes / self.report.window_s if self.report.window_s > 0 else 0.0

    @property
    def sockets_idle_s(self) -> float:
        """The time for which its sockets have not moved a byte; its idle time where that is unknown."""
        return self.report.sockets_s if self.report.sockets_s >= 0 else self.report.idle_s

    @property
    def is_busy(self) -> bool:
        """It works outside of any wait, and so is slow, not hung, for as long as a rank may be slow.

        A rank that could run but got no CPU, one that a debugger traces, and one that is exiting count as busy. So does
        one in a wait whose Python still moves.
        """
        if self.report.state in ("t", "X"):
            return True
        if self.holds_gil:  # the threads that want it wake up 200 times a second
            return self.cores > BUSY_GIL_HOLDER_CORES or self.bytes_per_s > BUSY_BYTES_PER_S
        if self.is_moving or self.waits:
            return self.is_moving
        return self.cores > BUSY_CORES or self.bytes_per_s > BUSY_BYTES_PER_S

    @property
    def likely_cause(self) -> str:
        """The cause of a hang that this rank by itself looks like."""
        if self.report.state in ("T", "Z"):
            return "stopped" if self.report.state == "T" else "zombie"
        if self.holds_gil:
            return "gil"
        return "spinning" if self.is_busy else "blocked"

    def label(self) -> str:
        at = f" (step {self.report.step})" if self.report.step else ""
        return f"rank {self.report.rank} on {self.node}{at}"

    def activity(self) -> str:
        """ "waits in x.py:88 next_batch, without using CPU, for 5.2 s" """
        report = self.report
        where = f" in {report.function}" if report.function else ""
        phase = f", in phase {report.phase}" if report.phase in ("eval", "checkpoint", "exit") else ""
        idle = f"for {report.idle_s:.1f} s"
        cpu = f"using {self.cores:.0%} of a core"
        disk = f" and {self.bytes_per_s / 1e6:.1f} MB/s" if self.bytes_per_s > BUSY_BYTES_PER_S else ""
        for holds, words in (
            (report.exited, "has exited with code 0"),
            (report.state == "T", f"is stopped (state T) for {report.stopped_s:.1f} s"),
            (report.state == "Z", f"is a zombie {idle}"),
            (report.state == "X", f"is exiting {idle}"),
            (report.state == "t", f"is traced by a debugger{where}{phase}, {idle}"),
            (report.where == "debugger", f"is at a prompt{where}{phase}, {idle}"),
            (report.where == "output", f"writes output that nobody reads{where}{phase}, {idle}"),
            (report.idle_s < RECENT_PROGRESS_S, f"makes progress{phase}"),
            (self.holds_gil, f"holds the GIL{where}{phase}, {cpu}, for {report.alive_s:.1f} s"),
            (self.is_moving, f"is active without finishing a step, now in {_describe_wait(self)}{phase}, {idle}"),
            (self.waits, f"waits in {_describe_wait(self)}{phase} {idle}"),
            (self.is_busy, f"works{where}{phase}, {cpu}{disk}, {idle}"),
            (report.state == "D", f"is blocked in the kernel (state D){where}{phase}, {idle}"),
            (report.window_s <= 0, f"has made no progress{where}{phase} {idle}"),
        ):
            if holds:
                return words
        return f"waits{where}{phase}, without using CPU, {idle}"


def labels(ranks: Sequence[RankState]) -> str:
    """ "rank 1 on a (step 5)", "rank 1 on a (step 5) and 3 more": one sentence stays one line."""
    shown = [rank.label() for rank in ranks[:3]]
    if len(ranks) > len(shown):
        shown.append(f"{len(ranks) - len(shown)} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def describe_waits(ranks: Iterable[RankState]) -> str:
    """ "3 ranks wait in all_reduce, 1 in barrier 'epoch'": what the waiting ones of `ranks` wait in; "" for none."""
    places = Counter(_describe_wait(rank) for rank in ranks if rank.waits)
    if not places:
        return ""
    (first, n), *others = sorted(places.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join([f"{n} rank{'s wait' if n > 1 else ' waits'} in {first}", *(f"{m} in {w}" for w, m in others)])


def _describe_wait(rank: RankState) -> str:
    report = rank.report
    if report.wait_call:
        return f"session.{report.wait_call}"
    if report.where in ("", "elsewhere") and rank.has_pending_collective:
        return "an NCCL collective on its device" + (f", called from {report.function}" if report.function else "")
    if report.barrier and report.phase == "barrier":
        return f"barrier {report.barrier!r}"
    named = {"collective": "a collective", "device": "a device synchronisation"}
    other = INIT_PROCESS_GROUP_BARRIER if report.phase == "starting" else "a barrier"
    return report.function or named.get(report.where, other)
