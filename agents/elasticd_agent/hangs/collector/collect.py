"""One collection of evidence: all ranks at once, each in a thread of its own, so that a blocked read costs only itself.

A rank's state is reported first, then its stack and where that is; its log and the GPUs are read in parallel. A report
is a part of the record that evidence.py composes. At the deadline the process ends under the threads that still run:
what was reported by then counts.

The order is that of worth: the state in /proc costs a read and says "stopped" or "asleep in the kernel", which no stack
can; a stack says where; the recording says what for. Each is reported when it is there, so a deadline cuts off the
least. Programs that may hang (py-spy, a driver's library) are processes of their own and are given up before the end.
"""

from __future__ import annotations

import json
import linecache
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from elasticd.channel import Message
from elasticd.errors import WireError
from elasticd.heartbeat.record import HeartbeatReader, Phase
from elasticd_agent.hangs import recordings
from elasticd_agent.hangs.collector import classify, stacks
from elasticd_agent.hangs.collector import files as disk
from elasticd_agent.hangs.collector import flight_recorder as flight
from elasticd_agent.hangs.collector import proc_facts as facts
from elasticd_agent.hangs.collector.request import CollectRequest, EvidenceTarget, FilePath
from elasticd_agent.hangs.stacks import Frame, ProcessStacks, ThreadStack, digest
from elasticd_agent.system.gpus.nvml import start_nvml_process
from elasticd_agent.system.processes import procfs
from elasticd_agent.system.processes.helper_process import HelperError, HelperTimeout

RESERVED_TIME_SHARE = 0.2
"""Programs are given up this part of the time before its end, which leaves time for faulthandler and the report."""
CPU_SAMPLE_S = 0.2
"""Over how long the use of the processor is measured: a busy thread has had many turns by then."""
IDLE_CPU_SHARE = 0.1
"""A share of the sample. A rank that waits in gloo uses nothing; an OpenMP pool spins for the first 0.1 s of a wait."""
SOURCE_READ_TIMEOUT_S = 0.2
LOG_GRACE_S = 0.5
"""Logs, read in milliseconds, may take this much longer than all else."""
FLIGHT_S, FLIGHT_PART = 0.6, 0.25
"""The heartbeat thread reads requests ten times a second, and writes for 25 ms; or this part of the time, if longer.
One that runs has all of the time."""
NCCL_S, NCCL_PART = 1.0, 0.1
"""NCCL's monitor thread reads its pipe four times a second (docs/nccl.md), or in an interval of the user's own. Its RAS
answers in milliseconds, or waits for a process that is stopped: that one is found without it."""
MAX_LAUNCH_COUNTS = 16
CHILDREN, CHILDREN_S = 16, 1.0
"""The stacks of at most this many processes below a worker are read, too, one after the other: 40 ms each."""


