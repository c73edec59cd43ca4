"""One gathering: all ranks at once, each in a thread of its own, and nobody waits for one that does not come back.

It exists so that what blocks costs only itself. A rank's state is told first, then its stack and where that is; its log
and the GPUs are read beside it. At the deadline the process ends under whatever still runs: what has been told is told,
what is on disk is whole.
"""

from __future__ import annotations

import json
import linecache
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from elasticd.errors import WireError
from elasticd.heartbeat.record import HeartbeatReader
from elasticd_agent.hangs.collector import classify as where
from elasticd_agent.hangs.collector import files as disk
from elasticd_agent.hangs.collector import flight_recorder as flight
from elasticd_agent.hangs.collector import proc_facts as facts
from elasticd_agent.hangs.collector import stacks
from elasticd_agent.hangs.collector.request import NO_STACKS, CollectRequest, WorkerRequest
from elasticd_agent.system import procfs
from elasticd_agent.system.helper_process import HelperError, HelperProcess, HelperTimeout
from elasticd_agent.system.nvml import start_nvml_process

SPARE_PART = 0.2
"""Of the time: programs are given up so much before its end, to have time to say so and to ask faulthandler."""
SAMPLE_S = 0.2
"""Over how long it is seen whether a thread uses the processor: a busy one has had many turns by then."""
IDLE_SHARE = 0.1
"""Of the sample. A rank that waits in gloo uses nothing; the first 0.1 s of an OpenMP pool's waiting are busy."""
SOURCE_S = 0.2
LOG_GRACE_S = 0.5
"""Logs may take this much longer than all else: they are read in milliseconds."""
FLIGHT_S = 0.6
"""The background thread looks ten times a second, and writes for 25 ms."""
NCCL_S = 2.5
"""NCCL's monitor thread looks once a second (docs/nccl.md)."""
CHILDREN, CHILDREN_S = 16, 1.0
"""Of so many processes below a worker the stacks are read, too, one after the other, for so long: 40 ms each."""


