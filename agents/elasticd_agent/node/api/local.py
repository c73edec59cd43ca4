"""What this node itself knows of a job: its event log, its runner's word, its ranks' logs, its evidence.

It exists so that a daemon asked for a job that runs elsewhere needs only to pass the question on. It answers from the
disk where it can, so that a job's history survives every agent; a runner is asked with a deadline, and a file system
that does not answer holds up only who asked. It never starts, stops or changes anything; a dump is taken by the runner.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticd_agent.hangs.explain import load as reading
from elasticd_agent.hangs.explain import locate as finding
from elasticd_agent.hangs.explain.json_report import document
from elasticd_agent.hangs.explain.text import page
from elasticd_agent.model.job import check_identifier
from elasticd_agent.model.job_dir import JobFiles, job_files
from elasticd_agent.node.api import rank_logs as ranklogs
from elasticd_agent.node.api.progress import JobTimeline, RoundCost, RoundTimeline
from elasticd_agent.node.api.rank_logs import FileSlice
from elasticd_agent.node.runners import poller as visiting
from elasticd_agent.system import bounded_io as evidence_files
from elasticd_agent.system import control_socket as control

STATUS_TIMEOUT_S = 2.0
DUMP_TIMEOUT_S = control.ANSWER_S
READ_TIMEOUT_S = 20.0
MAX_CACHED_LOGS = 64
"""Jobs whose event logs are remembered as far as they were read."""
MAX_ROUNDS = 100
_CHUNK = 1 << 20
_MAX_LINE_BYTES = 1 << 20


QueryRunner = Callable[[JobFiles, Mapping[str, Any], float], dict[str, Any]]
"""What the runner of a job's folder answers. Raises control.Unanswered."""


@dataclass(slots=True)
class _LogCursor:
    """An event log as far as it has been read."""

    progress: JobTimeline = field(default_factory=JobTimeline)
    offset: int = 0
    inode: int = 0
    partial_line: bytes = b""
    lock: threading.Lock = field(default_factory=threading.Lock)


class LocalJobs:
    """Thread-safe. Every call is bounded in time."""

    def __init__(self, node: str, state_dir: Path, ask: QueryRunner = visiting.ask_runner) -> None:
        self.node = node
        self._state_dir, self._query_runner = state_dir, ask
        self._lock = threading.Lock()
        self._cursors: OrderedDict[tuple[str, int], _LogCursor] = OrderedDict()

    def files(self, job: str, number: int) -> JobFiles:
        """Raises UsageError for an id that could lead elsewhere."""
        check_identifier("job id", job)
        return job_files(self._state_dir, job, number)

    def has_job(self, job: str, number: int) -> bool:
        return self.files(job, number).root.is_dir()

    def progress(self, job: str, number: int, now: float, *, brief: bool = False) -> dict[str, Any]:
        """How the job does, as far as this node knows. `now` is unix seconds. `brief`: without what lies behind it."""
        told = evidence_files.run_within(READ_TIMEOUT_S, lambda: self._history(job, number, now))
        running, trouble = self._runner_status(job, number)
        steps = [one for one in (told["step"], running.get("step")) if isinstance(one, int)]
        known = {name: running[name] for name in ("round", "world_size") if running.get(name)}
        live = {name: running.get(name) for name in ("phase", "members", "steps_per_second", "track")}
        ranks = running.get("ranks")
        rows = ranks if isinstance(ranks, list) else []
        live["ranks"] = [{**one, "node": self.node} for one in rows if isinstance(one, dict)]
        if brief:
            told["rounds"], live["track"] = [], []
        return {"node": self.node, **told, **live, **known, "step": max(steps, default=None), "trouble": trouble}

    def logs(
        self, job: str, number: int, rank: int, round: int | None, stream: str, offset: int, limit: int
    ) -> tuple[FileSlice, int] | None:
        """A piece and its round; None if there is no such log here. Without a `round` the rank's newest."""
        files = self.files(job, number)

        def work() -> tuple[FileSlice, int] | None:
            if stream == ranklogs.RUNNER_LOG:
                piece = ranklogs.read_runner_log(files, offset, limit)
                return None if piece is None else (piece, 0)
            which = ranklogs.newest_round_of(files, rank) if round is None else round
            piece = None if which is None else ranklogs.read_rank_log(files, which, rank, stream, offset, limit)
            return None if piece is None or which is None else (piece, which)

        return evidence_files.run_within(READ_TIMEOUT_S, work)

    def dump(self, job: str, number: int) -> dict[str, Any]:
        """Evidence of the group that runs, taken now. {"error"} where there is none to take."""
        try:
            answer = self._query_runner(self.files(job, number), {"do": "dump", "out": None}, DUMP_TIMEOUT_S)
        except control.ControlSocketError as error:
            return {"node": self.node, "error": f"its runner does not answer: {error}"}
        path = answer.get("path")
        if not isinstance(path, str):
            return {"node": self.node, "error": str(answer.get("error", "its runner did not say where it is"))}
        logs = self.files(job, number).logs
        # A runner is its job's user's: it cannot make the daemon read what lies elsewhere.
        if not Path(path).resolve().is_relative_to(logs.resolve()):
            return {"node": self.node, "path": path, "error": f"the evidence is in {path}, to be read there"}
        return self._read_evidence(Path(path), logs, None)

    def explain(self, job: str, number: int, round: int | None) -> dict[str, Any]:
        """What the evidence here says of a hang of the job: of `round`, or of the newest. {"error"} without any."""
        logs = self.files(job, number).logs
        return self._read_evidence(logs, logs, round)

    def metrics(self, job: str, number: int, within_s: float) -> bytes:
        """The runner's page. Raises control.Unanswered."""
        return str(self._query_runner(self.files(job, number), {"do": "metrics"}, within_s).get("text", "")).encode(
            errors="replace"
        )

    def _runner_status(self, job: str, number: int) -> tuple[dict[str, Any], str]:
        """What the runner says now, and why it says nothing."""
        try:
            answer = self._query_runner(self.files(job, number), {"do": "status"}, STATUS_TIMEOUT_S)
        except control.ControlSocketError as error:
            return {}, str(error)
        return ({}, str(answer["error"])) if "error" in answer else (answer, "")

    def _read_evidence(self, where: Path, logs: Path, round: int | None) -> dict[str, Any]:
        events = logs.parent / "events.jsonl"

        def work() -> dict[str, Any]:
            found = finding.find_folders(where)
            place = finding.choose_folder([one for one in found if round in (None, one.round)])
            if place is None:
                some = ", ".join(str(number) for number in sorted({one.round for one in found}))
                which = "" if round is None else f" of round {round}" + (f"; there is some of: {some}" if some else "")
                return {"node": self.node, "error": f"no evidence{which}: no hang was suspected here"}
            said = reading.explain(place, events if events.is_file() else None, found, here=self.node)
            return {"node": self.node, "path": str(place.path), "document": document(said), "page": page(said)}

        try:
            return evidence_files.run_within(READ_TIMEOUT_S, work)
        except evidence_files.DeadlineExceeded:
            return {"node": self.node, "error": f"{where} does not answer: is it on a file system that is gone?"}

    def _history(self, job: str, number: int, now: float) -> dict[str, Any]:
        """What the event log tells."""
        with self._lock:
            told = self._cursors.setdefault((job, number), _LogCursor())
            self._cursors.move_to_end((job, number))
            while len(self._cursors) > MAX_CACHED_LOGS:
                self._cursors.popitem(last=False)
        files = self.files(job, number)
        with told.lock:
            try:
                with ranklogs.open_below(files.root, (files.events.name,)) as fd:
                    _feed(told, fd)
            except (OSError, ValueError):
                pass  # no event log (yet): what was read of it counts
            return _history_row(told.progress, now)


