"""Removes the records and files of ended jobs, so that agents that run for months fill neither store nor disks.

Records age by the scheduler clock, which is in the store and advances only while an agent is the scheduler: no host's
time of day removes anything early. Files age by their own host's time of day. Both are also bounded by number.
Checkpoints belong to the jobs and are never touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from elasticd.errors import WireError
from elasticd_agent.model.keys import Keys, decode_record
from elasticd_agent.model.records import Round, is_later_run
from elasticd_agent.store import Lease, Store, Versioned
from elasticd_daemon import keys as names
from elasticd_daemon.job_dir import JobFiles
from elasticd_daemon.records import ClusterView, JobResult, KnownNode, Placement, Submission
from elasticd_daemon.runners.liveness import has_processes

RETENTION_S = 7 * 86400.0
MAX_RESULTS = 1000
"""Ended jobs whose records are kept: every read of the queue reads them."""
MAX_RUN_FOLDERS = 500
CLOCK_SAVE_INTERVAL_S = 600.0
"""The scheduler clock is saved this often; a change of schedulers loses at most that much."""
REMOVAL_TIMEOUT_S = 300.0
"""The time for the files of one run; the next cleanup continues."""
MAX_LOST_NODES = 200
"""Lost nodes that are kept: where machines come and go without leaving, each has another name."""
NODE_WRITES_PER_TURN = 20
"""Lost nodes whose records are written in one turn."""
REMOVALS_PER_TURN = 4
"""Jobs whose records are removed in one turn, which keeps it short."""
Guard = tuple[str, int]


@dataclass(slots=True)
class SchedulerClock:
    """Seconds for which any agent was the scheduler. Arguments are the caller's monotonic seconds."""

    store: Store
    _saved: Versioned | None = None
    _base_s: float = 0.0
    _since: float | None = None

    def reset(self) -> None:
        """Read the clock again: another scheduler may have advanced it."""
        self._since = None

    def now_s(self, now: float, guard: Guard, at_least: float) -> float:
        """Raises StoreUnavailable. `at_least`: a time known to have been reached, if the clock was lost."""
        if self._since is None:
            self._saved = self.store.read(names.SCHEDULER_CLOCK)
            text = b"" if self._saved is None else self._saved.value
            saved_s = float(text) if text.isdigit() and len(text) < 16 else 0.0
            self._base_s = max(saved_s, at_least)
            self._since = now
        elif now >= self._since + CLOCK_SAVE_INTERVAL_S:
            self._base_s += now - self._since
            self._since = now
            version = None if self._saved is None else self._saved.version
            if not self.store.compare_and_swap(names.SCHEDULER_CLOCK, version, b"%d" % self._base_s, guard):
                self.reset()  # another scheduler has the key; little time is lost
                return self._base_s
            self._saved = self.store.read(names.SCHEDULER_CLOCK)
        return self._base_s + now - self._since


def stamp_ended_placements(view: ClusterView, clock_s: float) -> tuple[Placement, ...]:
    """Pure. The placements of ended jobs that have no `ended_s` yet, with it."""
    placements = {placement.job: placement for placement in view.placements}
    stamped = []
    for result in view.results:
        placement = placements.get(result.job)
        if placement is None or placement.number < result.number:
            placement = Placement(result.job, result.number, (), result.reason)
        if placement.number == result.number and placement.ended_s is None:
            stamped.append(replace(placement, ended_s=clock_s))
    return tuple(stamped)


def changed_known_nodes(view: ClusterView, clock_s: float, wall: float) -> tuple[KnownNode, ...]:
    """Pure. The records of the nodes that were lost or came back since they were written."""
    present = {status.node for status in view.nodes}
    ended = {(result.job, result.number) for result in view.results}
    placed: dict[str, list[str]] = {}
    for placement in view.placements:
        for assignment in () if (placement.job, placement.number) in ended else placement.assignments:
            placed.setdefault(assignment.node, []).append(placement.job)
    lost = [
        replace(node, lost_s=clock_s, lost_at=wall, jobs=tuple(placed.get(node.node, ())))
        for node in view.known_nodes
        if node.lost_s is None and node.node not in present
    ]
    back = [
        replace(node, lost_s=None, lost_at=0.0, jobs=())
        for node in view.known_nodes
        if node.lost_s is not None and node.node in present
    ]
    return (*lost, *back)


def nodes_to_forget(view: ClusterView, clock_s: float, retention_s: float) -> tuple[str, ...]:
    """Pure. The nodes lost more than `retention_s` ago, and the longest lost of those above MAX_LOST_NODES."""
    lost = sorted((node.lost_s, node.node) for node in view.known_nodes if node.lost_s is not None)
    surplus = len(lost) - MAX_LOST_NODES
    return tuple(node for i, (lost_s, node) in enumerate(lost) if i < surplus or clock_s >= lost_s + retention_s)


def expired_results(
    view: ClusterView, clock_s: float, retention_s: float, max_results: int = MAX_RESULTS
) -> tuple[JobResult, ...]:
    """Pure. The results older than `retention_s`, and the oldest of those above `max_results`; the oldest first.

    Not of a job that still has a runner: its node would find no record of the job, and register it again.
    """
    runners = (runner for status in (*view.nodes, *view.absent_nodes) for runner in status.runners)
    running = {(runner.job, runner.number) for runner in runners if runner.state != "refused"}
    ended = (p for p in view.placements if (p.job, p.number) not in running)
    ended_s = {(p.job, p.number): p.ended_s for p in ended if p.ended_s is not None}
    stamped = sorted(
        (r for r in view.results if (r.job, r.number) in ended_s), key=lambda r: (ended_s[r.job, r.number], r.job)
    )
    surplus = len(view.results) - max_results
    return tuple(r for i, r in enumerate(stamped) if i < surplus or clock_s >= ended_s[r.job, r.number] + retention_s)


