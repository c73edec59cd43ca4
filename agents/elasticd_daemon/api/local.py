"""The knowledge of this node alone about a job: its event log, its runner's status, its ranks' logs, its evidence.

The history comes from the disk, so it survives every agent. A runner is asked with a deadline, and a file system that
does not answer delays only the request that reads it. Everything is read-only; a dump is taken by the runner.

It reads what the runner has written and asks the runner itself for what is only in its memory, each within a time limit
in a thread of its own, since the job's disk may be the one that hangs.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elasticd import bounded_json
from elasticd.errors import WireError
from elasticd_agent.hangs.explain import load, locate
from elasticd_agent.hangs.explain.json_report import document
from elasticd_agent.hangs.explain.text import page
from elasticd_agent.model.job import check_identifier
from elasticd_agent.model.log_events import MAX_LINE_BYTES, decode
from elasticd_agent.system.bounded_io import DeadlineExceeded, run_within
from elasticd_agent.system.network import control_socket
from elasticd_agent.telemetry.timeline import JobTimeline
from elasticd_daemon.api import rank_logs
from elasticd_daemon.api.rank_logs import LogRequest
from elasticd_daemon.api.schema import Answer, JobProgress, LogChunk, ScalarSeries
from elasticd_daemon.health.result import GpuUsage
from elasticd_daemon.job_dir import JobFiles, job_files
from elasticd_daemon.runners.poller import ask_runner

STATUS_TIMEOUT_S = 2.0
DUMP_TIMEOUT_S = control_socket.ANSWER_TIMEOUT_S
READ_TIMEOUT_S = 20.0
MAX_CACHED_EVENT_LOGS = 64
"""Event logs that are read on from where they were read last."""
NOTHING_HERE = "nothing of this job is here"
"""The answer of a node that never had the job, as most nodes of a large cluster have not."""
_CHUNK_BYTES = 1 << 20
MAX_SHOWN_ROUNDS = 100
MAX_UNREAD_BYTES = 256 << 20
"""A million events. Of more only the newest are read: a job's user can make a file of any size."""


QueryRunner = Callable[[JobFiles, Mapping[str, Any], float], Answer]
"""The answer of the runner of a job's folder. Raises ControlSocketError."""


@dataclass(slots=True)
class _EventLogCursor:
    """The place in an event log up to which it has been read."""

    timeline: JobTimeline = field(default_factory=JobTimeline)
    offset: int = 0
    inode: int = 0
    partial_line: bytes = b""
    lock: threading.Lock = field(default_factory=threading.Lock)