class Collection:
    """Belongs to one process, which ends with it. `say` takes what goes to the agent, one JSON object each."""

    def __init__(self, request: CollectRequest, say: Callable[[dict[str, Any]], None]) -> None:
        self._request, self._emit = request, say
        self._began = time.monotonic()
        self._until = self._began + request.seconds
        self._spare_s = SPARE_PART * request.seconds

    def run(self) -> None:
        """Returns when all is done, or the time is over."""
        first, logs, others = [], [], [self._start(self._gpus, {})]
        for asked in self._request.ranks:
            first.append(self._start(partial(self._rank, asked), {"rank": asked.rank}))
            logs.append(self._start(partial(self._log, asked), {}))
            others.append(self._start(partial(self._flight, asked), {}))
        self._join(first, self._until)
        self._join(others, self._until)
        self._join(logs, min(self._until, time.monotonic() + LOG_GRACE_S))

    def _start(self, act: Callable[[], None], about: dict[str, Any]) -> threading.Thread:
        """`about` says whose trouble it is if it fails."""

        def guarded() -> None:
            try:
                act()
            except Exception as error:  # noqa: BLE001 it is told, and costs nobody else anything
                self._emit({**about, "trouble": f"{type(error).__name__}: {error}"})

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def _join(self, threads: list[threading.Thread], until: float) -> None:
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _path(self, name: str) -> str:
        return os.path.join(self._request.directory, name)

    # --- one rank ---------------------------------------------------------------------------------------------------

    def _rank(self, asked: WorkerRequest) -> None:
        rank, pid = asked.rank, asked.pid
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._emit({"rank": rank, "trouble": "it has ended"})
            return
        except OSError:  # a container whose seccomp rules are older than pidfds
            pidfd = -1
        active, since = facts.run_time_ns(pid), time.monotonic()
        found = facts.process_facts(pid)
        state = found.get("state", "")
        self._emit({"rank": rank, "state": state, "wchan": found.get("wchan", "")})
        alive = facts.living_thread(pid)
        seen = stacks.ProcessStacks(trouble="it has ended")
        if alive:
            seen = stacks.by_py_spy(self._request.spy, pid, self._until - self._spare_s, alive)
        trouble = seen.trouble
        if not seen.source and alive and state not in ("T", "t"):
            asked_itself = stacks.by_faulthandler(pid, pidfd, asked.stacks, self._until)
            seen = asked_itself if asked_itself.source else seen
            trouble = trouble if asked_itself.source else f"{trouble}; {asked_itself.trouble}"
        located, thread = self._locate(asked, seen, found, active, since)
        words = {
            "where": located.where if seen.source else "",
            "function": located.function if seen.source else "",
            "stack": stacks.digest(thread.frames) if thread is not None else "",
            "source": seen.source,
            "trouble": trouble,
        }
        try:
            self._facts(asked, words | found)
            disk.write(self._path(f"rank-{rank}.stacks.txt"), (seen.text or f"{NO_STACKS}{trouble}\n").encode())
        finally:
            self._emit({"rank": rank, **words})
        self._children(asked, seen, found)

    def _facts(self, asked: WorkerRequest, found: dict[str, Any]) -> None:
        about = {"rank": asked.rank, "why": self._request.why, "at_wall": round(time.time(), 3)}
        text = json.dumps(about | _beat(asked.heartbeat) | found, indent=1)
        disk.write(self._path(f"rank-{asked.rank}.json"), text.encode() + b"\n")

    def _locate(
        self,
        asked: WorkerRequest,
        seen: stacks.ProcessStacks,
        found: dict[str, Any],
        active: dict[int, int],
        since: float,
    ) -> tuple[where.StackLocation, stacks.ThreadStack | None]:
        if not seen.threads:
            return where.StackLocation("", ""), None
        thread = seen.threads[where.representative_thread([thread.frames for thread in seen.threads])]
        fds = found.get("fds", {}).values()
        cuda = any(target.startswith(("/dev/nvidia-uvm", "/dev/kfd")) for target in fds)
        joined = _beat(asked.heartbeat).get("collectives", -1) >= 0
        idle = where.StackContext(idle=True, group=joined, cuda=cuda, gil=thread.gil, source=_source(thread.frames))
        located, if_busy = (where.locate(thread.frames, each) for each in (idle, replace(idle, idle=False)))
        # Only where it makes a difference is it worth the wait to see whether the thread is at work.
        if located != if_busy:
            time.sleep(max(0.0, since + SAMPLE_S - time.monotonic()))
            passed_ns = (time.monotonic() - since) * 1e9
            now = facts.run_time_ns(asked.pid)
            if any(ns < 0 or now.get(tid, ns) - ns > IDLE_SHARE * passed_ns for tid, ns in active.items()):
                located = if_busy
        return located, thread

    def _children(self, asked: WorkerRequest, seen: stacks.ProcessStacks, found: dict[str, Any]) -> None:
        """The stacks of Python processes below, DataLoader workers for instance, behind the worker's own."""
        if not seen.source:
            return
        until = min(self._until - self._spare_s, time.monotonic() + CHILDREN_S)
        text, exe = seen.text, _exe(asked.pid)
        below = [one["pid"] for one in found.get("processes", ()) if one["pid"] != asked.pid]
        for pid in [pid for pid in below if exe and _exe(pid) == exe][:CHILDREN]:
            child = stacks.by_py_spy(self._request.spy, pid, until)
            if child.source:
                text += "\n" + child.text
                disk.write(self._path(f"rank-{asked.rank}.stacks.txt"), text.encode())

    # --- beside it --------------------------------------------------------------------------------------------------

    def _log(self, asked: WorkerRequest) -> None:
        if asked.logs:
            disk.write(self._path(f"rank-{asked.rank}.log"), disk.last_lines(asked.logs))

    def _flight(self, asked: WorkerRequest) -> None:
        if procfs.state(asked.pid) in ("", "T", "t"):
            return
        recorded = b""
        if asked.pipe and asked.dump:
            recorded = flight.nccl_dump(asked.pipe, asked.dump, min(self._until, time.monotonic() + NCCL_S))
        if not recorded and asked.heartbeat and asked.flight:
            until = min(self._until, time.monotonic() + FLIGHT_S)
            recorded = flight.await_dump(asked.heartbeat, flight.request_dump(asked.heartbeat), asked.flight, until)
        if recorded:
            disk.write(self._path(f"rank-{asked.rank}.flight.json"), recorded)

    def _gpus(self) -> None:
        if self._request.nvml is None:
            return
        try:
            helper = start_nvml_process(self._request.nvml)
        except OSError as error:
            facts = {"gpus": [], "trouble": f"the NVML process cannot be started: {error.strerror or error}"}
        else:
            facts = self._ask_nvml(helper)
        disk.write(self._path(f"gpu-{os.uname().nodename}.json"), json.dumps(facts).encode())

    def _ask_nvml(self, helper: HelperProcess) -> dict[str, Any]:
        began, deadline = time.monotonic(), self._until - self._spare_s
        try:
            helper.send({"do": "gpus"}, deadline)
            return helper.receive(deadline)
        except HelperTimeout:
            trouble = f"the GPUs' driver did not answer within {time.monotonic() - began:.1f} s"
        except HelperError as error:
            trouble = str(error)
        finally:
            helper.kill()
        return {"gpus": [], "trouble": trouble}


def _beat(path: str) -> dict[str, Any]:
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
        "barrier": beat.barrier,
        "alive": beat.alive_ticks,
        "timeout_s": beat.timeout_s,
    }


def _source(frames: tuple[where.Frame, ...]) -> str:
    """The innermost frame's line. Read in a thread: the script may be on the file system that hangs."""
    lines: list[str] = []
    if frames:
        frame = frames[0]
        thread = threading.Thread(target=lambda: lines.append(linecache.getline(frame.file, frame.line)), daemon=True)
        thread.start()
        thread.join(SOURCE_S)
    return lines[0].strip() if lines else ""


def _exe(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""