def remove_records(store: Store, result: JobResult, node: str, lease_s: float) -> bool:
    """Remove all records of one ended run. False: its id was submitted again. Raises StoreUnavailable.

    The records are moved, each at the version that was read, under one lease that is revoked at the end. A submission
    that reuses the id meanwhile either loses its race or is not touched; and if this agent fails on the way, the moved
    records expire and the others are found again.
    """
    lease = store.announce(names.CLEANUP_LEASE, node.encode(), lease_s)
    if lease is None:
        return False
    try:
        return _remove_under_lease(store, result, lease)
    finally:
        lease.withdraw()


def _remove_under_lease(store: Store, result: JobResult, lease: Lease) -> bool:
    key = names.SUBMISSIONS + result.job
    entry = store.read(key)
    try:
        if entry is None:
            submission = Submission(result.job, result.number, "", 1, 1, 1, 1)
        else:
            submission = decode_record(Submission, key, entry.value)
    except WireError:
        return False
    if submission.number != result.number:
        return False
    removed = replace(submission, spec="", removed=True).to_json()
    if lease.put(key, removed, None if entry is None else entry.version) is None:
        return False
    if not _remove_rendezvous_keys(store, result, lease):
        return False
    return all(
        _move_to_lease(store, lease, prefix + result.job, kind, result.number)
        for prefix, kind in ((names.PLACEMENTS, Placement), (names.RESULTS, JobResult))
    )


def _remove_rendezvous_keys(store: Store, result: JobResult, lease: Lease) -> bool:
    """The keys of the job's own rendezvous, also of its runs before, unless an `elasticd run` uses its name."""
    keys = Keys(result.job)
    entry = store.read(keys.round)
    if entry is not None:
        try:
            last = decode_record(Round, keys.round, entry.value)
        except WireError:
            return True
        run = str(result.number)
        if not (last.run == run or is_later_run(run, last.run)) or store.list(keys.nodes):
            return True
    for key in store.list(keys.spec.removesuffix("spec")):
        store.delete(key)
        if not lease.renew():
            return False
    return True


def _move_to_lease(store: Store, lease: Lease, key: str, kind: type[Placement] | type[JobResult], number: int) -> bool:
    """Put a record of this run under the lease that is about to end. False: it is another run's, or has changed."""
    entry = store.read(key)
    if entry is None:
        return True
    try:
        if decode_record(kind, key, entry.value).number != number:
            return False
    except WireError:
        pass  # no agent can tell what it is about: it goes with the others
    return lease.put(key, entry.value, entry.version) is not None


def remove_files(
    state: Path,
    needed: Collection[tuple[str, int]],
    now: float,
    retention_s: float = RETENTION_S,
    max_folders: int = MAX_RUN_FOLDERS,
) -> list[str]:
    """Remove the files of runs that ended more than `retention_s` ago, and of the oldest above `max_folders`.

    Returns a sentence for each. `needed` are the (job, number) that run here; a run whose runner is alive is never
    touched. `now` is this host's time of day. It may take long: not for a thread that decides.
    Raises nothing.
    """
    runs = _ended_runs(state / "jobs", needed, now)
    oldest = sorted(runs, key=lambda path: (runs[path], path.name))
    surplus = len(oldest) - max_folders
    sentences = []
    for index, path in enumerate(oldest):
        if index < surplus or now >= runs[path] + retention_s:
            hours = max(0.0, now - runs[path]) / 3600
            why = f"more than {max_folders} runs" if index < surplus else f"ended {hours:.0f} h ago"
            sentences.append(_remove_folder(path, why))
    return sentences


def _ended_runs(jobs: Path, needed: Collection[tuple[str, int]], now: float) -> Mapping[Path, float]:
    """The folders of runs that are not in use, and when each was first seen to have ended."""
    ended: dict[Path, float] = {}
    try:
        with os.scandir(jobs) as entries:
            folders = list(entries)
    except OSError:
        return ended
    for folder in folders:
        job, dot, number = folder.name.rpartition(".")
        if not (dot and number.isdecimal() and folder.is_dir(follow_symlinks=False)):
            continue
        files = JobFiles(Path(folder.path))
        if (job, int(number)) in needed or has_processes(files):
            continue
        with contextlib.suppress(OSError):
            ended[files.root] = _stamp_end(files, now)
    return ended


def _stamp_end(files: JobFiles, now: float) -> float:
    """The time of the end, by a file that only the agent can write: a job's user could date its own into the future.
    Raises OSError."""
    if not files.end_mark.exists():
        files.agent_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.end_mark.touch(0o600)
        os.utime(files.end_mark, (0, 0))
    if not 0 < files.end_mark.stat().st_mtime <= now:  # not seen before, or the clock was corrected: it counts from now
        os.utime(files.end_mark, (now, now))
    return files.end_mark.stat().st_mtime


def _remove_folder(path: Path, why: str) -> str:
    """Remove with rm, which needs neither a stack nor descriptors for directories that a job has nested deeply."""
    rm = ["rm", "-rf", "--one-file-system", "--", str(path)]
    try:
        done = subprocess.run(rm, capture_output=True, text=True, errors="replace", timeout=REMOVAL_TIMEOUT_S)
        trouble = done.stderr.partition("\n")[0][:300]
    except (OSError, subprocess.TimeoutExpired) as error:
        trouble = str(error)
    if path.exists():
        return f"the files of {path.name} ({why}) cannot all be removed: {trouble}"
    shutil.rmtree(JobFiles(path).agent_folder, ignore_errors=True)
    return f"the files of {path.name} were removed: {why}"