class EvidenceGathering:
    """The work of one helper process. `emit` sends the agent one JSON object: fields of a RankEvidence, by its "rank",
    or of the NodeEvidence."""

    def __init__(self, request: CollectRequest, emit: Callable[[Message], None]) -> None:
        self._request = request
        self._emit = emit
        self._began = time.monotonic()
        self._until = self._began + request.seconds
        self._spare_s = RESERVED_TIME_SHARE * request.seconds

    def run(self) -> None:
        """Returns when all is done, or at the deadline."""
        first, logs = [], []
        others = [self._start_thread(self._collect_gpu_facts, {}), self._start_thread(self._collect_ras_counts, {})]
        for worker in self._request.ranks:
            first.append(self._start_thread(partial(self._collect_rank, worker), {"rank": worker.rank}))
            logs.append(self._start_thread(partial(self._collect_log, worker), {}))
            others.append(self._start_thread(partial(self._collect_recordings, worker), {}))
        self._join(first, self._until)
        self._join(others, self._until)
        self._join(logs, min(self._until, time.monotonic() + LOG_GRACE_S))

    def _start_thread(self, act: Callable[[], None], about: Message) -> threading.Thread:
        """`about` names the rank in the report of a failure."""

        def guarded() -> None:
            try:
                act()
            except Exception as error:  # noqa: BLE001 it is reported, and costs the other threads nothing
                self._emit({**about, "trouble": f"{type(error).__name__}: {error}"})

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def _join(self, threads: list[threading.Thread], until: float) -> None:
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    # --- one rank ---------------------------------------------------------------------------------------------------

    def _collect_rank(self, worker: EvidenceTarget) -> None:
        rank, pid = worker.rank, worker.pid
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._emit({"rank": rank, "trouble": "it has ended"})
            return
        except OSError:  # a container whose seccomp rules are older than pidfds
            pidfd = -1
        active, since = facts.runnable_time_ns(pid), time.monotonic()
        known = _heartbeat_fields(worker.heartbeat) | facts.process_facts(pid)
        self._emit({"rank": rank, **known})
        dump = self._take_stacks(worker, pidfd, known.get("state", ""))
        source = {"rank": rank, "source": dump.source, "trouble": dump.trouble}
        if not dump.threads:
            self._emit(source)
            return
        process = ProcessStacks(pid, known.get("proc", {}).get("comm", ""), dump.threads)
        located = self._locate(worker, dump.threads, known, active, since)
        self._emit({**source, **located, "processes": [process.to_dict()]})
        for child in self._stacks_of_children(worker, known):
            self._emit({"rank": rank, "processes": [child.to_dict()]})

    def _take_stacks(self, worker: EvidenceTarget, pidfd: int, state: str) -> stacks.StackDump:
        """The stacks read by py-spy, else by faulthandler. `trouble` keeps why py-spy failed."""
        alive = facts.living_thread(worker.pid)
        if not alive:
            return stacks.StackDump(trouble="it has ended")
        dump = stacks.by_py_spy(self._request.spy, worker.pid, self._until - self._spare_s, alive)
        if dump.source or state in ("T", "t"):
            return dump
        own = stacks.by_faulthandler(worker.pid, pidfd, worker.stacks, self._until)
        return replace(own, trouble=dump.trouble if own.source else f"{dump.trouble}; {own.trouble}")

    def _locate(
        self,
        worker: EvidenceTarget,
        threads: Sequence[ThreadStack],
        known: Message,
        active: dict[int, int],
        since: float,
    ) -> Message:
        """The fields of RankEvidence that say where the rank is. `active`: run times of its threads at `since`."""
        stacks_of = [thread.frames for thread in threads]
        fds = known.get("proc", {}).get("fds", {}).values()
        cuda = any(target.startswith(("/dev/nvidia-uvm", "/dev/kfd")) for target in fds)
        thread = threads[classify.representative_thread_index(stacks_of, cuda)]
        joined = known.get("collectives", -1) >= 0
        source = _source_line(thread.frames)
        idle = classify.FactsBesideStack(
            idle=True, has_process_group=joined, uses_cuda=cuda, holds_gil=thread.holds_gil, source_line=source
        )
        located, if_busy = (classify.locate(thread.frames, beside) for beside in (idle, replace(idle, idle=False)))
        # Whether the thread is at work is measured only where it makes a difference.
        if located != if_busy:
            time.sleep(max(0.0, since + CPU_SAMPLE_S - time.monotonic()))
            passed_ns = (time.monotonic() - since) * 1e9
            now = facts.runnable_time_ns(worker.pid)
            if any(ns < 0 or now.get(tid, ns) - ns > IDLE_CPU_SHARE * passed_ns for tid, ns in active.items()):
                located = if_busy
        if facts.is_in_output_write(known):
            time.sleep(max(0.0, since + CPU_SAMPLE_S - time.monotonic()))
            if facts.is_in_output_write(facts.process_facts(worker.pid)):
                located = replace(located, where="output")
        elif facts.is_in_input_read(known, source):
            located = replace(located, where="debugger")
        return {
            "where": located.where,
            "function": located.function,
            "place": classify.script_function(thread.frames),
            "stack": digest(thread.frames),
            "alone": classify.only_first_runs_script(stacks_of),
            "loading": any(
                classify.is_loading(one.frames) or facts.may_wait_for_file(worker.pid, one.tid)
                for one in threads
                if one is threads[0] or one.holds_gil
            ),
        }

    def _stacks_of_children(self, worker: EvidenceTarget, known: Message) -> Iterator[ProcessStacks]:
        """The stacks of Python processes below, DataLoader workers for instance."""
        until = min(self._until - self._spare_s, time.monotonic() + CHILDREN_S)
        exe = _executable(worker.pid)
        tree = [process for process in known.get("tree", ()) if process["pid"] != worker.pid]
        below = [process for process in tree if exe and exe == _executable(process["pid"])]
        for process in below[:CHILDREN]:
            dump = stacks.by_py_spy(self._request.spy, process["pid"], until)
            if dump.threads:
                yield ProcessStacks(process["pid"], process.get("comm", ""), dump.threads)

    # --- beside it --------------------------------------------------------------------------------------------------

    def _collect_log(self, worker: EvidenceTarget) -> None:
        if worker.logs:
            self._emit({"rank": worker.rank, "log": disk.last_lines(worker.logs)})

    def _collect_recordings(self, worker: EvidenceTarget) -> None:
        if procfs.state(worker.pid) in ("", "T", "t"):
            return
        request = flight.request_dump(worker.heartbeat) if worker.heartbeat and worker.flight else flight.NO_REQUEST
        until = self._nccl_until()
        if worker.dump and (dump := flight.take_nccl_dump(worker.pipe, worker.dump, until)):
            self._write_file(f"rank-{worker.rank}.nccl", dump)
        if not (worker.heartbeat and worker.flight):
            return
        until = min(self._until, time.monotonic() + max(FLIGHT_S, FLIGHT_PART * self._request.seconds))
        last = max(until, self._until - self._spare_s)
        recorded = flight.await_dump(worker.heartbeat, request, worker.flight, until, last)
        if recorded is None:
            self._emit({"rank": worker.rank, "late": True})
        elif recorded:
            self._write_file(f"rank-{worker.rank}.flight.json", recorded)
            recording = recordings.parse(json.loads(recorded))
            if recording is not None:
                groups = [tail.to_dict() for tail in recording.tails()]
                self._emit({"rank": worker.rank, "groups": groups, "deviation": recording.deviation()})

    def _nccl_until(self) -> float:
        return min(self._until, time.monotonic() + max(NCCL_S, NCCL_PART * self._request.seconds))

    def _write_file(self, name: str, content: bytes) -> None:
        disk.write_atomically(os.path.join(self._request.directory, name), content)

    def _collect_ras_counts(self) -> None:
        if self._request.ras:
            from elasticd_agent.hangs.collector.ras_client import unchanged_counts  # it takes sockets

            ranks = {worker.pid: worker.rank for worker in self._request.ranks}
            found = unchanged_counts(self._request.ras, ranks, self._nccl_until())
            for pid, counts in found.items():
                self._emit({"rank": ranks[pid], "launches": [count.to_dict() for count in counts[:MAX_LAUNCH_COUNTS]]})

    def _collect_gpu_facts(self) -> None:
        if self._request.nvml is None:
            return
        began, deadline = time.monotonic(), self._until - self._spare_s
        try:
            helper = start_nvml_process(self._request.nvml)
        except OSError as error:
            self._emit({"gpus": [], "trouble": f"the NVML process cannot be started: {error.strerror or error}"})
            return
        try:
            helper.send({"do": "gpus"}, deadline)
            facts = helper.receive(deadline)
        except HelperTimeout:
            facts = {"gpus": [], "trouble": f"the GPUs' driver did not answer within {time.monotonic() - began:.1f} s"}
        except HelperError as error:
            facts = {"gpus": [], "trouble": str(error)}
        finally:
            helper.kill()
        self._emit(facts)


def _heartbeat_fields(path: FilePath | None) -> Message:
    if not path:
        return {}
    try:
        with HeartbeatReader(path) as reader:
            beat = reader.read()
    except (OSError, WireError):
        return {}
    return {
        "phase": beat.phase.name.lower(),
        "step": beat.step,
        "collectives": max(beat.collectives, beat.collectives_at_step),
        "usual": beat.collectives_per_step,
        "barrier": beat.barrier if beat.phase == Phase.BARRIER else "",  # a step leaves the name of the last one
    }


def _source_line(frames: tuple[Frame, ...]) -> str:
    """The innermost frame's line, read in a thread: the script may be on a file system that hangs."""
    lines: list[str] = []
    if frames:
        frame = frames[0]
        thread = threading.Thread(target=lambda: lines.append(linecache.getline(frame.file, frame.line)), daemon=True)
        thread.start()
        thread.join(SOURCE_READ_TIMEOUT_S)
    return lines[0].strip() if lines else ""


def _executable(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""
