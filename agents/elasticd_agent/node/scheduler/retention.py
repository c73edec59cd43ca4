"""What is left of ended jobs, and when it goes: records in the store, logs and other files on each node.

It exists so that daemons that run for months do not fill the store and the disk. How long a record has been there is
counted by the placers' own clock, which is in the store and only runs while somebody places: no host's time of day
decides anything. Files go by this host's own clock alone. Both are bounded by their number, too. Checkpoints are the
jobs' own: nothing here touches them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from elasticd.errors import WireError
from elasticd_agent.model.job_dir import JobFiles
from elasticd_agent.model.keys import Keys, decode_record
from elasticd_agent.model.records import Round
from elasticd_agent.node import keys as names
from elasticd_agent.node.records import JobResult, Placement, Submission
from elasticd_agent.node.runners.liveness import is_locked
from elasticd_agent.node.scheduler.policy import ClusterView
from elasticd_agent.store import Lease, Store, Versioned

RETENTION_S = 7 * 86400.0
MAX_RESULTS = 500
"""Ended jobs whose records are kept at most: every look at the queue reads them."""
MAX_RUN_FOLDERS = 500
"""Ended jobs whose files are kept on a node at most."""
SAVE_CLOCK_S = 600.0
"""The placers' clock is written down so often; a change of placers loses that much at most."""
REMOVALS_PER_TURN = 4
"""Jobs whose records are removed in one turn, so that it stays short."""
Guard = tuple[str, int]


@dataclass(slots=True)
class SchedulerClock:
    """Seconds that placers have been at work. Times given to it are the caller's monotonic seconds."""

    store: Store
    _found: Versioned | None = None
    _base_s: float = 0.0
    _since: float | None = None

    def reset(self) -> None:
        """Somebody else may have gone on with it."""
        self._since = None

    def now_s(self, now: float, guard: Guard, at_least: float) -> float:
        """Raises StoreUnavailable. `at_least`: what is known to have been reached, should the clock be lost."""
        if self._since is None:
            self._found = self.store.read(names.CLOCK)
            text = b"" if self._found is None else self._found.value
            known_s = float(text) if text.isdigit() and len(text) < 16 else 0.0
            self._base_s, self._since = max(known_s, at_least), now
        elif now >= self._since + SAVE_CLOCK_S:
            self._base_s, self._since = self._base_s + now - self._since, now
            version = None if self._found is None else self._found.version
            if not self.store.compare_and_swap(names.CLOCK, version, b"%d" % self._base_s, guard):
                self.reset()  # it, or the placer, was somebody else's; what was counted is not much
                return self._base_s
            self._found = self.store.read(names.CLOCK)
        return self._base_s + now - self._since


def stamp_results(view: ClusterView, clock_s: float) -> tuple[Placement, ...]:
    """Pure. The placements of ended jobs that do not say yet since when, now saying it."""
    placed = {placement.job: placement for placement in view.placements}
    found = []
    for ending in view.results:
        placement = placed.get(ending.job)
        if placement is None or placement.number < ending.number:
            placement = Placement(ending.job, ending.number, (), ending.reason)
        if placement.number == ending.number and placement.ended_s is None:
            found.append(replace(placement, ended_s=clock_s))
    return tuple(found)


def expired(view: ClusterView, clock_s: float, keep_s: float, kept: int = MAX_RESULTS) -> tuple[JobResult, ...]:
    """Pure. The endings whose time is over, and the oldest of those that are too many; the oldest first."""
    since = {(p.job, p.number): p.ended_s for p in view.placements if p.ended_s is not None}
    seen = sorted(
        (e for e in view.results if (e.job, e.number) in since), key=lambda e: (since[e.job, e.number], e.job)
    )
    many = len(view.results) - kept
    return tuple(e for i, e in enumerate(seen) if i < many or clock_s >= since[e.job, e.number] + keep_s)