def _history_row(told: JobTimeline, now: float) -> dict[str, Any]:
    newest, goodput, at, costs = told.newest(), told.goodput(now), told.checkpoint_at, told.costs(now)
    saved = {"step": told.checkpoint_step, "round": told.checkpoint_round, "at": at}
    return {
        "round": None if newest is None else newest.number,
        "world_size": None if newest is None else newest.world_size,
        "step": told.step,
        "restarts": told.restarts,
        "checkpoint": None if at is None else {**saved, "age_seconds": round(max(0.0, now - at), 1)},
        "goodput": None if goodput is None else round(goodput, 4),
        "began_at": told.began_at,
        "rounds": [_round_row(one, costs.get(one.number)) for one in list(told.rounds.values())[-MAX_ROUNDS:]],
    }


def _round_row(one: RoundTimeline, cost: RoundCost | None) -> dict[str, Any]:
    return {
        "round": one.number,
        "at": one.at,
        "world_size": one.world_size,
        "nodes": list(one.nodes),
        "cause": one.cause,
        "reason": one.reason,
        "lost": list(one.lost),
        "first_step": one.first_step if one.first_step_at is not None else None,
        "first_step_at": one.first_step_at,
        "last_step": one.last_step if one.first_step_at is not None else None,
        "over_at": one.last_step_at,
        "lost_seconds": None if cost is None else round(cost.seconds, 3),
        "lost_steps": None if cost is None else cost.steps,
    }


def _feed(told: _LogCursor, fd: int) -> None:
    found = os.fstat(fd)
    if found.st_ino != told.inode or found.st_size < told.offset:
        told.progress, told.offset, told.partial_line, told.inode = JobTimeline(), 0, b"", found.st_ino
    while data := os.pread(fd, _CHUNK, told.offset):
        told.offset += len(data)
        *lines, told.partial_line = (told.partial_line + data).split(b"\n")
        if len(told.partial_line) > _MAX_LINE_BYTES:
            told.partial_line = b""
        for line in lines:
            try:
                one = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(one, dict):
                told.progress.feed(one)