class LocalJobs:
    """Thread-safe. Every call is bounded in time."""

    def __init__(
        self,
        node: str,
        state_dir: Path,
        query_runner: QueryRunner = ask_runner,
        gpu_usage: Callable[[], tuple[GpuUsage, ...]] = tuple,
    ) -> None:
        self.node = node
        self._gpu_usage = gpu_usage
        self._state_dir = state_dir
        self._query_runner = query_runner
        self._lock = threading.Lock()
        self._cursors: OrderedDict[tuple[str, int], _EventLogCursor] = OrderedDict()

    def files(self, job: str, number: int) -> JobFiles:
        """Raises UsageError for an id that could lead elsewhere."""
        check_identifier("job id", job)
        return job_files(self._state_dir, job, number)

    def has_job(self, job: str, number: int) -> bool:
        return self.files(job, number).root.is_dir()

    def progress(self, job: str, number: int, now: float, *, brief: bool = False) -> JobProgress:
        """The job's progress, as far as this node knows it. `now` is unix seconds. `brief`: without its history."""
        known = run_within(READ_TIMEOUT_S, lambda: self._read_history(job, number, now), job)
        runner, problem = self._query_runner_status(job, number)
        steps = [step for step in (known.step, runner.step) if step is not None]
        return replace(
            known,
            round=runner.round or known.round,
            phase=runner.phase or None,
            world_size=runner.world_size or known.world_size,
            members=runner.members,
            spares=tuple(replace(spare, node=self.node) for spare in runner.spares[:1]),
            step=max(steps, default=None),
            steps_per_second=runner.steps_per_second,
            rounds=() if brief else known.rounds,
            ranks=tuple(replace(rank, node=self.node) for rank in runner.ranks),
            step_samples=() if brief else runner.step_samples,
            snapshot=runner.snapshot and runner.snapshot.with_age(now),
            scalars=() if brief else known.scalars,
            gpus=tuple(replace(gpu, node=self.node) for gpu in self._gpu_usage()),
            runner_problem=problem,
        )

    def read_log(self, job: str, number: int, request: LogRequest) -> LogChunk | None:
        """None if there is no such log here."""
        files = self.files(job, number)
        return run_within(READ_TIMEOUT_S, lambda: rank_logs.read_log(files, self.node, request), job)

    def dump(self, job: str, number: int) -> Answer:
        """Evidence of the running group, taken now; {"error"} if there is none."""
        try:
            answer = self._query_runner(self.files(job, number), {"do": "dump", "out": None}, DUMP_TIMEOUT_S)
        except control_socket.ControlSocketError as error:
            return {"node": self.node, "error": f"its runner does not answer: {error}"}
        path = answer.get("path")
        if not isinstance(path, str):
            return {"node": self.node, "error": str(answer.get("error", "its runner did not name the folder"))}
        logs = self.files(job, number).logs
        # The runner belongs to the job's user and may name any path: the agent reads only below the job's logs.
        is_below = False
        with contextlib.suppress(DeadlineExceeded, OSError, ValueError, RuntimeError):
            is_below = run_within(READ_TIMEOUT_S, lambda: Path(path).resolve().is_relative_to(logs.resolve()), job)
        if not is_below:
            return {"node": self.node, "path": path, "error": f"the evidence is in {path}; read it there"}
        return self._read_evidence(Path(path), logs, None)

    def explain(self, job: str, number: int, round: int | None) -> Answer:
        """The explanation of a hang from the evidence here: of `round`, or the newest; {"error"} without any."""
        logs = self.files(job, number).logs
        return self._read_evidence(logs, logs, round)

    def metrics(self, job: str, number: int, within_s: float) -> bytes:
        """The runner's metrics page. Raises ControlSocketError."""
        answer = self._query_runner(self.files(job, number), {"do": "metrics"}, within_s)
        return str(answer.get("text", "")).encode(errors="replace")

    def _query_runner_status(self, job: str, number: int) -> tuple[JobProgress, str]:
        """The runner's answer, checked; or an empty one and why. It may claim anything, so not all of it is used."""
        try:
            answer = self._query_runner(self.files(job, number), {"do": "status"}, STATUS_TIMEOUT_S)
            if "error" in answer:
                return JobProgress(), str(answer["error"])
            return JobProgress.from_dict(answer), ""
        except control_socket.ControlSocketError as error:
            return JobProgress(), str(error)
        except WireError as error:
            return JobProgress(), f"its runner's answer makes no sense: {error}"

    def _read_evidence(self, where: Path, logs: Path, round: int | None) -> Answer:
        events = logs.parent / "events.jsonl"

        def work() -> Answer:
            if not logs.parent.is_dir():
                return {"node": self.node, "error": NOTHING_HERE}
            folders, log = locate.find_folders(where), events if events.is_file() else None
            place = locate.choose_default_folder([folder for folder in folders if round in (None, folder.round)])
            if place is None:
                some = ", ".join(str(number) for number in sorted({folder.round for folder in folders}))
                which = (
                    "" if round is None else f" of round {round}" + (f"; there is evidence of: {some}" if some else "")
                )
                error = f"no evidence{which}: no hang was suspected here{load.describe_job_end(log)}"
                return {"node": self.node, "error": error}
            explained = load.explain(place, log, folders, default_node=self.node)
            return {
                "node": self.node,
                "path": str(place.path),
                "document": document(explained),
                "page": page(explained),
            }

        try:
            return run_within(READ_TIMEOUT_S, work, str(logs))
        except DeadlineExceeded:
            return {"node": self.node, "error": f"{where} does not answer: is its file system unreachable?"}

    def _read_history(self, job: str, number: int, now: float) -> JobProgress:
        """The job's event log, read on from where it was read last."""
        with self._lock:
            cursor = self._cursors.setdefault((job, number), _EventLogCursor())
            self._cursors.move_to_end((job, number))
            while len(self._cursors) > MAX_CACHED_EVENT_LOGS:
                self._cursors.popitem(last=False)
        files = self.files(job, number)
        until = time.monotonic() + READ_TIMEOUT_S / 2
        if not cursor.lock.acquire(timeout=READ_TIMEOUT_S):
            raise DeadlineExceeded
        try:
            # No event log yet: the lines read so far count.
            with (
                contextlib.suppress(OSError, ValueError),
                rank_logs.open_below(files.events.parent, (files.events.name,)) as fd,
            ):
                _read_new_events(cursor, fd, until)
            return summarize(cursor.timeline, self.node, now)
        finally:
            cursor.lock.release()


def summarize(timeline: JobTimeline, node: str, now: float) -> JobProgress:
    """The view of the event log of `node`."""
    newest, goodput, saved = timeline.newest_round(), timeline.goodput(now), timeline.checkpoint
    return JobProgress(
        node=node,
        round=None if newest is None else newest.round,
        world_size=None if newest is None else newest.world_size,
        step=timeline.step,
        restarts=timeline.restarts,
        checkpoint=saved and saved.with_age(now),
        donor_resumes=timeline.donor_resumes,
        donor_steps=timeline.donor_steps_saved,
        goodput=None if goodput is None else round(goodput, 4),
        started_at=timeline.began_at,
        rounds=tuple(timeline.rounds_with_costs(now)[-MAX_SHOWN_ROUNDS:]),
        scalars=tuple(ScalarSeries(name, tuple(points)) for name, points in sorted(timeline.scalars.items())),
    )


def _read_new_events(cursor: _EventLogCursor, fd: int, until: float) -> None:
    """Read the lines that were added; from the start if the file is another one or became smaller.

    What is left at `until` is for the next time.
    """
    file = os.fstat(fd)
    if file.st_ino != cursor.inode or file.st_size < cursor.offset:
        cursor.timeline = JobTimeline()
        cursor.offset = 0
        cursor.partial_line = b""
        cursor.inode = file.st_ino
    if file.st_size - cursor.offset > MAX_UNREAD_BYTES:
        cursor.offset, cursor.partial_line = file.st_size - MAX_UNREAD_BYTES, b""
    while time.monotonic() < until and (data := os.pread(fd, _CHUNK_BYTES, cursor.offset)):
        cursor.offset += len(data)
        *lines, cursor.partial_line = (cursor.partial_line + data).split(b"\n")
        if len(cursor.partial_line) > MAX_LINE_BYTES:
            cursor.partial_line = b""
        for data in lines:
            try:
                values = bounded_json.loads(data)
            except (ValueError, RecursionError):
                continue
            if isinstance(values, dict) and (line := decode(values)) is not None:
                cursor.timeline.feed(line)