def remove_records(store: Store, ending: JobResult, node: str, lease_s: float) -> bool:
    """Remove all records of one ended run. False: somebody was faster, or uses its id again. Raises StoreUnavailable.

    Its records are taken, each at the version that was read, under a lease that is then given up: whoever submits the
    id again meanwhile either loses or is not touched; and should we die on the way, they go by themselves or are found
    again.
    """
    lease = store.announce(names.CLEANUP, node.encode(), lease_s)
    if lease is None:
        return False
    try:
        return _remove(store, ending, lease)
    finally:
        lease.withdraw()


def _remove(store: Store, ending: JobResult, lease: Lease) -> bool:
    key = names.SUBMISSIONS + ending.job
    found = store.read(key)
    try:
        if found is None:
            wants = Submission(ending.job, ending.number, "", 1, 1, 1, 1)
        else:
            wants = decode_record(Submission, key, found.value)
    except WireError:
        return False
    if wants.number != ending.number:
        return False
    going = replace(wants, spec="", removed=True).to_json()
    if lease.put(key, going, None if found is None else found.version) is None:
        return False
    if not _remove_own(store, ending, lease):
        return False
    return all(_taken(store, lease, prefix + ending.job, ending.number) for prefix in (names.PLACEMENTS, names.RESULTS))


def _remove_own(store: Store, ending: JobResult, lease: Lease) -> bool:
    """The job's own keys, unless somebody else uses its name, too (`elasticd run` may)."""
    keys = Keys(ending.job)
    found = store.read(keys.round)
    if found is not None:
        try:
            last = decode_record(Round, keys.round, found.value)
        except WireError:
            return True
        if last.run != str(ending.number) or store.list(keys.nodes):
            return True
    for key in store.list(keys.spec.removesuffix("spec")):
        store.delete(key)
        if not lease.renew():
            return False
    return True


def _taken(store: Store, lease: Lease, key: str, number: int) -> bool:
    found = store.read(key)
    if found is None:
        return True
    try:
        known: Placement | JobResult
        if key.startswith(names.PLACEMENTS):
            known = decode_record(Placement, key, found.value)
        else:
            known = decode_record(JobResult, key, found.value)
        if known.number != number:
            return False
    except WireError:
        pass  # nobody can tell what it is about: it goes with the rest
    return lease.put(key, found.value, found.version) is not None


# ---- files


def remove_files(
    state: Path,
    needed: Collection[tuple[str, int]],
    now: float,
    keep_s: float = RETENTION_S,
    kept: int = MAX_RUN_FOLDERS,
) -> list[str]:
    """Remove the files of runs that are over for `keep_s`, and the oldest of those that are too many; say which.

    `needed` are the (job, number) placed here. `now` is this host's time of day, which files carry, too. A run whose
    runner lives is never touched. It may take long: not for a thread that decides. Raises nothing.
    """
    runs = _runs_over(state / "jobs", needed)
    oldest = sorted(runs, key=lambda path: (runs[path], path.name))
    many = len(oldest) - kept
    said = []
    for index, path in enumerate(oldest):
        # A file of the future was written before the clock was set right: it is as old as it says, no older.
        if index < many or now >= runs[path] + keep_s:
            why = f"more than {kept} runs" if index < many else f"over for {max(0.0, now - runs[path]) / 3600:.0f} h"
            said.append(_removed(path, why))
    return said


def _runs_over(jobs: Path, needed: Collection[tuple[str, int]]) -> Mapping[Path, float]:
    """Each run's folder that nobody uses, and when it was last written to."""
    found: dict[Path, float] = {}
    try:
        folders = list(os.scandir(jobs))
    except OSError:
        return found
    for folder in folders:
        job, dot, number = folder.name.rpartition(".")
        if not (dot and number.isdigit() and folder.is_dir(follow_symlinks=False)):
            continue
        if (job, int(number)) in needed or is_locked((files := JobFiles(Path(folder.path))).lock):
            continue
        try:
            found[files.root] = max(path.stat().st_mtime for path in (files.root, files.runner_exit) if path.exists())
        except (OSError, ValueError):
            continue
    return found


def _removed(path: Path, why: str) -> str:
    try:
        shutil.rmtree(path)
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)  # what can go, goes
        if path.exists():
            return f"the files of {path.name} ({why}) cannot all be removed: {error}"
    return f"the files of {path.name} were removed: {why}"
